"""How often a run copies its state, so that copies take at most a share of its time."""

from __future__ import annotations

import statistics
from collections import deque

_NUM_NEWEST = 5
_NUM_NEEDED = 3


class CopyPace:
    """Learns what a copy costs, and says when the next one is due.

    A copy costs the wait for it, and what windows take longer while nodes fetch it: that takes processor time and links. Windows beside
    a copy are compared with windows without, by the seconds of an update, in the median of the newest. Until there are some of each
    kind, a window behind a copy is followed by one without.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._waits_s: deque[float] = deque(maxlen=_NUM_NEEDED)  # one may have met a busy machine
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what windows took: the next ones are of another plan."""
        self._is_first = True
        self._alone_s: deque[float] = deque(maxlen=_NUM_NEWEST)  # an update
        self._beside_s: deque[float] = deque(maxlen=_NUM_NEWEST)
        self._updates_beside = 0  # a copy

    def waited(self, seconds: float) -> None:
        """Note that the run has waited for a copy, which is fetched from now on."""
        self._waits_s.append(seconds)
        self._updates_beside = 0

    def window(self, seconds: float, *, num_updates: int, is_beside: bool) -> None:
        """Note what a window took, and if nodes fetched a copy when it began. The first one, which warms up, is left out."""
        if is_beside:
            self._updates_beside += num_updates
        if not self._is_first:
            (self._beside_s if is_beside else self._alone_s).append(seconds / num_updates)
        self._is_first = False

    @property
    def cost_s(self) -> float:
        """Seconds that a copy takes from the run, as far as that is known."""
        wait_s = statistics.median(self._waits_s) if self._waits_s else 0.0
        if min(len(self._alone_s), len(self._beside_s)) < _NUM_NEEDED:
            return wait_s
        longer_s = statistics.median(self._beside_s) - statistics.median(self._alone_s)
        return wait_s + max(longer_s, 0.0) * self._updates_beside

    def is_due(self, *, seconds: float, was_beside: bool) -> bool:
        """Tell if the next copy is due, so many seconds after the last one; `was_beside` is of the window that has just ended."""
        if self._share >= 1:
            return True
        must_compare = was_beside and len(self._alone_s) < _NUM_NEEDED
        return not must_compare and seconds >= self.cost_s / self._share
