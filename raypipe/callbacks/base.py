"""The class that receives the events of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypipe.callbacks.events import End, Evaluation, Failure, Phase, RecoveredFailure, Run, SavedCheckpoint, Window


class Callback:
    """Receives the events of a run, in the driver; every method does nothing unless a subclass overrides it.

    Methods are called in the order of the callbacks, between windows: the devices wait for them. An exception in `on_start` ends the run
    before it trains. A later one takes the callback out of the run, which says so and goes on, unless the callback is `required`: then the
    run saves what it did and ends with a `CallbackError`.

    Attributes:
        required: Whether the run cannot do without this callback.

    Example:
        A callback that ends a run when its loss is low enough::

            class LowEnough(raypipe.Callback):
                def on_window(self, run, window):
                    if window.loss < 1.5:
                        run.stop(f"the loss is {window.loss:.3f}")
    """

    required: bool = False

    def on_notice(self, text: str) -> None:
        """Receive one line for the user; some come before `on_start`."""

    def on_start(self, run: Run) -> None:
        """Receive the run before its actors start."""

    def on_phase(self, run: Run, phase: Phase) -> None:
        """Receive the plan that runs from now on: at the beginning, and after every switch."""

    def on_window(self, run: Run, window: Window) -> None:
        """Receive what a window of updates did."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Receive a validation loss; before `on_window` of the window behind which the weights were evaluated."""

    def on_checkpoint(self, run: Run, checkpoint: SavedCheckpoint) -> None:
        """Receive a checkpoint that is complete; it was written beside the training, so that `run.update` may be past it."""

    def on_failure(self, run: Run, failure: Failure) -> None:
        """Receive a failure of a device, a node or a link, before the run tries to recover from it."""

    def on_recovery(self, run: Run, recovery: RecoveredFailure) -> None:
        """Receive a recovery; the run repeats the updates after `recovery.from_update`, and their windows come again."""

    def on_end(self, run: Run, end: End) -> None:
        """Receive how a run ended, once its actors have; only after an `on_start` that succeeded."""

    def close(self) -> None:
        """Give back what the callback holds: called last, whatever happened before."""
