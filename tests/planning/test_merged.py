"""Workers of several devices, simulated as one device each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.hidden_sums import Division
from raypipe.planning.layout import Layout
from raypipe.planning.merged import MergedEvaluator, can_merge
from raypipe.planning.planners import PLANNERS, best_of_all, best_proposal
from raypipe.planning.problem import Problem
from raypipe.schedules.collectives import Collective, CollectiveKind
from tests.planning.instances import behind_ports, random_problem

GB = 1_000_000_000


def alike(*, output_bytes: int = 16_000_000, parameter_bytes: int = 0, memory_bytes: int | None = None) -> Problem:
    """Two nodes of four equal devices, the second half as fast."""
    layer = LayerProfile(
        name="layer",
        forward_s=0.01,
        backward_s=0.02,
        weight_grad_s=0.01,
        output_bytes=output_bytes,
        saved_bytes=64_000_000,
        parameter_bytes=parameter_bytes,
    )
    profile = ModelProfile(name="equal", microbatch_size=8, layers=tuple(replace(layer, name=f"layer{number}") for number in range(12)))
    inside = NodeLink(bandwidth_bytes_per_s=100 * GB, latency_s=1e-5)
    nodes = tuple(
        Node(name=name, devices=tuple(Device(f"{name}/{at}", "gpu", memory_bytes, speed) for at in range(4)), link=inside)
        for name, speed in (("a", 1.0), ("b", 0.5))
    )
    links = (Link(source="a", target="b", bandwidth_bytes_per_s=2 * GB, latency_s=2e-5),)
    return Problem(profile, ClusterTopology(name="two", nodes=nodes, links=links), 16, 8)


_PLACED = (((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 1), (2, 3), (4, 5), (6, 7)), (tuple(range(8)),))


@pytest.mark.parametrize("workers", _PLACED, ids=str)
def test_sums_of_several_workers_share_the_wire_between_their_nodes(workers: tuple[tuple[int, ...], ...]) -> None:
    inside = NodeLink(bandwidth_bytes_per_s=GB, latency_s=0.0)
    nodes = tuple(Node(name=name, devices=tuple(Device(f"{name}/{at}", "cpu") for at in range(4)), link=inside) for name in "ab")
    topology = ClusterTopology(name="two", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=10e6, latency_s=1e-4))
    profile = ModelProfile.uniform(
        8, microbatch_size=8, parameter_bytes=20_000_000, output_bytes=10_000, forward_s=0.02, backward_s=0.04, weight_grad_s=0.02
    )
    problem = Problem(profile, topology, 40, 8)
    layout = Layout(tuple(8 * at // len(workers) for at in range(len(workers) + 1)), workers)
    exact, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert exact is not None
    assert merged is not None
    assert merged.update_s == pytest.approx(exact.update_s, rel=0.02)


LAYOUT = Layout((0, 8, 12), ((0, 1, 2, 3), (4, 5, 6, 7)))


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "list", "zb-h1", "zb-h2"])
def test_devices_that_do_the_same_take_as_long_as_one(order: str) -> None:
    problem = alike(output_bytes=0)
    layout = replace(LAYOUT, order=order)
    whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert whole is not None
    assert merged is not None
    assert merged.update_s == pytest.approx(whole.update_s, rel=1e-3)
    assert len(merged.timing.order.devices) == 2


def test_of_unlike_devices_the_one_stands_for_all_that_takes_longest_for_its_rows() -> None:
    problem = alike(output_bytes=0)
    (first, *others) = problem.topology.nodes[0].devices
    node = replace(problem.topology.nodes[0], devices=(replace(first, speed=4.0), *others))
    problem = replace(problem, topology=replace(problem.topology, nodes=(node, problem.topology.nodes[1])))
    layers = tuple(replace(layer, fixed_share=0.5) for layer in problem.profile.layers)
    problem = replace(problem, profile=replace(problem.profile, layers=layers), microbatch_size=7)
    layout = Layout((0, 8, 12), ((0, 1), (4, 5)))
    assert problem.rows((0, 1)) == (6, 1)
    whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert whole is not None
    assert merged is not None
    assert merged.update_s == pytest.approx(whole.update_s, rel=0.05)


# 1F1B waits for every message, and devices whose rows come first go on earlier than their mean.
@pytest.mark.parametrize(("order", "error"), [("1f1b", 0.05), ("zb-h1", 0.03), ("zb-h2", 0.03), ("zb-v", 0.03)])
def test_messages_and_sums_of_all_devices_take_about_as_long_as_those_of_one(order: str, error: float) -> None:
    problem = alike(parameter_bytes=20_000_000)
    layout = replace(LAYOUT, order=order)
    if order == "zb-v":
        layout = replace(layout, cuts=(0, 4, 6, 8, 12))
    whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert whole is not None
    assert merged is not None
    assert merged.update_s == pytest.approx(whole.update_s, rel=error)


@pytest.mark.parametrize(("order", "error"), [("1f1b", 0.05), ("zb-h1", 0.05), ("zb-h2", 0.05)])
def test_long_sums_run_beside_what_other_workers_compute(order: str, error: float) -> None:
    # The second worker is done first, and its sum, over the same kind of links, takes as long as four microbatches.
    problem = alike(parameter_bytes=1_500_000_000)
    (first, second), layers = LAYOUT.workers, problem.profile.layers
    profile = replace(problem.profile, layers=tuple(replace(layer, parameter_bytes=1000) for layer in layers[:8]) + layers[8:])
    problem = replace(problem, profile=profile, num_microbatches=4)
    layout = Layout((0, 8, 12), (first, second), order)
    whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert whole is not None
    assert merged is not None
    sum_s = MergedEvaluator(problem).estimator.stage(second, 8, 12).sum_s
    assert sum_s > 0.1 * whole.update_s
    assert merged.update_s == pytest.approx(whole.update_s, rel=error)


@pytest.mark.parametrize(("late", "gain"), [(4, 1.0), (16, 1.08)])
def test_sums_of_a_divided_worker_come_one_after_the_other_behind_its_parts(late: int, gain: float) -> None:
    problem = alike(parameter_bytes=1_600_000_000)
    layout = Division("zb-h2", 4, late).of(problem, LAYOUT)
    plain, whole, merged = (
        evaluator.simulate(each)
        for evaluator, each in (
            (LayoutEvaluator(problem), replace(LAYOUT, order="zb-h2")),
            (LayoutEvaluator(problem), layout),
            (MergedEvaluator(problem), layout),
        )
    )
    assert plain is not None
    assert whole is not None
    assert merged is not None
    assert whole.update_s < plain.update_s / gain
    assert merged.update_s == pytest.approx(whole.update_s, rel=0.01)


@pytest.mark.parametrize("workers", [((0,), (1, 2, 3, 4), (5,)), ((0,), (1, 2), (3,))])
def test_behind_ports_merged_workers_are_no_quicker_and_little_slower_than_their_devices(workers: tuple[tuple[int, ...], ...]) -> None:
    problem = behind_ports(num_nodes=8, output_bytes=64_000_000)
    layout = Layout((0, 3, 7, 10), workers)
    whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert whole is not None
    assert merged is not None
    assert 0.98 < merged.update_s / whole.update_s < 1.12


def test_memory_counts_for_each_device_with_its_own_rows() -> None:
    """A fast device with much memory has most rows; the others have as little memory as their rows need."""
    problem = alike(parameter_bytes=20_000_000)
    names = ("a/0", "a/1", "a/2", "a/3")
    speeds, limits = (3.0, 1.0, 1.0, 1.0), (6 * GB, 2 * GB, 2 * GB, 2 * GB)
    devices = tuple(Device(name, "gpu", limit, speed) for name, limit, speed in zip(names, limits, speeds, strict=True))
    node = replace(problem.topology.nodes[0], devices=devices)
    problem = replace(problem, topology=replace(problem.topology, nodes=(node, problem.topology.nodes[1])), recompute=False)
    layout = replace(LAYOUT, order="gpipe")
    assert problem.rows((0, 1, 2, 3)) == (5, 1, 1, 1)
    whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
    assert whole is not None
    assert merged is not None
    peaks = whole.timing.peak_memory_bytes
    assert peaks[0] > 2 * GB > peaks[1]
    assert whole.missing_bytes == merged.missing_bytes == 0


@pytest.mark.parametrize("seed", range(12))
def test_of_divided_workers_with_unequal_rows_no_device_lacks_memory_unseen(seed: int) -> None:
    """The vector of a sum, and what weight gradients at the end hold, count for devices with few rows, too."""
    problem = random_problem(seed, num_devices=6, num_layers=8, num_microbatches=6, speeds=(1.0, 0.5, 0.3))
    layout = Division("zb-h2", 2, 3).of(problem, Layout((0, 4, 8), ((0, 1, 2), (3, 4, 5))))
    free = LayoutEvaluator(problem).simulate(layout)
    assert free is not None
    peaks = free.timing.peak_memory_bytes
    rows = [problem.rows(group) for group in layout.workers]
    assert any(of_worker is not None and len(set(of_worker)) > 1 for of_worker in rows)
    devices = [device for group in layout.workers for device in group]
    for number, device in enumerate(devices):
        # One device has a little less than it needs, all others have plenty.
        limits = dict.fromkeys(devices, 2 * max(peaks)) | {device: peaks[number] * 97 // 100}
        nodes = tuple(
            replace(node, devices=(replace(node.devices[0], memory_bytes=limits[at]),)) for at, node in enumerate(problem.topology.nodes)
        )
        limited = replace(problem, topology=replace(problem.topology, nodes=nodes), recompute=False)
        whole, merged = LayoutEvaluator(limited).simulate(layout), MergedEvaluator(limited).simulate(layout)
        assert whole is not None
        assert merged is not None
        assert whole.missing_bytes > 0
        assert merged.missing_bytes > 0


def test_the_last_part_of_a_sum_stands_for_all() -> None:
    problem = alike(parameter_bytes=800_000_000)
    evaluator = MergedEvaluator(problem)
    evaluation = evaluator.simulate(LAYOUT)
    assert evaluation is not None
    parts = [Collective(CollectiveKind.GRADIENTS, 0, 0, part, (0,), 4, ()) for part in range(1, 5)]
    seconds = list(map(evaluation.timing.cost.collective_s, parts))
    assert seconds == [0.0, 0.0, 0.0, evaluation.timing.cost.collective_s(replace(parts[0], part=0, num_parts=1))]
    assert seconds[-1] > 0


@pytest.mark.parametrize("order", ["1f1b", "zb-h2"])
def test_the_memory_of_the_fullest_device_is_that_of_all(order: str) -> None:
    problem = alike(parameter_bytes=20_000_000, memory_bytes=600_000_000)
    layout = replace(LAYOUT, order=order, recomputed=())
    whole, merged = LayoutEvaluator(problem).simulate_exactly(layout), MergedEvaluator(problem).simulate_exactly(layout)
    assert whole is not None
    assert merged is not None
    assert whole.missing_bytes > 0
    vector_bytes = LayoutEvaluator(problem).estimator.vector_bytes(0, 8)
    assert whole.missing_bytes <= merged.missing_bytes <= whole.missing_bytes + vector_bytes


def test_workers_of_one_device_and_several_pipelines_are_simulated_device_by_device() -> None:
    problem = alike(parameter_bytes=20_000_000)
    for layout in (replace(LAYOUT, workers=((0,), (4,))), replace(LAYOUT, order="chimera")):
        whole, merged = LayoutEvaluator(problem).simulate(layout), MergedEvaluator(problem).simulate(layout)
        assert whole is not None
        assert merged is not None
        assert merged.update_s == whole.update_s
        assert merged.extrapolated_s is None


def test_devices_without_links_are_no_worker_and_no_neighbors() -> None:
    problem = alike()
    alone = replace(problem, topology=replace(problem.topology, links=()))
    evaluator = MergedEvaluator(alone)
    assert evaluator.simulate(LAYOUT) is None
    assert evaluator.simulate(Layout((0, 12), ((0, 4),))) is None


def test_devices_that_share_cores_do_not_stand_for_each_other() -> None:
    problem = alike()
    assert can_merge(problem)
    nodes = tuple(replace(node, cores=2) for node in problem.topology.nodes)
    assert not can_merge(replace(problem, topology=replace(problem.topology, nodes=nodes)))


def test_forwards_ahead_are_found_at_the_hops_of_merged_workers() -> None:
    problem = alike(output_bytes=40_000_000)
    evaluator = MergedEvaluator(problem)
    begun = evaluator.simulate(replace(LAYOUT, order="1f1b"))
    found = with_forwards_ahead(evaluator, begun, most_steps=3)
    assert begun is not None
    assert found is not None
    assert found.update_s < begun.update_s
    assert any(found.layout.ahead)


@pytest.mark.parametrize("seed", range(3))
def test_no_baseline_is_ahead_of_the_best_of_all(seed: int) -> None:
    problem = random_problem(seed, num_devices=5, num_layers=6)
    best = best_of_all(LayoutEvaluator(problem), "auto", None)
    assert best is not None
    plans = [best_proposal(planner, LayoutEvaluator(problem), "auto") for planner in PLANNERS if planner.layouts is not None]
    assert best.update_s == min(plan.update_s for plan in plans if plan is not None)


def test_what_cannot_be_better_is_not_simulated() -> None:
    problem = random_problem(1, num_devices=5, num_layers=6)
    best = best_of_all(LayoutEvaluator(problem), "auto", None)
    again: list[object] = []
    evaluator = LayoutEvaluator(problem, on_evaluated=again.append)
    assert best_of_all(evaluator, "auto", best) is best
    all_of_them: list[object] = []
    best_of_all(LayoutEvaluator(problem, on_evaluated=all_of_them.append), "auto", None)
    assert len(again) < len(all_of_them)
