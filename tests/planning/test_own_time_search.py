"""The search for layouts in orders by their own times."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning import own_times
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.hidden_sums import HiddenSumSearch
from raypipe.planning.layout import Layout
from raypipe.planning.own_time_search import ORDER, OwnTimeSearch, most_workers
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve
from raypipe.planning.split_order_search import SplitOrderSearch
from tests.planning.instances import random_problem


def slow_links() -> Problem:
    """Messages that take as long as a stage's forward: known orders leave gaps."""
    profile = ModelProfile.uniform(
        16, forward_s=0.01, backward_s=0.02, weight_grad_s=0.01, output_bytes=8_000_000, parameter_bytes=10**9, microbatch_size=4
    )
    return Problem(profile, ClusterTopology.uniform(4, latency_s=1e-4, bandwidth_bytes_per_s=200e6, devices_per_node=1), 16, 4)


@pytest.mark.parametrize("seed", range(8))
def test_without_copies_the_estimate_is_below_every_order(seed: int) -> None:
    problem = random_problem(seed, num_devices=4, num_layers=8, num_microbatches=6)
    evaluator, rng = LayoutEvaluator(problem), random.Random(seed)
    search = OwnTimeSearch(evaluator)
    for _ in range(4):
        cuts = (0, *sorted(rng.sample(range(1, 8), 3)), 8)
        layout = Layout(cuts, tuple((device,) for device in rng.sample(range(4), 4)), ORDER)
        found = own_times.simulated(evaluator, layout)
        assert found is not None
        for order in ("1f1b", "zb-h2", "list"):
            known = evaluator.simulate(replace(layout, order=order))
            assert known is not None
            assert search.least_s(layout) <= min(known.update_s, found.update_s) * (1 + 1e-9)


def test_the_search_finds_better_cuts_than_those_it_begins_with() -> None:
    evaluator = LayoutEvaluator(slow_links())
    begin = Layout((0, 2, 6, 10, 16), ((0,), (1,), (2,), (3,)), "1f1b")
    found: list[Evaluation] = []
    OwnTimeSearch(evaluator, effort=0.5).run([begin], found)
    assert [each.rank for each in found] == sorted(each.rank for each in found)
    first = own_times.simulated(evaluator, begin)
    assert first is not None
    assert found[0].update_s < 0.9 * first.update_s
    again = LayoutEvaluator(slow_links()).simulate(found[0].layout)
    assert again is not None
    assert again.update_s == found[0].update_s
    # Devices are alike: no two layouts that only name them differently are simulated.
    times = [(each.layout.cuts, each.layout.hops_s) for each in found]
    assert len(set(times)) == len(times)


def test_a_layout_without_pipeline_is_left_out() -> None:
    found: list[Evaluation] = []
    OwnTimeSearch(LayoutEvaluator(slow_links())).run([Layout((0, 16), ((0, 1, 2, 3),))], found)
    assert found == []


def test_with_messages_as_long_as_forwards_no_known_order_of_one_stage_is_as_fast() -> None:
    problem = slow_links()
    own = solve(LayoutEvaluator(problem))
    known = [solve(LayoutEvaluator(problem), schedule=order).update_s for order in ("1f1b", "zb-h1", "zb-h2")]
    assert own.layout.order == ORDER
    assert own.update_s < min(known)


@pytest.mark.parametrize(("num_microbatches", "searches"), [(16, True), (512, False)])
def test_where_the_best_layout_has_more_workers_layouts_for_known_orders_are_searched_for(
    monkeypatch: pytest.MonkeyPatch, num_microbatches: int, searches: bool
) -> None:
    problem = replace(slow_links(), num_microbatches=num_microbatches)
    begun: list[OwnTimeSearch] = []

    def begin(search: OwnTimeSearch, _begin: object, _evaluated: object) -> None:
        if not isinstance(search, HiddenSumSearch):
            begun.append(search)

    monkeypatch.setattr(OwnTimeSearch, "run", begin)
    found = solve(LayoutEvaluator(problem), budget=SearchBudget(num_estimates=500, num_simulations=24, work_s=3.0))
    assert (len(found.layout.workers) <= most_workers(problem)) == searches
    assert begun
    assert [isinstance(search, SplitOrderSearch) for search in begun] == [not searches] * len(begun)


@pytest.mark.parametrize("memory", [700_000_000, 10_000_000_000])
def test_rooms_keep_memory(memory: int) -> None:
    problem = random_problem(3, num_devices=3, num_layers=6, num_microbatches=8, memory_bytes=memory)
    evaluator = LayoutEvaluator(problem)
    found = own_times.simulated(evaluator, Layout((0, 2, 4, 6), ((0,), (1,), (2,))))
    assert found is not None
    held = [evaluator.simulate(replace(found.layout, max_in_flight=most)) for most in (6, 8)]
    fitting = [each for each in held if each is not None and not each.missing_bytes]
    assert (not found.missing_bytes) == bool(fitting)
    assert all(found.update_s <= each.update_s for each in fitting)


def test_sums_end_in_time() -> None:
    """Copies of the last stage sum their gradients behind their last weight gradient."""
    problem = slow_links()
    timed = own_times.timed(LayoutEvaluator(problem), Layout((0, 8, 16), ((0,), (1, 2))))
    assert timed.sums_s[0] == 0
    assert timed.sums_s[1] > 0
    assert len(timed.hops_s) == len(list(itertools.pairwise(timed.workers)))
