"""Figures of one schedule with equal stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from raypipe.artifacts.branches import stage_branches
from raypipe.artifacts.trace import Trace
from raypipe.errors import InputError, ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import lower
from raypipe.schedules.metrics import ScheduleMetrics, metrics
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs

_STEADY_UPDATES = 9
# Two million Ops take some two minutes and two gigabytes; what all updates wait for grows with the square of the stages.
_MOST_OPS = 2_000_000
_MOST_STAGES = 1024


@dataclass(frozen=True)
class StageSeconds:
    """Times of each stage: F, B, the W that is a part of B, and the latency between devices."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_grad_s: float = 1.0
    latency_s: float = 0.0

    @property
    def input_grad_s(self) -> float:
        """Seconds of I."""
        return self.backward_s - self.weight_grad_s

    @property
    def searched(self) -> StageTimes:
        """Times for schedules that are searched for."""
        return StageTimes(self.forward_s, self.input_grad_s, self.weight_grad_s)

    def share(self, share: float) -> StageSeconds:
        """Return the times of a part of a stage."""
        return StageSeconds(self.forward_s * share, self.backward_s * share, self.weight_grad_s * share, self.latency_s)


@dataclass(frozen=True)
class ScheduleFigures:
    """A simulated schedule.

    Attributes:
        long_window: The schedule for so many updates that most are far from the ends; None if there is none or updates are alike.
        steady_update_s: Seconds per update far from the ends.
        work: Seconds of each stage over the stage's whose times were asked for; empty where all are equal.
    """

    schedule: Schedule
    trace: Trace
    long_window: Schedule | None
    steady_update_s: float
    work: tuple[float, ...] = ()

    @cached_property
    def metrics(self) -> ScheduleMetrics:
        """Metrics of the window."""
        return self._metrics(self.schedule)

    @cached_property
    def steady_metrics(self) -> ScheduleMetrics:
        """Metrics of the long window, where overlapping updates reach their peaks."""
        return self._metrics(self.long_window or self.schedule)

    def _metrics(self, schedule: Schedule) -> ScheduleMetrics:
        return metrics(schedule, holds_nothing=[stage for stage, each in enumerate(self.work) if not each])


def figures_of(spec: ScheduleSpec, schedule: Schedule, request: ScheduleRequest, times: StageSeconds) -> ScheduleFigures:
    """Simulate a schedule built to a request."""
    work = spec.stage_work(request) if spec.stage_work else ()
    trace = simulated(schedule, times, work)
    window = _long_window(spec, schedule, request)
    steady = trace if window is None else simulated(window, times, work)
    return ScheduleFigures(schedule, trace, window, steady.steady_update_s, work)


def simulated(schedule: Schedule, times: StageSeconds, work: Sequence[float] = ()) -> Trace:
    """Simulate a valid schedule whose stages are equal, or take `work` times as long."""
    cost = equal_stages(
        schedule,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_grad_s=times.weight_grad_s,
        latency_s=times.latency_s,
        work=work,
    )
    trace = simulate_programs(lower(schedule), cost, name=schedule.name, num_updates=schedule.num_updates, with_memory=False)
    return replace(trace, branches=stage_branches(schedule.graph))


def flushes(schedule: Schedule) -> bool:
    """Return whether each update waits for all of the one before, so all take equally long."""
    return not schedule.weight_rule.overlaps_updates and schedule.update_scope is UpdateScope.GLOBAL


def _long_window(spec: ScheduleSpec, schedule: Schedule, request: ScheduleRequest) -> Schedule | None:
    num_updates = _steady_updates(spec, replace(request, update_scope=schedule.update_scope))
    if flushes(schedule) or num_updates == request.num_updates:
        return None
    try:
        return catalogue.of_size(spec, replace(request, num_updates=num_updates))
    except ScheduleError:  # an order that is written for this window alone
        return None


def _steady_updates(spec: ScheduleSpec, request: ScheduleRequest) -> int:
    num_updates = max(request.num_updates, _STEADY_UPDATES)
    if spec.weight_rule.overlaps_updates or request.update_scope not in {None, UpdateScope.GLOBAL}:
        # A quarter of the updates fills the pipeline twice.
        num_updates = max(num_updates, 8 * math.ceil(request.num_devices * request.num_chunks / request.num_microbatches))
    return num_updates


def refuse_large(spec: ScheduleSpec, request: ScheduleRequest) -> None:
    """Refuse what would take minutes to simulate.

    Raises:
        InputError: Too many stages or Ops.
    """
    num_stages, num_updates = request.num_devices * request.num_chunks, _steady_updates(spec, request)
    if num_stages > _MOST_STAGES:
        raise InputError(f"{num_stages} stages are too many to simulate; use at most {_MOST_STAGES}")
    if (num_copies := num_stages * request.num_pipelines) > _MOST_STAGES:
        raise InputError(
            f"{request.num_pipelines} pipelines of {num_stages} stages are {num_copies} copies of a stage, too many to simulate; "
            f"use at most {_MOST_STAGES}"
        )
    # Three Ops a stage and microbatch at most: F, I and W; halves of a microbatch are done in four.
    num_ops = 3 * num_stages * request.num_microbatches * num_updates
    if num_ops > _MOST_OPS:
        raise InputError(
            f"{num_stages} stages with {request.num_microbatches} microbatches for {num_updates} updates, which the steady time per update "
            f"needs, are up to {num_ops} Ops; the limit is {_MOST_OPS}. Use fewer devices, microbatches or updates"
        )
