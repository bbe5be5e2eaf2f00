"""The search for layouts of many workers in known orders with split backwards."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.own_time_search import ORDER, OwnTimeSearch
from raypipe.planning.split_order_search import ORDERS, SplitOrderSearch
from tests.planning.instances import random_problem


def lopsided() -> tuple[LayoutEvaluator, Layout]:
    """Sixteen unequal devices, the first half of which are copies of two stages; the others have most layers."""
    problem = random_problem(3, num_devices=16, num_layers=20, num_microbatches=24)
    workers = ((0, 1, 2, 3), (4, 5, 6, 7), *((device,) for device in range(8, 16)))
    return LayoutEvaluator(problem), Layout((0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20), workers)


def test_devices_go_to_those_that_have_most_to_do() -> None:
    evaluator, begin = lopsided()
    first = min(
        (evaluation for order in ORDERS if (evaluation := evaluator.simulate(replace(begin, order=order))) is not None),
        key=lambda evaluation: evaluation.rank,
    )
    found: list[Evaluation] = []
    SplitOrderSearch(evaluator, effort=0.1).run([begin], found)
    assert [each.rank for each in found] == sorted(each.rank for each in found)
    assert {each.layout.order for each in found} <= set(ORDERS)
    assert found[0].update_s < 0.85 * first.update_s
    again = LayoutEvaluator(evaluator.problem).simulate(found[0].layout)
    assert again is not None
    assert again.update_s == found[0].update_s


def test_the_other_order_is_tried_where_memory_is_short() -> None:
    problem = random_problem(5, num_devices=6, num_layers=12, num_microbatches=12)
    layers = tuple(replace(layer, parameter_bytes=1000, saved_bytes=1_000_000) for layer in problem.profile.layers)
    nodes = tuple(
        replace(node, devices=tuple(replace(device, memory_bytes=13_000_000) for device in node.devices)) for node in problem.topology.nodes
    )
    profile, topology = replace(problem.profile, layers=layers), replace(problem.topology, nodes=nodes)
    evaluator = LayoutEvaluator(replace(problem, profile=profile, topology=topology, recompute=False))
    layout = Layout(tuple(range(0, 13, 2)), tuple((device,) for device in range(6)), ORDER)
    found = SplitOrderSearch(evaluator)._simulated(layout)
    assert found is not None
    assert (found.layout.order, found.missing_bytes) == ("zb-h1", 0)


@pytest.mark.parametrize("seed", range(6))
def test_the_estimate_with_the_way_back_is_nearer_and_not_above_what_an_order_takes(seed: int) -> None:
    problem = random_problem(seed, num_devices=6, num_layers=9, num_microbatches=6)
    evaluator, rng = LayoutEvaluator(problem), random.Random(seed)
    split, without = SplitOrderSearch(evaluator), OwnTimeSearch(evaluator)
    for _ in range(4):
        cuts = (0, *sorted(rng.sample(range(1, 9), 5)), 9)
        layout = Layout(cuts, tuple((device,) for device in rng.sample(range(6), 6)), ORDER)
        known = [evaluator.simulate(replace(layout, order=order)) for order in ("1f1b", "zb-h1", "zb-h2")]
        least_s = min(each.update_s for each in known if each is not None)
        assert without.least_s(layout) <= split.least_s(layout) <= least_s * (1 + 1e-9)


def test_layouts_that_do_not_fit_are_not_simulated() -> None:
    evaluator, begin = lopsided()
    search = SplitOrderSearch(evaluator)
    unlinked = replace(begin, workers=begin.workers[::-1], order=ORDER)
    search._least = {replace(begin, order=ORDER): 1.0, unlinked: math.inf}
    assert search._different(search._least, 8) == [replace(begin, order=ORDER)]
