"""What every bundled schedule states about itself, and what their generators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import Op, OpKind, Schedule, Size, StageGraph, StageTimes, UpdateScope


@dataclass(frozen=True)
class Family:
    """A schedule by name, for any size.

    Attributes:
        name: as the command line knows it.
        build: the generator; raises ScheduleError for sizes it cannot take, saying what would work.
        title: what it is, in a few words.
        paper: author, year and where to find it.
        bubble: idle time per device or its share, as a formula over D devices, M microbatches, V chunks and stage times.
        memory: stage activations held, as a formula over the same and the stage s.
        mismatch: weight versions between forward and backward of a microbatch.
        delay: updates between the weights of a forward and those its gradient changes.
        makespan_s: the time of one update with equal stages and no latency, or `None` where the formula does not hold.
        peak_in_flight: the bound on the activations that a worker holds.
        default_chunks: stages a device where none are asked for.
    """

    name: str
    build: Callable[[Size], Schedule]
    title: str
    paper: str
    bubble: str
    memory: str
    mismatch: str
    delay: str
    makespan_s: Callable[[Size, StageTimes], float | None]
    peak_in_flight: Callable[[Size, int], int]
    default_chunks: int = 1


def synchronous(name: str, size: Size, *, workers: Sequence[int], one_update: Sequence[Sequence[Op]]) -> Schedule:
    """A synchronous schedule of one pipeline: the same order for each update, with the updates of a worker's stages behind it.

    Args:
        name: of the schedule.
        size: for how many microbatches and updates.
        workers: the worker of each stage of the chain.
        one_update: for each worker, the Ops of update 0.
    """
    stages = [[stage for stage, at in enumerate(workers) if at == worker] for worker in range(size.num_devices)]
    programs = tuple(
        tuple(
            op
            for update in range(size.num_updates)
            for op in (
                *(op._replace(index=op.index + update * size.num_microbatches) for op in ops),
                *(Op(OpKind.UPDATE, stage, update) for stage in stages[worker]),
            )
        )
        for worker, ops in enumerate(one_update)
    )
    return Schedule(
        name=name,
        graph=StageGraph.chain(len(workers)),
        pipelines=(tuple(workers),),
        programs=programs,
        num_microbatches=size.num_microbatches,
        num_updates=size.num_updates,
        update_scope=size.update_scope or UpdateScope.GLOBAL,
    )


def require_one_chunk(name: str, size: Size) -> None:
    """Refuses several stages a worker for a schedule that takes one.

    Raises:
        ScheduleError: `num_chunks` is not 1.
    """
    if size.num_chunks != 1:
        raise ScheduleError(f"{name} holds one stage a device, got {size.num_chunks} chunks; use --chunks 1, or the schedule 'interleaved'")


def require_one_pipeline(name: str, size: Size) -> None:
    """Refuses several pipelines for a schedule that has one.

    Raises:
        ScheduleError: `num_pipelines` is neither 0 nor 1.
    """
    if size.num_pipelines not in {0, 1}:
        raise ScheduleError(f"{name} has one pipeline, got {size.num_pipelines}; leave --pipelines out")
