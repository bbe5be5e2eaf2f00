"""Handles Ctrl-C and SIGTERM where they would do harm or be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
# Of Ray's jobs: set in their environment, and the seconds from SIGTERM to SIGKILL unless the cluster's environment says otherwise.
_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
JOB_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_JOB_WAIT_S = 3
# Of a limit that is shorter than the grace, so much is kept for writing the copy of the last window.
_WRITING_SHARE = 0.5


def job_wait_s() -> float | None:
    """Return the seconds that `ray job stop` leaves this process after SIGTERM; `None` outside of a job.

    The supervisor of a job reads the limit from its own environment, which the process inherits.
    """
    if _IN_JOB not in os.environ:
        return None
    try:
        return float(int(os.environ.get(JOB_WAIT, _JOB_WAIT_S)))
    except ValueError:
        return float(_JOB_WAIT_S)


class StopRequest:
    """Notes the first Ctrl-C or SIGTERM inside of its block. A second one, or the end of the grace, raises KeyboardInterrupt.

    Only in the main thread, which alone may handle signals; elsewhere nothing is noted.

    Args:
        grace_s: Seconds that what goes on may still take; in a Ray job at most half of what `ray job stop` waits, if that is less. At 0 the
            first signal raises.
        notice: Told once what the request means, from a thread of its own.
    """

    def __init__(self, grace_s: float, notice: Callable[[str], None]) -> None:
        wait_s = job_wait_s()
        self.is_short = wait_s is not None and wait_s <= grace_s
        """Whether `ray job stop` leaves less than the grace."""
        self.is_late = False
        """Whether the end of the grace, and no second signal, raised KeyboardInterrupt."""
        self.grace_s = wait_s * _WRITING_SHARE if wait_s is not None and wait_s <= grace_s else grace_s
        self._notice = notice
        self._came = False
        self._before: dict[int, Any] = {}

    @property
    def came(self) -> bool:
        """Whether the run was asked to stop."""
        return self._came

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop_timer()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came or not self.grace_s:
            self._interrupt(number, frame)
        self._came = True
        # Not before: until then an alarm is somebody else's.
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        name = signal.Signals(number).name
        text = f"{name}: ending the window, then saving, within {self.grace_s:.3g} s; a second signal ends the run at once"
        # Not here: the signal may have come in the middle of printing.
        threading.Thread(target=self._notice, args=(text,), daemon=True).start()

    def _stop_timer(self) -> None:
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._stop_timer()
        self._came, self.is_late = True, number == signal.SIGALRM
        raise KeyboardInterrupt


@contextlib.contextmanager
def put_off(clean_up: Callable[[], object] | None = None) -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM to the end of the block; if one came, call `clean_up` and raise KeyboardInterrupt.

    Ray leaves processes behind if its start is interrupted, and an import may swallow an interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    set_handler = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return note if number in _NUMBERS else set_handler(number, handler)

    before = {number: signal.signal(number, note) for number in _NUMBERS}
    # Ray sets a handler of its own in the middle of its start, which ends the process there or waits for nodes to drain.
    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:  # whatever else went wrong in the block
            if clean_up is not None:
                clean_up()
            raise KeyboardInterrupt


@contextlib.contextmanager
def also_on_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
