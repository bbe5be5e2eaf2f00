"""Sums of buckets that begin inside the last backward, with times worked out by hand."""

from __future__ import annotations

import pytest

from raypipe.artifacts.topology import ClusterTopology, Path
from raypipe.artifacts.trace import SpanKind, Trace
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, UpdateScope
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.cost import Cost, LayerCost, SharedCompute, StageCost
from raypipe.simulation.simulator import simulate_programs

FORWARD_S = 1.0
BACKWARD_S = 8.0
LAYERS = tuple(LayerCost(100, 0, BACKWARD_S / 4, BACKWARD_S / 8) for _ in range(4))
RATE = 50.0
"""A ring of two members passes as many bytes through each link as the gradients have: 400 take 8 s."""


def trace(name: str, *, buckets: int, cores: int | None = None) -> Trace:
    """One stage on two devices, one microbatch."""
    programs = lower(
        build(name, ScheduleRequest(1, 1, update_scope=UpdateScope.STAGE)), Placement((((0, 0.5), (1, 0.5)),)), buckets=[buckets]
    )
    topology = ClusterTopology.uniform(2)
    cost = StageCost(2 * FORWARD_S, 2 * BACKWARD_S, BACKWARD_S, update_s=1.0, parameter_bytes=400, gradient_bytes=400, layers=LAYERS)
    names = [device.name for device in topology.devices]

    def path(source: int, target: int) -> Path:
        return Path(0.0, RATE, ((f"{names[source]}->{names[target]}", RATE),))

    shared = () if cores is None else (SharedCompute((0, 1), cores),)
    return simulate_programs(programs, Cost(tuple(names), {(0, 0): cost, (1, 0): cost}, {}, path, shared), name=name, with_memory=True)


def update_start_s(found: Trace) -> float:
    return next(span.start_s for span in found.spans if span.ops and span.ops[0].kind is OpKind.UPDATE)


@pytest.mark.parametrize(
    ("buckets", "starts_s"),
    [
        (1, 1.0 + 8.0 + 8.0),
        # The first half leaves at 5 s and has passed at 9 s, when the second half is complete.
        (2, 1.0 + 8.0 + 4.0),
        (4, 1.0 + 8.0 + 2.0),
    ],
)
def test_the_sum_of_a_bucket_begins_inside_the_backward(buckets: int, starts_s: float) -> None:
    found = trace("1f1b", buckets=buckets)
    assert update_start_s(found) == pytest.approx(starts_s)
    (backward,) = {(span.start_s, span.end_s) for span in found.spans if span.ops == (Op(OpKind.BACKWARD, 0, 0),)}
    assert backward == (1.0, 9.0)
    passed = [span for span in found.spans if span.kind is SpanKind.TRANSFER]
    assert min(span.start_s for span in passed) == pytest.approx(1.0 + 8.0 / buckets)


def test_the_sum_of_a_bucket_begins_inside_the_weight_gradient() -> None:
    # I ends at 5 s, W at 9 s. The first half is complete after 7 s and passes in 4 s, then the second.
    assert update_start_s(trace("zb-h1", buckets=2)) == pytest.approx(7.0 + 4.0 + 4.0)


def test_a_backward_on_shared_cores_takes_as_long_in_pieces() -> None:
    whole, divided = (trace("1f1b", buckets=count, cores=1) for count in (1, 4))
    ends_s = [max(span.end_s for span in found.spans if span.ops and span.ops[0].kind is OpKind.BACKWARD) for found in (whole, divided)]
    assert ends_s == pytest.approx([18.0, 18.0])
    assert update_start_s(whole) == pytest.approx(26.0)
    assert update_start_s(divided) == pytest.approx(20.0)
