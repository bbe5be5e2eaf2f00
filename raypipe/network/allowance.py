"""How a budget of seconds and bytes is divided among the measurements of a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from raypipe.errors import InputError
from raypipe.network.rounds import NumRounds, Pair, Round, company, fan_rounds, num_rounds, tournament
from raypipe.network.sharing import Rates, fastest_of_nodes
from raypipe.units import seconds, size

_PING_S = 0.4
_STREAM_S = 0.15
_STEP_S = 0.05
"""What a round takes besides: calls, threads, connections."""
_LEAST_SCALE = 0.25
_LEAST_STREAM_S = 0.02
"""In less time, a pause of the machine looks like a slow link."""
_LEAST_IN_FAN_S = 0.01
"""Of streams that together are expected to last longer, and are looked at again if they do not."""
_COMPANY_LOOKS, _FAN_LOOKS = 1.25, 3.0
"""How often a round is measured, about: where all that leaves a node has the node's limit, three times."""
_PARTS_OF_S = 10
"""Of a second: how exactly a budget is asked for."""
_USED = 0.8
"""Of the seconds; what takes longer than thought, and what is measured again at the end, has the rest."""
_PING_SHARE, _STREAM_SHARE = 0.6, 0.25
"""Of the bytes; what is looked at more closely has the rest."""


_SEARCHED = 0.9
"""Of seconds and bytes, until when shared links are looked for; what was in bad company is measured again with the rest."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a probe may take.

    Attributes:
        seconds: for measuring, once the actors are there.
        num_bytes: through all links together.
    """

    seconds: float = 60.0
    num_bytes: int = 16 << 30

    @property
    def for_search(self) -> Budget:
        """Its part until the end of the search for shared links."""
        return Budget(seconds=_SEARCHED * self.seconds, num_bytes=int(_SEARCHED * self.num_bytes))

    def allows(self, seconds: float, num_bytes: int) -> bool:
        """Whether a measurement may begin after so many seconds, with which so many bytes would have been sent."""
        return seconds <= self.seconds and num_bytes <= self.num_bytes


@dataclass(frozen=True)
class Allowance:
    """What each measurement may take.

    Attributes:
        ping_s: for the latency and bandwidth of a directed pair.
        ping_bytes: likewise.
        stream_s: for the rate of a pair in company.
        stream_bytes: likewise.
        rounds: of nodes.
        looks: how often each pair of nodes is measured, at different moments, where there is time to spare.
        looks_for_sharing: whether the budget suffices to look for shared links.
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
        """Between nodes, those of a second look too; what a finding is looked at more closely with comes on top."""
        rounds = self.rounds
        return self.looks * rounds.tournament + (rounds.company + rounds.fans if self.looks_for_sharing else 0)

    def streams_s(self, pairs: Round, bandwidths: Rates) -> dict[Pair, float]:
        """How long the stream of each pair of a round is to last by itself, so that the round lasts `stream_s`.

        A node is expected to carry what its fastest pair does: of the pairs that leave or enter it at the same time, each then takes
        longer than by itself. If they do not, the round is shorter, but no stream lasts less than a pause of the machine might.

        Args:
            pairs: that are measured at the same time.
            bandwidths: bytes per second of all pairs that were measured, by themselves.
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
                min(_LEAST_IN_FAN_S, self.stream_s),
            )
            for source, target in pairs
        }

    def tells_sharing_of(self, bytes_per_s: float) -> bool:
        """Whether the bytes of a stream suffice, too, to see what slows a link that carries so much."""
        return self.looks_for_sharing and self.stream_bytes >= _LEAST_STREAM_S * bytes_per_s


def divide(
    budget: Budget,
    classes: Sequence[Hashable],
    *,
    num_inside: int,
    rounds_inside: int,
    least_ping_bytes: int,
    least_stream_bytes: int,
) -> Allowance:
    """The allowance of each measurement.

    Args:
        budget: of all.
        classes: of each node.
        num_inside: measurements within nodes, each a quarter of one between nodes.
        rounds_inside: in which they are made, those on different machines at the same time.
        least_ping_bytes: with which a link can be measured.
        least_stream_bytes: with which a rate can be measured.

    Raises:
        InputError: the budget is too small to measure every link; says how much would do.
    """
    met, rounds = tournament(classes), num_rounds(classes)
    num_pings = 2 * sum(map(len, met)) + num_inside
    num_streams = sum(map(len, (*company(met, len(classes)), *fan_rounds(len(classes)))))
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
    streams = _COMPANY_LOOKS * rounds.company + _FAN_LOOKS * rounds.fans
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
    return Allowance(scale * _PING_S, ping_bytes, scale * _STREAM_S, stream_bytes, rounds, looks, sharing)
