"""What windows show of layers and devices."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from raypipe.analysis.observed import ObservedSpeeds, factors
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.simulation.simulator import simulate

PROFILE = ModelProfile.uniform(6, forward_s=0.01, backward_s=0.03, output_bytes=1000, microbatch_size=1)
TOPOLOGY = ClusterTopology.uniform(3, latency_s=1e-4, bandwidth_bytes_per_s=1e8)
STAGES = ((0, 1), (2, 3), (4, 5))
LAYOUT = Layout((0, 2, 4, 6), ((0,), (1,), (2,)), "1f1b")


def window(profile: ModelProfile = PROFILE, topology: ClusterTopology = TOPOLOGY, *, layout: Layout = LAYOUT, noise: float = 0.0) -> Trace:
    """A window as it goes there; every Op takes a little more or less."""
    evaluator = LayoutEvaluator(Problem(profile, topology, 4, 1))
    judged = evaluator.simulate(layout)
    assert judged is not None
    trace = simulate(evaluator.plan(judged, planner="test", lower_bound_s=0.0))
    rng = random.Random(1)
    spans = [
        span._replace(end_s=span.start_s + (span.end_s - span.start_s) * math.exp(rng.gauss(0.0, noise))) if noise else span
        for span in trace.spans
    ]
    return replace(trace, spans=tuple(spans))


def slower(profile: ModelProfile, layers: dict[int, float]) -> ModelProfile:
    """The profile with some layers that take a multiple of their time."""
    found = tuple(
        replace(layer, forward_s=layer.forward_s * by, backward_s=layer.backward_s * by, weight_grad_s=layer.weight_grad_s * by)
        for number, layer in enumerate(profile.layers)
        for by in [layers.get(number, 1.0)]
    )
    return replace(profile, layers=found)


def of_speed(speeds: dict[int, float]) -> ClusterTopology:
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(device, speed=speeds.get(number, 1.0)) for number, device in enumerate(TOPOLOGY.devices) if device in node.devices
            ),
        )
        for node in TOPOLOGY.nodes
    )
    return replace(TOPOLOGY, nodes=nodes)


def test_each_stage_has_the_factor_of_its_median_op() -> None:
    found = factors(window(slower(PROFILE, {2: 2.0}), noise=0.05), window())
    assert found == {
        ("device0", 0): pytest.approx(1.0, rel=0.06),
        ("device1", 1): pytest.approx(1.5, rel=0.06),
        ("device2", 2): pytest.approx(1.0, rel=0.06),
    }


def test_what_differs_in_the_first_window_is_the_layers_and_stays_theirs_on_other_devices() -> None:
    truth = slower(PROFILE, {4: 2.0, 5: 2.0})
    speeds = ObservedSpeeds(PROFILE)
    speeds.observe(window(truth), window(), STAGES)
    assert speeds.profile.layers[4].forward_s == pytest.approx(0.02)
    assert speeds.profile.layers[5].backward_s == pytest.approx(0.06)
    assert speeds.profile.layers[3].forward_s == pytest.approx(0.01)
    turned = Layout((0, 2, 4, 6), ((2,), (1,), (0,)), "1f1b")
    for _ in range(3):
        speeds.observe(window(truth, layout=turned), window(speeds.first, layout=turned), STAGES)
    assert [device.speed for device in speeds.topology(TOPOLOGY).devices] == pytest.approx([1.0, 1.0, 1.0])


def test_what_changes_later_is_the_devices_and_goes_with_them() -> None:
    speeds = ObservedSpeeds(PROFILE)
    speeds.observe(window(), window(), STAGES)
    slow = of_speed({1: 0.5})
    speeds.observe(window(topology=slow), window(speeds.first), STAGES)
    assert [device.speed for device in speeds.topology(TOPOLOGY).devices] == pytest.approx([1.0, 0.5, 1.0])
    # Another layout that does without it: what was seen of it last stays.
    others = Layout((0, 3, 6), ((0,), (2,)), "1f1b")
    for _ in range(3):
        speeds.observe(window(topology=slow, layout=others), window(speeds.first, layout=others), ((0, 1, 2), (3, 4, 5)))
    assert [device.speed for device in speeds.topology(TOPOLOGY).devices] == pytest.approx([1.0, 0.5, 1.0])


def test_one_disturbed_window_among_three_does_not_count() -> None:
    speeds = ObservedSpeeds(PROFILE)
    speeds.observe(window(), window(), STAGES)
    for topology in (TOPOLOGY, TOPOLOGY, of_speed({0: 0.2})):
        speeds.observe(window(topology=topology), window(speeds.first), STAGES)
    assert [device.speed for device in speeds.topology(TOPOLOGY).devices] == pytest.approx([1.0, 1.0, 1.0])


def test_a_change_of_one_stage_of_a_device_is_its_layers_and_goes_with_them() -> None:
    both = Layout((0, 1, 2, 3, 4, 5, 6), ((0,), (1,), (2,)), "interleaved")  # layers 0 and 3 on device 0
    stages = tuple((layer,) for layer in range(6))
    speeds = ObservedSpeeds(PROFILE)
    speeds.observe(window(layout=both), window(layout=both), stages)
    truth = slower(PROFILE, {3: 1.5})
    speeds.observe(window(truth, layout=both), window(speeds.first, layout=both), stages)
    assert [device.speed for device in speeds.topology(TOPOLOGY).devices] == pytest.approx([1.0, 1.0, 1.0])
    assert [layer.forward_s for layer in speeds.profile.layers] == pytest.approx([0.01, 0.01, 0.01, 0.015, 0.01, 0.01])
    speeds.observe(window(layout=both), window(speeds.first, layout=both), stages)
    assert speeds.profile == speeds.first, "it is as fast as before"
    for _ in range(2):
        speeds.observe(window(topology=of_speed({0: 0.5}), layout=both), window(speeds.first, layout=both), stages)
    assert [device.speed for device in speeds.topology(TOPOLOGY).devices] == pytest.approx([0.5, 1.0, 1.0]), "all stages of the device"
    assert speeds.profile == speeds.first


def test_a_device_is_not_slower_because_each_of_its_stages_has_slower_layers() -> None:
    both = Layout((0, 4, 8, 12, 16), ((0,), (1,)), "interleaved")  # layers 0 to 3 and 8 to 11 on device 0
    stages = tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4))
    profile = ModelProfile.uniform(16, forward_s=0.01, backward_s=0.03, output_bytes=1000, microbatch_size=1)
    two = ClusterTopology.uniform(2, latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    speeds = ObservedSpeeds(profile)
    speeds.observe(window(profile, two, layout=both), window(profile, two, layout=both), stages)
    truth = slower(profile, {0: 1.5, 8: 1.5, 9: 1.5, 10: 1.5})
    for _ in range(3):
        speeds.observe(window(truth, two, layout=both), window(speeds.first, two, layout=both), stages)
    assert [device.speed for device in speeds.topology(two).devices] == pytest.approx([1.0, 1.0])
    assert speeds.profile.layers[8].forward_s == pytest.approx(0.01375)
