"""Updates of many microbatches, judged by two of few."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.planning import extrapolation
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.extrapolation import ShortEvaluator, evaluator_of, short_lengths
from raypipe.planning.layout import Layout
from raypipe.planning.plan import plan_problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve
from tests.planning.instances import random_problem

SMALL = SearchBudget(num_estimates=2000, num_simulations=40, num_starts=4)


@given(num_microbatches=st.integers(1, 100_000), num_devices=st.integers(1, 64))
def test_short_updates_suit_all_orders_that_the_long_one_suits(num_microbatches: int, num_devices: int) -> None:
    lengths = short_lengths(num_microbatches, num_devices)
    if lengths is None:
        return
    assert 4 * num_devices <= lengths[0] < lengths[1]
    assert 2 * sum(lengths) <= num_microbatches
    for number in range(1, 2 * num_devices + 1):
        if num_microbatches % number == 0:
            assert lengths[0] % number == lengths[1] % number == 0


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "list", "interleaved", "zb-h1", "zb-h2", "zb-v", "chimera", "dualpipe-v"])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_update_takes_what_two_short_ones_say(order: str, seed: int) -> None:
    problem = random_problem(seed, num_devices=4, num_layers=12, num_microbatches=256, memory_bytes=10**9)
    chunks = 2 if order in {"interleaved", "zb-v", "dualpipe-v"} else 1
    rng = random.Random(seed)
    cuts = (0, *sorted(rng.sample(range(1, 12), 4 * chunks - 1)), 12)
    workers = ((2,), (0,), (3,), (1,))
    layout = Layout(cuts, workers, order)
    evaluator = LayoutEvaluator(problem)
    short = ShortEvaluator.of(evaluator)
    assert short is not None
    assert short.lengths(layout) == (16, 24)
    whole, said = evaluator.simulate(layout), short.simulate(layout)
    assert whole is not None
    assert said is not None
    assert said.update_s == pytest.approx(whole.update_s, rel=0.015)
    assert (said.missing_bytes > 0) == (whole.missing_bytes > 0)
    assert said.missing_bytes == pytest.approx(whole.missing_bytes, rel=0.01)


@pytest.mark.combined
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory_bytes", [None, 600_000_000])
def test_searches_by_short_updates_find_plans_as_fast(seed: int, memory_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed, num_devices=3, num_layers=7, num_microbatches=128, memory_bytes=memory_bytes)
    assert ShortEvaluator.of(LayoutEvaluator(problem)) is not None
    found = solve(LayoutEvaluator(problem), budget=SMALL)
    assert found.extrapolated_s is None
    assert len(found.timing.order.updates) <= 1
    monkeypatch.setattr(ShortEvaluator, "of", lambda _judge: None)
    assert found.update_s <= solve(LayoutEvaluator(problem), budget=SMALL).update_s * 1.01
    assert found.missing_bytes == 0


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("order", ["list", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("late", [1, 16, 32])
def test_weight_gradients_that_stand_last_do_so_in_short_updates(seed: int, order: str, late: int) -> None:
    problem = random_problem(seed, num_devices=3, num_layers=7, num_microbatches=256)
    evaluator = LayoutEvaluator(problem)
    short = ShortEvaluator.of(evaluator)
    assert short is not None
    for cuts, workers, divided in (((0, 3, 4, 6, 7), ((1, 2, 0),), (4,)), ((0, 3, 4, 6, 7), ((1, 2), (0,)), (3, 1))):
        layout = Layout(cuts, workers, order, divided=divided, late_weight_grads=late)
        lengths = short.lengths(layout)
        assert lengths is not None
        assert lengths[0] > late
        whole, said = evaluator.simulate(layout), short.simulate(layout)
        assert whole is not None
        assert said is not None
        assert said.update_s == pytest.approx(whole.update_s, rel=1e-9)


def test_short_updates_do_not_stand_for_limits_on_staleness() -> None:
    problem = random_problem(1, num_devices=3, num_layers=6, num_microbatches=128)
    assert ShortEvaluator.of(LayoutEvaluator(problem)) is not None
    assert ShortEvaluator.of(LayoutEvaluator(replace(problem, max_staleness=1))) is None
    assert ShortEvaluator.of(LayoutEvaluator(replace(problem, num_microbatches=16))) is None


def test_the_best_that_was_seen_is_kept_once_and_decided_as_a_whole() -> None:
    problem = random_problem(2, num_devices=3, num_layers=9, num_microbatches=128)
    evaluator = LayoutEvaluator(problem)
    short = ShortEvaluator.of(evaluator)
    assert short is not None
    layouts = [Layout((0, first, second, 9), ((0,), (1,), (2,))) for first in range(1, 8) for second in range(first + 1, 9)]
    judged = [short.simulate(layout) for layout in (*layouts, *layouts)]
    best = min((one for one in judged if one is not None), key=lambda one: one.rank)
    assert short.best["1f1b", False][0].rank == best.rank
    assert len({kept.layout for kept in short.best["1f1b", False]}) == len(short.best["1f1b", False]) == 4
    decided = short.decided(best, evaluator)
    assert decided is not None
    fastest = min(one.update_s for one in map(evaluator.simulate, layouts) if one is not None)
    assert decided.update_s == pytest.approx(fastest, rel=1e-9)
    assert math.isfinite(decided.timing.makespan_s)


def test_a_problem_of_another_length_has_the_same_pairs_of_devices() -> None:
    problem = random_problem(3, num_devices=5, num_layers=6, one_way=True)
    assert problem.bandwidth.shape == problem.block_of.shape
    shorter = problem.of_length(3)
    assert shorter.bandwidth is problem.bandwidth
    assert shorter.block_of is problem.block_of
    assert (shorter.num_microbatches, problem.num_microbatches) == (3, 8)
    assert shorter.summed_prefix is not problem.summed_prefix


def test_updates_that_take_minutes_to_simulate_are_planned_by_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(4, num_devices=6, num_layers=8, num_microbatches=256)
    assert not isinstance(evaluator_of(problem), ShortEvaluator)
    whole = LayoutEvaluator(problem)
    monkeypatch.setattr(extrapolation, "MOST_EXACT", 1000)
    evaluator = evaluator_of(problem)
    assert isinstance(evaluator, ShortEvaluator)
    layout = Layout((0, 3, 8), ((0, 1), (2, 3, 4)), "zb-h1")
    short, exact = evaluator.simulate(layout), whole.simulate(layout)
    assert short is not None
    assert exact is not None
    said = evaluator.plan(short, planner="raypipe", lower_bound_s=1.0).predicted
    foretold = whole.plan(exact, planner="raypipe", lower_bound_s=1.0).predicted
    assert said is not None
    assert foretold is not None
    assert said.update_s == pytest.approx(foretold.update_s, rel=0.05)
    assert said.bubble_ratio == pytest.approx(foretold.bubble_ratio, abs=0.05)
    assert said.device_bubble_ratios == pytest.approx(foretold.device_bubble_ratios, abs=0.08)
    assert said.peak_memory_bytes == pytest.approx(foretold.peak_memory_bytes, rel=0.05)
    assert plan_problem(problem, budget=SMALL).predicted is not None
