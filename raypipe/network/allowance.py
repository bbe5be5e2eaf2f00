"""How a budget of seconds and bytes is divided among the measurements of a cluster."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from raypipe.errors import InputError
from raypipe.network.rounds import NumRounds, company, fan_rounds, num_rounds, tournament
from raypipe.show.amounts import seconds, size

_PING_S = 0.4
_STREAM_S = 0.15
_STEP_S = 0.05
"""What a round takes besides: calls, threads, connections."""
_LEAST_SCALE = 0.25
_LEAST_STREAM_S = 0.02
"""In less time, a pause of the machine looks like a slow link."""
_REFINED = 1.5
"""Rounds that a finding takes besides those that are planned, for each of these, about."""
_USED = 0.8
"""Of the seconds; what takes longer than thought has the rest."""
_PING_SHARE, _STREAM_SHARE = 0.6, 0.25
"""Of the bytes; what is looked at more closely has the rest."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a probe may take.

    Attributes:
        seconds: for measuring, once the actors are there.
        num_bytes: through all links together.
    """

    seconds: float = 60.0
    num_bytes: int = 16 << 30


@dataclass(frozen=True)
class Allowance:
    """What each measurement may take.

    Attributes:
        ping_s: for the latency and bandwidth of a directed pair.
        ping_bytes: likewise.
        stream_s: for the rate of a pair in company.
        stream_bytes: likewise.
        rounds: of nodes.
        looks_for_sharing: whether the budget suffices to look for shared links.
    """

    ping_s: float
    ping_bytes: int
    stream_s: float
    stream_bytes: int
    rounds: NumRounds
    looks_for_sharing: bool

    def tells_sharing_of(self, bytes_per_s: float) -> bool:
        """Whether the bytes of a stream suffice, too, to see what slows a link that carries so much."""
        return self.looks_for_sharing and self.stream_bytes >= _LEAST_STREAM_S * bytes_per_s


def divide(budget: Budget, classes: Sequence[Hashable], *, num_inside: int, least_ping_bytes: int, least_stream_bytes: int) -> Allowance:
    """The allowance of each measurement.

    Args:
        budget: of all.
        classes: of each node.
        num_inside: measurements within nodes, each a quarter of one between nodes.
        least_ping_bytes: with which a link can be measured.
        least_stream_bytes: with which a rate can be measured.

    Raises:
        InputError: the budget is too small to measure every link; says how much would do.
    """
    met, rounds = tournament(classes), num_rounds(classes)
    num_pings = 2 * sum(map(len, met)) + num_inside
    num_streams = sum(map(len, (*company(met, len(classes)), *fan_rounds(len(classes)))))
    ping_bytes = int(_PING_SHARE * budget.num_bytes / max(num_pings, 1))
    if num_pings and ping_bytes < least_ping_bytes:
        least = least_ping_bytes * num_pings / _PING_SHARE
        raise InputError(
            f"a budget of {size(budget.num_bytes)} is too small: {num_pings} directed links take at least {size(least)}; "
            f"raise --budget-bytes to {least:.0f}"
        )
    fixed_s = _STEP_S * (rounds.tournament + num_inside)
    pings_s = _PING_S * (rounds.tournament + num_inside / 4)
    streams = _REFINED * (rounds.company + rounds.fans)
    usable_s = _USED * budget.seconds
    least_s = (fixed_s + _LEAST_SCALE * pings_s) / _USED
    if budget.seconds < least_s:
        raise InputError(
            f"a budget of {seconds(budget.seconds)} is too small: {rounds.tournament} rounds between {len(classes)} nodes and {num_inside} "
            f"measurements within them take at least {seconds(least_s)}; raise --budget-s to {least_s:.1f}"
        )
    stream_bytes = int(_STREAM_SHARE * budget.num_bytes / max(num_streams, 1))
    sharing = (
        fixed_s + streams * _STEP_S + _LEAST_SCALE * (pings_s + streams * _STREAM_S) <= usable_s and stream_bytes >= least_stream_bytes
    )
    if not sharing:
        streams = 0.0
    scale = min((usable_s - fixed_s - streams * _STEP_S) / max(pings_s + streams * _STREAM_S, 1e-9), 1.0)
    return Allowance(scale * _PING_S, ping_bytes, scale * _STREAM_S, stream_bytes, rounds, sharing)
