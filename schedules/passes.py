"""Passes: schedules from schedules, never in place."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter

from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, StageGraph, StageReplica, UpdateScope, ops_of
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.dispatch import TimedPipelines, defer_updates


def over_graph(schedule: Schedule, graph: StageGraph, *, times: tuple[StageTimes, ...] = (), latency_s: float = 0.0) -> Schedule:
    """Return the order of a chain of stages over a stage graph of as many, as the cut of a model has it.

    Updates of stages that share a weight wait for each other's gradients. Where updates overlap with microbatches, a U stands where all
    gradients have arrived; with several pipelines, next to the worker's other updates, or workers would meet in different orders.
    """
    laid = replace(schedule, graph=graph)
    whole = all(op.kind in _WHOLE for op in schedule.places)
    if not graph.ties or not schedule.weight_rule.overlaps_updates or schedule.forward_only or not whole:
        return laid
    if len(schedule.pipelines) > 1:
        return _gathered(laid)
    request = ScheduleRequest(laid.num_workers, 1, times=times, latency_s=latency_s)
    return defer_updates(laid, TimedPipelines.of(laid.pipelines, request, graph))


_WHOLE = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.UPDATE})
"""The kinds of Op of an order whose backwards are whole."""


def evaluation(schedule: Schedule, *, num_microbatches: int) -> Schedule:
    """Return a schedule of forwards only, with the same stages on the same workers, through the first pipeline.

    Forwards stand in the order of microbatch plus depth of the stage. Each needs one that is earlier in that order, so that the
    order cannot deadlock however the stages are placed.
    """
    depths = schedule.graph.depths
    programs: list[tuple[Slot, ...]] = []
    for worker in range(schedule.num_workers):
        forwards = [
            Op(OpKind.FORWARD, stage, microbatch)
            for stage, at in enumerate(schedule.pipelines[0])
            if at == worker
            for microbatch in range(num_microbatches)
        ]
        forwards.sort(key=lambda op: (op.index + depths[op.stage], -depths[op.stage], op.stage))
        programs.append(tuple(forwards))
    return replace(
        schedule,
        name=f"{schedule.name} evaluation",
        pipelines=schedule.pipelines[:1],
        programs=tuple(programs),
        num_microbatches=num_microbatches,
        num_updates=1,
    )


def repeated(schedule: Schedule, *, num_updates: int) -> Schedule:
    """Return the order of one update again and again, each worker's next update directly behind its last."""
    assert schedule.num_updates == 1, "an order of several updates may overlap them"

    def later(slot: Slot, update: int) -> Slot:
        by = {True: update, False: update * schedule.num_microbatches}
        moved = tuple(op._replace(index=op.index + by[op.kind.per_update]) for op in ops_of(slot))
        return Overlap(moved) if isinstance(slot, Overlap) else moved[0]

    programs = tuple(tuple(later(slot, update) for update in range(num_updates) for slot in program) for program in schedule.programs)
    return replace(schedule, programs=programs, num_updates=num_updates)


def one_of_repeated(schedule: Schedule) -> Schedule | None:
    """Return the order of one update of which `repeated` makes this one; `None` where its updates overlap or differ."""
    programs: list[tuple[Slot, ...]] = []
    for program in schedule.programs:
        end = 0
        while end < len(program) and all(schedule.update(op) == 0 for op in ops_of(program[end])):
            end += 1
        programs.append(program[:end])
    one = replace(schedule, programs=tuple(programs), num_updates=1)
    return one if repeated(one, num_updates=schedule.num_updates).programs == schedule.programs else None


def first_update(schedule: Schedule) -> Schedule:
    """Return the order of the first update alone, in which nothing is late.

    No Op of the first update waits for one of a later update, so that every order has such a part.
    """

    def kept(slot: Slot) -> Slot | None:
        ops = tuple(op for op in ops_of(slot) if schedule.update(op) == 0)
        if len(ops) == len(ops_of(slot)):
            return slot
        return None if not ops else ops[0] if len(ops) == 1 else Overlap(ops)

    programs = tuple(tuple(slot for slot in map(kept, program) if slot is not None) for program in schedule.programs)
    return replace(schedule, programs=programs, num_updates=1)


def recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Return the schedule in which some stages keep only their inputs and run each forward again right before its backward (R).

    R stands before the Recv of the gradient, so that it may fill that wait (Chen et al., 2016, arXiv 1604.06174, for whole stages).
    """
    programs: list[tuple[Slot, ...]] = []
    for program in schedule.programs:
        slots: list[Slot] = []
        for slot in program:
            again = [op._replace(kind=OpKind.RECOMPUTE) for op in ops_of(slot) if op.kind.gives_input_gradient and op.stage in stages]
            slots += [op for op in again if op not in schedule.places]
            slots.append(slot)
        programs.append(tuple(slots))
    return replace(schedule, programs=tuple(programs))


def late_updates(schedule: Schedule, slots: int | None = None) -> Schedule:
    """Return the schedule with each U so many slots later, so that sums of gradients may last.

    At most right before the first Op of its worker that must read the version, and by default just there, where the rule fixes versions:
    then no Op reads another one than before. Where it does not, each slot makes some gradients later; none is moved by default.

    Under `double_buffer` update u + 2 reads first what
    update u makes: on stage s of D the sum may take (M - D + 1 + s) forwards and backwards (after TriRace, Li et al., TPDS 2024, which
    schedules all-reduces by what depends on them). Meanwhile its gradients lie next to those of the following update. Where stages share a
    weight and a norm, each U stands before their last gradient of the following update, since their sums and norms take turns.
    """
    rule, places = schedule.weight_rule, schedule.places
    if slots is None and rule.fixed_version(0) is not None:
        slots = sum(map(len, schedule.programs))
    if not slots or schedule.forward_only or any(op.kind is OpKind.PUBLISH for op in places):
        return schedule
    in_turn = schedule.graph.tie_of if schedule.update_scope is UpdateScope.TIED else ()
    programs: list[tuple[Slot, ...]] = []
    for worker, program in enumerate(schedule.programs):
        waiting: dict[Op, int] = {}
        found: list[Slot] = []
        for slot in program:
            if isinstance(slot, Op) and slot.kind is OpKind.UPDATE:
                waiting[slot] = slots
                continue
            if not waiting:
                found.append(slot)
                continue
            read = {(op.stage, rule.fixed_version(schedule.update(op))) for op in ops_of(slot) if not op.kind.per_update}
            ended = {schedule.update(op) for op in ops_of(slot) if op.stage in in_turn and _is_last_gradient(schedule, op, worker)}
            due = [
                op
                for op, left in waiting.items()
                if not left or (op.stage, op.index + 1) in read or (op.stage in in_turn and op.index + 1 in ended)
            ]
            waiting = {op: left - 1 for op, left in waiting.items() if op not in due}
            found += [*due, slot]
        programs.append((*found, *waiting))
    return replace(schedule, programs=tuple(programs))


def _is_last_gradient(schedule: Schedule, op: Op, worker: int) -> bool:
    return op.kind.writes_gradient and op in schedule.gradient_ops(StageReplica(worker, op.stage), schedule.update(op))[-1:]


def forwards_ahead(schedule: Schedule, more: Sequence[int]) -> Schedule:
    """Return the schedule in which each worker runs up to so many more forwards before each of its other Ops.

    They hide messages that take long: with one more on each side of a hop, the hop may take a forward and a backward longer (after policy B
    of DAPPLE, Fan et al., PPoPP 2021, section 4). Each takes the memory of an activation and, under `double_buffer`, as much time from the
    sums of gradients. No forward passes the update whose version it reads. More on a worker than on those before it may deadlock:
    `validate` says so.
    """
    programs = [_ahead(schedule, program, count) if count else program for program, count in zip(schedule.programs, more, strict=True)]
    return replace(schedule, programs=tuple(programs))


def _ahead(schedule: Schedule, program: Sequence[Slot], more: int) -> tuple[Slot, ...]:
    forwards = [slot for slot in program if isinstance(slot, Op) and slot.kind is OpKind.FORWARD]
    slots: list[Slot] = []
    updated: set[tuple[int, int]] = set()
    num_ahead = num_before = 0

    def run_until(count: int) -> None:
        nonlocal num_ahead
        while num_ahead < min(count, len(forwards)) and _is_readable(schedule, forwards[num_ahead], updated):
            slots.append(forwards[num_ahead])
            num_ahead += 1

    for slot in program:
        if isinstance(slot, Op) and slot.kind is OpKind.FORWARD:
            num_before += 1
            continue
        run_until(num_before + more)
        updated |= {(op.stage, op.index + 1) for op in ops_of(slot) if op.kind is OpKind.UPDATE}
        slots.append(slot)
    run_until(len(forwards))
    return tuple(slots)


def _is_readable(schedule: Schedule, forward: Op, updated: Collection[tuple[int, int]]) -> bool:
    version = schedule.weight_rule.fixed_version(schedule.update(forward))
    return not version or (forward.stage, version) in updated


def divide_stages(schedule: Schedule, counts: Sequence[int], *, graph: StageGraph, late_weight_grads: int) -> Schedule:
    """Return the schedule with each stage divided into consecutive ones on the same worker, and with some weight gradients last.

    The weight gradients of the last microbatches stand behind all else of an update, stage by stage from the last one: while the gradients
    of a stage are summed, those of the stages before it are computed. Sums that only the last backward would hide then have so many
    microbatches' weight gradients to hide behind, for the memory of these (I and W as in Qi et al., ICLR 2024, arXiv 2401.10241).

    Args:
        schedule: A flush of single Ops, through one pipeline.
        counts: Number of stages that each stage becomes.
        graph: The new stages.
        late_weight_grads: Number of microbatches of an update whose weight gradients stand last.
    """
    firsts = list(itertools.accumulate(counts, initial=0))
    parts = [range(first, end) for first, end in itertools.pairwise(firsts)]
    programs = [tuple(_divided(schedule, program, parts, late_weight_grads)) for program in schedule.programs]
    pipelines = tuple(
        tuple(worker for worker, count in zip(workers, counts, strict=True) for _ in range(count)) for workers in schedule.pipelines
    )
    return replace(schedule, graph=graph, pipelines=pipelines, programs=tuple(programs))


def division_of_stages(schedule: Schedule) -> tuple[tuple[int, ...], int]:
    """Return the `counts` and `late_weight_grads` of `divide_stages`; no counts for an order that it has not made."""
    counts = tuple(len(list(of_worker)) for _, of_worker in itertools.groupby(schedule.pipelines[0]))
    if len(schedule.pipelines) > 1 or len(counts) != schedule.num_workers or max(counts) == 1:
        return (), 0
    late = 0
    for worker, count in zip(dict.fromkeys(schedule.pipelines[0]), counts, strict=True):
        computed = [op for slot in schedule.programs[worker] for op in ops_of(slot) if not op.kind.per_update and schedule.update(op) == 0]
        last = itertools.takewhile(lambda op: op.kind is OpKind.WEIGHT_GRADIENT, reversed(computed))
        late = max(late, len(list(last)) // count)
    return counts, late


def _divided(schedule: Schedule, program: Sequence[Slot], parts: Sequence[range], num_late: int) -> Iterator[Op]:
    ops = [op for slot in program for op in ops_of(slot)]  # Orders of one stage on each worker have single Ops.
    gradients: dict[tuple[int, int], list[Op]] = {}
    for op in ops:
        if op.kind.writes_gradient:
            gradients.setdefault((op.stage, schedule.update(op)), []).append(op)
    late = {op for of_update in gradients.values() for op in of_update[max(len(of_update) - num_late, 0) :]}
    waiting: list[Op] = []
    for op in ops:
        of_stage = parts[op.stage]
        if op.kind.per_update:
            yield from (one._replace(kind=OpKind.WEIGHT_GRADIENT, stage=part) for part in reversed(of_stage) for one in waiting)
            waiting = []
        if op not in late:
            yield from (op._replace(stage=part) for part in (of_stage if op.kind is OpKind.FORWARD else reversed(of_stage)))
            continue
        waiting.append(op)
        if op.kind is OpKind.BACKWARD:
            yield from (op._replace(kind=OpKind.INPUT_GRADIENT, stage=part) for part in reversed(of_stage))


def recomputed_stages(schedule: Schedule) -> tuple[int, ...]:
    """Return the stages that some forward is run again of."""
    return tuple(sorted({op.stage for op, _ in schedule.ops() if op.kind is OpKind.RECOMPUTE}))


def shard_optimizer(schedule: Schedule, *, replicated_workers: Collection[int] = ()) -> Schedule:
    """Return the schedule in which the copies of each stage step a part of its weights each (U) and pass it on to the others (P).

    ZeRO stage 1 over the copies of a stage (Rajbhandari et al., SC 2020, arXiv 1910.02054), as reduce-scatter, step, all-gather. P comes
    right behind U. Where several pipelines share workers, a worker's U come first, then its P in the order of the stages, in which all
    workers meet. Elsewhere, where a rule fixes versions, a U that stands later than the gradients goes back half of the way, so that the
    weights have as much time as the gradients, which are as many.

    Args:
        schedule: A schedule without P.
        replicated_workers: Workers that are several devices each, whose copies count, too.
    """
    sharded = {
        replica.stage for replicas in schedule.replicas for replica in replicas if len(replicas) > 1 or replica.worker in replicated_workers
    }
    if not sharded or schedule.forward_only:
        return schedule
    if len(schedule.pipelines) == 1:
        programs = [_published(program, sharded) for program in _halfway(schedule, sharded)]
        return replace(schedule, programs=tuple(programs))
    schedule = _gathered(schedule)
    programs = []
    for program in schedule.programs:
        slots: list[Slot] = []
        for is_update, group in itertools.groupby(program, key=_is_update):
            found = list(group)
            slots += _owned([op for slot in found for op in ops_of(slot)], sharded) if is_update else found
        programs.append(tuple(slots))
    return replace(schedule, programs=tuple(programs))


def _published(program: Sequence[Slot], sharded: Collection[int]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for slot in program:
        slots.append(slot)
        if isinstance(slot, Op) and _is_update(slot) and slot.stage in sharded:
            slots.append(slot._replace(kind=OpKind.PUBLISH))
    return tuple(slots)


def _halfway(schedule: Schedule, sharded: Collection[int]) -> Iterator[Sequence[Slot]]:
    """Yield the programs with each U of some stages halfway to the first Op that reads its version, where a rule fixes versions."""
    late = late_updates(schedule)
    alone = schedule.update_scope is UpdateScope.STAGE
    for worker, program in enumerate(schedule.programs):
        last = _positions_behind_updates(program, late.programs[worker])
        time = [0, *itertools.accumulate(sum(_USUAL_TIMES.get(op.kind, 0) for op in ops_of(slot)) for slot in program)]
        placed: list[tuple[int, bool, Slot]] = []
        for position, slot in enumerate(program):
            at = position
            if isinstance(slot, Op) and _is_update(slot) and slot.stage in sharded and schedule.weight_rule.fixed_version(0) is not None:
                first, end = position, last[slot]
                # What waits for no other stage may begin as soon as its own gradients are there.
                if alone and slot.stage not in schedule.graph.tie_of:
                    gradients = schedule.gradient_ops(StageReplica(worker, slot.stage), slot.index)
                    first = max((schedule.places[op].position + 1 for op in gradients), default=position)
                off = [(abs(2 * time[place] - time[first] - time[end]), -place) for place in range(first, end + 1)]
                at = -min(off)[1]
            placed.append((at, at == position, slot))
        placed.sort(key=itemgetter(0, 1))  # What is moved stands before what was at its new place.
        yield tuple(slot for _, _, slot in placed)


def _positions_behind_updates(program: Sequence[Slot], moved: Sequence[Slot]) -> dict[Slot, int]:
    """Return for each U of a program with moved U the position that what stands behind it has in the program as it was."""
    others = [position for position, slot in enumerate(program) if not _is_update(slot)]
    behind: dict[Slot, int] = {}
    num_before = 0
    for slot in moved:
        if _is_update(slot):
            behind[slot] = others[num_before] if num_before < len(others) else len(program)
        else:
            num_before += 1
    return behind


_USUAL_TIMES = {
    OpKind.FORWARD: 1,
    OpKind.RECOMPUTE: 1,
    OpKind.BACKWARD: 2,
    OpKind.INPUT_GRADIENT: 1,
    OpKind.WEIGHT_GRADIENT: 1,
}
"""Times of Ops in relation to each other, as models usually have them."""


def _gathered(schedule: Schedule) -> Schedule:
    """Return the schedule with the U of each worker together, where the gradients of all stages have arrived."""
    if all(_is_drained(schedule, program) for program in schedule.programs):
        return replace(schedule, programs=tuple(tuple(_with_updates_at_ends(schedule, program)) for program in schedule.programs))
    if all(len(found) <= schedule.num_updates for found in map(_runs_of_updates, schedule.programs)):
        return schedule
    meeting = replace(schedule, update_scope=UpdateScope.GLOBAL)
    line = TimedPipelines.of(schedule.pipelines, ScheduleRequest(schedule.num_workers, 1), schedule.graph)
    gathered = defer_updates(meeting, line)
    return replace(gathered, update_scope=schedule.update_scope)


def _is_drained(schedule: Schedule, program: Sequence[Slot]) -> bool:
    """Whether a worker of a flush ends all Ops of an update before it begins the next."""
    updates = [schedule.update(op) for slot in program if not _is_update(slot) for op in ops_of(slot)]
    return not schedule.weight_rule.overlaps_updates and updates == sorted(updates)


def _with_updates_at_ends(schedule: Schedule, program: Sequence[Slot]) -> Iterator[Slot]:
    """Yield the program of a worker that drains with the U of each update behind its last Op."""
    updates = deque(sorted((slot for slot in program if isinstance(slot, Op) and _is_update(slot)), key=attrgetter("index")))
    for slot in program:
        if _is_update(slot):
            continue
        while updates and updates[0].index < min(map(schedule.update, ops_of(slot))):
            yield updates.popleft()
        yield slot
    yield from updates


def _is_update(slot: Slot) -> bool:
    return isinstance(slot, Op) and slot.kind is OpKind.UPDATE


def _runs_of_updates(program: Sequence[Slot]) -> list[bool]:
    return [is_update for is_update, _ in itertools.groupby(program, key=_is_update) if is_update]


def _owned(updates: Sequence[Op], sharded: Collection[int]) -> list[Op]:
    found: list[Op] = []
    for update in sorted({op.index for op in updates}):
        mine = [op for _, op in sorted((op.stage, op) for op in updates if op.index == update)]
        found += [*mine, *(op._replace(kind=OpKind.PUBLISH) for op in mine if op.stage in sharded)]
    return found
