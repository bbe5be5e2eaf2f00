"""What a generator of schedules is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import UpdateScope


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage and microbatch, the same for all stages: forward, input gradient and weight gradient.

    The full backward takes the sum of the last two.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float


@dataclass(frozen=True)
class ScheduleRequest:
    """What a generator is asked for.

    Attributes:
        num_devices: workers, at least 1.
        num_microbatches: of one update, over all pipelines, at least 1.
        num_updates: updates of the window, at least 1.
        num_chunks: stages a worker, for the schedules that take several.
        num_pipelines: pipelines, for the schedules that have several; 0 lets the schedule choose.
        update_scope: what an update waits for; `None` for the schedule's own default.
        times: of each stage, or one for all of them, for the schedules that are searched for; F = I = W = 1 where there are none.
        latency_s: seconds of every dependency between devices, likewise.
        max_in_flight: the most stage activations that a worker may hold, likewise; `None` for the schedule's own limit.
        max_mean_staleness: the most updates between the weights of a forward and those that its gradient changes, on average,
            for `amdp-auto`; `None` for no limit.
        weight_grad_share: of an activation, what a worker keeps from I to W, likewise; 1 for all of it, as raypipe's executor does.
    """

    num_devices: int
    num_microbatches: int
    num_updates: int = 1
    num_chunks: int = 1
    num_pipelines: int = 0
    update_scope: UpdateScope | None = None
    times: tuple[StageTimes, ...] = ()
    latency_s: float = 0.0
    max_in_flight: float | None = None
    max_mean_staleness: float | None = None
    weight_grad_share: float = 1.0

    def require_one_chunk(self, name: str, *, instead: str = "interleaved") -> None:
        """Refuse several stages a worker, naming the schedule that takes them `instead`."""
        if self.num_chunks != 1:
            raise ScheduleError(
                f"{name} holds one stage a device, got {self.num_chunks} chunks; use --chunks 1, or the schedule {instead!r}"
            )

    def require_one_pipeline(self, name: str) -> None:
        """Refuse several pipelines for a schedule that has one."""
        if self.num_pipelines not in {0, 1}:
            raise ScheduleError(f"{name} has one pipeline, got {self.num_pipelines}; leave --pipelines out")

    def require_even_devices(self, name: str) -> None:
        """Refuse an odd number of devices for a schedule of pipelines in opposite directions."""
        if self.num_devices % 2:
            near = " or ".join(f"--devices {number}" for number in (self.num_devices - 1, self.num_devices + 1) if number)
            raise ScheduleError(
                f"{name} has pipelines in opposite directions on an even number of devices, got {self.num_devices}; use {near}"
            )
