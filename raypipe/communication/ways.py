"""Which transfers of a device take turns: those whose paths share a bottleneck."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


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
