"""How often a run copies its state, so that copies take at most a share of its time."""

from __future__ import annotations

import math
import statistics
from collections import deque

_NUM_NEWEST = 8
_NUM_NEEDED = 6
_MOST_WINDOWS_BESIDE = 8  # in a row
_LONGEST = 10.0  # interval between two copies, over the shortest one


class CopyPace:
    """Learns what a copy costs, and says when the next one is due; CheckFreq (Mohan et al., FAST 2021) sets intervals by such a limit.

    A copy costs the wait for it, and what windows take longer beside it: fetching takes processor time and links. A window is beside a
    copy if nodes still fetch that when the window begins. It is compared with the windows before and behind it that are not, by the
    seconds of an update: neighbors, since machines are busier at one time than at another. Until enough are compared, a window beside a
    copy is followed by one without; afterwards one in nine at least is without.

    Of a run that seldom fails, copies take less than the share: with a copy of C seconds and a mean time between failures of M, least is
    lost where sqrt(2 C M) seconds lie between two copies (Young, Communications of the ACM 1974).
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waits_s: deque[float] = deque(maxlen=3)  # one may have met a busy machine
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what windows took: the next ones are of another plan, and the first of them warms up."""
        self._extra_update_s: deque[float] = deque(maxlen=_NUM_NEWEST)  # of windows beside a copy, over neighbors without
        self._last: tuple[float, bool] | None = None  # seconds of an update, and whether beside a copy, of the last window that counts
        self._is_first = True
        self._most_updates = 0  # of a window
        self._updates_beside = 0  # the newest copy
        self._windows_beside = 0  # copies, in a row

    def note_wait(self, seconds: float) -> None:
        """Note that the run has waited for a copy, which is fetched from now on."""
        self._waits_s.append(seconds)
        self._updates_beside = 0

    def note_end_of_hopeless_fetch(self) -> None:
        """Note that the newest copy is fetched no longer, though it is not there: the next one must not wait."""
        self._updates_beside = self._windows_beside = 0
        self._last = None

    def note_window(self, seconds: float, *, num_updates: int, is_beside: bool) -> None:
        """Note what a window took. Fewer updates than usual are not compared: each has a larger part of filling and draining."""
        if is_beside:
            self._updates_beside += num_updates
        if num_updates < self._most_updates:
            return
        if num_updates > self._most_updates:
            self._extra_update_s.clear()
            self._last = None
        self._most_updates = num_updates
        self._windows_beside = self._windows_beside + 1 if is_beside else 0
        update_s = seconds / num_updates
        if self._last is not None and self._last[1] is not is_beside:
            self._extra_update_s.append((update_s - self._last[0]) * (1 if is_beside else -1))
        self._last = None if self._is_first else (update_s, is_beside)
        self._is_first = False

    @property
    def cost_s(self) -> float:
        """Seconds that a copy takes from the run, as far as that is known."""
        wait_s = statistics.median(self._waits_s) if self._waits_s else 0.0
        if len(self._extra_update_s) < _NUM_NEEDED:
            return wait_s
        return wait_s + max(statistics.median(self._extra_update_s), 0.0) * self._updates_beside

    def interval_s(self, mtbf_s: float) -> float:
        """Return the seconds from one copy to the next, given the mean time between failures."""
        shortest_s = self.cost_s / self._share
        return min(max(shortest_s, math.sqrt(2 * self.cost_s * mtbf_s)), _LONGEST * shortest_s)

    def is_due(self, seconds: float, *, mtbf_s: float = 0.0) -> bool:
        """Tell whether the next copy is due, so many seconds after the last one."""
        if self._share >= 1:
            return True
        must_compare = self._last is not None and self._last[1]
        must_compare &= len(self._extra_update_s) < _NUM_NEEDED or self._windows_beside >= _MOST_WINDOWS_BESIDE
        return not must_compare and seconds >= self.interval_s(mtbf_s)
