"""How often a run copies its state, so that copies take at most a share of its time."""

from __future__ import annotations

import statistics
from collections import deque

_NUM_NEWEST = 8
_NUM_NEEDED = 6
_MOST_BESIDE = 8  # windows in a row


class CopyPace:
    """Learns what a copy costs, and says when the next one is due.

    A copy costs the wait for it, and what windows take longer while nodes fetch it: that takes processor time and links. A window beside
    a copy is compared with the ones before and behind it that are not, by the seconds of an update: neighbors, since machines are busier
    at one time than at another. Until enough are compared, a window behind a copy is followed by one without; afterwards one in nine at
    least is without.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waits_s: deque[float] = deque(maxlen=3)  # one may have met a busy machine
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what windows took: the next ones are of another plan, and the first of them warms up."""
        self._longer_s: deque[float] = deque(maxlen=_NUM_NEWEST)  # an update of a window beside a copy than one of its neighbor
        self._last: tuple[float, bool] | None = None
        self._is_first = True
        self._updates_beside = 0  # a copy
        self._windows_beside = 0  # copies, in a row

    def waited(self, seconds: float) -> None:
        """Note that the run has waited for a copy, which is fetched from now on."""
        self._waits_s.append(seconds)
        self._updates_beside = 0

    def window(self, seconds: float, *, num_updates: int, is_beside: bool) -> None:
        """Note what a window took, and if nodes fetched a copy when it began."""
        self._windows_beside = self._windows_beside + 1 if is_beside else 0
        if is_beside:
            self._updates_beside += num_updates
        update_s = seconds / num_updates
        if self._last is not None and self._last[1] is not is_beside:
            self._longer_s.append((update_s - self._last[0]) * (1 if is_beside else -1))
        self._last = None if self._is_first else (update_s, is_beside)
        self._is_first = False

    @property
    def cost_s(self) -> float:
        """Seconds that a copy takes from the run, as far as that is known."""
        wait_s = statistics.median(self._waits_s) if self._waits_s else 0.0
        if len(self._longer_s) < _NUM_NEEDED:
            return wait_s
        return wait_s + max(statistics.median(self._longer_s), 0.0) * self._updates_beside

    def is_due(self, *, seconds: float, was_beside: bool) -> bool:
        """Tell if the next copy is due, so many seconds after the last one; `was_beside` is of the window that has just ended."""
        if self._share >= 1:
            return True
        must_compare = was_beside and (len(self._longer_s) < _NUM_NEEDED or self._windows_beside >= _MOST_BESIDE)
        return not must_compare and seconds >= self.cost_s / self._share
