from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.planning.estimator import Estimator, RunBytes
from raypipe.planning.layout import Layout
from raypipe.planning.partition import Partition
from raypipe.planning.problem import Problem
from tests.planning.instances import MB, contiguous_plans, islands, random_problem


def bottleneck_s(estimator: Estimator, layout: Layout, *, half_duplex: bool) -> float:
    """Seconds an update of the busiest stage or channel, worked out plan by plan."""
    problem = estimator.problem
    most = 0.0
    for stage, group in enumerate(layout.workers):
        forward_s, backward_s, sum_s = estimator.stage(group, layout.cuts[stage], layout.cuts[stage + 1])
        num_forwards = 2 if stage in estimator.recomputed(layout) else 1
        most = max(most, problem.num_microbatches * (num_forwards * forward_s + backward_s) + sum_s)
        if stage + 1 < len(layout.workers):
            num_bytes = float(problem.crossing_bytes[layout.cuts[stage + 1]])
            there = estimator.channel(group, layout.workers[stage + 1]).s_per_byte
            back = estimator.channel(layout.workers[stage + 1], group).s_per_byte
            most = max(most, problem.num_microbatches * num_bytes * (there + back if half_duplex else max(there, back)))
    return most


def microbatch_s(estimator: Estimator, layout: Layout) -> float:
    """Seconds that a microbatch takes forth and back."""
    total = 0.0
    for stage, group in enumerate(layout.workers):
        total += sum(estimator.stage(group, layout.cuts[stage], layout.cuts[stage + 1])[:2])
        if stage + 1 < len(layout.workers):
            num_bytes = float(estimator.problem.crossing_bytes[layout.cuts[stage + 1]])
            for ends in ((group, layout.workers[stage + 1]), (layout.workers[stage + 1], group)):
                per_byte, latency_s, _, _ = estimator.channel(*ends)
                total += per_byte * num_bytes + latency_s
    return total


@pytest.mark.parametrize("seed", range(40))
def test_the_least_bottleneck_is_that_of_all_contiguous_plans(seed: int) -> None:
    num_devices, num_layers = 1 + seed % 5, 2 + seed % 7
    problem = random_problem(seed, num_devices=num_devices, num_layers=num_layers, one_way=seed % 2 == 0)
    estimator = Estimator(problem)
    order = tuple(range(num_devices))
    half_duplex = seed % 3 == 0
    found = Partition(estimator, order, half_duplex=half_duplex).least_bottleneck()
    best: dict[int, float] = {}
    for layout in contiguous_plans(order, num_layers):
        value = bottleneck_s(estimator, layout, half_duplex=half_duplex)
        best[layout.num_stages] = min(best.get(layout.num_stages, math.inf), value)
    assert [of_level.layout.num_stages for of_level in found] == sorted(best)
    for of_level in found:
        assert of_level.value_s == pytest.approx(best[of_level.layout.num_stages])
        assert bottleneck_s(estimator, of_level.layout, half_duplex=half_duplex) == pytest.approx(of_level.value_s)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_sum_under_a_limit_is_that_of_all_contiguous_plans(seed: int) -> None:
    num_devices, num_layers = 1 + seed % 5, 2 + seed % 6
    estimator = Estimator(random_problem(seed, num_devices=num_devices, num_layers=num_layers))
    order = tuple(reversed(range(num_devices)))
    partition = Partition(estimator, order)
    limit_s = partition.least_limit_s() * (1.0, 1.3, 2.0)[seed % 3] * (1 + 1e-9)
    (found,) = partition.least_sum(limit_s)
    best = min(
        microbatch_s(estimator, layout)
        for layout in contiguous_plans(order, num_layers)
        if bottleneck_s(estimator, layout, half_duplex=False) <= limit_s
    )
    assert found.value_s == pytest.approx(best)
    assert microbatch_s(estimator, found.layout) == pytest.approx(best)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "list"])
@pytest.mark.parametrize("seed", range(8))
def test_what_does_not_fit_is_no_stage(seed: int, schedule: str, again: bool) -> None:
    num_devices, num_layers = 2 + seed % 4, 4 + seed % 4
    problem = random_problem(seed, num_devices=num_devices, num_layers=num_layers)
    needed = float(problem.trained_prefix[-1]) * (1 + problem.state_bytes_per_parameter_byte)
    problem = random_problem(seed, num_devices=num_devices, num_layers=num_layers, memory_bytes=round(0.7 * needed) + 20 * MB)
    problem = replace(problem, recompute=again)
    estimator = Estimator(problem)
    order = tuple(range(num_devices))
    fitting = [
        layout
        for plan in contiguous_plans(order, num_layers)
        for layout in [replace(plan, order=schedule)]
        if estimator.missing_bytes(layout) <= 0
    ]
    best: dict[int, float] = {}
    for layout in fitting:
        value = bottleneck_s(estimator, layout, half_duplex=False)
        best[layout.num_stages] = min(best.get(layout.num_stages, math.inf), value)
    found = Partition(estimator, order).least_bottleneck(schedule)
    assert {of_level.layout.num_stages: pytest.approx(of_level.value_s) for of_level in found} == best
    assert all(estimator.missing_bytes(of_level.layout) <= 0 for of_level in found)


def test_no_more_devices_divide_the_rows_than_there_are_rows() -> None:
    problem = random_problem(1, num_devices=5, num_layers=2)
    small = Problem(problem.profile, problem.topology, problem.num_microbatches, microbatch_size=2)
    for found in Partition(Estimator(small), tuple(range(5))).least_bottleneck():
        assert all(len(group) <= 2 for group in found.layout.workers)


def test_runs_of_devices_are_used_as_one_where_there_are_many() -> None:
    estimator = Estimator(random_problem(3, num_devices=9, num_layers=6))
    order = tuple(range(9))
    coarse = Partition(estimator, order, most_units=3)
    assert coarse.num_units == 3
    assert coarse.least_limit_s() >= Partition(estimator, order).least_limit_s() - 1e-9


def test_runs_that_are_used_as_one_end_where_links_are_slow() -> None:
    estimator = Estimator(islands((3, 5, 2, 2)))
    order = tuple(range(12))
    assert Partition(estimator, order, most_units=4).borders == (0, 3, 8, 10, 12)
    assert Partition(estimator, order, most_units=3).borders == (0, 3, 8, 12)
    assert Partition(Estimator(islands((12,))), order, most_units=3).borders == (0, 4, 8, 12)


@given(
    st.tuples(*[st.integers(0, 60)] * 5),
    st.lists(st.tuples(st.sampled_from([1 / 3, 0.5, 1.0]), st.integers(0, 300)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_as_many_activations_fit_as_the_memory_of_each_device_holds(
    sizes: tuple[int, ...], demands: list[tuple[float, float]], recomputed: bool, copied: bool
) -> None:
    standing, saved, inputs, working, vectors = map(float, sizes)
    run = RunBytes(*(np.array([[value]]) for value in (standing, saved, inputs, working, vectors)))
    (most,) = run.most_in_flight(demands, recomputed=recomputed, copied=copied).ravel()
    for held in range(1, 9):
        needed = (inputs if recomputed else saved) * (held - 1) + working
        fits = all(standing + max(needed * share, vectors if copied else 0.0) <= limit + 1e-9 for share, limit in demands)
        assert bool(held <= most) == fits
