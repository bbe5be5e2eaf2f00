"""Ends a run that gets no better."""

from __future__ import annotations

import math

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Evaluation, Run, Window
from raypipe.config import CheckpointMetric
from raypipe.errors import ConfigError


class EarlyStopping(Callback):
    """Ends a run once its loss has not fallen for a number of evaluations (Prechelt 1998, "Early Stopping - But When?").

    A run that is resumed counts the evaluations before its checkpoint, too. `run.keep_best_by` keeps the best weights.

    Args:
        by: `validation_loss`, or `loss` for the training loss of the last update of each window.
        patience: Number of evaluations, or windows, without a lower loss after which the run ends.
        least_gain: Amount by which a loss must be lower than the lowest before to count.

    Raises:
        ConfigError: A value cannot be used.
    """

    required = True

    def __init__(self, *, by: str = CheckpointMetric.VALIDATION_LOSS.value, patience: int = 3, least_gain: float = 0.0) -> None:
        choices = [metric.value for metric in CheckpointMetric]
        if by not in choices:
            raise ConfigError(f"callbacks 'early-stopping': by is {by!r}; choose from {', '.join(choices)}")
        if patience < 1 or least_gain < 0:
            raise ConfigError("callbacks 'early-stopping': patience is 1 or more and least_gain 0 or more")
        self.by = CheckpointMetric(by)
        self.patience = patience
        self.least_gain = least_gain
        self._best, self._best_update, self._num_worse, self._seen = math.inf, 0, 0, -1

    def on_start(self, run: Run) -> None:
        """See `Callback`; refuses a run that never evaluates."""
        self._best, self._best_update, self._num_worse, self._seen = math.inf, 0, 0, -1
        config = run.config
        if self.by is CheckpointMetric.VALIDATION_LOSS and not (config.data.num_validation_microbatches and config.run.evaluate_every):
            raise ConfigError(
                "the callback 'early-stopping' waits for validation losses, which this run has only at its end: set run.evaluate_every and "
                "data.num_validation_microbatches, or by: loss"
            )
        if self.by is CheckpointMetric.VALIDATION_LOSS:
            for line in run.metrics():
                if line.get(self.by) is not None and line["update"] < run.first_update:
                    self._note(run, line["update"], line[self.by])

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """See `Callback`."""
        if self.by is CheckpointMetric.VALIDATION_LOSS:
            self._note(run, evaluation.update, evaluation.loss)

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        if self.by is CheckpointMetric.LOSS:
            self._note(run, window.update, window.loss)

    def _note(self, run: Run, update: int, loss: float) -> None:
        if update <= self._seen:
            return  # a run that recovered evaluates again
        self._seen = update
        if loss < self._best - self.least_gain:
            self._best, self._best_update, self._num_worse = loss, update, 0
            return
        self._num_worse += 1
        if self._num_worse >= self.patience:
            word = "evaluations" if self.by is CheckpointMetric.VALIDATION_LOSS else "windows"
            run.stop(f"{self.by} has not fallen for {self._num_worse} {word}: it was {self._best:.4g} after update {self._best_update}")
