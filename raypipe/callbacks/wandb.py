"""Weights & Biases."""

from __future__ import annotations

import hashlib
from typing import Any

from raypipe.callbacks.base import Callback
from raypipe.callbacks.catalogue import require
from raypipe.callbacks.events import End, Evaluation, Failure, Run, Window


class WandB(Callback):
    """Logs all figures of a run, and its configuration, to Weights & Biases; the axis is the number of the update.

    Args:
        project: Project of the run.
        mode: `online`, `offline` or `disabled`; left out for wandb's own choice (`WANDB_MODE`).
        options: More keyword arguments of `wandb.init`.

    Raises:
        ConfigError: The package `wandb` is not installed.
    """

    def __init__(self, *, project: str = "raypipe", mode: str | None = None, **options: Any) -> None:
        require("wandb", "wandb", callback="wandb")
        self._options = {"project": project, "mode": mode, **options}
        self._logged: Any = None

    def on_start(self, run: Run) -> None:
        """See `Callback`; a resumed run goes on under the same id."""
        import wandb  # noqa: PLC0415  # takes seconds to load

        # Runs of other storage paths may have the same name.
        own = f"{run.name}-{hashlib.sha256(run.path.encode()).hexdigest()[:8]}"
        usual = {"name": run.name, "id": own, "resume": "allow", "dir": str(run.records)}
        self._logged = wandb.init(config=run.settings(), **(usual | self._options))
        # wandb refuses steps that come again; an axis of its own does not mind.
        self._logged.define_metric("*", step_metric="update")

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        *before, last = window.updates
        for update in before:
            self._log(update.number, {"loss": update.loss, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate})
        self._log(last.number, window.figures())

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """See `Callback`."""
        self._log(evaluation.update, {"validation_loss": evaluation.loss})

    def on_failure(self, run: Run, failure: Failure) -> None:
        """See `Callback`."""
        self._logged.alert(title="failure", text=failure.text)

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self._logged.finish(exit_code=0 if end.error is None else 1)
        self._logged = None

    def close(self) -> None:
        """See `Callback`."""
        if self._logged is not None:
            self._logged.finish(exit_code=1)
            self._logged = None

    def _log(self, update: int, figures: dict[str, Any]) -> None:
        self._logged.log({"update": update} | {name: value for name, value in figures.items() if value is not None})
