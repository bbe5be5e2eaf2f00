"""Compares all schedules at one size, on the same model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.analysis.schedule_figures import ScheduleFigures, StageSeconds, figures_of, flushes, refuse_large
from raypipe.errors import InputError, ScheduleError
from raypipe.planning.lower_bounds import Block, lower_bound
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Send, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.validate import validate


@dataclass(frozen=True)
class ComparedSchedule:
    """A schedule, with figures that compare across different numbers of stages and pipelines.

    Attributes:
        num_messages: Messages that each device sends for an update.
        message_volume: Bytes of all messages over an activation and a gradient on D - 1 edges.
        lower_bound_s: Seconds per update that no order of the same stages on as many copies can beat.
    """

    name: str
    figures: ScheduleFigures
    num_messages: tuple[float, ...]
    message_volume: float
    lower_bound_s: float

    @property
    def share(self) -> float:
        """Size of a stage, where 1 is a device's share of the model."""
        return self.figures.schedule.num_workers / self.figures.schedule.num_stages

    @property
    def over_lower_bound(self) -> float | None:
        """Steady update time over the bound; None for a bound of 0."""
        return self.figures.steady_update_s / self.lower_bound_s if self.lower_bound_s else None


@dataclass(frozen=True)
class ScheduleComparison:
    """Schedules that take the size; name and reason of those that refuse it."""

    compared: tuple[ComparedSchedule, ...]
    refused: tuple[tuple[str, str], ...]


def compare_schedules(
    specs: Sequence[ScheduleSpec], request: ScheduleRequest, times: StageSeconds, *, num_chunks: int | None = None
) -> ScheduleComparison:
    """Build, validate and simulate schedules of the same model.

    `times` are of a device's share of the model. `num_chunks` is for schedules that take several; None for their defaults.
    """
    compared: list[ComparedSchedule] = []
    refused: list[tuple[str, str]] = []
    for spec in specs:
        chunks = num_chunks if num_chunks and spec.default_chunks > 1 else spec.default_chunks
        try:
            compared.append(_compared(spec, replace(request, num_chunks=chunks), times))
        except (ScheduleError, InputError) as error:
            refused.append((spec.name, error.problem if isinstance(error, ScheduleError) else str(error)))
    return ScheduleComparison(tuple(compared), tuple(refused))


def _compared(spec: ScheduleSpec, request: ScheduleRequest, times: StageSeconds) -> ComparedSchedule:
    refuse_large(spec, request)
    # An order that is searched for is searched for with the times that its stages will have.
    request = replace(request, times=(times.share(1 / request.num_chunks).searched,), latency_s=times.latency_s)
    schedule = catalogue.of_size(spec, request)
    validate(schedule)
    stage = times.share(schedule.num_workers / schedule.num_stages)
    sent = [[item.message.rows for item in program.items if isinstance(item, Send)] for program in lower(schedule)]
    volume = math.fsum(end - first for rows in sent for first, end in rows) / schedule.num_updates
    num_edges = schedule.num_workers - 1
    return ComparedSchedule(
        name=spec.name,
        figures=figures_of(spec, schedule, request, stage),
        num_messages=tuple(len(rows) / schedule.num_updates for rows in sent),
        message_volume=volume / (2 * schedule.num_microbatches * num_edges) if num_edges else 0.0,
        lower_bound_s=_bound_s(schedule, stage),
    )


def _bound_s(schedule: Schedule, stage: StageSeconds) -> float:
    blocks = [Block(stage.forward_s, stage.input_grad_s, stage.weight_grad_s, sources=sources) for sources in schedule.graph.predecessors]
    bound = lower_bound(
        blocks,
        num_microbatches=schedule.num_microbatches,
        speeds=(1.0,) * schedule.num_workers,
        num_copies=len(schedule.pipelines),
        latency_s=stage.latency_s,
    )
    return bound.update_s if flushes(schedule) else bound.work_s  # only the work of all devices bounds updates that overlap
