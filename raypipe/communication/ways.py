"""How what devices send each other goes, and which transfers of a device take turns: those whose paths share a bottleneck."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
        entrances: For each device, the same of the ways from others, where several of these share one; messages by it take turns.
    """

    patterns: Mapping[tuple[int, ...], Pattern] = field(default_factory=dict)
    wires: tuple[Mapping[int, int], ...] = ()
    entrances: tuple[Mapping[int, int], ...] = ()

    @classmethod
    def between(cls, num_devices: int, path: PathOf, patterns: Mapping[tuple[int, ...], Pattern]) -> Wiring:
        """Return the wiring of devices between which there are these paths, of infinite latency where they cannot communicate."""
        devices = range(num_devices)
        wires = tuple(ways({other: path(device, other) for other in devices if other != device}) for device in devices)
        return cls(
            patterns, wires, tuple(entrances({other: path(other, device) for other in devices if other != device}) for device in devices)
        )


def entrances(paths: Mapping[K, LinkPath]) -> dict[K, int]:
    """Return for the senders to a device, by the paths from them, the number of the way into it that they share with others."""
    number_of = ways(paths, by_port=False)
    num_senders = Counter(number_of.values())
    return {sender: number for sender, number in number_of.items() if num_senders[number] > 1}


def ways(paths: Mapping[K, LinkPath], *, by_port: bool = True) -> dict[K, int]:
    """Return the number of the way to each peer of a device, by the path to it.

    Paths that share a limited link, or on request the port of the node, or lead to one that does, have the same way. Those that are much
    slower than the others have one of their own (`_apart`), so that nobody waits for a slow receiver.
    """
    number_of: dict[K, int] = {}
    by_number: dict[int, list[K]] = {}
    shared = {peer: path.bottlenecks if by_port else [name for name, _ in path.resources] for peer, path in paths.items()}
    for peer, number in _joined(shared).items():
        by_number.setdefault(number, []).append(peer)
    for number, peers in enumerate(chain.from_iterable(_apart(paths, joined, shared) for joined in by_number.values())):
        number_of |= dict.fromkeys(peers, number)
    return number_of


def _joined(resources: Mapping[K, Collection[str]]) -> dict[K, int]:
    number_of: dict[K, int] = {}
    members: dict[int, list[K]] = {}
    holders: dict[str, int] = {}
    for peer, names in resources.items():
        joined = sorted({holders[name] for name in names if name in holders})
        number = joined[0] if joined else len(number_of)
        members.setdefault(number, []).append(peer)
        for other in joined[1:]:
            members[number] += members.pop(other)
            holders = {name: number if holder == other else holder for name, holder in holders.items()}
        holders |= dict.fromkeys(names, number)
        number_of |= dict.fromkeys(members[number], number)
    return number_of


def _apart(paths: Mapping[K, LinkPath], peers: Sequence[K], shared: Mapping[K, Sequence[str]]) -> list[list[K]]:
    """Divide the peers behind one bottleneck: first those that take turns, then each node that is reached beside them.

    In turn, a message that passes a slow link keeps the whole bottleneck for as long. It does not where it is beside others, and shares of
    a bottleneck are fair: a transfer that needs no more than half of it is as quick beside one other transfer as alone. So slow nodes are
    set apart, the slowest first, as long as together they need half of what they share with others, or no more than the others leave.
    """
    groups: dict[tuple[tuple[str, float], ...], list[K]] = {}
    for peer in peers:
        groups.setdefault(tuple(paths[peer].resources), []).append(peer)
    if len(groups) == 1:
        return [list(peers)]
    in_turn = sorted(groups.values(), key=lambda group: paths[group[0]].bandwidth_bytes_per_s)
    limits: dict[str, float] = {}
    rates: dict[str, list[float]] = {}
    for group in in_turn:
        path = paths[group[0]]
        bandwidths = dict(path.resources)
        for name in shared[group[0]]:
            # Nobody has said how quick a port is: as quick as the quickest path.
            limits[name] = max(limits.get(name, 0.0), bandwidths.get(name, path.bandwidth_bytes_per_s))
            rates.setdefault(name, []).append(path.bandwidth_bytes_per_s)
    apart: list[list[K]] = []
    needed = dict.fromkeys(limits, 0.0)
    for group in list(in_turn):
        rate = paths[group[0]].bandwidth_bytes_per_s
        names = [name for name in shared[group[0]] if len(rates[name]) > 1]
        left = {name: limits[name] - rates[name][-2 if rates[name][-1] == rate else -1] for name in names}
        if rate < math.inf and all(needed[name] + rate <= max(limits[name] / 2, left[name]) for name in names):
            in_turn.remove(group)
            apart.append(group)
            needed |= {name: needed[name] + rate for name in names}
    kept = {peer for group in in_turn for peer in group}
    return [[peer for peer in peers if peer in kept], *apart] if kept else apart
