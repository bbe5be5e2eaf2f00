"""The callbacks of one run, called in order; one that fails cannot take the run with it unless it is required."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import End, Evaluation, Failure, Phase, RecoveredFailure, Run, SavedCheckpoint, Window
from raypipe.errors import CallbackError, RaypipeError, StageFailedError, StageRaisedError, TransportError

_LOG = logging.getLogger("raypipe.callbacks")


class CallbackGroup:
    """Passes on the events of one run.

    Attributes:
        error: What a required callback raised; the run ends with it once it has saved what it did.
        dropped: What each callback raised that the run goes on without.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._run: Run | None = None
        self._started: list[Callback] = []
        self.error: CallbackError | None = None
        self.dropped: list[CallbackError] = []

    @property
    def run(self) -> Run:
        """The run, once it has started."""
        assert self._run is not None, "a run has started before anything happens in it"
        return self._run

    @property
    def stop_reason(self) -> str:
        """Why the run is to end before its last update; empty if it is not."""
        return str(self.error) if self.error is not None else self._run.stop_reason if self._run is not None else ""

    def start(self, run: Run) -> None:
        """Begin the run; raises what a callback refuses, or `CallbackError`."""
        self._run = run
        for callback in self._callbacks:
            try:
                callback.on_start(run)
            except RaypipeError:
                raise
            except Exception as error:
                raise _named(callback, "on_start", error) from error
            self._started.append(callback)

    def notice(self, text: str) -> None:
        """Pass on a line for the user."""
        self._call("on_notice", lambda callback: callback.on_notice(text))

    def phase(self, phase: Phase) -> None:
        """Pass on the plan that runs from now on."""
        self._call("on_phase", lambda callback: callback.on_phase(self.run, phase))

    def window(self, window: Window) -> None:
        """Pass on what a window did."""
        self.run.update = window.update
        self._call("on_window", lambda callback: callback.on_window(self.run, window))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Pass on a validation loss."""
        self.run.update = evaluation.update
        self._call("on_evaluation", lambda callback: callback.on_evaluation(self.run, evaluation))

    def checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """Pass on a complete checkpoint."""
        self._call("on_checkpoint", lambda callback: callback.on_checkpoint(self.run, checkpoint))

    def failure(self, failure: Failure) -> None:
        """Pass on a failure."""
        self._call("on_failure", lambda callback: callback.on_failure(self.run, failure))

    def recovery(self, recovery: RecoveredFailure) -> None:
        """Pass on a recovery."""
        self.run.update = recovery.from_update
        self._call("on_recovery", lambda callback: callback.on_recovery(self.run, recovery))

    def end(self, end: End) -> None:
        """Tell the callbacks that have started how the run ended."""
        if (run := self._run) is not None:
            started = self._started
            self._call("on_end", lambda callback: callback.on_end(run, end) if callback in started else None, can_recover=False)

    def close(self) -> None:
        """Let the callbacks give back what they hold."""
        self._run = None
        for callback in self._callbacks:
            with contextlib.suppress(Exception):
                callback.close()

    def _call(self, hook: str, call: Callable[[Callback], None], *, can_recover: bool = True) -> None:
        for callback in list(self._callbacks):
            if callback not in self._callbacks:
                continue  # it failed to take the notice that another one has failed
            try:
                call(callback)
            except Exception as error:
                # A device failed while the callback used it, and the run recovers.
                is_of_device = isinstance(error, StageFailedError | TransportError) and can_recover
                if not is_of_device:
                    self._drop(_named(callback, hook, error), callback, error)
                    continue
                # The stage's own code raised it, and would again: rather the callback's rows than the model, which trains.
                if isinstance(error, StageRaisedError) and not callback.required:
                    self._drop(_named(callback, hook, error), callback, error)
                raise

    def _drop(self, named: CallbackError, callback: Callback, error: Exception) -> None:
        self._callbacks.remove(callback)
        named.__cause__ = error
        _LOG.warning("%s", named, exc_info=error)
        if callback.required:
            self.error = self.error or named
            return
        self.dropped.append(named)
        self.notice(f"{named}; the run goes on without it")


def _named(callback: Callback, hook: str, error: Exception) -> CallbackError:
    return CallbackError(type(callback).__name__, hook, f"{type(error).__name__}: {error}")
