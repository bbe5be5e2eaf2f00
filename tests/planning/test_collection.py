"""Garbage collection while planning."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from raypipe.planning.collection import young_garbage_alone
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.solve import solve
from tests.planning.instances import random_problem


@pytest.fixture(autouse=True)
def known_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(500, 9, 8)
    yield
    gc.set_threshold(*before)


def test_a_search_lets_the_collector_look_at_young_objects_alone_and_leaves_it_as_it_was() -> None:
    seen: set[tuple[int, int, int]] = set()

    def look(_: Evaluation) -> None:
        seen.add(gc.get_threshold())

    solve(LayoutEvaluator(random_problem(1, num_devices=2, num_layers=3), on_evaluated=look), name="1f1b-equal")
    assert {thresholds[:2] for thresholds in seen} == {(500, 9)}
    assert min(oldest for *_, oldest in seen) > 1e6
    assert gc.get_threshold() == (500, 9, 8)


def test_where_searches_overlap_the_last_one_leaves_the_collector_as_it_was() -> None:
    first, second = young_garbage_alone(), young_garbage_alone()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 1e6
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (500, 9, 8)


def test_a_search_that_fails_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(KeyError), young_garbage_alone():
        raise KeyError
    assert gc.get_threshold() == (500, 9, 8)
