"""What a run reports and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan
from raypipe.callbacks.events import RecoveredFailure
from raypipe.errors import ConfigError
from raypipe.model import Model
from raypipe.training.trained import TrainedModel, load
from raypipe.units import counted

Resume = bool | Literal["auto"]
"""Whether a run goes on from a checkpoint; `auto` where there is a run of its name, which then need not have one."""


class StoppedRun(KeyboardInterrupt):
    """A run that was asked to stop has saved what it did."""


@dataclass(frozen=True, repr=False)
class Result:
    """What a run returns.

    Attributes:
        path: Run folder.
        metrics: Last values of `loss`, `validation_loss`, `samples_per_s`, `tokens_per_s` (where the data has tokens), `update_s`,
            `bubble_ratio` and `updates`.
        losses: Training loss of each update of this fit.
        validation_losses: Pairs (updates done, loss).
        checkpoint: Last checkpoint.
        plan: Plan that ran last.
        figures: Predicted against measured.
        sample: Generated text; empty unless configured.
        recoveries: Failures that the run has recovered from.
        stop_reason: Why a callback ended the run before its last update; empty if none did.
        callback_errors: What callbacks raised that the run went on without.
        model: Returns the model.
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
    stop_reason: str = ""
    callback_errors: tuple[str, ...] = ()
    model: Callable[[], Model] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return a few lines: where the run is, its last metrics and its newest checkpoint."""
        done = self.checkpoint.index.update
        figures = [f"{name} {_shown(value)}" for name, value in self.metrics.items() if name != "updates"]
        lines = [f"run {self.path}, {counted(done, 'update')} done", ", ".join(figures), f"checkpoint {self.checkpoint.path}"]
        lines += [f"recovered from {counted(len(self.recoveries), 'failure')}"] if self.recoveries else []
        lines += [f"ended early: {self.stop_reason}"] if self.stop_reason else []
        lines += [f"went on without a callback: {error}" for error in self.callback_errors]
        return "\n".join(line for line in lines if line)

    def load(self) -> TrainedModel:
        """Return the model with the weights of `checkpoint`, in the memory of this process; `raypipe.load` loads other checkpoints.

        Raises:
            ConfigError: The result is of no `Trainer`.
            FormatError: The checkpoint is damaged.
        """
        if self.model is None:
            raise ConfigError(f"this result knows no model; give its function: raypipe.load({self.checkpoint.path!r}, my_model)")
        return load(self.checkpoint.path, self.model, model_options={})


def _shown(value: object) -> str:
    # The records of a run that has all of its updates have null for figures that were no numbers.
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
