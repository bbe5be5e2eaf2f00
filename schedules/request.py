"""The size and the options for which a generator builds a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import OpKind, UpdateScope

MOST_OPS = 100_000_000
"""Of an order: a forward and a backward of each stage and microbatch. Python takes some hundred bytes for each."""


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage for one microbatch. The full backward takes `input_grad_s + weight_grad_s`."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    @property
    def backward_s(self) -> float:
        """Seconds of the full backward."""
        return self.input_grad_s + self.weight_grad_s

    def of(self, kind: OpKind) -> float:
        """Return the seconds of an F, R, B, I or W."""
        match kind:
            case OpKind.BACKWARD:
                return self.backward_s
            case OpKind.INPUT_GRADIENT:
                return self.input_grad_s
            case OpKind.WEIGHT_GRADIENT:
                return self.weight_grad_s
        return self.forward_s


@dataclass(frozen=True)
class ScheduleRequest:
    """The size and the options for which a generator builds a schedule.

    Attributes:
        num_devices: number of workers, at least 1.
        num_microbatches: microbatches per update, summed over all pipelines, at least 1.
        num_updates: updates per window, at least 1.
        num_chunks: stages per worker, for schedules that take several.
        num_pipelines: number of pipelines, for schedules that have several; 0 lets the schedule choose.
        update_scope: which gradients an update waits for; `None` selects the schedule's default.
        times: times of each stage, or one entry for all stages, for schedules that are searched; empty means F = I = W = 1.
        latency_s: seconds that every dependency between devices adds, for schedules that are searched.
        hops_s: seconds that each hop from a worker to the next adds to them, both ways, for `zb-auto`; empty for none.
        queues_s: seconds for which a message keeps the next one of its direction from each hop, for `zb-auto`; empty for none.
        sums_s: seconds that the sum of each stage's gradients takes behind its last weight gradient, for `zb-auto`; empty for none.
        max_in_flight: largest number of stage activations per worker, for `list` and schedules that are searched; `None` selects
            the schedule's own limit.
        max_mean_staleness: largest mean number of updates between the weights that a forward reads and the weights that its
            gradient changes, for `amdp-auto`; `None` means no limit.
        weight_grad_share: share of an activation that a worker keeps between I and W, for `zb-auto`; raypipe's executor keeps 1.
        branches: relative work of each branch of the model, for `branch-aware`.
        coupled: whether one loss takes all microbatches of an update, for `branch-aware`.
        split: whether backwards are split into I and W, for `branch-aware`.
    """

    num_devices: int
    num_microbatches: int
    num_updates: int = 1
    num_chunks: int = 1
    num_pipelines: int = 0
    update_scope: UpdateScope | None = None
    times: tuple[StageTimes, ...] = ()
    latency_s: float = 0.0
    hops_s: tuple[float, ...] = ()
    queues_s: tuple[float, ...] = ()
    sums_s: tuple[float, ...] = ()
    max_in_flight: float | None = None
    max_mean_staleness: float | None = None
    weight_grad_share: float = 1.0
    branches: tuple[float, ...] = ()
    coupled: bool = False
    split: bool = False

    def require_possible(self) -> None:
        """Refuse a size whose order no machine holds, before it is built."""
        stages = self.num_devices * self.num_chunks * max(self.num_pipelines, 1)
        if (num_ops := 2 * stages * self.num_microbatches * self.num_updates) > MOST_OPS:
            raise ScheduleError(
                f"{stages} stages with {self.num_microbatches} microbatches for {self.num_updates} updates are at least {num_ops} Ops; the "
                f"limit is {MOST_OPS}. Use fewer devices, microbatches or updates per window"
            )

    def require_one_chunk(self, name: str, *, instead: str = "interleaved") -> None:
        """Refuse several stages per worker, naming the schedule that takes them `instead`."""
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
