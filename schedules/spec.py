"""What every schedule states about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raypipe.schedules.ir import Schedule, WeightRule
from raypipe.schedules.request import ScheduleRequest, StageTimes


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule by name, for any request.

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
