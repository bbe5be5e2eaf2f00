"""When Ops begin and end: by the host's clock on a CPU, by the device's own on a GPU, which works behind the host.

    host     F0 F1 B0 | waits for F0's end | F2 | ...        the host only says what is to be done, a little ahead
    device         F0 ------- F1 ------- B0 -------          and finds out afterwards when it was

A mark is a moment on the way of the device: of a CPU now, of a GPU when it will have done all that it was told before. A host that were
far ahead would fill the driver's queue, where nothing can end its wait; so it waits for the Ops behind the last few. What it waits
for may be another device's message. A thread looks whether something moves, and says so if nothing does for too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from raypipe.actors.execution.report import SpanLog
from raypipe.actors.execution.steps import TimedStep

Mark = Any
"""A moment, as the clock has it: seconds, or an event of the device."""

_STEPS_AHEAD = 8
"""Of the host, at most: two or three Ops and what belongs to them."""
_LOOK_EVERY_S = 0.2


class Clock(Protocol):
    """Finds out what the steps of a window took."""

    def rest(self) -> None:
        """Waits until the device has done all that it was told. What waits for a peer must not be begun before, or it never rests."""

    def begin(self) -> float:
        """Begins a window; returns the time that `time.time` reads at that moment."""

    def mark(self) -> Mark:
        """The moment that the device has come to, or will have, with what it was told until now."""

    def note(self, step: TimedStep, since: Mark, until: Mark, num_bytes: int) -> None:
        """Notes what lies between two marks."""

    def finish(self) -> SpanLog:
        """Waits until all is done; returns what was noted, in seconds since `begin`."""

    def doing(self) -> TimedStep | None:
        """The step that the device is at, where that is not the host's. Called from another thread."""

    def close(self) -> None:
        """Ends what the clock began."""


class HostClock:
    """The clock of a CPU device: what the host calls has ended when it returns."""

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
        self._log.add(step.position, since - self._origin_s, until - self._origin_s, num_bytes)

    def finish(self) -> SpanLog:
        """See `Clock`."""
        return self._log

    def doing(self) -> None:
        """See `Clock`."""

    def close(self) -> None:
        """See `Clock`."""


class DeviceClock:
    """The clock of a device with a queue of its own.

    Args:
        module: torch's for this sort of device, such as `torch.cuda`.
        timeout_s: until a device that has something to do must have done another step.
        check: called from another thread now and then; is to end what the device waits for, where that will not come.
        stuck: called from there with the step at which nothing has moved for so long; is to end it.
    """

    def __init__(self, module: Any, *, timeout_s: float, check: Callable[[], None], stuck: Callable[[TimedStep], None]) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._check = check
        self._stuck = stuck
        self._origin: Mark = None
        self._lock = threading.Lock()
        """For the next three, which other threads look at."""
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
        self._origin = self.mark()
        self._in_window.set()
        return time.time()

    def mark(self) -> Mark:
        """See `Clock`."""
        event = self._module.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def note(self, step: TimedStep, since: Mark, until: Mark, num_bytes: int) -> None:
        """See `Clock`; waits where the host would be too far ahead."""
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
            log.add(step.position, start_s, end_s, num_bytes)
        return log

    def doing(self) -> TimedStep | None:
        """See `Clock`."""
        with self._lock:
            # A device that has failed says so at every question; whoever waits for it is told what happened.
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
