"""The one check that an order can run and means what it says.

`validate` refuses, with the grid and the failing Op marked: Ops on the wrong worker or named twice, microbatches that miss
a stage, an Op before what it needs, a gradient outside its update, reductions in different orders, and deadlock.
`facts` states what a valid order costs in activations, copies of weights and staleness, proved from `reads` and the order.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import Counter
from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.schedules.collectives import Await, Collective, CollectiveKind, Start
from raypipe.schedules.ir import Op, OpKind, ProgramPlace, Schedule, dependencies, ops_of
from raypipe.schedules.lower import Item, Message, Recv, Send, lower
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
    _check_local_order(schedule)
    _check_deadlock(schedule)
    _check_lowered(schedule)
    vars(schedule)["is_valid"] = True


def _refuse(schedule: Schedule, problem: str, *places: ProgramPlace) -> ScheduleError:
    at = places[0] if places else None
    head = f"worker {at.worker}, position {at.position}: {problem}" if at else problem
    return ScheduleError(head, order_grid(schedule.programs, dict.fromkeys(places, "")))


def _check_shape(schedule: Schedule) -> None:
    for what, number in (
        ("num_microbatches", schedule.num_microbatches),
        ("num_updates", schedule.num_updates),
        ("loss_group_size", schedule.loss_group_size),
        ("pipelines", len(schedule.pipelines)),
        ("workers", schedule.num_workers),
    ):
        if number < 1:
            raise ScheduleError(f"schedule {schedule.name!r} has {number} {what}; it needs at least 1")
    if schedule.num_microbatches % schedule.loss_group_size:
        raise ScheduleError(
            f"{schedule.num_microbatches} microbatches an update cannot be grouped by loss_group_size {schedule.loss_group_size}"
        )
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
    layings: dict[int, set[int]] = {}
    for op, _ in schedule.ops():
        if not op.kind.per_update:
            layings.setdefault(op.index, set()).add(op.pipeline)
    for microbatch in range(schedule.num_microbatches * schedule.num_updates):
        pipelines = layings.get(microbatch, set())
        if len(pipelines) != 1:
            raise _refuse(
                schedule,
                f"microbatch {microbatch} passes through {len(pipelines)} pipelines, not through one",
                *(place for op, place in schedule.ops() if op.index == microbatch and not op.kind.per_update),
            )
        for stage in range(schedule.num_stages):
            _check_microbatch(schedule, microbatch, stage, min(pipelines))
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
    """What one copy of a stage reduces or publishes, all copies do."""
    for op, place in schedule.ops():
        if op.kind in {OpKind.REDUCE, OpKind.PUBLISH}:
            replicas = schedule.replicas[op.stage]
            for replica in replicas:
                if (other := op._replace(pipeline=schedule.first_pipeline[replica])) not in schedule.places:
                    raise _refuse(schedule, f"{op} would wait for ever: worker {replica.worker} has no {other} for its copy", place)
            if op.kind is OpKind.PUBLISH and not any(
                schedule.find(Op(OpKind.UPDATE, op.stage, op.index, schedule.first_pipeline[replica])) for replica in replicas
            ):
                raise _refuse(schedule, f"{op} publishes what no worker updates; give one of the copies of stage {op.stage} a U", place)


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
    """The parts of what is divided count from 1 without a gap, and all that a stage does with a microbatch is divided alike."""
    divided = [sorted(ops, key=lambda op: op.part) for ops in found if ops and ops[0].part]
    most = max(map(len, divided), default=0)
    for ops in divided:
        if [op.part for op in ops] != list(range(1, max(most, 2) + 1)):
            have = ", ".join(map(str, ops))
            problem = f"{have}: the parts of what is divided are 1, 2 and so on, and as many for each kind of Op at a stage"
            raise _refuse(schedule, f"{problem}; here {max(most, 2)} are needed", *(schedule.places[op] for op in ops))


def _check_local_order(schedule: Schedule) -> None:
    for op, place in schedule.ops():
        for needed in dependencies(schedule, op):
            at = schedule.places[needed]
            if at.worker == place.worker and (at.position > place.position or (at == place and needed != op)):
                raise _refuse(schedule, f"{op} runs before {needed}", place, at)
        if op.kind.writes_gradient:
            reduction = schedule.find(Op(OpKind.REDUCE, op.stage, schedule.update(op), schedule.first_pipeline[schedule.replica(op)]))
            for needed in reduction:
                at = schedule.places[needed]
                if at.position < place.position:
                    raise _refuse(schedule, f"{op} adds to a gradient that {needed} has already reduced", place, at)
        elif op.kind is OpKind.UPDATE:
            for gradient in schedule.gradient_ops(schedule.replica(op), op.index)[-1:]:
                if schedule.places[gradient].position > place.position:
                    raise _refuse(schedule, f"{op} runs before {gradient}", place, schedule.places[gradient])


def _check_deadlock(schedule: Schedule) -> None:
    """Runs the order without times; what is left over waits for itself."""
    heads = [0] * schedule.num_workers
    done: set[Op] = set()
    needs: list[list[Op]] = [[] for _ in schedule.programs]
    waiting: dict[Op, list[int]] = {}

    def proceed(worker: int) -> list[int]:
        """Moves a worker on as far as it comes; returns those that waited for what it did."""
        woken: list[int] = []
        program = schedule.programs[worker]
        while heads[worker] < len(program):
            slot = program[heads[worker]]
            # A worker that is woken looks only at what was left, so that each need is looked at once.
            left = needs[worker] or [needed for op in ops_of(slot) for needed in dependencies(schedule, op)]
            while left and left[-1] in done:
                left.pop()
            needs[worker] = left
            if left:
                waiting.setdefault(left[-1], []).append(worker)
                break
            heads[worker] += 1
            done.update(ops_of(slot))
            for op in ops_of(slot):
                woken += waiting.pop(op, ())
        return woken

    ready = list(range(schedule.num_workers))
    while ready:
        ready += proceed(ready.pop())
    stuck = [worker for worker, head in enumerate(heads) if head < len(schedule.programs[worker])]
    if stuck:
        reasons = [f"worker {at} waits with {schedule.programs[at][heads[at]]} for {needed}" for needed, by in waiting.items() for at in by]
        places = [ProgramPlace(worker, heads[worker]) for worker in stuck]
        raise ScheduleError(f"deadlock: {'; '.join(sorted(reasons)[:6])}", order_grid(schedule.programs, dict.fromkeys(places, "")))


def _check_lowered(schedule: Schedule) -> None:
    """Finds one order for the collectives that share a worker, and runs the lowered programs without times.

    Messages cannot hang where the Ops do not; collectives can, because a worker may reach its part of one late.
    """
    programs = lower(schedule)
    order: graphlib.TopologicalSorter[Collective] = graphlib.TopologicalSorter()
    for program in programs:
        starts = [item.collective for item in program.items if isinstance(item, Start)]
        for before, after in itertools.pairwise(starts):
            order.add(after, before)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        names = ", ".join(map(str, error.args[1]))
        problem = f"workers meet the collectives [{names}] in different orders; give all workers one order"
        raise _refuse_collectives(schedule, problem, error.args[1]) from None
    heads = [0] * len(programs)
    sent: set[tuple[int, Message]] = set()
    started: Counter[Collective] = Counter()

    def can_go(worker: int, item: Item) -> bool:
        match item:
            case Recv():
                return (worker, item.message) in sent
            case Await():
                return started[item.collective] == len(item.collective.devices)
            case Send():
                sent.add((item.device, item.message))
            case Start():
                started[item.collective] += 1
        return True

    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while heads[worker] < len(program.items) and can_go(worker, program.items[heads[worker]]):
                heads[worker] += 1
                moved = True
    waits = [(worker, program.items[heads[worker]]) for worker, program in enumerate(programs) if heads[worker] < len(program.items)]
    if waits:
        reasons = [f"worker {worker} waits for {_awaited(item)}" for worker, item in waits if isinstance(item, Recv | Await)]
        collectives = [item.collective for _, item in waits if isinstance(item, Await)]
        raise _refuse_collectives(schedule, f"deadlock: {'; '.join(reasons[:6])}", collectives)


def _awaited(item: Recv | Await) -> str:
    return f"{item.message} from worker {item.device}" if isinstance(item, Recv) else str(item.collective)


def _refuse_collectives(schedule: Schedule, problem: str, collectives: Sequence[Collective]) -> ScheduleError:
    """The refusal with the Ops marked that bring workers to the collectives."""
    marked = {
        place: ""
        for op, place in schedule.ops()
        for collective in collectives
        if op.kind in {OpKind.REDUCE, OpKind.PUBLISH, OpKind.UPDATE} and op.index == collective.update
        if op.stage in _concerned(schedule, collective)
    }
    return ScheduleError(problem, order_grid(schedule.programs, marked))


def _concerned(schedule: Schedule, collective: Collective) -> Sequence[int]:
    """The stages that a collective is of."""
    if collective.kind is CollectiveKind.NORM:
        return range(schedule.num_stages)
    return schedule.graph.ties[collective.stage] if collective.kind.of_tie else (collective.stage,)
