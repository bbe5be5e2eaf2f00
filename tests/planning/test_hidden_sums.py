"""Divided stages, whose sums hide behind weight gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.hidden_sums import ORDERS, Division, HiddenSumSearch
from raypipe.planning.layout import Layout
from raypipe.planning.solve import solve
from tests.planning.instances import behind_ports, slow_sums


def test_the_sum_of_a_part_hides_behind_the_weight_gradients_of_the_parts_before_it() -> None:
    problem = slow_sums()
    evaluator, whole = LayoutEvaluator(problem), Layout((0, 2), ((0, 1),))
    undivided, found = evaluator.simulate(whole), evaluator.simulate(Division("1f1b", 2, 4).of(problem, whole))
    assert undivided is not None
    assert found is not None
    # 2.0 s until the last weight gradient of the second layer, 0.6 s for its sum, which the others' 0.4 s hide behind, and 0.6 s.
    assert found.update_s == pytest.approx(3.2, rel=1e-3)
    assert undivided.update_s > 3.35
    for late, update_s in ((2, 3.4), (1, 3.5)):
        fewer = evaluator.simulate(Division("1f1b", 2, late).of(problem, whole))
        assert fewer is not None
        assert fewer.update_s == pytest.approx(update_s, rel=1e-3)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), num_parts=st.integers(1, 8), data=st.data())
def test_a_division_keeps_the_cuts_and_divides_stages_with_copies(sizes: list[int], num_parts: int, data: st.DataObject) -> None:
    copies = [data.draw(st.integers(1, 2)) for _ in sizes]
    numbers = itertools.count()
    workers = tuple(tuple(next(numbers) for _ in range(count)) for count in copies)
    problem = slow_sums(num_layers=sum(sizes), num_devices=max(sum(copies), 2))
    whole = Layout(tuple(itertools.accumulate(sizes, initial=0)), workers)
    found = Division("zb-h1", num_parts, 3).of(problem, whole)
    assert found.divided == tuple(min(num_parts, size) if count > 1 else 1 for size, count in zip(sizes, copies, strict=True))
    assert set(whole.cuts) <= set(found.cuts)
    assert list(found.cuts) == sorted(set(found.cuts))
    assert (found.workers, found.late_weight_grads) == (workers, 3)


def test_the_planner_divides_stages_where_sums_are_slow() -> None:
    problem = slow_sums(num_layers=8, num_microbatches=8, message_s=4.0)
    found = solve(LayoutEvaluator(problem))
    assert found.layout.divided
    assert found.update_s < 8 * 8 * 0.3 + 0.7, "all sums but that of one layer hide"
    known = [solve(LayoutEvaluator(problem), schedule=order).update_s for order in ("1f1b", "list", "zb-h1", "zb-h2", "zb-auto")]
    assert found.update_s < 0.9 * min(known)


def test_forwards_run_ahead_of_divided_stages_where_messages_are_slow() -> None:
    evaluator = LayoutEvaluator(behind_ports())
    found = HiddenSumSearch(evaluator, effort=0.1).best([Layout((0, 2, 6, 10), ((0,), (1, 2), (3, 4)), "zb-h1")])
    assert found is not None
    assert found.layout.order == "zb-h2", "it takes the fewest steps to hide messages"
    assert any(found.layout.ahead)
    plain = [evaluator.simulate(replace(found.layout, order=order, ahead=())) for order in ("list", "zb-h1", "zb-h2")]
    assert found.update_s < 0.97 * min(other.update_s for other in plain if other is not None)


def test_one_layout_is_divided_in_the_best_order_with_forwards_ahead() -> None:
    evaluator, whole = LayoutEvaluator(behind_ports()), Layout((0, 2, 6, 10), ((0,), (1, 2), (3, 4)), "list")
    undivided, near = evaluator.simulate(whole), HiddenSumSearch(evaluator).near(whole)
    assert undivided is not None
    assert near is not None
    assert near.layout.worker_cuts == whole.cuts
    assert near.layout.workers == whole.workers
    assert any(near.layout.ahead)
    plain = [evaluator.simulate(Division(order, 4, late).of(evaluator.problem, whole)) for order in ORDERS for late in (6, 12)]
    assert near.update_s < 0.97 * min(other.update_s for other in (undivided, *plain) if other is not None)


def test_without_copies_nothing_is_divided_and_nothing_twice() -> None:
    search, single = HiddenSumSearch(LayoutEvaluator(slow_sums())), Layout((0, 1, 2), ((0,), (1,)))
    assert search.best([single]) is None
    assert search.near(single) is None
    assert search.near(Division("list", 2, 4).of(slow_sums(), Layout((0, 2), ((0, 1),)))) is None


def test_the_search_begins_with_divided_layouts_as_they_were_before() -> None:
    problem = slow_sums(num_layers=8)
    whole = Layout((0, 8), ((0, 1),), "zb-h1")
    found = HiddenSumSearch(LayoutEvaluator(problem), effort=0.2).best([whole])
    assert found is not None
    again = HiddenSumSearch(LayoutEvaluator(problem), effort=0.2).best([whole])
    assert again is not None
    assert replace(again.layout, recomputed=()) == replace(found.layout, recomputed=())
