"""Which devices have lost each other, by what their systems acknowledge of what they send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raypipe.actors.orders import Status


@dataclass
class LostLinks:
    """Looks again and again at the devices of a call that is under way.

    A link that is slow, or whose far end computes and reads nothing, acknowledges what has come. Where nothing is acknowledged for
    `patience_s` seconds, nothing comes through.
    """

    patience_s: float
    _since_s: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def look(self, statuses: Iterable[Status], *, now_s: float) -> tuple[int, int] | None:
        """Return a device and another that has acknowledged nothing for so long; `now_s` are seconds by any clock that goes on."""
        pairs = [(status.device, peer) for status in statuses for peer in status.unanswered]
        self._since_s = {pair: self._since_s.get(pair, now_s) for pair in pairs}
        lost = [pair for pair, since_s in self._since_s.items() if now_s - since_s >= self.patience_s]
        return min(lost, key=lambda pair: self._since_s[pair], default=None)
