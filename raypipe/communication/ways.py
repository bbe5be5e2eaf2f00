"""How what devices send each other goes, and which transfers of a device take turns: those whose paths share a bottleneck."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from raypipe.communication.paths import LinkPath, PathOf
from raypipe.communication.patterns import Pattern

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Wiring:
    """How the messages and sums of a run go.

    Attributes:
        patterns: Pattern of each sum, by members; where left out, a ring in their order.
        wires: For each device, `ways` to the others, so far as they are known; where left out, all are behind the port of its node.
        entrances: For each device, `entrances` from the others. Messages that come by the same one take turns.
    """

    patterns: Mapping[tuple[int, ...], Pattern] = field(default_factory=dict)
    wires: tuple[Mapping[int, int], ...] = ()
    entrances: tuple[Mapping[int, int], ...] = ()

    @classmethod
    def between(
        cls, pairs: Collection[tuple[int, int]], num_devices: int, path: PathOf, patterns: Mapping[tuple[int, ...], Pattern]
    ) -> Wiring:
        """Return the wiring for the pairs (source, target) that send; `path` is the path between two devices."""
        targets, sources = ([dict[int, LinkPath]() for _ in range(num_devices)] for _ in range(2))
        for source, target in sorted(pairs):
            targets[source][target] = sources[target][source] = path(source, target)
        return cls(patterns, tuple(map(ways, targets)), tuple(map(entrances, sources)))


def entrances(paths: Mapping[K, LinkPath]) -> dict[K, int]:
    """Return for the senders to a device, by the paths from them, the number of the way into it that they share with others."""
    number_of = ways(paths, by_port=False)
    num_senders = Counter(number_of.values())
    return {sender: number for sender, number in number_of.items() if num_senders[number] > 1}


def ways(paths: Mapping[K, LinkPath], *, by_port: bool = True) -> dict[K, int]:
    """Return the number of the way to each peer of a device, by the path to it.

    Paths that share a limited link have the same way, and with `by_port` those that share the port of the node. Paths to slow nodes have
    ways of their own, with negative numbers (`_apart`), so that nobody waits for a slow receiver.
    """
    shared = {peer: path.bottlenecks if by_port else [name for name, _ in path.resources] for peer, path in paths.items()}
    number_of: dict[K, int] = {}
    num_apart = 0
    for number, peers in enumerate(_joined(shared)):
        apart = _apart(paths, peers, shared) if len(peers) > 1 else []
        number_of |= dict.fromkeys(peers, number)
        for group in apart:
            num_apart += 1
            number_of |= dict.fromkeys(group, -num_apart)
    return number_of


def _joined(resources: Mapping[K, Collection[str]]) -> list[list[K]]:
    members: dict[int, list[K]] = {}
    holders: dict[str, int] = {}
    for number, (peer, names) in enumerate(resources.items()):
        joined = sorted({holders[name] for name in names if name in holders})
        first = joined[0] if joined else number
        members.setdefault(first, []).append(peer)
        for other in joined[1:]:
            members[first] += members.pop(other)
            holders = {name: first if holder == other else holder for name, holder in holders.items()}
        holders |= dict.fromkeys(names, first)
    return list(members.values())


def _apart(paths: Mapping[K, LinkPath], peers: Sequence[K], shared: Mapping[K, Sequence[str]]) -> list[list[K]]:
    """Return those of the peers behind one bottleneck that are sent to beside the others; those that share more of the way together.

    In turn, a message that passes a slow link keeps the whole bottleneck for as long. It does not where it is beside others, and shares of
    a bottleneck are fair: a transfer that needs no more than half of it is as quick beside one other transfer as alone. So slow nodes are
    set apart, the slowest first, as long as together they need half of the bottleneck, or no more than the others leave.
    """
    num_sharing = Counter(chain.from_iterable(shared[peer] for peer in peers))
    common = {name for name, count in num_sharing.items() if count == len(peers)}
    groups = _joined({peer: [name for name in shared[peer] if name not in common] for peer in peers})
    if not common or len(groups) == 1:
        return []
    rated = sorted(((max(paths[peer].bandwidth_bytes_per_s for peer in group), group) for group in groups), key=itemgetter(0))
    quickest = rated[-1][0]
    bandwidths = [dict(paths[peer].resources) for peer in peers]
    # Nobody has said how quick a port is: as quick as the quickest path.
    limit = min(max(of_path.get(name, quickest) for of_path in bandwidths) for name in common)
    apart: list[list[K]] = []
    needed = 0.0
    for position, (rate, group) in enumerate(rated):
        of_others = quickest if position < len(rated) - 1 else rated[-2][0]
        if rate < math.inf and needed + rate <= max(limit / 2, limit - of_others):
            apart.append(group)
            needed += rate
    return apart
