"""Passes: schedules from schedules, never in place."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from raypipe.schedules.ir import (
    Op,
    OpKind,
    Overlap,
    Schedule,
    ScheduleRequest,
    Slot,
    StageGraph,
    StageTimes,
    UpdateScope,
    ops_of,
)
from raypipe.schedules.search.dispatch import Line, defer_updates


def add_reductions(schedule: Schedule, *, replicated_workers: Collection[int] = ()) -> Schedule:
    """The schedule with a G right behind the last gradient of each update, where a stage has replicas.

    A copy that no microbatch of an update passes through takes part all the same, before its worker's first U or P of that update.
    Where workers would reduce their stages in orders that do not fit together, some G stand later, but before their own U or P. Where
    updates meet for more than their own stage (a norm, or a weight that stages share), or weights are published, a G stands before
    the first U or P of its worker for the same update, and behind those of the updates before.

    Args:
        schedule: one that has no G yet is given them; one that has keeps its own.
        replicated_workers: workers that are several devices each, whose copies count as replicas too.
    """
    if schedule.forward_only or any(op.kind is OpKind.REDUCE for op in schedule.places):
        return schedule
    met = _meeting_stages(schedule)
    first: dict[tuple[int, int], int] = {}
    latest: dict[tuple[int, int, int], int] = {}
    behind: dict[tuple[int, int, int], int] = {}
    for op, place in schedule.ops():
        if op.kind in {OpKind.UPDATE, OpKind.PUBLISH}:
            first.setdefault((place.worker, op.index), place.position)
            for stage in met[op.stage]:
                latest.setdefault((place.worker, stage, op.index), place.position)
                if len(met[op.stage]) > 1:
                    behind[place.worker, stage, op.index + 1] = place.position + 1
    added: list[list[tuple[int, Op]]] = [[] for _ in schedule.programs]
    for holder, pipeline in schedule.holders.items():
        if len(schedule.replicas[holder.stage]) == 1 and holder.worker not in replicated_workers:
            continue
        for update in range(schedule.num_updates):
            position = first.get((holder.worker, update))
            if gradients := schedule.gradient_ops(holder, update):
                position = max(schedule.places[gradients[-1]].position + 1, behind.get((holder.worker, holder.stage, update), 0))
            if position is not None:
                added[holder.worker].append((position, Op(OpKind.REDUCE, holder.stage, update, pipeline)))
    eager = [sorted(reductions, key=itemgetter(0)) for reductions in added]
    placed = _in_one_order(eager, latest)
    programs = tuple(_with_added(program, reductions) for program, reductions in zip(schedule.programs, placed, strict=True))
    return replace(schedule, programs=programs)


def _meeting_stages(schedule: Schedule) -> list[Sequence[int]]:
    """For each stage, those whose reductions for an update stand before the first U or P of any of them."""
    graph, everything = schedule.graph, range(schedule.num_stages)
    publishes = any(op.kind is OpKind.PUBLISH for op in schedule.places)
    # Among copies on several workers, those of all stages: a worker that sums a tie in between would be out of order with others.
    copied = bool(graph.ties) and len(schedule.pipelines) > 1
    if schedule.update_scope is UpdateScope.GLOBAL or publishes or copied:
        return [everything] * schedule.num_stages
    return [graph.ties[graph.tie_of[stage]] if stage in graph.tie_of else (stage,) for stage in everything]


def _with_added(program: Sequence[Slot], added: Sequence[tuple[int, Op]]) -> tuple[Slot, ...]:
    """A program with Ops before the slots at some positions, ascending."""
    slots: list[Slot] = []
    done = 0
    for position, op in added:
        slots += [*program[done:position], op]
        done = position
    return (*slots, *program[done:])


def _in_one_order(
    eager: Sequence[Sequence[tuple[int, Op]]], latest: Mapping[tuple[int, int, int], int]
) -> Sequence[Sequence[tuple[int, Op]]]:
    """The reductions of each worker with their positions, some of them later so that all workers meet in one order.

    Args:
        eager: for each worker, the reductions in the order of their earliest positions.
        latest: by worker, stage and update, the position to stay before; where it would have to be passed, all stay where they are.
    """
    wished = _common_order([[_meeting(op) for _, op in row] for row in eager])
    rank = {meeting: number for number, meeting in enumerate(_that_can_be_kept(wished, eager, latest))}
    placed: list[list[tuple[int, Op]]] = []
    for worker, row in enumerate(eager):
        at = 0
        placed.append([])
        for position, op in sorted(row, key=lambda reduction: rank[_meeting(reduction[1])]):
            at = max(at, position)
            if at > max(position, latest.get((worker, op.stage, op.index), at)):
                return eager
            placed[-1].append((at, op))
    return placed


def _that_can_be_kept(
    wished: Sequence[tuple[int, int]], eager: Sequence[Sequence[tuple[int, Op]]], latest: Mapping[tuple[int, int, int], int]
) -> list[tuple[int, int]]:
    """The wished order, but for what a worker must reduce before its gradients of another reduction are there.

    Where even that goes round in a circle the wish is returned; the validator will name it.
    """
    rank: dict[tuple[int, ...], int] = {meeting: number for number, meeting in enumerate(wished)}
    behind: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    count: Counter[tuple[int, ...]] = Counter()

    def precedes(before: tuple[int, ...], after: tuple[int, ...]) -> None:
        behind.setdefault(before, []).append(after)
        count[after] += 1

    for worker, row in enumerate(eager):
        # A gate for each place in the row: who must come before one of them comes before all that follow. No meeting has three numbers.
        gates: list[tuple[int, ...]] = [(worker, place, 0) for place in range(len(row))]
        for gate, after in itertools.pairwise(gates):
            precedes(gate, after)
        for gate, (_, op) in zip(gates, row, strict=True):
            precedes(gate, _meeting(op))
        positions = [position for position, _ in row]
        for _, op in row:
            place = bisect.bisect_right(positions, latest.get((worker, op.stage, op.index), positions[-1] + 1))
            if place < len(row):
                precedes(_meeting(op), gates[place])
    ready = [(rank.get(node, -1), node) for node in {*behind, *rank} if not count[node]]
    heapq.heapify(ready)
    order: list[tuple[int, int]] = []
    while ready:
        number, node = heapq.heappop(ready)
        if number >= 0:
            order.append(wished[number])
        for after in behind.get(node, ()):
            count[after] -= 1
            if not count[after]:
                heapq.heappush(ready, (rank.get(after, -1), after))
    return order if len(order) == len(wished) else list(wished)


def _meeting(reduction: Op) -> tuple[int, int]:
    """What the G of all copies of a stage have in common: stage and update."""
    return reduction.stage, reduction.index


def _common_order(queues: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """All members of some queues in one order: that of the queues, but for a member that has to pass others to resolve a circle.

    Of those at the head of any queue, it is the one that has the fewest before it in all.
    """
    positions: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, queue in enumerate(queues):
        for position, member in enumerate(queue):
            positions.setdefault(member, []).append((number, position))
    blocked = {member: sum(position > 0 for _, position in found) for member, found in positions.items()}
    ready = [member for member in positions if not blocked[member]]
    heads = [0] * len(queues)
    order: dict[tuple[int, int], None] = {}
    while len(order) < len(positions):
        if not ready:
            waiting = {queue[head] for queue, head in zip(queues, heads, strict=True) if head < len(queue)}
            ready.append(min(waiting, key=lambda member: (sum(max(at - heads[number], 0) for number, at in positions[member]), member)))
        order[member := ready.pop()] = None
        for number, _ in positions[member]:
            queue, head = queues[number], heads[number]
            if queue[head] != member:
                continue
            while head < len(queue) and queue[head] in order:
                head += 1
            heads[number] = head
            if head < len(queue):
                blocked[queue[head]] -= 1
                if not blocked[queue[head]]:
                    ready.append(queue[head])
    return list(order)


def over_graph(schedule: Schedule, graph: StageGraph, *, times: tuple[StageTimes, ...] = (), latency_s: float = 0.0) -> Schedule:
    """The order of a chain of stages over a stage graph of as many, as the cut of a model has it.

    Updates of stages that share a weight wait for each other's gradients. Where pipelines go on while they update, these stand where
    all gradients have arrived, so that nobody waits for them; of several pipelines, those of a worker's other stages with them, or
    workers would meet in different orders.

    Args:
        schedule: the order.
        graph: takes the place of its own.
        times: of the stages, as of `ScheduleRequest`.
        latency_s: likewise.
    """
    laid = replace(schedule, graph=graph)
    in_line = graph.edges == StageGraph.chain(graph.num_stages).edges and all(op.kind in _IN_LINE for op in schedule.places)
    if not graph.ties or not schedule.weight_rule.overlaps_updates or schedule.forward_only or not in_line:
        return laid
    if len(schedule.pipelines) > 1:
        return _gathered(laid)
    return defer_updates(laid, Line.of(laid.pipelines, ScheduleRequest(laid.num_workers, 1, times=times, latency_s=latency_s)))


_IN_LINE = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.UPDATE})
"""What can be timed without more than a line of stages."""


def evaluation(schedule: Schedule, *, num_microbatches: int) -> Schedule:
    """Forwards only, with the same stages on the same workers: microbatches flow through the first pipeline.

    Forwards stand in the order of microbatch plus depth of the stage. Each needs one that is earlier in that order, on
    whichever worker, so that the order cannot deadlock however the stages are placed.
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
        loss_group_size=1,
    )


def repeated(schedule: Schedule, *, num_updates: int) -> Schedule:
    """The order of one update again and again, each worker's next update directly behind its last.

    Args:
        schedule: of one update.
        num_updates: how often.
    """
    assert schedule.num_updates == 1, "an order of several updates may overlap them"

    def later(slot: Slot, update: int) -> Slot:
        by = {True: update, False: update * schedule.num_microbatches}
        moved = tuple(op._replace(index=op.index + by[op.kind.per_update]) for op in ops_of(slot))
        return Overlap(moved) if isinstance(slot, Overlap) else moved[0]

    programs = tuple(tuple(later(slot, update) for update in range(num_updates) for slot in program) for program in schedule.programs)
    return replace(schedule, programs=programs, num_updates=num_updates)


def one_of_repeated(schedule: Schedule) -> Schedule | None:
    """The order of one update of which `repeated` makes this one; `None` where its updates overlap or differ."""
    programs: list[tuple[Slot, ...]] = []
    for program in schedule.programs:
        end = 0
        while end < len(program) and all(schedule.update(op) == 0 for op in ops_of(program[end])):
            end += 1
        programs.append(program[:end])
    one = replace(schedule, programs=tuple(programs), num_updates=1)
    return one if repeated(one, num_updates=schedule.num_updates).programs == schedule.programs else None


def recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule in which some stages keep their inputs alone and run each forward again right before its backward (R).

    R stands before the message that brings the gradient is awaited, so that it may fill that wait (Chen et al., 2016, arXiv 1604.06174,
    for whole stages).
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


def recomputed_stages(schedule: Schedule) -> tuple[int, ...]:
    """The stages that some forward is run again of."""
    return tuple(sorted({op.stage for op, _ in schedule.ops() if op.kind is OpKind.RECOMPUTE}))


def shard_optimizer(schedule: Schedule) -> Schedule:
    """The schedule in which one copy of each stage is updated, the first pipeline's, and published to the others (P).

    The others need no optimizer state: ZeRO stage 1 over the copies of a stage (Rajbhandari et al., SC 2020, arXiv 1910.02054). Of the
    updates that follow each other a worker's own come first, so that owners work at the same time, then the publications in the
    order of the stages, in which all workers meet. They only begin there. Where a worker's updates are scattered, they are gathered
    where the gradients of all stages have arrived, or workers would meet in different orders.
    """
    if all(len(holders) == 1 for holders in schedule.replicas):
        return schedule
    schedule = _gathered(schedule)
    programs: list[tuple[Slot, ...]] = []
    for program in schedule.programs:
        slots: list[Slot] = []
        for is_update, group in itertools.groupby(program, key=_is_update):
            found = list(group)
            slots += _owned(schedule, [op for slot in found for op in ops_of(slot)]) if is_update else found
        programs.append(tuple(slots))
    return replace(schedule, programs=tuple(programs))


def _gathered(schedule: Schedule) -> Schedule:
    """The schedule with the U of each worker for an update behind each other, where the gradients of all stages have arrived."""
    if all(len(found) <= schedule.num_updates for found in map(_runs_of_updates, schedule.programs)):
        return schedule
    meeting = replace(schedule, update_scope=UpdateScope.GLOBAL)
    gathered = defer_updates(meeting, Line.of(schedule.pipelines, ScheduleRequest(schedule.num_workers, 1)))
    return replace(gathered, update_scope=schedule.update_scope)


def _is_update(slot: Slot) -> bool:
    return isinstance(slot, Op) and slot.kind is OpKind.UPDATE


def _runs_of_updates(program: Sequence[Slot]) -> list[bool]:
    """One for each time that updates follow each other."""
    return [is_update for is_update, _ in itertools.groupby(program, key=_is_update) if is_update]


def _owned(schedule: Schedule, updates: Sequence[Op]) -> list[Op]:
    """What takes the place of a worker's updates where each stage has one owner."""
    found: list[Op] = []
    for update in sorted({op.index for op in updates}):
        mine = sorted((op.stage, op) for op in updates if op.index == update)
        found += [op for stage, op in mine if schedule.replicas[stage][0] == schedule.holder(op)]
        found += [op._replace(kind=OpKind.PUBLISH) for stage, op in mine if len(schedule.replicas[stage]) > 1]
    return found


def merge_split_backwards(schedule: Schedule) -> Schedule:
    """The schedule with each W that directly follows its own I merged with it into B, which costs less than the two apart."""
    programs: list[tuple[Slot, ...]] = []
    for program in schedule.programs:
        merged: list[Slot] = []
        for slot in program:
            if isinstance(slot, Op) and slot.kind is OpKind.WEIGHT_GRADIENT and merged:
                before = merged[-1]
                if not isinstance(before, Overlap) and before == slot._replace(kind=OpKind.INPUT_GRADIENT):
                    merged[-1] = slot._replace(kind=OpKind.BACKWARD)
                    continue
            merged.append(slot)
        programs.append(tuple(merged))
    return replace(schedule, programs=tuple(programs))
