"""Finds the pairs of nodes that share a bottleneck by measuring them alone and together, in O(n log n) rounds for n nodes.

1. Pairs of a matching run with and against each other (`rounds.paired_rounds`); the median is a pair's rate.
2. Where pairs are slower than alone, each is left out in turn: those that become faster shared a bottleneck with it.
3. If bottlenecks have equal bandwidths, a few pairs of each run together. If they get no more, the two are one.
4. All that leaves, then enters, a node runs at once. What no bottleneck explains is the node's limit.

Not found: bottlenecks that no round fills, and members too slow to be slowed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypipe.network.rounds import Pair, Round

Rates = Mapping[Pair, float]
"""Bytes per second of directed pairs measured at the same time."""

JointRates = Callable[[Round], Rates]
"""Measures pairs at the same time."""

TOLERANCE = 0.15
"""A pair is slowed by others if it loses more than this share of its rate alone."""
_ALSO = 0.1  # enough for pairs that run with a slowed pair: a shared link may slow some less

_EQUAL = 0.15  # bandwidths that differ by less may belong to one bottleneck
_GAIN = 0.06  # least gain of a pair, relative to its rate, when a pair that shares its bottleneck is left out
_GAIN_OF_MOST = 0.4  # least gain relative to the possible gain: the remaining pairs divide the free bandwidth
_DECISIVE = 1.3  # pairs tell whether they share a bottleneck if their rates alone sum to this many times its bandwidth
_MOST_LEFT_OUT = 12  # with more pairs, all slowed ones are taken to share one bottleneck: single gains would drown in noise
_MOST_OF_EACH = 4
_NUM_AGAIN = 2


@dataclass(frozen=True)
class Bottleneck:
    """Directed pairs that share a bandwidth; if one `crosses`, pairs without a common end share it, so it is no node's limit."""

    members: frozenset[Pair]
    bandwidth_bytes_per_s: float
    crosses: bool


class BottleneckSearch:
    """Looks for bottlenecks; those found so far stay in `bottlenecks` if a measurement raises."""

    def __init__(self, joint_rates: JointRates, alone: Rates | None = None) -> None:
        self._joint_rates = joint_rates
        self.alone: dict[Pair, float] = dict(alone or {})
        self.bottlenecks: list[Bottleneck] = []

    def run(self, paired: Iterable[Round], one_to_all: Iterable[Round]) -> None:
        """Measure these rounds, and look closer where pairs are slowed."""
        rates = [self._joint_rates(pairs) for pairs in paired]
        self._measure_alone(rates)
        for seen in rates:
            self._look(seen)
        for pairs in one_to_all:
            self._look(self._joint_rates(pairs))

    def _measure_alone(self, paired: Sequence[Rates]) -> None:
        seen: dict[Pair, list[float]] = {}
        for pair, rate in itertools.chain.from_iterable(rates.items() for rates in paired):
            seen.setdefault(pair, []).append(rate)
        self.alone |= {pair: statistics.median(of_pair) for pair, of_pair in seen.items()}
        for pair, of_pair in seen.items():
            if min(of_pair) < (1 - TOLERANCE) * max(of_pair):
                self.alone[pair] = max(self._joint_rates((pair,))[pair], self.alone[pair])

    # One round

    def _slowed(self, rates: Rates, *, tolerance: float = TOLERANCE) -> set[Pair]:
        return {pair for pair, rate in rates.items() if rate < (1 - tolerance) * self.alone.get(pair, 0.0)}

    def _unexplained(self, rates: Rates) -> set[Pair]:
        full = [
            shared.members
            for shared in self.bottlenecks
            if sum(rates[pair] for pair in shared.members & rates.keys()) > (1 - _EQUAL) * shared.bandwidth_bytes_per_s
        ]
        return {pair for pair in self._slowed(rates) if not any(pair in members for members in full)}

    def _look(self, rates: Rates) -> None:
        if not self._unexplained(rates):
            return
        # A pause of the machine is no bottleneck: what is one shows again and again.
        runs = [rates]
        for _ in range(_NUM_AGAIN):
            again = self._joint_rates(tuple(rates))
            runs.append(again)
            rates = {pair: max(rate, again[pair]) for pair, rate in rates.items()}
            if not (unexplained := self._unexplained(rates)):
                return
        for members in self._groups(rates):
            if members & unexplained and self._holds(members, runs):
                crosses = any(not set(a) & set(b) for a, b in itertools.combinations(members, 2))
                bandwidth = statistics.median(sum(run[pair] for pair in members) for run in runs)
                self._add(Bottleneck(members, bandwidth, crosses))

    def _holds(self, members: frozenset[Pair], runs: Sequence[Rates]) -> bool:
        """Return whether pairs are limited without the others of their round, too; else members are missing."""
        if members == runs[0].keys():
            return True
        together = statistics.median(sum(run[pair] for pair in members) for run in runs)
        return sum(self._joint_rates(tuple(sorted(members))).values()) < (1 + _EQUAL) * together

    def _groups(self, rates: Rates) -> list[frozenset[Pair]]:
        slowed = self._slowed(rates, tolerance=_ALSO)
        if self._is_one_thing(rates, slowed):
            return [frozenset(rates)]
        if len(rates) > _MOST_LEFT_OUT:
            return [frozenset(slowed)] if len(slowed) > 1 else []
        groups: list[frozenset[Pair]] = []
        for pair in tuple(rates):
            rate, others = rates[pair], slowed - {pair}
            if not others:
                continue
            without = self._joint_rates(tuple(other for other in rates if other != pair))
            faster = {other for other in others if self._gains(other, rates, without, share=rate / len(others))}
            if not faster:
                continue
            # Nor is it a gain if the round was disturbed: with the pair, they must be slow again.
            again = self._joint_rates(tuple(rates))
            rates = {other: max(slow, again[other]) for other, slow in rates.items()}
            faster = {other for other in faster if self._gains(other, rates, without, share=rate / len(others))}
            groups = _joined(groups, frozenset({pair, *faster}))
        return [group for group in groups if len(group) > 1]

    def _is_one_thing(self, rates: Rates, slowed: Collection[Pair]) -> bool:
        """Return whether one bottleneck must slow all pairs of a round: two would carry those of two pairs alone."""
        if len(slowed) < len(rates) or len(rates) < 2:
            return False
        fastest, second = sorted((self.alone[pair] for pair in rates), reverse=True)[:2]
        return sum(rates.values()) < min((1 + _EQUAL) * fastest, fastest + second / 2)

    def forget_limits_of_nodes(self) -> bool:
        """Drop limits of single nodes, which would make less known nodes look better; return whether there were any."""
        crossing = [shared for shared in self.bottlenecks if shared.crosses]
        there_were = len(crossing) < len(self.bottlenecks)
        self.bottlenecks = crossing
        return there_were

    def _gains(self, pair: Pair, rates: Rates, without: Rates, *, share: float) -> bool:
        most = min(share, self.alone[pair] - rates[pair])
        return without[pair] - rates[pair] > max(_GAIN_OF_MOST * most, _GAIN * rates[pair])

    # All rounds

    def _add(self, shared: Bottleneck) -> None:
        for position, known in enumerate(self.bottlenecks):
            if self._are_one(known, shared):
                self.bottlenecks[position] = Bottleneck(
                    known.members | shared.members, max(known.bandwidth_bytes_per_s, shared.bandwidth_bytes_per_s), crosses=True
                )
                return
        self.bottlenecks.append(shared)

    def _are_one(self, known: Bottleneck, shared: Bottleneck) -> bool:
        bandwidth = max(known.bandwidth_bytes_per_s, shared.bandwidth_bytes_per_s)
        if min(known.bandwidth_bytes_per_s, shared.bandwidth_bytes_per_s) < (1 - _EQUAL) * bandwidth:
            return False
        # The limits of single nodes are different things, and often equal.
        if not (known.crosses or shared.crosses):
            return False
        if shared.members <= known.members or known.members <= shared.members:
            return True
        pairs = (*self._fastest(known.members - shared.members), *self._fastest(shared.members - known.members))
        if sum(self.alone[pair] for pair in pairs) < _DECISIVE * bandwidth:
            pairs += self._fastest(known.members & shared.members)
        if sum(self.alone[pair] for pair in pairs) < _DECISIVE * bandwidth:
            return False
        return sum(self._joint_rates(pairs).values()) < (1 + _EQUAL) * bandwidth

    def _fastest(self, pairs: Collection[Pair]) -> Round:
        return tuple(sorted(pairs, key=lambda pair: (-self.alone[pair], pair))[:_MOST_OF_EACH])


def _joined(groups: Sequence[frozenset[Pair]], more: frozenset[Pair]) -> list[frozenset[Pair]]:
    apart = [group for group in groups if not group & more]
    return [*apart, more.union(*(group for group in groups if group & more))]


def shared_when_measured(rounds: Iterable[Round], measured: Rates, bottlenecks: Collection[Bottleneck]) -> set[Pair]:
    """Return the pairs that filled a bottleneck together when measured, so that their rates are shares of it."""
    filled: set[Pair] = set()
    for pairs, shared in itertools.product(rounds, bottlenecks):
        together = shared.members.intersection(pairs)
        if len(together) > 1 and sum(measured[pair] for pair in together) > (1 - _EQUAL) * shared.bandwidth_bytes_per_s:
            filled |= together
    return filled


def below_their_ends(measured: Rates) -> set[Pair]:
    """Return the pairs slower than other pairs of both their nodes; running with others may have slowed them."""
    leaving, entering = fastest_of_nodes(measured)
    return {pair for pair, rate in measured.items() if rate < (1 - TOLERANCE) * min(leaving[pair[0]], entering[pair[1]])}


def fastest_of_nodes(measured: Rates) -> tuple[dict[int, float], dict[int, float]]:
    """Return the rates of the fastest pair that leaves, and that enters, each node."""
    leaving: dict[int, float] = {}
    entering: dict[int, float] = {}
    for (source, target), rate in measured.items():
        leaving[source] = max(rate, leaving.get(source, 0.0))
        entering[target] = max(rate, entering.get(target, 0.0))
    return leaving, entering


Arrival = tuple[float, int]
"""Seconds by one clock, and bytes, of a message."""


def rates(arrivals: Mapping[Pair, Sequence[Arrival]], *, warm_up_bytes: int) -> dict[Pair, float]:
    """Return the bytes per second of pairs while all were under way, from the latest first to the earliest last arrival.

    The first `warm_up_bytes` may have found an idle path (tokens of a shaper, empty buffers). Pairs that never ran together count alone.
    """
    spans: dict[Pair, tuple[Sequence[Arrival], float, float]] = {}
    for pair, of_pair in arrivals.items():
        total = list(itertools.accumulate(num_bytes for _, num_bytes in of_pair))
        first = next((place for place, so_far in enumerate(total) if so_far >= warm_up_bytes), len(total) - 1)
        # Two arrivals at least must be left to count between.
        first = min(first, len(of_pair) - 2)
        spans[pair] = ([(at_s, so_far) for (at_s, _), so_far in zip(of_pair, total, strict=True)], of_pair[first][0], of_pair[-1][0])
    since_s, until_s = max(span[1] for span in spans.values()), min(span[2] for span in spans.values())
    bytes_per_s: dict[Pair, float] = {}
    for pair, (curve, own_since_s, own_until_s) in spans.items():
        begin_s, end_s = (since_s, until_s) if until_s - since_s > 0.1 * (own_until_s - own_since_s) else (own_since_s, own_until_s)
        carried = _at(curve, end_s) - _at(curve, begin_s)
        bytes_per_s[pair] = carried / (end_s - begin_s) if end_s > begin_s else float("inf")
    return bytes_per_s


def _at(curve: Sequence[Arrival], at_s: float) -> float:
    for (before_s, before), (after_s, after) in itertools.pairwise(curve):
        if before_s <= at_s <= after_s:
            return before + (after - before) * ((at_s - before_s) / (after_s - before_s) if after_s > before_s else 1.0)
    return curve[0][1] if at_s < curve[0][0] else curve[-1][1]
