"""Vectors that owners divide: that each owner gets the sum of its numbers, added as in a whole sum, and that all get what owners have."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.communication.patterns import Pattern, Route, additions, direct, ring
from raypipe.communication.shards import (
    Segment,
    gather_loads,
    gathered,
    owners_of,
    reduce_loads,
    reduced,
    segments_of,
    slice_owners,
)
from tests.communication.patterns import PATTERNS


def of_owners(pattern: Pattern, ends: list[int]) -> tuple[Segment, ...]:
    """Segments of the owners, in the order of the slices, then one that all need."""
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    return segments_of(sizes, [*slice_owners(pattern), None])


def sums_at(route: Route) -> dict[int, Counter[int]]:
    """Whose numbers each member has after the route."""
    members = {route.owner, *(member for hop in (*route.shares, *route.totals) for member in hop)}
    contents = {member: Counter([member]) for member in members}
    for source, target in route.shares:
        contents[target] += contents[source]
    for source, target in route.totals:
        contents[target] = contents[source]
    return contents


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@given(data=st.data())
def test_an_owner_gets_the_sum_of_its_numbers_in_the_order_of_a_whole_sum(pattern: Pattern, data: st.DataObject) -> None:
    count = pattern.num_members
    ends = sorted(data.draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)))
    segments = of_owners(pattern, [*ends, 60])
    pieces = reduced(pattern, 60, segments)
    starts = [piece.start for piece in pieces]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    for piece, end in zip(pieces, [*starts[1:], 60], strict=True):
        assert end > piece.start
        owner = next(segment.owner for segment in segments if piece.start < segment.end)
        number = next(n for n, later in enumerate(pattern.starts(60)[1:]) if piece.start < later)
        assert additions(piece.route) == additions(pattern.routes[number])
        contents = sums_at(piece.route)
        for member in range(count) if owner is None else (owner,):
            assert contents[member] == Counter(range(count))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_what_owners_have_goes_to_all_once(pattern: Pattern) -> None:
    count = pattern.num_members
    segments = segments_of([7] * count, slice_owners(pattern))
    for piece, segment in zip(gathered(pattern, segments), segments, strict=True):
        have = {segment.owner}
        for source, target in piece.route.totals:
            assert source in have
            assert target not in have
            have.add(target)
        assert have == set(range(count))


@pytest.mark.parametrize("pattern", [ring(range(2)), ring(range(5)), ring((0, 2, 1, 3)), direct((0, 3, 1, 2))], ids=str)
def test_sums_to_owners_and_their_weights_take_the_bytes_of_a_whole_sum(pattern: Pattern) -> None:
    everybody = tuple(range(pattern.num_members))
    shares, further = reduce_loads(pattern, everybody)
    assert (shares, gather_loads(pattern, everybody)) == pattern.loads
    assert not further


def test_one_owner_sends_what_it_has_over_each_link_of_a_ring_but_one() -> None:
    assert set(gather_loads(ring(range(4)), (2,)).values()) == {1.0}
    assert len(gather_loads(ring(range(4)), (2,))) == 3


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30), count=st.integers(1, 6))
def test_owners_have_about_as_many_numbers(sizes: list[int], count: int) -> None:
    owners = owners_of(sizes, range(count))
    assert owners == sorted(owners)
    for owner in range(count):
        owned = sum(size for size, of_weight in zip(sizes, owners, strict=True) if of_weight == owner)
        assert owned <= sum(sizes) / count + max(sizes)
