"""Every schedule at one size: the figures that `raypipe schedules --devices D --microbatches M` compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypipe.cli.figures import schedule_figures
from raypipe.cli.schedule import StageSeconds, long_window, refuse_large
from raypipe.errors import InputError, ScheduleError
from raypipe.planning.lower_bounds import Piece, lower_bound
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import DeviceProgram, Send, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.validate import validate
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import time_order
from raypipe.simulation.timing import Timing


@dataclass(frozen=True)
class Zoo:
    """What became of each schedule.

    Attributes:
        figures: of those that take the size: what `raypipe schedule --json` prints, and what `_compared` adds.
        refused: pairs of the name and the reason of those that do not.
    """

    figures: tuple[dict[str, Any], ...]
    refused: tuple[tuple[str, str], ...]


def survey(families: Sequence[ScheduleSpec], size: ScheduleRequest, times: StageSeconds, *, num_chunks: int | None = None) -> Zoo:
    """Builds, validates and simulates schedules of the same model.

    Args:
        families: which.
        size: of all of them, chunks left out.
        times: per device: of one of as many equal parts of the model as there are devices, however many stages a schedule makes of it.
        num_chunks: stages a device for the families that have several; `None` for each family's own number.
    """
    figures: list[dict[str, Any]] = []
    refused: list[tuple[str, str]] = []
    for spec in families:
        chunks = num_chunks if num_chunks and spec.default_chunks > 1 else spec.default_chunks
        try:
            figures.append(_figures_of(spec, replace(size, num_chunks=chunks), times))
        except ScheduleError as error:
            refused.append((spec.name, error.problem))
        except InputError as error:
            refused.append((spec.name, str(error)))
    return Zoo(tuple(figures), tuple(refused))


def _share(times: StageSeconds, share: float) -> StageSeconds:
    """The times of a part of what a device does; those of messages stay."""
    return StageSeconds(times.forward_s * share, times.backward_s * share, times.weight_grad_s * share, times.latency_s)


def _figures_of(spec: ScheduleSpec, size: ScheduleRequest, times: StageSeconds) -> dict[str, Any]:
    refuse_large(spec, size)
    # Those that are searched for are searched with the times of the stages that they will have.
    stage = _share(times, 1 / size.num_chunks)
    size = replace(size, times=(stage.searched,), latency_s=times.latency_s)
    schedule = catalogue.of_size(spec, size)
    validate(schedule)
    stage = _share(times, schedule.num_workers / schedule.num_stages)
    programs = lower(schedule)
    timing = _timed(schedule, programs, stage)
    trace = timing.trace(name=spec.name, num_updates=schedule.num_updates, with_memory=False)
    window = _long_window(spec, schedule, size)
    if window is None:
        steady_update_s = trace.steady_update_s
    else:
        long_trace = _timed(window, lower(window), stage).trace(name=spec.name, num_updates=window.num_updates, with_memory=False)
        steady_update_s = long_trace.steady_update_s
    figures = schedule_figures(schedule, trace, steady_update_s=steady_update_s)
    if window is not None:  # what updates that overlap hold, and how stale they are, shows there alone
        known = metrics(window)
        figures |= {
            "peak_in_flight": list(known.peak_in_flight),
            "weight_copies": list(known.weight_copies),
            "max_mismatch": known.max_mismatch,
            "max_delay": known.max_delay,
            "mean_delay": known.mean_delay,
        }
    return figures | {"schedule": spec.name} | _compared(schedule, programs, figures, stage)


def _timed(schedule: Schedule, programs: Sequence[DeviceProgram], stage: StageSeconds) -> Timing:
    cost = equal_stages(
        schedule,
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        weight_grad_s=stage.weight_grad_s,
        latency_s=stage.latency_s,
    )
    return time_order(CompiledOrder(programs), cost)


def _flushes(schedule: Schedule) -> bool:
    """Whether each update waits for all of the last one, so that all take as long as the first."""
    return not schedule.weight_rule.overlaps_updates and schedule.update_scope is UpdateScope.GLOBAL


def _long_window(spec: ScheduleSpec, schedule: Schedule, size: ScheduleRequest) -> Schedule | None:
    """The schedule for so many updates that most are far from the ends; `None` where all updates are alike, or no other window is had."""
    longer = long_window(spec, replace(size, update_scope=schedule.update_scope))
    if _flushes(schedule) or longer.num_updates == size.num_updates:
        return None
    try:
        return catalogue.of_size(spec, longer)
    except ScheduleError:  # an order that is written for this window alone
        return None


def _compared(schedule: Schedule, programs: Sequence[DeviceProgram], figures: dict[str, Any], stage: StageSeconds) -> dict[str, Any]:
    """What makes schedules of different stages and pipelines comparable; the keys are a contract.

    Shares are of what one device holds where each has one stage of as many as there are devices: stage activations and stage
    weights divided by the stages of a pipeline per device. A message's volume is that of one microbatch between two stages, the same
    wherever the model is cut; as a multiple of what one stage a device sends, an activation and a gradient over each of D-1 edges.
    """
    num_devices, num_updates = schedule.num_workers, schedule.num_updates
    share = num_devices / schedule.num_stages
    sent = [[item.message.rows for item in program.items if isinstance(item, Send)] for program in programs]
    volume = math.fsum(end - first for rows in sent for first, end in rows) / num_updates
    bound_s = _bound_s(schedule, stage)
    return {
        "peak_in_flight_shares": [held * share for held in figures["peak_in_flight"]],
        "weight_copies_shares": [copies * share for copies in figures["weight_copies"]],
        "messages_per_update": sum(map(len, sent)) / num_updates,
        "max_device_messages_per_update": max(map(len, sent)) / num_updates,
        "relative_message_volume": volume / (2 * schedule.num_microbatches * (num_devices - 1)) if num_devices > 1 else 0.0,
        "lower_bound_s": bound_s,
        "over_lower_bound": figures["steady_update_s"] / bound_s if bound_s else None,
    }


def _bound_s(schedule: Schedule, stage: StageSeconds) -> float:
    """What no order of the same stages on as many copies can beat; for updates that overlap, the work of all devices alone."""
    pieces = [
        Piece(stage.forward_s, stage.backward_s - stage.weight_grad_s, stage.weight_grad_s, sources=sources)
        for sources in schedule.graph.predecessors
    ]
    bound = lower_bound(
        pieces,
        num_microbatches=schedule.num_microbatches,
        speeds=(1.0,) * schedule.num_workers,
        num_copies=len(schedule.pipelines),
        latency_s=stage.latency_s,
    )
    return bound.update_s if _flushes(schedule) else bound.work_s
