"""What callbacks receive: a run, and what happens in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from raypipe.analysis.idle import IDLE, divide
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Trace
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# Names of a run's own figures, which callbacks log nothing under.
OWN_FIGURES = (
    "update",
    "loss",
    "validation_loss",
    "grad_norm",
    "learning_rate",
    "update_s",
    "predicted_update_s",
    "samples_per_s",
    "tokens_per_s",
    "bubble_ratio",
)
_OWN_GROUPS = ("idle_ratio/", "peak_memory_bytes/", "link_bytes_per_s/")


class Forward(Protocol):
    """The model of a run, which its stages hold, as a function of rows."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of a row of each field of the training data; empty where the driver could not read them."""

    def __call__(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the last layer for the fields of some rows; raises `ConfigError` or `RunError`."""


@dataclass
class Run:
    """A run as its callbacks see it.

    Attributes:
        name: Name of its folder.
        path: Its folder, a path or a URI.
        records: Folder on this machine where files of a callback may go; of a run at a URI they are copied there.
        config: Its configuration.
        first_update: Updates that were done when this process began.
        update: Updates that are done.
        stop_reason: Why a callback asked the run to end; empty if none did.
        forward: The model in eval mode, over rows of one's own: from the first window to the last, while the stages hold it and wait.
        logged: The newest value of each figure that callbacks have logged.
    """

    name: str
    path: str
    records: Path
    config: TrainConfig
    first_update: int
    read_metrics: Callable[[], list[dict[str, Any]]] = field(repr=False, default=list)
    update: int = 0
    stop_reason: str = ""
    forward: Forward | None = field(repr=False, default=None)
    write_metrics: Callable[[dict[str, Any]], None] | None = field(repr=False, default=None)
    logged: dict[str, float] = field(default_factory=dict)

    @property
    def num_updates(self) -> int:
        """Updates that the run has when it is done."""
        return self.config.run.num_updates

    def stop(self, reason: str) -> None:
        """End the run after the window that is done, with checkpoint, trace and `Result`; the first reason counts."""
        self.stop_reason = self.stop_reason or reason

    def log(self, name: str, value: float) -> None:
        """Record a figure of one's own: in `metrics.jsonl` now, and with `Window.figures`, so with all loggers, from the next window on.

        Raises:
            ConfigError: The name is that of a figure of the run.
        """
        if name in OWN_FIGURES or name.startswith(_OWN_GROUPS):
            raise ConfigError(f"run.log: {name!r} is a figure of the run; choose another name, such as {f'my_{name}'!r}")
        self.logged[name] = float(value)
        if self.write_metrics is not None:
            self.write_metrics({"update": self.update, name: float(value)})

    def settings(self) -> dict[str, Any]:
        """Return the configuration as values by name, for logs elsewhere: without callbacks, whose options may have passwords."""
        return {name: value for name, value in dataclasses.asdict(self.config).items() if name != "callbacks"}

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, also those from before a resume."""
        return self.read_metrics()


@dataclass(frozen=True)
class Phase:
    """Windows under one plan.

    Attributes:
        update: Updates that were done when it began.
        predicted: Simulated window.
        reason: Why the run switched to the plan; empty for the first.
    """

    update: int
    plan: Plan
    predicted: Trace
    reason: str

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of each stage."""
        names = [layer.name for layer in self.plan.profile.layers]
        return tuple(tuple(names[layer] for layer in layers) for layers in self.plan.cut.stages)


@dataclass(frozen=True)
class Update:
    """One update.

    Attributes:
        number: Counted from 1.
        loss: Mean training loss over its rows.
        grad_norm: Norm of the gradient over all stages before clipping; `None` where it is not computed.
    """

    number: int
    loss: float
    grad_norm: float | None
    learning_rate: float


@dataclass(frozen=True)
class Window:
    """What a window of updates did.

    Attributes:
        updates: Its updates in order.
        update_s: Seconds per update.
        samples_per_s: Rows of the data per second.
        tokens_per_s: Tokens per second; `None` where the data has no tokens.
        trace: What every device did when.
        plan: The plan that ran.
        validation_loss: Of the last evaluation; `None` before the first.
        links: Bytes per second that each link between two nodes carries, as last seen; empty on one node.
        logged: Figures that callbacks have logged.
    """

    updates: tuple[Update, ...]
    update_s: float
    samples_per_s: float
    tokens_per_s: float | None
    trace: Trace
    plan: Plan
    num_updates_left: int
    validation_loss: float | None = None
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)

    @property
    def update(self) -> int:
        """Number of the last update."""
        return self.updates[-1].number

    @property
    def loss(self) -> float:
        """Training loss of the last update."""
        return self.updates[-1].loss

    @property
    def bubble_ratio(self) -> float:
        """Idle share of the devices' time."""
        return self.trace.bubble_ratio

    @property
    def seconds_left(self) -> float:
        """Seconds that the rest of the run takes at this speed."""
        return self.num_updates_left * self.update_s

    @property
    def predicted_update_s(self) -> float | None:
        """Seconds per update as the plan predicts."""
        return self.plan.predicted.update_s if self.plan.predicted else None

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """The most memory that each device held; empty if unknown."""
        return dict(zip(self.trace.devices, self.trace.peak_memory_bytes, strict=True)) if self.trace.memory else {}

    @cached_property
    def idle_ratios(self) -> dict[str, float]:
        """Share of the devices' time that went to each cause of idleness, such as `activation` or `drain`."""
        division = divide(self.trace)
        whole_s = self.trace.makespan_s * len(self.trace.devices)
        sums = {str(cause): sum(row.get(cause, 0.0) for row in division.by_cause_s) for cause in IDLE}
        return {cause: seconds / whole_s for cause, seconds in sums.items() if seconds and whole_s}

    def figures(self) -> dict[str, float]:
        """Return all figures of the window by name, those of devices and links behind a `/`; unknown ones are left out."""
        last = self.updates[-1]
        known: dict[str, float | None] = {
            "loss": last.loss,
            "grad_norm": last.grad_norm,
            "learning_rate": last.learning_rate,
            "update_s": self.update_s,
            "predicted_update_s": self.predicted_update_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "bubble_ratio": self.bubble_ratio,
        }
        known |= self.logged
        known |= {f"idle_ratio/{cause}": share for cause, share in self.idle_ratios.items()}
        known |= {f"peak_memory_bytes/{device}": peak for device, peak in self.peak_memory_bytes.items()}
        known |= {f"link_bytes_per_s/{source} -> {target}": rate for (source, target), rate in self.links.items()}
        return {name: float(value) for name, value in known.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class Evaluation:
    """A validation loss of the weights after `update` updates."""

    update: int
    loss: float


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        update: Updates that led to it.
        path: Its folder, a path or a URI.
        seconds: What writing it took, beside the training.
        metrics: The losses that it may be kept by (`run.keep_best_by`).
    """

    update: int
    path: str
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """A failure after `update` updates; the text names device, stage and cause."""

    update: int
    text: str


@dataclass(frozen=True)
class RecoveredFailure:
    """A failure that a run has recovered from.

    Attributes:
        update: Updates that were done when it failed.
        from_update: Updates that were done in the state that the run went on from.
        source: Where this state came from.
    """

    update: int
    from_update: int
    source: str
    recovered_s: float
    text: str
    error: str


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        update: Updates that were done.
        error: Why it ended before its last update; `None` for a run that returns a `Result`.
    """

    update: int
    error: BaseException | None = None
