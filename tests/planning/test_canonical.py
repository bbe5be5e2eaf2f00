"""Names and numbers of devices do not matter; what they are and how they are linked does."""

from __future__ import annotations

import pytest

from raypipe.planning.device_order import canonical, device_colors
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.solve import solve
from tests.marks import slow_unless
from tests.planning.instances import islands, random_problem, shuffled


@pytest.mark.parametrize("seed", range(6))
def test_a_device_has_its_colour_wherever_it_is_listed(seed: int) -> None:
    problem = random_problem(seed, num_devices=7, num_layers=3, one_way=seed % 2 == 0)
    other = shuffled(problem, seed=seed)
    assert dict(zip(problem.names, device_colors(problem), strict=True)) == dict(zip(other.names, device_colors(other), strict=True))
    assert len(set(device_colors(problem))) == 7


def test_devices_that_names_alone_tell_apart_have_one_colour() -> None:
    found = device_colors(islands((3, 3, 2)))
    assert len(set(found[:6])) == 1
    assert len(set(found[6:])) == 1
    assert found[0] != found[6]


@pytest.mark.parametrize("seed", range(4))
def test_a_layout_comes_back_in_the_old_numbers(seed: int) -> None:
    problem = shuffled(random_problem(seed, num_devices=5, num_layers=5), seed=seed)
    ordered, numbers = canonical(problem)
    assert [problem.names[number] for number in numbers] == list(ordered.names)
    layout = Layout((0, 2, 5), ((3, 1), (4,)))
    times = [LayoutEvaluator(problem).simulate(layout.renumbered(numbers)), LayoutEvaluator(ordered).simulate(layout)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].update_s == pytest.approx(times[1].update_s)


@pytest.mark.parametrize("seed", slow_unless({1}, range(4)))
def test_equal_clusters_get_equal_plans(seed: int) -> None:
    if seed % 2:
        problem = random_problem(seed, num_devices=6, num_layers=6, one_way=True)
    else:
        problem = islands((3, 2, 1), between=(0.5, 1.0, 3.0, 20.0)[seed])
    times = [solve(LayoutEvaluator(case)).update_s for case in (problem, shuffled(problem, seed=seed))]
    assert times[0] == pytest.approx(times[1], rel=1e-6)
