"""Patterns of a sum: that all members contribute once and get the total, and in which order numbers are added."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from raypipe.communication.patterns import Pattern, Tree, ring, slice_starts, tree
from tests.communication.patterns import PATTERNS


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_member_gives_its_numbers_once_and_gets_the_total(pattern: Pattern) -> None:
    members = set(range(pattern.num_members))
    assert len(pattern.routes) == len(pattern.weights)
    for route in pattern.routes:
        contents = {member: Counter([member]) for member in members}
        for source, target in route.shares:
            contents[target] += contents.pop(source)  # whoever has sent its share takes no other
        assert contents == {route.owner: Counter(members)}
        have = {route.owner}
        for source, target in route.totals:
            assert source in have
            assert target not in have, "it gets the total once"
            have.add(target)
        assert have == members


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_what_each_member_does_is_what_the_trees_say(pattern: Pattern) -> None:
    for route in pattern.routes:
        parts = [route.part(member) for member in range(pattern.num_members)]
        shares = {(member, target) for member, part in enumerate(parts) for target in part.share_to}
        totals = {(member, target) for member, part in enumerate(parts) for target in part.totals_to}
        assert shares == set(route.shares) == {(source, member) for member, part in enumerate(parts) for source in part.sources}
        assert totals == set(route.totals) == {(source, member) for member, part in enumerate(parts) for source in part.total_from}


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_loads_are_the_slices_that_pass(pattern: Pattern) -> None:
    for phase, name in enumerate(("shares", "totals")):
        slices = zip(pattern.weights, pattern.routes, strict=True)
        counts = Counter(hop for weight, route in slices for hop in getattr(route, name) for _ in range(weight))
        assert pattern.loads[phase] == {hop: count / sum(pattern.weights) for hop, count in counts.items()}


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_ring_and_direct_exchange_of_the_same_groups_add_in_the_same_order(pattern: Pattern) -> None:
    same, *others = pattern.with_same_bits
    assert same == pattern
    if pattern.edges:
        assert not others
        return
    (other,) = others
    assert other != pattern
    assert other.additions == pattern.additions


def test_additions_follow_the_members_from_the_one_that_begins() -> None:
    assert ring(range(3)).additions == (((0, 1), 2), ((1, 2), 0), ((0, 2), 1))
    assert ring((0, 2, 1)).additions == (((0, 2), 1), ((0, 1), 2), ((1, 2), 0))


def test_two_levels_add_within_groups_first() -> None:
    assert Pattern(((0, 1), (2, 3))).additions == (((0, 1), (2, 3)),) * 4


def test_members_of_a_group_take_turns_as_its_head() -> None:
    pattern = Pattern(((0, 1), (2, 3)))
    across = Counter(hop for route in pattern.routes for hop in (*route.shares, *route.totals) if (hop.source < 2) != (hop.target < 2))
    assert set(across.values()) == {2}
    assert len(across) == 4, "each member exchanges with its counterpart alone"


@pytest.mark.parametrize(("numel", "starts"), [(8, [0, 3, 6, 8]), (2, [0, 1, 2, 2]), (0, [0, 0, 0, 0])])
def test_the_first_slices_are_longer_where_numbers_do_not_divide(numel: int, starts: list[int]) -> None:
    assert slice_starts(numel, 3) == starts


def test_slices_with_trees_of_their_own_are_as_long_as_their_weights() -> None:
    pattern = replace(ring(range(3)), trees=(Tree(((0, 1), (0, 2)), 0, 5), Tree(((0, 1), (1, 2)), 1, 3)))
    assert pattern.starts(16) == [0, 10, 16]
    assert pattern.starts(1) == [0, 0, 1]
    assert pattern.edges == ((0, 1), (0, 2), (1, 2))


def test_a_pattern_says_what_it_is() -> None:
    assert [str(pattern) for pattern in (ring((0, 2, 1)), Pattern(((0, 1), (2,)), direct=True))] == ["ring 0 2 1", "direct (0 1) 2"]


def test_each_member_of_a_tree_sends_as_many_shares_as_in_a_ring() -> None:
    pattern = tree(((0, 2), (1, 2), (1, 3), (3, 4)))
    sent: Counter[int] = Counter()
    for (source, _), part in pattern.loads[0].items():
        sent[source] += part  # type: ignore[assignment]
    assert set(pattern.loads[0]) == {(one, other) for edge in pattern.edges for one, other in (edge, edge[::-1])}
    assert all(of_member == pytest.approx(4 / 5) for of_member in sent.values())
