"""How far the clocks of nodes are apart, from messages that go there and back.

    asking node     t0 ----.           .---> t3
                            `--> t1   /                 offset = ((t1 - t0) + (t2 - t3)) / 2
    answering node          t1 ... t2                   delay  = (t3 - t0) - (t2 - t1)

As in NTP (Mills, RFC 5905, sections 8 and 10): of many exchanges the one with the least delay counts, since what delayed the others
delayed one way more than the other. Whatever the ways, the offset is wrong by half of that delay at most.

Left out: nothing is disciplined. Two offsets, taken some time apart, give the drift; a trace corrects what lies between.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raypipe.errors import RunError


@dataclass(frozen=True)
class Exchange:
    """A question and its answer: four readings, in seconds, of two clocks.

    Attributes:
        asked_s: when the question left, by the asking node's clock.
        heard_s: when it arrived, by the answering node's.
        answered_s: when the answer left, by the answering node's.
        returned_s: when it arrived, by the asking node's.
    """

    asked_s: float
    heard_s: float
    answered_s: float
    returned_s: float

    @property
    def offset_s(self) -> float:
        """By how much the answering node's clock is ahead."""
        return ((self.heard_s - self.asked_s) + (self.answered_s - self.returned_s)) / 2

    @property
    def delay_s(self) -> float:
        """Seconds on the way, both ways together; not below 0, however coarse the clocks are."""
        return max((self.returned_s - self.asked_s) - (self.answered_s - self.heard_s), 0.0)


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of the reference.

    Attributes:
        offset_s: seconds; subtract it from the clock's readings to have the reference's.
        residual_s: the offset is wrong by this much at most.
        at_s: when that was so, by the reference's clock.
        drift: by how much the offset grows, in seconds per second; `None` where it was seen once only, or so little that the
            residuals explain it.
    """

    offset_s: float
    residual_s: float
    at_s: float
    drift: float | None = None

    @property
    def inverse(self) -> ClockOffset:
        """How far the reference is ahead of the clock."""
        return ClockOffset(-self.offset_s, self.residual_s, self.at_s + self.offset_s, None if self.drift is None else -self.drift)


SAME_CLOCK = ClockOffset(0.0, 0.0, 0.0)
"""Of the reference itself."""


def offset(exchanges: Iterable[Exchange]) -> ClockOffset:
    """The offset of the answering node's clock from the asking node's, by the exchange with the least delay.

    Raises:
        RunError: there are none.
    """
    best = min(exchanges, key=lambda exchange: exchange.delay_s, default=None)
    if best is None:
        raise RunError("no exchange of clock readings came back; see that the nodes reach each other")
    return ClockOffset(best.offset_s, best.delay_s / 2, (best.asked_s + best.returned_s) / 2)


def with_drift(earlier: ClockOffset, later: ClockOffset) -> ClockOffset:
    """The better of two offsets of the same clock, with the drift between them where it is more than their residuals."""
    best = min(earlier, later, key=lambda seen: seen.residual_s)
    grown_s, passed_s = later.offset_s - earlier.offset_s, later.at_s - earlier.at_s
    if passed_s <= 0 or abs(grown_s) <= earlier.residual_s + later.residual_s:
        return best
    return ClockOffset(best.offset_s, best.residual_s, best.at_s, grown_s / passed_s)


def from_reference(offsets: Mapping[tuple[int, int], ClockOffset], *, reference: int) -> dict[int, ClockOffset]:
    """The offset of every node's clock from the reference's, along the pairs whose residuals add up to the least (Dijkstra, 1959).

    Args:
        offsets: by (asking, answering) node; each pair serves both ways.
        reference: the node whose clock counts.
    """
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
