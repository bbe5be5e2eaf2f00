"""Sums and weights that are divided among owners: who sends which part of a vector to whom.

    shares     of each number, to the member who owns it; along the pattern's way of its slice, so that it is added as in a whole sum
    weights    of each owner, to all others; along the ways of the pattern's totals

A slice of a pattern ends at some member. Owners are chosen so that they own about the slice that ends at them: together, shares and
weights then take the bytes of a whole sum. Where a border of weights lies within a slice, what ends at another member than its owner goes
one hop further.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from raypipe.communication.patterns import MOST_MESHED, Hop, Part, Pattern, Route, additions

Loads = dict[Hop, float]
"""The part of the numbers that passes each hop."""


class Segment(NamedTuple):
    """Numbers of a vector that lie behind those of the segment before it.

    Attributes:
        end: Where they end.
        owner: Position of the member who owns them; `None` if all need their sum.
    """

    end: int
    owner: int | None


class Piece(NamedTuple):
    """Numbers of a vector from a start to that of the next piece, all with one route."""

    start: int
    route: Route


def slice_owners(pattern: Pattern) -> tuple[int, ...]:
    """Return the member who should own what lies at each slice, each member once: the one at whom its shares end, where these differ."""
    found = tuple(route.owner for route in pattern.routes)
    return found if len(set(found)) == len(found) == pattern.num_members else tuple(range(pattern.num_members))


def owners_of(sizes: Sequence[int], owners: Sequence[int]) -> list[int]:
    """Return the owner of each of some weights that lie one behind the other, so that each owner has about as many numbers."""
    total, count = max(sum(sizes), 1), len(owners)
    ends = itertools.accumulate(sizes)
    # By the middle of the weight, in halves of a number.
    return [owners[min((2 * end - size) * count // (2 * total), count - 1)] for size, end in zip(sizes, ends, strict=True)]


def segments_of(sizes: Iterable[int], owners: Iterable[int | None]) -> tuple[Segment, ...]:
    """Return the segments of numbers that lie one behind the other, those of one owner as one."""
    found: list[Segment] = []
    for end, owner in zip(itertools.accumulate(sizes), owners, strict=True):
        if found and found[-1].owner == owner:
            found.pop()
        found.append(Segment(end, owner))
    return tuple(found)


@lru_cache(maxsize=1024)
def reduce_route(pattern: Pattern, number: int, owner: int | None) -> Route:
    """Return the way of the shares of a slice to an owner, added as in a whole sum; the whole route where all need the total."""
    route = pattern.routes[number]
    if owner is None:
        return route
    for other in (route, *pattern.routes):
        if other.owner == owner and (other is route or additions(other) == additions(route)):
            return Route(owner, other.shares, ())
    if pattern.num_members <= MOST_MESHED and not pattern.trees:
        return Route(route.owner, route.shares, (Hop(route.owner, owner),))
    sender = {target: source for source, target in route.totals}
    back: list[Hop] = []
    while owner != route.owner:
        back.append(Hop(sender[owner], owner))
        owner = sender[owner]
    return Route(route.owner, route.shares, tuple(reversed(back)))


@lru_cache(maxsize=1024)
def gather_route(pattern: Pattern, owner: int) -> Route:
    """Return the way of an owner's numbers to all others."""
    return Route(owner, (), pattern.from_member(owner))


@lru_cache(maxsize=1024)
def reduced(pattern: Pattern, numel: int, segments: tuple[Segment, ...]) -> tuple[Piece, ...]:
    """Return the pieces of a sum of which each owner gets its numbers."""
    starts = pattern.starts(numel)
    borders = sorted({*starts, *(segment.end for segment in segments)})
    slices, owned = 0, 0
    found: list[Piece] = []
    for start in borders[:-1]:
        while starts[slices + 1] <= start:
            slices += 1
        while segments[owned].end <= start:
            owned += 1
        found.append(Piece(start, reduce_route(pattern, slices, segments[owned].owner)))
    return tuple(found)


@lru_cache(maxsize=1024)
def gathered(pattern: Pattern, segments: tuple[Segment, ...]) -> tuple[Piece, ...]:
    """Return the pieces of a vector of which each owner sends its numbers to all."""
    starts = [0, *(segment.end for segment in segments[:-1])]
    routes = [gather_route(pattern, owner) for _, owner in segments if owner is not None]
    return tuple(map(Piece, starts, routes))


@lru_cache(maxsize=1024)
def parts_of(pieces: tuple[Piece, ...], member: int) -> tuple[Part, ...]:
    """Return what a member does with each piece."""
    return tuple(piece.route.part(member) for piece in pieces)


@lru_cache(maxsize=1024)
def reduce_loads(pattern: Pattern, owners: tuple[int, ...]) -> tuple[Loads, Loads]:
    """Return what passes each hop as shares, and further to owners, if these own equal parts."""
    if len(owners) == pattern.num_members and pattern.ends_apart:
        return pattern.loads[0], {}
    numel, segments = _equal(pattern, owners)
    pieces = reduced(pattern, numel, segments)
    return _loads(pieces, numel, [piece.route.shares for piece in pieces]), _loads(pieces, numel, [piece.route.totals for piece in pieces])


@lru_cache(maxsize=1024)
def gather_loads(pattern: Pattern, owners: tuple[int, ...]) -> Loads:
    """Return what passes each hop of the owners' numbers, if these own equal parts."""
    if len(owners) == pattern.num_members and pattern.ends_apart:
        return pattern.loads[1]
    numel, segments = _equal(pattern, owners)
    pieces = gathered(pattern, segments)
    return _loads(pieces, numel, [piece.route.totals for piece in pieces])


@lru_cache(maxsize=1024)
def gather_needs(pattern: Pattern, owners: tuple[int, ...]) -> dict[Hop, frozenset[int]]:
    """Return the owners whose numbers pass each hop."""
    if len(owners) == pattern.num_members and pattern.is_ring:
        return pattern.needs
    found: dict[Hop, set[int]] = {}
    for owner in owners:
        for hop in gather_route(pattern, owner).totals:
            found.setdefault(hop, set()).add(owner)
    return {hop: frozenset(members) for hop, members in found.items()}


def _equal(pattern: Pattern, owners: tuple[int, ...]) -> tuple[int, tuple[Segment, ...]]:
    in_order = [owner for owner in slice_owners(pattern) if owner in owners]
    each = pattern.num_members * sum(pattern.weights)
    return each * len(owners), segments_of([each] * len(owners), in_order)


def _loads(pieces: Sequence[Piece], numel: int, hops: Sequence[Iterable[Hop]]) -> Loads:
    counts: Counter[Hop] = Counter()
    ends = [*(piece.start for piece in pieces[1:]), numel]
    for piece, end, of_piece in zip(pieces, ends, hops, strict=True):
        for hop in of_piece:
            counts[hop] += end - piece.start
    return {hop: count / numel for hop, count in counts.items()}
