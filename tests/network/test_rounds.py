"""Every pair meets, and nobody has to do two things at once."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.network.rounds import (
    MOST_ALL_PAIRS,
    Round,
    all_paired_rounds,
    directed,
    hypercube,
    matchings,
    num_rounds,
    one_to_all_rounds,
    paired_rounds,
    representatives,
    tournament,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "probing.md"


def is_contention_free(pairs: Round) -> bool:
    sources, targets = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    return max(sources.values()) == 1 and max(targets.values()) == 1


@given(st.integers(2, 40))
def test_every_directed_pair_is_measured_once_and_without_contention(num_nodes: int) -> None:
    rounds = [pairs for matching in matchings(num_nodes) for pairs in directed(matching)]
    assert Counter(pair for pairs in rounds for pair in pairs) == Counter(itertools.permutations(range(num_nodes), 2))
    assert all(map(is_contention_free, rounds))
    assert all(not {a for a, _ in pairs} & {b for _, b in pairs} for pairs in rounds)
    assert len(rounds) == 2 * (num_nodes - 1 + num_nodes % 2)


@given(st.integers(1, 20))
def test_every_two_pairs_of_a_matching_run_in_both_ways_together(num_pairs: int) -> None:
    matching = tuple((2 * place, 2 * place + 1) for place in range(num_pairs))
    rounds = paired_rounds(matching)
    assert len(rounds) == 2 * (1 + math.ceil(math.log2(num_pairs)))
    for a, b in itertools.combinations(matching, 2):
        for first, second in itertools.product((a, a[::-1]), (b, b[::-1])):
            assert any(first in pairs and second in pairs for pairs in rounds)


def test_fans_hold_all_that_leaves_and_all_that_enters() -> None:
    assert one_to_all_rounds(3) == [
        ((0, 1), (0, 2)),
        ((1, 0), (1, 2)),
        ((2, 0), (2, 1)),
        ((1, 0), (2, 0)),
        ((0, 1), (2, 1)),
        ((0, 2), (1, 2)),
    ]


@given(st.integers(2, 300))
def test_few_matchings_join_all_nodes(num_nodes: int) -> None:
    found = hypercube(num_nodes)
    assert len(found) == math.ceil(math.log2(num_nodes))
    assert all(is_contention_free(matching) for matching in found)
    reached = {0}
    for _ in found:
        reached |= {node for matching in found for pair in matching if reached & set(pair) for node in pair}
    assert reached == set(range(num_nodes))


def test_a_large_cluster_is_measured_by_sample() -> None:
    classes = ["fast"] * 30 + ["slow"] * 70
    assert representatives(classes) == [0, 1, 30, 31]
    met = tournament(classes)
    pairs = [pair for matching in met for pair in matching]
    assert len(pairs) == len(set(pairs)), "no pair is measured twice"
    assert set(itertools.combinations((0, 1, 30, 31), 2)) <= set(pairs)
    assert {node for pair in pairs for node in pair} == set(range(100))
    assert len(met) <= 3 + 7
    assert all(is_contention_free(matching) for matching in met)


def test_rounds_of_a_large_cluster_grow_as_the_logarithm() -> None:
    assert num_rounds(["node"] * 1000).total <= 2 * (1 + 10) + 10 * 2 * (1 + 9)


def test_two_nodes_have_no_paired_rounds() -> None:
    assert num_rounds(["node"] * 2).total == 2
    assert all_paired_rounds(matchings(2), 2) == []


@pytest.mark.parametrize(("num_nodes", "tournament_rounds"), [(2, 2), (3, 6), (4, 6), (8, 14), (16, 30), (MOST_ALL_PAIRS, 46)])
def test_the_number_of_tournament_rounds_is_stated(num_nodes: int, tournament_rounds: int) -> None:
    assert num_rounds(["node"] * num_nodes).tournament == tournament_rounds


def test_the_documented_table_is_what_the_function_gives() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 6
    for row in rows:
        num_nodes, *counts = map(int, row)
        found = num_rounds(["node"] * num_nodes)
        assert counts == [found.tournament, found.paired, found.one_to_all, found.total]
