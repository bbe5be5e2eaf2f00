"""Patterns of a sum: who sends which slice of the numbers to whom, and in which order it is added.

The numbers are cut into slices. The shares of a slice go along a tree to one member, which so has the total; the total goes along
another tree to all. Members stand in groups, such as those of one node, and the groups in a circle:

    within a group    all send their shares to one member, the head, which sends them the total later
    across groups     heads pass the share on from group to group (a ring), or all send it to the head that begins (direct)

A group of its own for each member makes the ring of all (Patarasuk and Yuan, JPDC 2009), or the direct exchange; groups of several are
two levels. Heads take turns by slice.

Members may also sum along one tree of links: the shares of each slice go towards the member who begins it, the total from it to all. Each
member sends (n - 1) / n of its numbers as shares, as in a ring. Such a tree passes by bad links, over one of which a circle may have to
close; it is the only way where some members cannot communicate.

A member adds what comes to its own numbers, first that of its group, then that of others. So the order in which a number is added depends
on the pattern and the number's place, not on chunks or time. Ring and direct exchange of the same groups add in the same order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

MOST_MESHED = 16
"""Members that are all connected with each other; more have the ring in their order alone."""


class Hop(NamedTuple):
    """A slice goes from one member to another, both by position among the members."""

    source: int
    target: int


@dataclass(frozen=True)
class Part:
    """What one member does with a slice.

    Attributes:
        sources: Whose shares it adds to its own, in this order.
        share_to: Whom it sends the share then; nobody if it is the owner.
        total_from: Who sends it the total; nobody if it is the owner.
        totals_to: Whom it sends the total.
    """

    sources: tuple[int, ...]
    share_to: tuple[int, ...]
    total_from: tuple[int, ...]
    totals_to: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The trees of one slice, each hop behind those that it depends on.

    Attributes:
        shares: Hops to the owner; a member adds what comes in this order.
        totals: Hops from the owner to all others.
    """

    owner: int
    shares: tuple[Hop, ...]
    totals: tuple[Hop, ...]

    def num_hops(self, member: int) -> int:
        """Return over how many hops a member's share goes to the owner."""
        next_of, count = dict(self.shares), 0
        while member in next_of:
            member, count = next_of[member], count + 1
        return count

    def part(self, member: int) -> Part:
        """Return what a member does with the slice."""
        return Part(
            sources=tuple(source for source, target in self.shares if target == member),
            share_to=tuple(target for source, target in self.shares if source == member),
            total_from=tuple(source for source, target in self.totals if target == member),
            totals_to=tuple(target for source, target in self.totals if source == member),
        )


@dataclass(frozen=True)
class Pattern:
    """A pattern of sums over some members, who are numbered from 0.

    Attributes:
        groups: Members of each group, groups in the order of the circle.
        direct: Whether heads send to the one that begins, and not from group to group.
        edges: Links of the tree along which all slices go; none where groups say who sends to whom.
        is_meshed: Whether members can communicate as any pattern may ask; if not, as the tree has them next to each other, no more.
    """

    groups: tuple[tuple[int, ...], ...]
    direct: bool = False
    edges: tuple[tuple[int, int], ...] = ()
    is_meshed: bool = True

    def __str__(self) -> str:
        if self.edges:
            return f"tree {' '.join(f'{one}-{other}' for one, other in self.edges)}"
        parts = [" ".join(map(str, group)) if len(group) == 1 else f"({' '.join(map(str, group))})" for group in self.groups]
        return f"{'direct' if self.direct else 'ring'} {' '.join(parts)}"

    @property
    def num_members(self) -> int:
        """Number of members."""
        return sum(map(len, self.groups))

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The way of each slice, by the number of the member who begins it."""
        return tuple(map(self._route, range(self.num_members)))

    @cached_property
    def neighbors(self) -> tuple[tuple[int, ...], ...]:
        """The members next to each one in the tree; nobody where there is none."""
        found: list[list[int]] = [[] for _ in range(self.num_members)]
        for one, other in self.edges:
            found[one].append(other)
            found[other].append(one)
        return tuple(tuple(sorted(members)) for members in found)

    def _route(self, beginner: int) -> Route:
        if self.edges:
            outwards = self._outwards(beginner)
            return Route(beginner, tuple(Hop(target, source) for source, target in reversed(outwards)), tuple(outwards))
        heads, within = self._heads(beginner)
        if self.direct:
            shares, totals = [Hop(head, beginner) for head in heads[1:]], [Hop(beginner, head) for head in heads[1:]]
        else:
            shares, totals = _chain(heads), _chain(heads[-1:] + heads[:-1])
        to_heads = [Hop(target, source) for source, target in within]
        return Route(beginner if self.direct else heads[-1], (*to_heads, *shares), (*totals, *within))

    def _heads(self, beginner: int) -> tuple[list[int], list[Hop]]:
        """Return the head of each group, in the order of the circle from a member on, and the hops from heads to their groups."""
        first = next(number for number, group in enumerate(self.groups) if beginner in group)
        turn = self.groups[first].index(beginner)
        groups = self.groups[first:] + self.groups[:first]
        heads = [group[turn % len(group)] for group in groups]
        return heads, [Hop(head, member) for group, head in zip(groups, heads, strict=True) for member in _behind(group, head)]

    def from_member(self, member: int) -> tuple[Hop, ...]:
        """Return the tree along which what one member has goes to all others, each hop behind those that it depends on."""
        if self.edges:
            return tuple(self._outwards(member))
        heads, within = self._heads(member)
        across = [Hop(member, head) for head in heads[1:]] if self.direct else _chain(heads)
        return (*across, *within)

    def _outwards(self, beginner: int) -> list[Hop]:
        hops: list[Hop] = []
        reached = [beginner]
        for member in reached:  # Grows while it is walked.
            new = [other for other in self.neighbors[member] if other not in reached]
            hops += [Hop(member, other) for other in new]
            reached += new
        return hops

    @cached_property
    def loads(self) -> tuple[dict[Hop, float], dict[Hop, float]]:
        """The part of the numbers that passes each hop, as shares and as totals."""
        num_slices = self.num_members
        if self.is_ring:
            order = [member for (member,) in self.groups]
            around = {Hop(*ends): (num_slices - 1) / num_slices for ends in zip(order, order[1:] + order[:1], strict=True)}
            return around, around
        shares = Counter(hop for route in self.routes for hop in route.shares)
        totals = Counter(hop for route in self.routes for hop in route.totals)
        return _parts(shares, num_slices), _parts(totals, num_slices)

    @cached_property
    def needs(self) -> dict[Hop, frozenset[int]]:
        """The members whose numbers pass each hop as shares."""
        if self.is_ring:
            everybody = frozenset(range(self.num_members))
            return {hop: everybody - {hop.target} for hop in self.loads[0]}
        needed: dict[Hop, set[int]] = {}
        for route in self.routes:
            contents = {member: {member} for member in range(self.num_members)}
            for hop in route.shares:
                needed.setdefault(hop, set()).update(contents[hop.source])
                contents[hop.target] |= contents[hop.source]
        return {hop: frozenset(members) for hop, members in needed.items()}

    @property
    def ends_apart(self) -> bool:
        """Whether the shares of each slice end at another member."""
        return self.is_ring or len({route.owner for route in self.routes}) == self.num_members

    @property
    def is_ring(self) -> bool:
        """Whether the pattern is a ring of all."""
        # Loads of a ring of hundreds of members are not counted hop by hop.
        return len(self.groups) == self.num_members and not self.direct and not self.edges

    @property
    def with_same_bits(self) -> tuple[Pattern, ...]:
        """The patterns that add in the same order, this one first."""
        return (self,) if self.edges else (self, replace(self, direct=not self.direct))

    @property
    def additions(self) -> tuple[Any, ...]:
        """The order of additions in each slice: a member, or a pair of two such orders, whose own order does not matter."""
        return tuple(map(additions, self.routes))


def ring(order: Iterable[int]) -> Pattern:
    """Return the ring in an order of members."""
    return Pattern(tuple((member,) for member in order))


def direct(order: Iterable[int]) -> Pattern:
    """Return the direct exchange, which adds in the order of a ring."""
    return replace(ring(order), direct=True)


def tree(edges: Iterable[tuple[int, int]], *, is_meshed: bool = False) -> Pattern:
    """Return the pattern along a tree of at least one link."""
    edges = tuple(edges)
    return replace(ring(range(len(edges) + 1)), edges=edges, is_meshed=is_meshed)


def slice_starts(numel: int, num_members: int) -> list[int]:
    """Return the first number of each slice, and behind the last one `numel`; the first slices are one longer where it does not divide."""
    base, longer = divmod(numel, num_members)
    return [number * base + min(number, longer) for number in range(num_members + 1)]


def _parts(counts: Counter[Hop], num_slices: int) -> dict[Hop, float]:
    return {hop: count / num_slices for hop, count in counts.items()}


def _chain(members: Sequence[int]) -> list[Hop]:
    return [Hop(*ends) for ends in itertools.pairwise(members)]


def _behind(group: Sequence[int], head: int) -> list[int]:
    at = group.index(head)
    return [*group[at + 1 :], *group[:at]]


def additions(route: Route) -> Any:
    """Return the order of additions along a route; see `Pattern.additions`."""
    sums: dict[int, Any] = {}
    for source, target in route.shares:
        pair = (sums.get(target, target), sums.get(source, source))
        sums[target] = tuple(sorted(pair, key=repr))
    return sums.get(route.owner, route.owner)
