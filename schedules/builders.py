"""What generators share: schedules from the order of one update, or from an order that never drains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, StageGraph, StageReplica, UpdateScope, WeightRule, ops_of
from raypipe.schedules.request import ScheduleRequest


def synchronous(name: str, request: ScheduleRequest, *, workers: Sequence[int], one_update: Sequence[Sequence[Slot]]) -> Schedule:
    """Return a schedule of one pipeline that repeats one order for each update, with the updates of each worker behind it."""
    return synchronous_pipelines(name, request, pipelines=[workers], one_update=one_update)


def synchronous_pipelines(
    name: str,
    request: ScheduleRequest,
    *,
    pipelines: Sequence[Sequence[int]],
    one_update: Sequence[Sequence[Slot]],
    graph: StageGraph | None = None,
) -> Schedule:
    """Return `synchronous` for several pipelines: each worker ends an update with a U for every copy of a stage that it holds."""
    replicas: dict[StageReplica, int] = {}
    for pipeline, workers in enumerate(pipelines):
        for stage, worker in enumerate(workers):
            replicas.setdefault(StageReplica(worker, stage), pipeline)
    updates = [
        [Op(OpKind.UPDATE, replica.stage, 0, replicas[replica]) for replica in sorted(replicas) if replica.worker == worker]
        for worker in range(request.num_devices)
    ]
    programs = tuple(
        tuple(
            slot
            for update in range(request.num_updates)
            for slot in (
                *(_later(slot, update * request.num_microbatches) for slot in slots),
                *(_later(op, update) for op in updates[worker]),
            )
        )
        for worker, slots in enumerate(one_update)
    )
    return Schedule(
        name=name,
        graph=graph or StageGraph.chain(len(pipelines[0])),
        pipelines=tuple(map(tuple, pipelines)),
        programs=programs,
        num_microbatches=request.num_microbatches,
        num_updates=request.num_updates,
        update_scope=request.update_scope or UpdateScope.GLOBAL,
    )


def in_turn(forwards: Sequence[Slot], backwards: Sequence[Slot], *, warm_up: int) -> list[Slot]:
    """Return `warm_up` forwards (or all), then a forward and a backward in turn, then the backwards left over; both are as many."""
    lead = min(warm_up, len(forwards))
    num_pairs = len(forwards) - lead
    pairs = [slot for pair in zip(forwards[lead:], backwards[:num_pairs], strict=True) for slot in pair]
    return [*forwards[:lead], *pairs, *backwards[num_pairs:]]


def unflushed(
    name: str, request: ScheduleRequest, *, workers: Sequence[int], programs: Sequence[Sequence[Slot]], weight_rule: WeightRule
) -> Schedule:
    """Return a schedule of one pipeline that goes on while it updates: a stage's U stands right behind its last backward of the update."""
    updated: list[tuple[Slot, ...]] = []
    for program in programs:
        left = Counter[tuple[int, int]]()
        for slot in program:
            left.update((op.stage, op.index // request.num_microbatches) for op in ops_of(slot) if op.kind.writes_gradient)
        slots: list[Slot] = []
        for slot in program:
            slots.append(slot)
            for op in ops_of(slot):
                if op.kind.writes_gradient:
                    left[key := (op.stage, op.index // request.num_microbatches)] -= 1
                    if not left[key]:
                        slots.append(Op(OpKind.UPDATE, *key))
        updated.append(tuple(slots))
    return Schedule(
        name=name,
        graph=StageGraph.chain(len(workers)),
        pipelines=(tuple(workers),),
        programs=tuple(updated),
        num_microbatches=request.num_microbatches,
        num_updates=request.num_updates,
        weight_rule=weight_rule,
        update_scope=request.update_scope or UpdateScope.STAGE,
    )


def _later(slot: Slot, by: int) -> Slot:
    moved = tuple(op._replace(index=op.index + by) for op in ops_of(slot))
    return Overlap(moved) if isinstance(slot, Overlap) else moved[0]
