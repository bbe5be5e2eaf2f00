"""Passes: schedules from schedules, never in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from raypipe.schedules.ir import Op, OpKind, Schedule, Slot, Together, ops_of


def add_reductions(schedule: Schedule, *, replicated_workers: Collection[int] = ()) -> Schedule:
    """The schedule with a G right behind the last gradient of each update, where a stage has replicas.

    A copy that no microbatch of an update passes through takes part all the same, before its worker's first U of that update.

    Args:
        schedule: one that has no G yet is given them; one that has keeps its own.
        replicated_workers: workers that are several devices each, whose copies count as replicas too.
    """
    if schedule.forward_only or any(op.kind is OpKind.REDUCE for op in schedule.places):
        return schedule
    first_update: dict[tuple[int, int], Op] = {}
    for op, place in schedule.ops():
        if op.kind is OpKind.UPDATE:
            first_update.setdefault((place.worker, op.index), op)
    added: dict[Op, list[Op]] = {}
    for holder, pipeline in schedule.holders.items():
        if len(schedule.replicas[holder.stage]) == 1 and holder.worker not in replicated_workers:
            continue
        for update in range(schedule.num_updates):
            beside = [*schedule.gradient_ops(holder, update)[-1:], first_update.get((holder.worker, update))]
            if beside[0]:
                added.setdefault(beside[0], []).append(Op(OpKind.REDUCE, holder.stage, update, pipeline))
    programs = tuple(tuple(item for slot in program for item in _with_added(slot, added)) for program in schedule.programs)
    return replace(schedule, programs=programs)


def _with_added(slot: Slot, added: Mapping[Op, list[Op]]) -> list[Slot]:
    """A slot with what is added behind its gradients and before its updates."""
    before = [new for op in ops_of(slot) if op.kind is OpKind.UPDATE for new in added.get(op, ())]
    return [*before, slot, *(new for op in ops_of(slot) if op.kind is not OpKind.UPDATE for new in added.get(op, ()))]


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


def merge_split_backwards(schedule: Schedule) -> Schedule:
    """The schedule with each W that directly follows its own I merged with it into B, which costs less than the two apart."""
    programs: list[tuple[Slot, ...]] = []
    for program in schedule.programs:
        merged: list[Slot] = []
        for slot in program:
            if isinstance(slot, Op) and slot.kind is OpKind.WEIGHT_GRADIENT and merged:
                before = merged[-1]
                if not isinstance(before, Together) and before == slot._replace(kind=OpKind.INPUT_GRADIENT):
                    merged[-1] = slot._replace(kind=OpKind.BACKWARD)
                    continue
            merged.append(slot)
        programs.append(tuple(merged))
    return replace(schedule, programs=tuple(programs))
