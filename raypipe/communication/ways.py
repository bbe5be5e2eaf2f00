"""How what devices send each other goes, and which transfers of a device take turns: those whose paths share a bottleneck."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from raypipe.communication.patterns import Pattern

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Wiring:
    """How the messages and sums of a run go.

    Attributes:
        patterns: Pattern of each sum, by members; where left out, a ring in their order.
        wires: For each device, `ways` to the others, so far as they are known; where left out, all are behind the port of its node.
    """

    patterns: Mapping[tuple[int, ...], Pattern] = field(default_factory=dict)
    wires: tuple[Mapping[int, int], ...] = ()


def ways(resources: Mapping[K, Collection[str]]) -> dict[K, int]:
    """Return a number for each peer of a device; peers have the same one if the paths to them share a resource, or lead to one that does.

    `resources` are the limited links on the path to each peer.
    """
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
