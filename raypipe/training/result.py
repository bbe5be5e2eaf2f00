"""What a run reports and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan

Resume = bool | Literal["auto"]
"""Whether a run goes on from a checkpoint; `auto` where there is a run of its name, which then need not have one."""


class StoppedRun(KeyboardInterrupt):
    """A run that was asked to stop has saved what it did."""


@dataclass(frozen=True)
class Progress:
    """State of a run after a window.

    Attributes:
        loss: Training loss of the last update.
        tokens_per_s: Rows per second where rows are not tokens.
        bubble_ratio: Idle share of the devices' time in the window.
        unit: What `tokens_per_s` counts: "tokens" or "rows".
    """

    update: int
    num_updates: int
    loss: float
    validation_loss: float | None
    tokens_per_s: float
    update_s: float
    bubble_ratio: float
    seconds_left: float
    unit: str = "tokens"


class Listener(Protocol):
    """Receives notices and progress."""

    def notice(self, text: str) -> None:
        """Receive one line for the user."""

    def progress(self, progress: Progress) -> None:
        """Receive the state after a window."""


class Silent:
    """A listener that ignores everything."""

    def notice(self, text: str) -> None:
        """See `Listener`."""

    def progress(self, progress: Progress) -> None:
        """See `Listener`."""


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
class Result:
    """What a run returns.

    Attributes:
        path: Run folder.
        metrics: Last values of `loss`, `validation_loss`, `tokens_per_s`, `update_s`, `bubble_ratio` and `updates`.
        losses: Training loss of each update of this fit.
        validation_losses: Pairs (updates done, loss).
        checkpoint: Last checkpoint.
        plan: Plan that ran last.
        figures: Predicted against measured.
        sample: Generated text; empty unless configured.
        recoveries: Failures that the run has recovered from.
    """

    path: str
    metrics: dict[str, float]
    losses: list[float]
    validation_losses: list[tuple[int, float]]
    checkpoint: Checkpoint
    plan: Plan
    figures: list[ComparedFigure]
    sample: str
    recoveries: tuple[RecoveredFailure, ...] = ()
