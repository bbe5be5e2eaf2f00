"""The pass that adds the reductions of gradients (G) over the replicas of a stage."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TypeVar

from raypipe.schedules.ir import Op, OpKind, Schedule, Slot, UpdateScope


def add_reductions(schedule: Schedule, *, replicated_workers: Collection[int] = (), buckets: Sequence[int] = ()) -> Schedule:
    """Return the schedule with a G behind the last gradient of each update, where a stage has replicas; a schedule with G is unchanged.

    A copy without microbatches takes part before its worker's first U or P of that update. Some G stand later, so that all workers reduce
    in one order. Where an update waits for several stages, they stand before the worker's first U or P of the same update.

    Args:
        schedule: A valid schedule.
        replicated_workers: Workers that are several devices each, whose copies count as replicas too.
        buckets: In how many parts the gradients of each stage are summed, one behind the other; 1 by default.
    """
    if schedule.forward_only or any(op.kind is OpKind.REDUCE for op in schedule.places):
        return schedule
    joint, copied = _joint_stages(schedule), len(schedule.pipelines) > 1
    first: dict[tuple[int, int], int] = {}
    latest: dict[tuple[int, int, int], int] = {}
    behind: dict[tuple[int, int, int], int] = {}  # By worker, the first of stages that wait for each other, and update.
    for op, place in schedule.places.items():
        if op.kind is OpKind.UPDATE or op.kind is OpKind.PUBLISH:
            first.setdefault((place.worker, op.index), place.position)
            for stage in joint[op.stage]:
                latest.setdefault((place.worker, stage, op.index), place.position)
        # What joins the stages of one update comes before the sums of the next. Of copies on several workers these may be delayed.
        is_last = (op.kind is OpKind.UPDATE or op.kind is OpKind.PUBLISH) if copied else op.kind.writes_gradient
        if is_last and len(joint[op.stage]) > 1:
            at = place.worker, joint[op.stage][0], schedule.update(op) + 1
            behind[at] = max(behind.get(at, 0), place.position + 1)
    added: list[list[tuple[int, Op]]] = [[] for _ in schedule.programs]
    for replica, pipeline in schedule.first_pipeline.items():
        if len(schedule.replicas[replica.stage]) == 1 and replica.worker not in replicated_workers:
            continue
        for update in range(schedule.num_updates):
            position = first.get((replica.worker, update))
            if gradients := schedule.gradient_ops(replica, update):
                position = schedule.places[gradients[-1]].position + 1
                ended = behind.get((replica.worker, joint[replica.stage][0], update), 0)
                position = max(position, min(ended, latest.get((replica.worker, replica.stage, update), position)))
            if position is not None:
                added[replica.worker].append((position, Op(OpKind.REDUCE, replica.stage, update, pipeline)))
    if not any(added):
        return schedule
    eager = [sorted(reductions, key=itemgetter(0)) for reductions in added]
    placed = _in_one_order(eager, latest)
    divided = [[(position, part) for position, op in row for part in _divided(op, buckets)] for row in placed]
    programs = tuple(_with_added(program, reductions) for program, reductions in zip(schedule.programs, divided, strict=True))
    return replace(schedule, programs=programs)


def _divided(reduction: Op, buckets: Sequence[int]) -> list[Op]:
    count = buckets[reduction.stage] if buckets else 1
    return [reduction._replace(part=part) for part in range(1, count + 1)] if count > 1 else [reduction]


def _joint_stages(schedule: Schedule) -> list[Sequence[int]]:
    """List for each stage the stages that wait with it: their reductions stand before the first U or P of any of these stages."""
    graph, everything = schedule.graph, range(schedule.num_stages)
    # Among copies on several workers, those of all stages: a worker that sums a tie or passes weights on in between would be out of order.
    copied = bool(graph.ties or schedule.published_stages) and len(schedule.pipelines) > 1
    if schedule.update_scope is UpdateScope.GLOBAL or copied:
        return [everything] * schedule.num_stages
    return [graph.ties[graph.tie_of[stage]] if stage in graph.tie_of else (stage,) for stage in everything]


def _with_added(program: Sequence[Slot], added: Sequence[tuple[int, Op]]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    done = 0
    for position, op in added:
        slots += [*program[done:position], op]
        done = position
    return (*slots, *program[done:])


def _in_one_order(
    eager: Sequence[Sequence[tuple[int, Op]]], latest: Mapping[tuple[int, int, int], int]
) -> Sequence[Sequence[tuple[int, Op]]]:
    """Delay some reductions so that all workers reduce in one order; if one would pass its `latest` position, all stay in place."""
    wished = common_order([[_reduction_key(op) for _, op in row] for row in eager])
    rank = {key: number for number, key in enumerate(_that_can_be_kept(wished, eager, latest))}
    placed: list[list[tuple[int, Op]]] = []
    for worker, row in enumerate(eager):
        at = 0
        placed.append([])
        for position, op in sorted(row, key=lambda reduction: rank[_reduction_key(reduction[1])]):
            at = max(at, position)
            if at > max(position, latest.get((worker, op.stage, op.index), at)):
                return eager
            placed[-1].append((at, op))
    return placed


def _that_can_be_kept(
    wished: Sequence[tuple[int, int]], eager: Sequence[Sequence[tuple[int, Op]]], latest: Mapping[tuple[int, int, int], int]
) -> list[tuple[int, int]]:
    """Adjust the preferred order where a worker must finish one reduction before the gradients of another exist; on a cycle keep it."""
    rank: dict[tuple[int, ...], int] = {key: number for number, key in enumerate(wished)}
    behind: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    count: Counter[tuple[int, ...]] = Counter()

    def precedes(before: tuple[int, ...], after: tuple[int, ...]) -> None:
        behind.setdefault(before, []).append(after)
        count[after] += 1

    for worker, row in enumerate(eager):
        # A gate for each place in the row: what must come before a gate comes before all that follow. A reduction's key has two numbers.
        gates: list[tuple[int, ...]] = [(worker, place, 0) for place in range(len(row))]
        for gate, after in itertools.pairwise(gates):
            precedes(gate, after)
        for gate, (_, op) in zip(gates, row, strict=True):
            precedes(gate, _reduction_key(op))
        positions = [position for position, _ in row]
        for _, op in row:
            place = bisect.bisect_right(positions, latest.get((worker, op.stage, op.index), positions[-1] + 1))
            if place < len(row):
                precedes(_reduction_key(op), gates[place])
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


def _reduction_key(reduction: Op) -> tuple[int, int]:
    return reduction.stage, reduction.index


_Member = TypeVar("_Member", bound=tuple[object, ...])


def common_order(queues: Sequence[Sequence[_Member]]) -> list[_Member]:
    """Merge the queues into one order; on a cycle the head with the fewest members before it in all passes the others."""
    positions: dict[_Member, list[tuple[int, int]]] = {}
    for number, queue in enumerate(queues):
        for position, member in enumerate(queue):
            positions.setdefault(member, []).append((number, position))
    blocked = {member: sum(position > 0 for _, position in found) for member, found in positions.items()}
    ready = [member for member in positions if not blocked[member]]
    heads = [0] * len(queues)
    order: dict[_Member, None] = {}
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
