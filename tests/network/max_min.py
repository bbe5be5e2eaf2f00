"""A network of fair flows, as an oracle: links, bottlenecks on top, and what each flow gets (max-min fairness)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypipe.network.rounds import Pair, Round


@dataclass
class Network:
    """Links by directed pair and shared bottlenecks, in bytes per second.

    Attributes:
        links: of each pair.
        shared: bandwidth and members of each bottleneck.
        noise: standard deviation of what is measured, relative.
        seed: of the noise.
        num_rounds: measured so far.
    """

    links: dict[Pair, float]
    shared: Sequence[tuple[float, frozenset[Pair]]] = ()
    noise: float = 0.0
    seed: int = 0
    num_rounds: int = 0
    _source: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)

    def together(self, pairs: Round) -> dict[Pair, float]:
        """What pairs that run at the same time are measured at."""
        self.num_rounds += 1
        limits = [(self.links[pair], frozenset({pair})) for pair in pairs]
        limits += [(bandwidth, members & set(pairs)) for bandwidth, members in self.shared]
        rates: dict[Pair, float] = {}
        while len(rates) < len(pairs):
            # The tightest limit first: who passes through it gets an equal share of what is left.
            shares = [
                ((bandwidth - sum(rates[pair] for pair in members & rates.keys())) / len(members - rates.keys()), members)
                for bandwidth, members in limits
                if members - rates.keys()
            ]
            share, members = min(shares, key=lambda of_limit: of_limit[0])
            rates |= dict.fromkeys(members - rates.keys(), share)
        return {pair: rate * max(self._source.gauss(1, self.noise), 0.5) for pair, rate in rates.items()}
