"""The one check that an order can run and means what it says.

`validate` refuses, with the grid and the failing Op marked: Ops on the wrong worker or named twice, microbatches that miss
a stage, an Op before what it needs, a gradient outside its update, reductions in different orders, and deadlock.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import defaultdict
from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.schedules.collectives import NOT_COMPUTED, Await, Collective, CollectiveKind, CollectiveOrder, Start
from raypipe.schedules.ir import Op, OpKind, ProgramPlace, Schedule, UpdateScope, dependencies, ops_of
from raypipe.schedules.reductions import add_reductions
from raypipe.schedules.steps import run_steps
from raypipe.schedules.text import order_grid


def validate(schedule: Schedule) -> None:
    """Check a schedule; return at once if this object has passed before.

    Time: proportional to Ops and dependencies.

    Raises:
        ScheduleError: the first problem, with worker, position, Op and the marked grid.
    """
    if vars(schedule).get("is_valid"):
        return
    _check_shape(schedule)
    _check_places(schedule)
    _check_completeness(schedule)
    needs = _slot_needs(schedule)
    _check_deadlock(schedule, needs)
    replicated = _replicated_workers(schedule)
    reduced = add_reductions(schedule, replicated_workers=replicated)
    _check_collectives(reduced, needs if reduced is schedule else _slot_needs(reduced), replicated)
    vars(schedule)["is_valid"] = True


def _refuse(schedule: Schedule, problem: str, *places: ProgramPlace) -> ScheduleError:
    at = places[0] if places else None
    head = f"worker {at.worker}, position {at.position}: {problem}" if at else problem
    return ScheduleError(head, order_grid(schedule.programs, dict.fromkeys(places, "")))


def _check_shape(schedule: Schedule) -> None:
    for what, number in (
        ("num_microbatches", schedule.num_microbatches),
        ("num_updates", schedule.num_updates),
        ("pipelines", len(schedule.pipelines)),
        ("workers", schedule.num_workers),
    ):
        if number < 1:
            raise ScheduleError(f"schedule {schedule.name!r} has {number} {what}; it needs at least 1")
    for pipeline, workers in enumerate(schedule.pipelines):
        if len(workers) != schedule.num_stages:
            raise ScheduleError(f"pipeline {pipeline} places {len(workers)} stages, the stage graph has {schedule.num_stages}")
        for stage, worker in enumerate(workers):
            if not 0 <= worker < schedule.num_workers:
                raise ScheduleError(
                    f"pipeline {pipeline} places stage {stage} on worker {worker}; there are programs for 0..{schedule.num_workers - 1}"
                )


def _check_places(schedule: Schedule) -> None:
    seen: dict[Op, ProgramPlace] = {}
    last = schedule.num_microbatches * schedule.num_updates
    for op, place in schedule.ops():
        if not 0 <= op.pipeline < len(schedule.pipelines):
            raise _refuse(schedule, f"{op} names pipeline {op.pipeline}; there are {len(schedule.pipelines)}", place)
        if not 0 <= op.stage < schedule.num_stages:
            raise _refuse(schedule, f"{op} names stage {op.stage}; there are {schedule.num_stages}", place)
        count = schedule.num_updates if op.kind.per_update else last
        if not 0 <= op.index < count:
            raise _refuse(schedule, f"{op}: its index must be less than {count}", place)
        if schedule.worker(op) != place.worker:
            raise _refuse(schedule, f"{op} belongs on worker {schedule.worker(op)}, which holds stage {op.stage}", place)
        if op.kind.per_update and op.pipeline != schedule.first_pipeline[schedule.replica(op)]:
            right = op._replace(pipeline=schedule.first_pipeline[schedule.replica(op)])
            raise _refuse(schedule, f"{op} is done once for the copy that pipelines share; write {right}", place)
        if op in seen:
            raise _refuse(schedule, f"{op} runs a second time", place, seen[op])
        seen[op] = place
        if op.part and op._replace(part=0) in schedule.places:
            raise _refuse(schedule, f"{op} is a part of what also runs whole", place, schedule.places[op._replace(part=0)])


def _check_completeness(schedule: Schedule) -> None:
    pipelines: defaultdict[int, set[int]] = defaultdict(set)
    work: defaultdict[tuple[int, int], set[tuple[OpKind, int]]] = defaultdict(set)
    for op in schedule.places:
        if not op.kind.per_update:
            pipelines[op.index].add(op.pipeline)
            work[op.index, op.stage].add((op.kind, op.part))
    complete: set[frozenset[tuple[OpKind, int]]] = set()
    for microbatch in range(schedule.num_microbatches * schedule.num_updates):
        passed = pipelines[microbatch]
        if len(passed) != 1:
            raise _refuse(
                schedule,
                f"microbatch {microbatch} passes through {len(passed)} pipelines, not through one",
                *(place for op, place in schedule.places.items() if op.index == microbatch and not op.kind.per_update),
            )
        for stage in range(schedule.num_stages):
            kinds_and_parts = frozenset(work[microbatch, stage])
            if kinds_and_parts not in complete:
                _check_microbatch(schedule, microbatch, stage, min(passed))
                complete.add(kinds_and_parts)
    if schedule.forward_only:
        return
    for replica, pipeline in schedule.first_pipeline.items():
        for update in range(schedule.num_updates):
            brought = Op(OpKind.UPDATE, replica.stage, update, pipeline), Op(OpKind.PUBLISH, replica.stage, update, pipeline)
            if not any(map(schedule.find, brought)):
                raise ScheduleError(
                    f"worker {replica.worker} has no {brought[0]}: its copy of stage {replica.stage} would miss update {update}",
                    order_grid(schedule.programs),
                )
    _check_members(schedule)


def _check_members(schedule: Schedule) -> None:
    for op, place in schedule.places.items():
        if op.kind in NOT_COMPUTED:
            replicas = schedule.replicas[op.stage]
            for replica in replicas:
                if (other := op._replace(pipeline=schedule.first_pipeline[replica])) not in schedule.places:
                    raise _refuse(schedule, f"{op} would wait for ever: worker {replica.worker} has no {other} for its copy", place)
            if op.kind is OpKind.PUBLISH and not any(
                schedule.find(Op(OpKind.UPDATE, op.stage, op.index, schedule.first_pipeline[replica])) for replica in replicas
            ):
                raise _refuse(schedule, f"{op} publishes what no worker updates; give one of the copies of stage {op.stage} a U", place)
    _check_publications(schedule)


def _check_publications(schedule: Schedule) -> None:
    """Refuse an Op of a stage between a copy's U and its P, where some weights are those of the next version and some are not."""
    of_copy: defaultdict[tuple[int, int], list[tuple[int, Op]]] = defaultdict(list)
    for op, place in schedule.places.items():
        if op.stage in schedule.published_stages and op.kind is not OpKind.REDUCE:
            of_copy[schedule.replica(op)].append((place.position, op))
    for ops in of_copy.values():
        ops.sort()
        for (at, op), (_, behind) in itertools.pairwise(ops):
            publication = op._replace(kind=OpKind.PUBLISH)
            if op.kind is OpKind.UPDATE and behind != publication:
                problem = f"{behind} stands behind {op}, which changes some of the stage's weights; put {publication} right behind the U"
                raise _refuse(schedule, problem, ProgramPlace(schedule.worker(op), at))


def _check_microbatch(schedule: Schedule, microbatch: int, stage: int, pipeline: int) -> None:
    def find(kind: OpKind) -> list[Op]:
        return schedule.find(Op(kind, stage, microbatch, pipeline))

    def missing(kind: OpKind) -> ScheduleError:
        worker = schedule.pipelines[pipeline][stage]
        near = [place for op, place in schedule.ops() if op.index == microbatch and op.stage == stage and not op.kind.per_update]
        problem = f"worker {worker} has no {Op(kind, stage, microbatch, pipeline)}"
        return ScheduleError(problem, order_grid(schedule.programs, dict.fromkeys(near, "")))

    if not find(OpKind.FORWARD):
        raise missing(OpKind.FORWARD)
    _check_parts(schedule, [find(kind) for kind in OpKind if not kind.per_update])
    if schedule.forward_only:
        return
    full, inputs, weights = find(OpKind.BACKWARD), find(OpKind.INPUT_GRADIENT), find(OpKind.WEIGHT_GRADIENT)
    if full and (inputs or weights):
        both = [*full, *inputs, *weights]
        raise _refuse(schedule, f"{both[0]} runs whole and split", *(schedule.places[op] for op in both))
    if not full and not inputs:
        raise missing(OpKind.INPUT_GRADIENT if weights else OpKind.BACKWARD)
    if inputs and not weights:
        raise missing(OpKind.WEIGHT_GRADIENT)


def _check_parts(schedule: Schedule, found: Sequence[list[Op]]) -> None:
    """Require parts numbered from 1 without a gap, and as many for each kind of Op of a stage and microbatch."""
    divided = [sorted(ops, key=lambda op: op.part) for ops in found if ops and ops[0].part]
    most = max(map(len, divided), default=0)
    for ops in divided:
        if [op.part for op in ops] != list(range(1, max(most, 2) + 1)):
            have = ", ".join(map(str, ops))
            problem = f"{have}: the parts of what is divided are 1, 2 and so on, and as many for each kind of Op at a stage"
            raise _refuse(schedule, f"{problem}; here {max(most, 2)} are needed", *(schedule.places[op] for op in ops))


def _slot_needs(schedule: Schedule) -> _Needs:
    places = schedule.places
    needs: _Needs = []
    for worker, program in enumerate(schedule.programs):
        needs.append([])
        for position, slot in enumerate(program):
            elsewhere: list[tuple[int, int]] = []
            for op in ops_of(slot):
                for needed in dependencies(schedule, op):
                    at = places[needed]
                    if at.worker != worker:
                        elsewhere.append(at)
                    elif at.position > position or (at.position == position and needed != op):
                        raise _refuse(schedule, f"{op} runs before {needed}", ProgramPlace(worker, position), at)
            needs[worker].append(elsewhere)
    return needs


_Needs = list[list[Sequence[tuple[int, int]]]]
"""For each worker and each of its steps, the (worker, step) that must have ended before it starts."""


def _waits(needs: _Needs) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the steps at which workers wait for ever, each with a step that it waits for."""
    programs = [[(worker, number) for number in range(len(row))] for worker, row in enumerate(needs)]
    run = run_steps(programs, seconds=lambda _: 0.0, needs=lambda at: [(needed, 0.0) for needed in needs[at[0]][at[1]]])
    return {(worker, len(run.starts_s[worker])): needed for worker, needed in run.stuck.items()}


def _check_deadlock(schedule: Schedule, needs: _Needs) -> None:
    waits = _waits(needs)
    if waits:
        reasons = [_slot_reason(schedule, at, needed) for at, needed in sorted(waits.items())]
        places = dict.fromkeys((ProgramPlace(*at) for at in waits), "")
        raise ScheduleError(f"deadlock: {'; '.join(reasons[:6])}", order_grid(schedule.programs, places))


def _slot_reason(schedule: Schedule, at: tuple[int, int], needed: tuple[int, int]) -> str:
    slot, other = (schedule.programs[worker][position] for worker, position in (at, needed))
    return f"worker {at[0]} waits with {slot} for {other}"


def _replicated_workers(schedule: Schedule) -> frozenset[int]:
    """Return workers that must be several devices each: they pass on weights of which no other worker has a copy."""
    return frozenset(schedule.replicas[stage][0].worker for stage in schedule.published_stages if len(schedule.replicas[stage]) == 1)


def _check_collectives(schedule: Schedule, needs: _Needs, replicated: frozenset[int]) -> None:
    """Find one order for the collectives that share a worker; run the schedule with them, since a worker may reach its part late."""
    # Devices of one worker have one program: two stand for as many as there are.
    devices = [(2 * worker, 2 * worker + 1) if worker in replicated else (2 * worker,) for worker in range(schedule.num_workers)]
    collectives = CollectiveOrder(schedule, devices)
    if not collectives.concerned:
        return
    steps = [_steps(collectives, worker) for worker in range(schedule.num_workers)]
    order: graphlib.TopologicalSorter[Collective] = graphlib.TopologicalSorter()
    # What takes part in collectives goes on by itself beside each worker, as another one: in each when the worker has started it.
    starters: list[list[tuple[int, Start]]] = []
    starts: dict[Collective, list[tuple[int, int]]] = {}
    step_of: list[list[int]] = []
    for worker, row in enumerate(steps):
        step_of.append([number for number, step in enumerate(row) if type(step) is int])
        starters.append([(number, step) for number, step in enumerate(row) if isinstance(step, Start)])
        for number, (_, start) in enumerate(starters[-1]):
            starts.setdefault(start.collective, []).append((schedule.num_workers + worker, number))
        for (_, before), (_, after) in itertools.pairwise(starters[-1]):
            order.add(after.collective, before.collective)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        names = ", ".join(map(str, error.args[1]))
        problem = f"workers meet the collectives [{names}] in different orders; give all workers one order"
        if schedule.update_scope is UpdateScope.TIED and any(collective.kind.of_tie for collective in error.args[1]):
            problem += f", or the updates the scope {UpdateScope.STAGE} or {UpdateScope.GLOBAL}, where no tie has a norm of its own"
        raise _refuse_collectives(schedule, problem, error.args[1]) from None

    # G and P only hand over: a slot of nothing else waits for nobody.
    places = {schedule.places[op] for op in collectives.concerned if op.kind in NOT_COMPUTED}
    handed = {at for at in places if all(op.kind in NOT_COMPUTED for op in ops_of(schedule.programs[at.worker][at.position]))}

    def waits_for(worker: int, step: Start | Await | int) -> Sequence[tuple[int, int]]:
        if isinstance(step, int):
            return () if (worker, step) in handed else [(other, step_of[other][position]) for other, position in needs[worker][step]]
        return starts[step.collective] if isinstance(step, Await) else ()

    needed = [[waits_for(worker, step) for step in row] for worker, row in enumerate(steps)]
    needed += [
        [[(worker, number), *(at for each in start.after for at in starts[each])] for number, start in row]
        for worker, row in enumerate(starters)
    ]
    waits = {at: other for at, other in _waits(needed).items() if at[0] < schedule.num_workers}
    if waits:
        met: list[Collective] = []
        reasons: list[str] = []
        for (worker, at), (other, number) in sorted(waits.items()):
            step = steps[worker][at]
            if isinstance(step, Await):
                reasons.append(f"worker {worker} waits for {step.collective}, which worker {other % schedule.num_workers} has not reached")
                met.append(step.collective)
            elif isinstance(step, int) and isinstance(other_step := steps[other][number], int):
                reasons.append(_slot_reason(schedule, (worker, step), (other, other_step)))
        raise _refuse_collectives(schedule, f"deadlock: {'; '.join(reasons[:6])}", met)


def _steps(collectives: CollectiveOrder, worker: int) -> list[Start | Await | int]:
    steps: list[Start | Await | int] = []
    for position, slot in enumerate(collectives.schedule.programs[worker]):
        ops = ops_of(slot)
        if collectives.concerned.isdisjoint(ops):
            steps.append(position)
        else:
            steps += [*collectives.before(ops), position, *collectives.behind(ops)]
    return steps + collectives.at_end.get(worker, [])


def _refuse_collectives(schedule: Schedule, problem: str, collectives: Sequence[Collective]) -> ScheduleError:
    marked = {
        place: ""
        for op, place in schedule.ops()
        for collective in collectives
        if op.kind in {OpKind.REDUCE, OpKind.PUBLISH, OpKind.UPDATE} and op.index == collective.update
        if op.stage in _concerned(schedule, collective)
    }
    return ScheduleError(problem, order_grid(schedule.programs, marked))


def _concerned(schedule: Schedule, collective: Collective) -> Sequence[int]:
    if collective.kind is CollectiveKind.NORM:
        return range(schedule.num_stages)
    return schedule.graph.ties[collective.stage] if collective.kind.of_tie else (collective.stage,)
