"""TensorBoard."""

from __future__ import annotations

from typing import Any

from raypipe.callbacks.base import Callback
from raypipe.callbacks.catalogue import require
from raypipe.callbacks.events import End, Evaluation, Run, Window


class TensorBoard(Callback):
    """Writes all figures of a run for TensorBoard: `tensorboard --logdir FOLDER`.

    Args:
        folder: Folder of the event files; `tensorboard` in the run's folder if left out.

    Raises:
        ConfigError: The package `tensorboard` is not installed.
    """

    def __init__(self, *, folder: str | None = None) -> None:
        require("tensorboard", "tensorboard", callback="tensorboard")
        self._folder = folder
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # takes seconds to load

        # Events of updates that a resumed or recovered run does again are taken out of the curves.
        self._writer = SummaryWriter(self._folder or str(run.records / "tensorboard"), purge_step=run.first_update + 1)

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        for update in window.updates:
            self._writer.add_scalar("loss", update.loss, update.number)
            self._writer.add_scalar("learning_rate", update.learning_rate, update.number)
            if update.grad_norm is not None:
                self._writer.add_scalar("grad_norm", update.grad_norm, update.number)
        for name, value in window.figures().items():
            if name not in {"loss", "learning_rate", "grad_norm"}:
                self._writer.add_scalar(name.replace(" -> ", "_to_"), value, window.update)
        self._writer.flush()

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """See `Callback`."""
        self._writer.add_scalar("validation_loss", evaluation.loss, evaluation.update)

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self._writer.flush()

    def close(self) -> None:
        """See `Callback`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
