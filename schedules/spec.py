"""What every bundled schedule states about itself, and what their generators share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import (
    Holder,
    Op,
    OpKind,
    Overlap,
    Schedule,
    ScheduleRequest,
    Slot,
    StageGraph,
    StageTimes,
    UpdateScope,
    WeightRule,
    ops_of,
)


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule by name, for any size.

    Attributes:
        name: as the command line knows it.
        build: the generator; raises ScheduleError for sizes it cannot take, saying what would work.
        title: what it is, in a few words.
        paper: author, year and where to find it.
        bubble: idle time per device or its share, as a formula over D devices, M microbatches, V chunks, P pipelines and stage
            times; F&B is the time of a forward and a backward that overlap.
        memory: stage activations held, as a formula over the same and the stage s.
        mismatch: weight versions between forward and backward of a microbatch.
        delay: updates between the weights of a forward and those its gradient changes.
        makespan_s: the time of one update with equal stages and no latency, where Ops that overlap take as long as one after
            the other; `None` where the formula does not hold.
        peak_in_flight: the bound on the activations that a worker holds.
        weight_rule: how a backward finds its weights; only under `flush` do microbatches see the weights of their own update.
        default_chunks: stages a device where none are asked for.
    """

    name: str
    build: Callable[[ScheduleRequest], Schedule]
    title: str
    paper: str
    bubble: str
    memory: str
    mismatch: str
    delay: str
    makespan_s: Callable[[ScheduleRequest, StageTimes], float | None]
    peak_in_flight: Callable[[ScheduleRequest, int], int]
    default_chunks: int = 1
    weight_rule: WeightRule = WeightRule.FLUSH


def synchronous(name: str, size: ScheduleRequest, *, workers: Sequence[int], one_update: Sequence[Sequence[Slot]]) -> Schedule:
    """A synchronous schedule of one pipeline: the same order for each update, with the updates of a worker's stages behind it.

    Args:
        name: of the schedule.
        size: for how many microbatches and updates.
        workers: the worker of each stage of the chain.
        one_update: for each worker, the slots of update 0.
    """
    return synchronous_pipelines(name, size, pipelines=[workers], one_update=one_update)


def synchronous_pipelines(
    name: str, size: ScheduleRequest, *, pipelines: Sequence[Sequence[int]], one_update: Sequence[Sequence[Slot]]
) -> Schedule:
    """The same for several pipelines: each worker ends an update with a U for every copy of a stage that it holds.

    Args:
        name: of the schedule.
        size: for how many microbatches and updates.
        pipelines: for each laying of the chain, the worker of each stage.
        one_update: for each worker, the slots of update 0.
    """
    holders: dict[Holder, int] = {}
    for pipeline, workers in enumerate(pipelines):
        for stage, worker in enumerate(workers):
            holders.setdefault(Holder(worker, stage), pipeline)
    updates = [
        [Op(OpKind.UPDATE, holder.stage, 0, holders[holder]) for holder in sorted(holders) if holder.worker == worker]
        for worker in range(size.num_devices)
    ]
    programs = tuple(
        tuple(
            slot
            for update in range(size.num_updates)
            for slot in (
                *(_later(slot, update * size.num_microbatches) for slot in slots),
                *(_later(op, update) for op in updates[worker]),
            )
        )
        for worker, slots in enumerate(one_update)
    )
    return Schedule(
        name=name,
        graph=StageGraph.chain(len(pipelines[0])),
        pipelines=tuple(map(tuple, pipelines)),
        programs=programs,
        num_microbatches=size.num_microbatches,
        num_updates=size.num_updates,
        update_scope=size.update_scope or UpdateScope.GLOBAL,
    )


def in_turn(forwards: Sequence[Slot], backwards: Sequence[Slot], *, warm_up: int) -> list[Slot]:
    """Some forwards, then a forward and a backward in turn, then the backwards left over.

    Args:
        forwards: in order.
        backwards: as many, in order.
        warm_up: forwards before the first backward but one; all of them if there are fewer.
    """
    lead = min(warm_up, len(forwards))
    num_pairs = len(forwards) - lead
    pairs = [slot for pair in zip(forwards[lead:], backwards[:num_pairs], strict=True) for slot in pair]
    return [*forwards[:lead], *pairs, *backwards[num_pairs:]]


def unflushed(
    name: str, size: ScheduleRequest, *, workers: Sequence[int], programs: Sequence[Sequence[Slot]], weight_rule: WeightRule
) -> Schedule:
    """A schedule of one pipeline that goes on while it updates: each stage's U stands right behind its last backward of the update.

    Args:
        name: of the schedule.
        size: for how many microbatches and updates.
        workers: the worker of each stage of the chain.
        programs: for each worker, the slots of all updates.
        weight_rule: how a backward finds its weights.
    """
    updated: list[tuple[Slot, ...]] = []
    for program in programs:
        left = Counter[tuple[int, int]]()
        for slot in program:
            left.update((op.stage, op.index // size.num_microbatches) for op in ops_of(slot) if op.kind.writes_gradient)
        slots: list[Slot] = []
        for slot in program:
            slots.append(slot)
            for op in ops_of(slot):
                if op.kind.writes_gradient:
                    left[key := (op.stage, op.index // size.num_microbatches)] -= 1
                    if not left[key]:
                        slots.append(Op(OpKind.UPDATE, *key))
        updated.append(tuple(slots))
    return Schedule(
        name=name,
        graph=StageGraph.chain(len(workers)),
        pipelines=(tuple(workers),),
        programs=tuple(updated),
        num_microbatches=size.num_microbatches,
        num_updates=size.num_updates,
        weight_rule=weight_rule,
        update_scope=size.update_scope or UpdateScope.STAGE,
    )


def _later(slot: Slot, by: int) -> Slot:
    """The slot with all indices larger by a number."""
    moved = tuple(op._replace(index=op.index + by) for op in ops_of(slot))
    return Overlap(moved) if isinstance(slot, Overlap) else moved[0]


def require_one_chunk(name: str, size: ScheduleRequest, *, instead: str = "interleaved") -> None:
    """Refuses several stages a worker for a schedule that takes one.

    Args:
        name: of the schedule.
        size: what is asked for.
        instead: the schedule that takes several.

    Raises:
        ScheduleError: `num_chunks` is not 1.
    """
    if size.num_chunks != 1:
        raise ScheduleError(f"{name} holds one stage a device, got {size.num_chunks} chunks; use --chunks 1, or the schedule {instead!r}")


def require_one_pipeline(name: str, size: ScheduleRequest) -> None:
    """Refuses several pipelines for a schedule that has one.

    Raises:
        ScheduleError: `num_pipelines` is neither 0 nor 1.
    """
    if size.num_pipelines not in {0, 1}:
        raise ScheduleError(f"{name} has one pipeline, got {size.num_pipelines}; leave --pipelines out")


def require_even_devices(name: str, size: ScheduleRequest) -> None:
    """Refuses an odd number of devices for a schedule of pipelines in opposite directions.

    Raises:
        ScheduleError: `num_devices` is odd.
    """
    if size.num_devices % 2:
        near = " or ".join(f"--devices {number}" for number in (size.num_devices - 1, size.num_devices + 1) if number)
        raise ScheduleError(f"{name} has pipelines in opposite directions on an even number of devices, got {size.num_devices}; use {near}")
