"""Measures when steps begin and end: by the host's clock on a CPU, by events on a GPU, which works behind the host.

    host     F0 F1 B0 | waits for F0's end | F2 | ...        launches work a little ahead
    device         F0 ------- F1 ------- B0 -------          times are read afterwards

The host stays at most `_STEPS_AHEAD` steps ahead: a full launch queue would block it in a wait that nothing can end. As the GPU may wait
for another device's message, a thread watches whether steps end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from raypipe.actors.execution.report import SpanLog
from raypipe.actors.execution.steps import RowsStep, TimedStep

Mark = Any
"""A moment: seconds, or an event of the device."""

_STEPS_AHEAD = 8
"""Two or three Ops with their messages."""
_LOOK_EVERY_S = 0.2


class Clock(Protocol):
    """Measures the steps of a window."""

    def rest(self) -> None:
        """Wait until the device is idle; called before it begins to wait for peers."""

    def begin(self) -> float:
        """Begin a window; return the time of `time.time`."""

    def mark(self) -> Mark:
        """Return the moment when the work launched so far is done: now on a CPU."""

    def note(self, step: TimedStep, since: Mark, until: Mark, num_bytes: int) -> None:
        """Log a step that lies between two marks."""

    def finish(self) -> SpanLog:
        """Wait until the device is idle; return the log, in seconds since `begin`."""

    def doing(self) -> TimedStep | None:
        """Return the device's current step, if it may differ from the host's. Called from another thread."""

    def close(self) -> None:
        """End the clock's threads."""


class HostClock:
    """The clock of a CPU device, where a call has ended when it returns."""

    mark = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._log = SpanLog()
        self._origin_s = 0.0

    def rest(self) -> None:
        """See `Clock`."""

    def begin(self) -> float:
        """See `Clock`."""
        self._log = SpanLog()
        began_s = time.time()
        self._origin_s = time.perf_counter()
        return began_s

    def note(self, step: TimedStep, since: float, until: float, num_bytes: int) -> None:
        """See `Clock`."""
        for_rows = isinstance(step, RowsStep)
        self._log.add(step.position, since - self._origin_s, until - self._origin_s, num_bytes, for_rows=for_rows)

    def finish(self) -> SpanLog:
        """See `Clock`."""
        return self._log

    def doing(self) -> None:
        """See `Clock`."""

    def close(self) -> None:
        """See `Clock`."""


class DeviceClock:
    """The clock of a device that works behind the host; `module` is torch's for its type, such as `torch.cuda`.

    A thread calls `check`, which ends waits for messages that will never come, and `stuck` with a step that exceeds `timeout_s`.
    """

    def __init__(self, module: Any, *, timeout_s: float, check: Callable[[], None], stuck: Callable[[TimedStep], None]) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._check = check
        self._stuck = stuck
        self._origin: Mark = None
        self._stream: Any = None
        """The computing stream of the thread that runs the window."""
        self._lock = threading.Lock()
        """Guards the next three, which other threads read."""
        self._noted: list[tuple[TimedStep, Mark, Mark, int]] = []
        self._num_done = 0
        self._num_windows = 0
        self._in_window = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="raypipe watches the device", daemon=True).start()

    def rest(self) -> None:
        """See `Clock`."""
        self._module.synchronize()

    def begin(self) -> float:
        """See `Clock`."""
        with self._lock:
            self._noted, self._num_done = [], 0
            self._num_windows += 1
        self._stream = self._module.current_stream()
        self._origin = self.mark()
        self._in_window.set()
        return time.time()

    def mark(self) -> Mark:
        """See `Clock`."""
        event = self._module.Event(enable_timing=True, blocking=True)
        event.record(self._stream)  # most of the time would go into looking for it
        return event

    def note(self, step: TimedStep, since: Mark, until: Mark, num_bytes: int) -> None:
        """See `Clock`; waits if the host is too far ahead."""
        self._noted.append((step, since, until, num_bytes))
        if len(self._noted) > _STEPS_AHEAD:
            self._noted[-1 - _STEPS_AHEAD][2].synchronize()

    def finish(self) -> SpanLog:
        """See `Clock`."""
        log = SpanLog()
        if self._noted:
            self._noted[-1][2].synchronize()
        self._in_window.clear()
        for step, since, until, num_bytes in self._noted:
            start_s, end_s = (self._origin.elapsed_time(mark) / 1000 for mark in (since, until))
            log.add(step.position, start_s, end_s, num_bytes, for_rows=isinstance(step, RowsStep))
        return log

    def doing(self) -> TimedStep | None:
        """See `Clock`."""
        with self._lock:
            # A failed device raises at every query; the thread that waits for it reports the error.
            with suppress(RuntimeError):
                while self._num_done < len(self._noted) and self._noted[self._num_done][2].query():
                    self._num_done += 1
            return self._noted[self._num_done][0] if self._num_done < len(self._noted) else None

    def close(self) -> None:
        """See `Clock`."""
        self._closed.set()
        self._in_window.set()

    def _watch(self) -> None:
        last = (0, 0)
        since_s = time.monotonic()
        while True:
            self._in_window.wait()
            if self._closed.wait(_LOOK_EVERY_S):
                return
            self._check()
            step = self.doing()
            now_at = (self._num_windows, self._num_done)
            if step is None or now_at != last:
                last, since_s = now_at, time.monotonic()
            elif time.monotonic() - since_s > self._timeout_s:
                since_s = time.monotonic()
                self._stuck(step)
