"""Divides a budget of seconds and bytes among the measurements of a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from raypipe.errors import InputError
from raypipe.network.rounds import NumRounds, Pair, Round, all_paired_rounds, num_rounds, one_to_all_rounds, tournament
from raypipe.network.sharing import Rates, fastest_of_nodes
from raypipe.units import seconds, size

_PING_S = 0.4
_STREAM_S = 0.15
_STEP_S = 0.05  # overhead of a round: calls, threads, connections
_LEAST_SCALE = 0.25
_LEAST_STREAM_S = 0.02  # in less time, a pause of the machine looks like a slow link
_LEAST_ONE_TO_ALL_S = 0.01  # least length of a stream in a one-to-all round; shorter rounds are repeated
_PAIRED_LOOKS, _ONE_TO_ALL_LOOKS = 1.25, 3.0  # expected measurements per round
_PARTS_OF_S = 10  # steps per second in which a larger budget is asked for
_USED = 0.8  # planned share of the seconds; the rest is for delays and repeated measurements
_PING_SHARE, _STREAM_SHARE = 0.6, 0.25  # shares of the bytes; the rest is for closer looks
_SEARCHED = 0.9  # share of the budget for the search for shared links; then pairs that shared one are measured again


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The seconds and bytes, through all links together, that a probe may use once the actors are up."""

    seconds: float = 60.0
    num_bytes: int = 16 << 30

    @property
    def for_search(self) -> Budget:
        """Return the budget until the search for bottlenecks ends."""
        return Budget(seconds=_SEARCHED * self.seconds, num_bytes=int(_SEARCHED * self.num_bytes))

    def allows(self, seconds: float, num_bytes: int) -> bool:
        """Return whether a measurement may start at this time and end with so many bytes sent."""
        return seconds <= self.seconds and num_bytes <= self.num_bytes


@dataclass(frozen=True)
class MeasurementBudget:
    """The seconds and bytes of each measurement, and the number of rounds.

    Attributes:
        ping_s: Seconds for latency and bandwidth of a directed pair.
        stream_s: Seconds for the rate of a pair that runs together with others.
        looks: Times that each pair of nodes is measured.
        looks_for_sharing: Whether the budget suffices to look for shared links.
    """

    ping_s: float
    ping_bytes: int
    stream_s: float
    stream_bytes: int
    rounds: NumRounds
    looks: int
    looks_for_sharing: bool

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds between nodes, without closer looks."""
        rounds = self.rounds
        return self.looks * rounds.tournament + (rounds.paired + rounds.one_to_all if self.looks_for_sharing else 0)

    def streams_s(self, pairs: Round, bandwidths: Rates) -> dict[Pair, float]:
        """Return how long each stream lasts alone, so that the round lasts `stream_s`; `bandwidths` are those of pairs alone.

        A node should carry the rate of its fastest pair, so its pairs take longer together. If not, the round is shorter, but no stream
        lasts less than a pause of the machine might.
        """
        leaving, entering = fastest_of_nodes(bandwidths)
        leaves: defaultdict[int, float] = defaultdict(float)
        enters: defaultdict[int, float] = defaultdict(float)
        for source, target in pairs:
            leaves[source] += bandwidths[source, target]
            enters[target] += bandwidths[source, target]
        return {
            (source, target): max(
                self.stream_s / max(leaves[source] / leaving[source], enters[target] / entering[target], 1.0),
                min(_LEAST_ONE_TO_ALL_S, self.stream_s),
            )
            for source, target in pairs
        }

    def tells_sharing_of(self, bytes_per_s: float) -> bool:
        """Return whether a stream has bytes enough to show what slows this bandwidth."""
        return self.looks_for_sharing and self.stream_bytes >= _LEAST_STREAM_S * bytes_per_s


def divide(
    budget: Budget,
    classes: Sequence[Hashable],
    *,
    num_inside: int,
    rounds_inside: int,
    least_ping_bytes: int,
    least_stream_bytes: int,
) -> MeasurementBudget:
    """Return the budget of each measurement; raise `InputError` that names a sufficient budget.

    Measurements within nodes (`num_inside`) cost a quarter of those between nodes; different machines measure at the same time.
    """
    met, rounds = tournament(classes), num_rounds(classes)
    num_pings = 2 * sum(map(len, met)) + num_inside
    num_streams = sum(map(len, (*all_paired_rounds(met, len(classes)), *one_to_all_rounds(len(classes)))))
    # Rounded up, as it is said.
    least_bytes = math.ceil(least_ping_bytes * num_pings / _PING_SHARE)
    if budget.num_bytes < least_bytes:
        raise InputError(
            f"a budget of {size(budget.num_bytes)} is too small: {num_pings} directed links take at least {size(least_bytes)}; "
            f"raise --budget-bytes to {least_bytes}"
        )
    ping_bytes = max(int(_PING_SHARE * budget.num_bytes / max(num_pings, 1)), least_ping_bytes)
    fixed_s = _STEP_S * (rounds.tournament + rounds_inside)
    pings_s = _PING_S * (rounds.tournament + rounds_inside / 4)
    streams = _PAIRED_LOOKS * rounds.paired + _ONE_TO_ALL_LOOKS * rounds.one_to_all
    usable_s = _USED * budget.seconds
    least_s = math.ceil(_PARTS_OF_S * (fixed_s + _LEAST_SCALE * pings_s) / _USED) / _PARTS_OF_S
    if budget.seconds < least_s:
        raise InputError(
            f"a budget of {seconds(budget.seconds)} is too small: {rounds.tournament} rounds between {len(classes)} nodes and "
            f"{rounds_inside} within them take at least {seconds(least_s)}; raise --budget-s to {least_s:.1f}"
        )
    stream_bytes = int(_STREAM_SHARE * budget.num_bytes / max(num_streams, 1))
    sharing = (
        fixed_s + streams * _STEP_S + _LEAST_SCALE * (pings_s + streams * _STREAM_S) <= usable_s and stream_bytes >= least_stream_bytes
    )
    if not sharing:
        streams = 0.0
    scale = min((usable_s - fixed_s - streams * _STEP_S) / max(pings_s + streams * _STREAM_S, 1e-9), 1.0)
    again_s = rounds.tournament * (_PING_S + _STEP_S)
    looks = 1
    if fixed_s + pings_s + streams * (_STREAM_S + _STEP_S) + again_s <= usable_s and ping_bytes >= 2 * least_ping_bytes:
        looks, ping_bytes = 2, ping_bytes // 2
    return MeasurementBudget(scale * _PING_S, ping_bytes, scale * _STREAM_S, stream_bytes, rounds, looks, sharing)
