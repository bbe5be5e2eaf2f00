"""Patterns of a sum: who sends which slice of the numbers to whom, and in which order it is added.

The numbers are cut into slices. The shares of a slice go along a tree to one member, which so has the total; the total goes along
another tree to all. Members stand in groups, such as those of one node, and the groups in a circle:

    within a group    all send their shares to one member, the head, which sends them the total later
    across groups     heads pass the share on from group to group (a ring), or all send it to the head that begins (direct)

A group of its own for each member makes the ring of all (Patarasuk and Yuan, JPDC 2009), or the direct exchange; groups of several are
two levels. Heads take turns by slice.

Members may also sum along trees of links: the shares of each slice go towards the root of its tree, the total from it to all. Where all
slices have one tree, rooted at each member in turn, each member sends (n - 1) / n of its numbers as shares, as in a ring. Such a tree
passes by bad links, over one of which a circle may have to close; it is the only way where some members cannot communicate. Slices with
trees of their own use all links at once (`raypipe.simulation.packing`).

A member adds what comes to its own numbers, first that of its group, then that of others. So the order in which a number is added depends
on the pattern and the number's place, not on chunks or time. Ring and direct exchange of the same groups add in the same order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

MOST_MESHED = 16
"""Members that are all connected with each other; more have the ring in their order alone."""
_LEAST_SLICE_BYTES = 64 << 10
"""In the mean, of a sum along trees that is pipelined."""


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
class Tree:
    """The tree of links along which a slice goes.

    Attributes:
        root: Member to whom the shares go; of as many equal slices each member in turn if it is `None`.
        weight: Length of the slice, beside those of others.
    """

    edges: tuple[tuple[int, int], ...]
    root: int | None = None
    weight: int = 1

    def __str__(self) -> str:
        return " ".join(f"{one}-{other}" for one, other in self.edges)

    @cached_property
    def neighbors(self) -> dict[int, list[int]]:
        """The members next to each one."""
        next_to: dict[int, list[int]] = {}
        for one, other in sorted((*self.edges, *(edge[::-1] for edge in self.edges))):
            next_to.setdefault(one, []).append(other)
        return next_to

    def outwards(self, member: int) -> list[Hop]:
        """Return the hops from a member to all others, each behind those that it depends on."""
        hops: list[Hop] = []
        before, reached = {member: member}, [member]
        for source in reached:  # Grows while it is walked.
            new = [other for other in self.neighbors[source] if other != before[source]]
            hops += [Hop(source, other) for other in new]
            before |= dict.fromkeys(new, source)
            reached += new
        return hops


@dataclass(frozen=True)
class Pattern:
    """A pattern of sums over some members, who are numbered from 0.

    Attributes:
        groups: Members of each group, groups in the order of the circle.
        direct: Whether heads send to the one that begins, and not from group to group.
        trees: Those along which slices go; none where groups say who sends to whom.
        is_meshed: Whether members can communicate as any pattern may ask; if not, as trees have them next to each other, no more.
    """

    groups: tuple[tuple[int, ...], ...]
    direct: bool = False
    trees: tuple[Tree, ...] = ()
    is_meshed: bool = True

    def __str__(self) -> str:
        if len(self.trees) == 1:
            return f"tree {self.trees[0]}"
        if self.trees:
            return f"{len(self.trees)} trees ({blake2b(repr(self.trees).encode(), digest_size=4).hexdigest()})"
        parts = [" ".join(map(str, group)) if len(group) == 1 else f"({' '.join(map(str, group))})" for group in self.groups]
        return f"{'direct' if self.direct else 'ring'} {' '.join(parts)}"

    @property
    def num_members(self) -> int:
        """Number of members."""
        return sum(map(len, self.groups))

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The way of each slice; without trees, by the number of the member who begins it."""
        return tuple(map(self._route, range(len(self.weights))))

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The links of all trees."""
        return tuple(sorted({edge for tree in self.trees for edge in tree.edges}))

    @cached_property
    def neighbors(self) -> tuple[tuple[int, ...], ...]:
        """The members next to each one in trees; nobody where there is none."""
        found: list[list[int]] = [[] for _ in range(self.num_members)]
        for one, other in self.edges:
            found[one].append(other)
            found[other].append(one)
        return tuple(tuple(sorted(members)) for members in found)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """How long each slice is, beside the others."""
        return tuple(tree.weight for tree, _ in self._rooted) or (1,) * self.num_members

    @cached_property
    def _rooted(self) -> list[tuple[Tree, int]]:
        # The tree of each slice, and its root.
        each = range(self.num_members)
        return [(tree, root) for tree in self.trees for root in (each if tree.root is None else (tree.root,))]

    def starts(self, numel: int) -> list[int]:
        """Return the first number of each slice of so many numbers, and behind the last one `numel`."""
        if len({*self.weights}) == 1:
            return slice_starts(numel, len(self.weights))
        ends = list(itertools.accumulate(self.weights))
        return [0, *(numel * end // ends[-1] for end in ends)]

    def _route(self, number: int) -> Route:
        if self.trees:
            tree, root = self._rooted[number]
            outwards = tree.outwards(root)
            return Route(root, tuple(Hop(target, source) for source, target in reversed(outwards)), tuple(outwards))
        beginner = number
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
        if self.trees:
            return tuple(max(self.trees, key=lambda tree: (tree.root == member, tree.weight)).outwards(member))
        heads, within = self._heads(member)
        across = [Hop(member, head) for head in heads[1:]] if self.direct else _chain(heads)
        return (*across, *within)

    @cached_property
    def loads(self) -> tuple[dict[Hop, float], dict[Hop, float]]:
        """The part of the numbers that passes each hop, as shares and as totals."""
        if self.is_ring:
            order = [member for (member,) in self.groups]
            around = {Hop(*ends): (len(order) - 1) / len(order) for ends in zip(order, order[1:] + order[:1], strict=True)}
            return around, around
        return self._parts([route.shares for route in self.routes]), self._parts([route.totals for route in self.routes])

    def _parts(self, hops: Iterable[Iterable[Hop]]) -> dict[Hop, float]:
        passed: Counter[Hop] = Counter()
        for weight, of_slice in zip(self.weights, hops, strict=True):
            passed.update(dict.fromkeys(of_slice, weight))
        return {hop: count / sum(self.weights) for hop, count in passed.items()}

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

    def is_pipelined(self, num_bytes: int) -> bool:
        """Return whether members pass the slices of a sum of so many bytes one after the other, all in the same order.

        Along a tree each slice passes each link once each way, as a share or as its total, so that no link is ever without work. Slices
        that are not cut into chunks would wait for each other at each member.
        """
        return bool(self.trees) and num_bytes >= len(self.weights) * _LEAST_SLICE_BYTES

    @property
    def ends_apart(self) -> bool:
        """Whether the shares of each slice end at another member, and slices are equally long."""
        owners = sorted(route.owner for route in self.routes)
        return self.is_ring or (owners == [*range(self.num_members)] and len({*self.weights}) == 1)

    @property
    def is_ring(self) -> bool:
        """Whether the pattern is a ring of all."""
        # Loads of a ring of hundreds of members are not counted hop by hop.
        return len(self.groups) == self.num_members and not self.direct and not self.trees

    @property
    def with_same_bits(self) -> tuple[Pattern, ...]:
        """The patterns that add in the same order, this one first."""
        return (self,) if self.trees else (self, replace(self, direct=not self.direct))

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
    """Return the pattern along one tree of at least one link."""
    edges = tuple(edges)
    return replace(ring(range(len(edges) + 1)), trees=(Tree(edges),), is_meshed=is_meshed)


def exchange(num_members: int, pattern: Pattern | None = None) -> Pattern:
    """Return the pattern by whose totals the numbers of small tensors, such as norms, go from each member to all.

    Where large sums of the same members have a tree as their `pattern`, because some cannot communicate, small ones go along it, too.
    """
    if pattern is not None and not pattern.is_meshed:
        return pattern
    return direct(range(num_members)) if num_members <= MOST_MESHED else ring(range(num_members))


def slice_starts(numel: int, num_members: int) -> list[int]:
    """Return the first number of each slice, and behind the last one `numel`; the first slices are one longer where it does not divide."""
    base, longer = divmod(numel, num_members)
    return [number * base + min(number, longer) for number in range(num_members + 1)]


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
