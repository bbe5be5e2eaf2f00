"""The name, the generator and the published properties of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raypipe.schedules.ir import Schedule, WeightRule
from raypipe.schedules.request import ScheduleRequest, StageTimes


@dataclass(frozen=True)
class ScheduleSpec:
    """The name, the generator and the published properties of a schedule.

    Attributes:
        name: name on the command line.
        build: generator; raises ScheduleError for a size that the schedule cannot take, naming one that would work.
        title: description in a few words.
        paper: authors, year, and where to find the paper.
        bubble: idle time per device or its share, as a formula of D devices, M microbatches, V chunks, N pipelines, K rounds
            per update and stage times; F&B is the time of a forward and a backward that overlap.
        memory: stage activations per worker, as a formula of D, M, V, N and the stage s.
        mismatch: number of updates between the weights that a microbatch's forward and backward use.
        delay: number of updates between the weights that a forward reads and the weights that its gradient changes.
        makespan_s: seconds of one update with equal stages and no latency; overlapping Ops count as if run one after the
            other. `None` where the formula does not hold.
        peak_in_flight: bound on the activations that a worker holds, as a function of the request and the worker.
        weight_rule: rule by which a backward finds its weights.
        default_chunks: stages per device when the user does not say.
        stage_work: seconds of each stage for one microbatch of the schedule over those of the stage whose times the request has;
            `None` where all stages are equal. A stage of no work holds no activations.
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
    stage_work: Callable[[ScheduleRequest], tuple[float, ...]] | None = None
