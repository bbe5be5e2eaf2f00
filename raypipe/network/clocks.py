"""Offsets of nodes' clocks, as in NTP (Mills, RFC 5905, sections 8 and 10): the exchange with the least delay counts.

Delays affect one direction more than the other; the error is at most half of the delay. Two offsets give the drift.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raypipe.errors import RunError


@dataclass(frozen=True)
class Exchange:
    """A question and its answer: readings in seconds of the asking, twice the answering, and the asking clock."""

    asked_s: float
    heard_s: float
    answered_s: float
    returned_s: float

    @property
    def offset_s(self) -> float:
        """Return by how much the answering node's clock is ahead."""
        return ((self.heard_s - self.asked_s) + (self.answered_s - self.returned_s)) / 2

    @property
    def delay_s(self) -> float:
        """Return the seconds under way both ways, at least 0 even with coarse clocks."""
        return max((self.returned_s - self.asked_s) - (self.answered_s - self.heard_s), 0.0)


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock from the reference, subtracted from its readings, with the largest error `residual_s`.

    Attributes:
        at_s: Time of the measurement, by the reference's clock.
        drift: Growth in seconds per second; `None` if measured once only, or within the residuals.
    """

    offset_s: float
    residual_s: float
    at_s: float
    drift: float | None = None

    @property
    def inverse(self) -> ClockOffset:
        """Return the offset of the reference from the clock."""
        return ClockOffset(-self.offset_s, self.residual_s, self.at_s + self.offset_s, None if self.drift is None else -self.drift)


def offset(exchanges: Iterable[Exchange]) -> ClockOffset:
    """Return the answering node's offset, by the exchange with the least delay, or raise `RunError`."""
    best = min(exchanges, key=lambda exchange: exchange.delay_s, default=None)
    if best is None:
        raise RunError("no exchange of clock readings came back; see that the nodes reach each other")
    return ClockOffset(best.offset_s, best.delay_s / 2, (best.asked_s + best.returned_s) / 2)


def with_drift(earlier: ClockOffset, later: ClockOffset) -> ClockOffset:
    """Return the better of two offsets of a clock, with the drift between them if it exceeds their residuals."""
    best = min(earlier, later, key=lambda seen: seen.residual_s)
    grown_s, passed_s = later.offset_s - earlier.offset_s, later.at_s - earlier.at_s
    if passed_s <= 0 or abs(grown_s) <= earlier.residual_s + later.residual_s:
        return best
    return ClockOffset(best.offset_s, best.residual_s, best.at_s, grown_s / passed_s)


def from_reference(offsets: Mapping[tuple[int, int], ClockOffset], *, reference: int) -> dict[int, ClockOffset]:
    """Return each node's offset, along the pairs (asking, answering) with the least sum of residuals (Dijkstra, 1959)."""
    near: dict[int, list[tuple[int, ClockOffset]]] = {}
    for (asking, answering), seen in offsets.items():
        near.setdefault(asking, []).append((answering, seen))
        near.setdefault(answering, []).append((asking, seen.inverse))
    found: dict[int, ClockOffset] = {}
    waiting: list[tuple[float, int, float, float]] = [(0.0, reference, 0.0, 0.0)]
    while waiting:
        residual_s, node, offset_s, at_s = heapq.heappop(waiting)
        if node in found:
            continue
        found[node] = ClockOffset(offset_s, residual_s, at_s)
        for other, seen in near.get(node, ()):
            if other not in found:
                heapq.heappush(waiting, (residual_s + seen.residual_s, other, offset_s + seen.offset_s, seen.at_s - offset_s))
    return found
