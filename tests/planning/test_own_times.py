"""Orders that are searched for by the times of stages get those of their layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning import own_times
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.own_times import with_own_times
from raypipe.planning.problem import Problem
from raypipe.schedules.validate import validate
from tests.planning.reaction import LATENCY_S, PORT, ports

FACTORS = (1.0, 3.0, 1.0, 2.0)
"""Times of the layers over those of the first."""


def evaluator(latency_s: float = 0.001) -> LayoutEvaluator:
    """Four devices, and layers of different lengths whose weight gradients are short."""
    even = ModelProfile.uniform(4, forward_s=0.02, backward_s=0.05, weight_grad_s=0.01, output_bytes=1000)
    layers = tuple(
        replace(layer, forward_s=times * layer.forward_s, backward_s=times * layer.backward_s, weight_grad_s=times * layer.weight_grad_s)
        for times, layer in zip(FACTORS, even.layers, strict=True)
    )
    topology = ClusterTopology.uniform(4, latency_s=latency_s, bandwidth_bytes_per_s=1e9, devices_per_node=1)
    return LayoutEvaluator(Problem(replace(even, layers=layers), topology, 8, 1))


def simulated(judge: LayoutEvaluator, order: str) -> Evaluation:
    found = judge.simulate(Layout((0, 1, 2, 3, 4), ((0,), (1,), (2,), (3,)), order))
    assert found is not None
    return found


def test_an_order_for_the_own_times_of_stages_is_faster_than_one_for_equal_times() -> None:
    judge = evaluator(latency_s=0.02)
    equal = simulated(judge, "zb-auto")
    own = with_own_times(judge, equal)
    assert own is not None
    assert own.update_s < equal.update_s
    assert [times.forward_s for times in own.layout.times] == pytest.approx([0.02 * times for times in FACTORS])
    assert [times.weight_grad_s for times in own.layout.times] == pytest.approx([0.01 * times for times in FACTORS])
    assert own.layout.hops_s == pytest.approx((0.02,) * 3, rel=1e-3)
    assert own.layout.sums_s == ()
    validate(layout_schedule(judge.problem, own.layout, num_updates=3))
    again = judge.simulate(own.layout)
    assert again is not None
    assert again.update_s == own.update_s


def test_messages_that_leave_a_slow_port_one_behind_the_other_are_expected_so() -> None:
    profile = ModelProfile.uniform(8, forward_s=0.008, backward_s=0.016, weight_grad_s=0.008, output_bytes=400_000, parameter_bytes=400_000)
    # With less than half of the others', it would be sent to beside them.
    judge = LayoutEvaluator(Problem(profile, ports({3: 0.55}), 8, 1))
    own = own_times.simulated(judge, Layout((0, 2, 4, 6, 8), ((0,), (1,), (2,), (3,))))
    assert own is not None
    message_s = 400_000 / PORT
    assert own.layout.queues_s == pytest.approx((message_s, message_s, message_s / 0.55))
    assert own.layout.hops_s == pytest.approx([queue_s + LATENCY_S for queue_s in own.layout.queues_s])
    unaware = judge.simulate(replace(own.layout, queues_s=()))
    assert unaware is not None
    assert own.update_s < 0.98 * unaware.update_s


@pytest.mark.parametrize("order", ["1f1b", "zb-h1"])
def test_orders_that_are_not_searched_for_stay_as_they_are(order: str) -> None:
    judge = evaluator()
    found = simulated(judge, order)
    assert with_own_times(judge, found) is found


def test_without_a_layout_there_is_none() -> None:
    assert with_own_times(evaluator(), None) is None


def test_an_order_for_times_that_have_changed_is_searched_for_again() -> None:
    before, now = evaluator(latency_s=0.001), evaluator(latency_s=0.05)
    old = with_own_times(before, simulated(before, "zb-auto"))
    assert old is not None
    known = now.simulate(old.layout)
    again = with_own_times(now, known)
    assert known is not None
    assert again is not None
    assert again.update_s < known.update_s
    assert (again.layout.cuts, again.layout.workers) == (known.layout.cuts, known.layout.workers)
    assert again.layout.hops_s == pytest.approx((0.05,) * 3, rel=1e-3)
