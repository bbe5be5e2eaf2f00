from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raypipe.planning.enumeration import all_layouts, count
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.search import LayoutSearch
from tests.planning.instances import all_plans, random_problem
from tests.planning.optima import gap, stored


@pytest.mark.parametrize(("num_devices", "num_layers"), [(1, 3), (3, 3), (4, 3), (3, 5)])
def test_all_layouts_are_all_plans_up_to_the_order_of_a_workers_devices(num_devices: int, num_layers: int) -> None:
    problem = random_problem(0, num_devices=num_devices, num_layers=num_layers)
    expected = {(plan.cuts, tuple(tuple(sorted(group)) for group in plan.workers)) for plan in all_plans(num_devices, num_layers)}
    found = [(layout.cuts, layout.workers) for layout in all_layouts(problem, "1f1b", most=100_000)]
    assert len(found) == len(set(found)) == len(expected)
    assert set(found) == expected


def test_where_there_are_too_many_no_device_is_idle_or_nothing_is_tried() -> None:
    problem = random_problem(0, num_devices=4, num_layers=3)
    busy = list(all_layouts(problem, "1f1b", most=count(problem, 1) - 1))
    assert busy
    assert all(sum(map(len, layout.workers)) == problem.num_devices for layout in busy)
    assert not list(all_layouts(problem, "1f1b", most=count(problem, 0) - 1))


@pytest.mark.parametrize("seed", [0, 5])
def test_all_of_them_have_an_estimate_on_incomplete_networks_and_with_few_rows(seed: int) -> None:
    problem = replace(random_problem(seed, num_devices=4, num_layers=4, missing=0.5, room=0.5), microbatch_size=2)
    search = LayoutSearch(LayoutEvaluator(problem))
    layouts = list(all_layouts(problem, "1f1b", most=100_000))
    assert max(len(group) for layout in layouts for group in layout.workers) == problem.microbatch_size
    estimates = [search.estimate_s(layout) for layout in layouts]
    assert not any(map(math.isnan, estimates))
    assert 0 < min(estimates) < math.inf


@pytest.mark.parametrize("seed", [1195])
def test_seven_devices_whose_best_plan_no_change_of_good_ones_leads_to(seed: int) -> None:
    case, best_s = next((case, best_s) for case, best_s in stored() if case.seed == seed)
    assert gap(case, best_s) <= 0.001
