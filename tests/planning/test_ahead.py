"""Forwards that run ahead where a hop is slow: how much they gain, what they cost, and when there are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.plan import plan
from raypipe.planning.problem import Problem
from raypipe.schedules.validate import validate

F_S = 0.02


def cluster(num_devices: int, *, hop: int, latency_s: float, memory_bytes: int | None = None) -> ClusterTopology:
    """Nodes of one device each; the link behind node `hop` is slow both ways."""
    nodes = tuple(
        Node(name=f"n{at}", devices=(Device(name=f"n{at}/0", kind="cpu", memory_bytes=memory_bytes),)) for at in range(num_devices)
    )
    slow = Link(source=f"n{hop}", target=f"n{hop + 1}", latency_s=latency_s, bandwidth_bytes_per_s=None)
    link = NodeLink(latency_s=1e-4, bandwidth_bytes_per_s=None)
    return ClusterTopology(name="hop", nodes=nodes, links=(slow,), default_link=link)


def problem(topology: ClusterTopology, num_microbatches: int, **limits: Any) -> Problem:
    profile = ModelProfile.uniform(
        topology.num_devices, forward_s=F_S, backward_s=2 * F_S, output_bytes=1000, saved_bytes=1_000_000, parameter_bytes=1000
    )
    return Problem(profile, topology, num_microbatches, 1, **limits)


def both(given: Problem, order: str) -> tuple[Evaluation, Evaluation]:
    """The order on the devices as they come, without and with forwards ahead."""
    evaluator, size = LayoutEvaluator(given), given.num_devices
    without = evaluator.simulate(Layout(tuple(range(size + 1)), tuple((device,) for device in range(size)), order))
    found = with_forwards_ahead(evaluator, without, most_steps=20)
    assert without is not None
    assert found is not None
    return without, found


@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize(("delay", "least_gain"), [(0.5, 1.10), (1.0, 1.20), (2.0, 1.40)])
def test_a_slow_hop_is_hidden_by_forwards_ahead_there(num_devices: int, delay: float, least_gain: float) -> None:
    hop = num_devices // 2 - 1
    given = problem(cluster(num_devices, hop=hop, latency_s=delay * F_S), 4 * num_devices)
    without, found = both(given, "1f1b")
    assert without.update_s / found.update_s >= least_gain
    assert found.layout.ahead[hop] >= max(delay, 1)
    assert sum(found.layout.ahead[:hop]) == 0, "workers before the hop need as many more, and no others"


def test_forwards_run_ahead_only_where_a_loss_is_reached_sooner() -> None:
    """Without a flush, a forward ahead may read weights that are an update older."""
    topology = cluster(4, hop=1, latency_s=2 * F_S)
    early, faster = both(problem(topology, 8), "async-1f1b")
    assert faster.update_s * 1.1 < early.update_s
    paying = problem(topology, 8, optimizer="nadamw")
    without, found = both(paying, "async-1f1b")
    as_faster = LayoutEvaluator(paying).simulate(faster.layout)
    assert as_faster is not None
    assert as_faster.mean_delay > without.mean_delay
    assert as_faster.loss_s > without.loss_s
    assert found.loss_s <= without.loss_s


def test_without_a_slow_hop_no_forward_runs_ahead() -> None:
    without, found = both(problem(cluster(4, hop=1, latency_s=1e-4), 16), "1f1b")
    assert found is without


def test_an_order_of_several_stages_a_worker_is_left_alone() -> None:
    given = problem(cluster(4, hop=1, latency_s=F_S), 16)
    evaluator = LayoutEvaluator(given)
    layout = Layout((0, 1, 2, 3, 4), ((0,), (1,)), "zb-v")
    found = with_forwards_ahead(evaluator, evaluator.simulate(layout), most_steps=20)
    assert found is not None
    assert found.layout.ahead == ()


def test_forwards_ahead_keep_to_the_memory() -> None:
    free, _ = both(problem(cluster(4, hop=1, latency_s=2 * F_S), 16), "1f1b")
    peak = max(free.timing.peak_memory_bytes)
    without, found = both(problem(cluster(4, hop=1, latency_s=2 * F_S, memory_bytes=peak), 16, recompute=False), "1f1b")
    assert without.missing_bytes == found.missing_bytes == 0
    assert max(found.timing.peak_memory_bytes) <= peak


def test_forwards_ahead_keep_to_limits_on_staleness() -> None:
    given = problem(cluster(4, hop=1, latency_s=2 * F_S), 4, max_staleness=1, max_mismatch=1)
    without, found = both(given, "async-1f1b")
    assert without.update_s >= found.update_s
    free = replace(given, max_staleness=9, max_mismatch=9)
    assert both(free, "async-1f1b")[1].update_s < found.update_s


def test_a_plan_with_forwards_ahead_is_valid_and_as_fast_as_promised() -> None:
    given = problem(cluster(4, hop=1, latency_s=2 * F_S), 16)
    found = plan(given.profile, given.topology, num_microbatches=16, schedule="1f1b", effort=0.1)
    validate(found.schedule)
    assert found.predicted is not None
    without, _ = both(given, "1f1b")
    assert found.predicted.update_s * 1.4 < without.update_s
