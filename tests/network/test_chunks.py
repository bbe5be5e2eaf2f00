"""What chunks tell of links: windows made by hand, with known rates."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, SharedLink
from raypipe.artifacts.trace import Dimension, Source, Span, SpanItem, SpanKind, Trace
from raypipe.network.chunks import chunk_transfers, link_uses, with_other_latency
from raypipe.network.estimate import LinkEstimate, NetworkEstimate
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.lower import Direction, Message

RATE = 25e6
CHUNK = 125_000
LATENCY_S = 2e-4
SUM = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
MESSAGE = Message(Direction.ACTIVATION, 0, 1, 0)
NODES = ("a", "b", "c")


@dataclass
class Wire:
    """A port that takes one chunk after the other; a sender hands the next one over while the last is on its way."""

    rate: float = RATE
    ahead_s: float = 0.002
    free_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def carry(self, source: int, target: int, sizes: Iterable[int], *, at_s: float = 0.0, item: SpanItem = SUM) -> None:
        for size in sizes:
            start_s = max(at_s, self.free_s - self.ahead_s)
            self.free_s = max(start_s, self.free_s) + size / self.rate
            self.spans.append(Span(target, SpanKind.TRANSFER, item, start_s, self.free_s + LATENCY_S, size, source))


def window(spans: Sequence[Span]) -> Trace:
    return Trace("by hand", Source.MEASURED, ("a/0", "b/0", "c/0"), 1, tuple(spans))


def known(*, shared: Sequence[SharedLink] = ()) -> NetworkEstimate:
    """Estimates that begin with the rates of a topology."""
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in NODES)
    default = NodeLink(latency_s=LATENCY_S, bandwidth_bytes_per_s=RATE)
    estimate = NetworkEstimate(NODES)
    estimate.seed(ClusterTopology(name="lab", nodes=nodes, default_link=default, shared_links=tuple(shared)))
    return estimate


def rate_of(num_bytes: int, seconds: float) -> float:
    return num_bytes / (seconds - LATENCY_S)


def test_a_sum_that_nobody_waits_for_tells_the_rate_of_its_link() -> None:
    wire = Wire()
    wire.carry(0, 1, [CHUNK] * 40)
    found = chunk_transfers(window(wire.spans), NODES, known(), began_s=100.0)
    assert len(found) > 5, "a long sum is cut, so that a change shows"
    assert [rate_of(transfer.num_bytes, transfer.seconds) for transfer in found] == pytest.approx([RATE] * len(found))
    assert found[-1].at_s == pytest.approx(100.0 + 40 * CHUNK / RATE + LATENCY_S, abs=0.02)
    assert {(transfer.source, transfer.target) for transfer in found} == {("a", "b")}


def test_pauses_of_a_link_do_not_count() -> None:
    wire = Wire()
    for number in range(5):
        wire.carry(0, 1, [CHUNK], at_s=0.1 * number, item=MESSAGE)
    found = chunk_transfers(window(wire.spans), NODES, known())
    assert [rate_of(transfer.num_bytes, transfer.seconds) for transfer in found] == pytest.approx([RATE] * 5)


def test_what_is_too_short_tells_nothing() -> None:
    wire = Wire(rate=1e9)  # what a port lets through at once
    for number in range(50):  # parts of a share, passed on as they come
        wire.carry(0, 1, [17_000], at_s=0.0005 * number)
    assert chunk_transfers(window(wire.spans), NODES, known()) == []


def test_what_stays_on_a_node_tells_nothing() -> None:
    wire = Wire()
    wire.carry(0, 1, [CHUNK] * 10)
    assert chunk_transfers(window(wire.spans), ("a", "a", "c"), NetworkEstimate(("a", "c"))) == []


def longer(spans: Sequence[Span], seconds: float) -> list[Span]:
    return [span._replace(end_s=span.end_s + seconds) for span in spans]


@pytest.mark.parametrize("num_bytes", [4_000, CHUNK])
def test_a_link_whose_quickest_chunk_is_early_or_late_may_have_another_latency(num_bytes: int) -> None:
    wire = Wire()
    for number in range(10):
        wire.carry(0, 1, [num_bytes], at_s=0.1 * number, item=MESSAGE)
        wire.carry(0, 1, [CHUNK] * (number % 3), at_s=0.1 * number)  # that some wait behind sums says nothing
    estimate = known()
    assert with_other_latency(window(wire.spans), NODES, estimate) == []
    assert with_other_latency(window(longer(wire.spans, 0.01)), NODES, estimate) == [("a", "b")]
    estimate.links["a", "b"].set(bandwidth_bytes_per_s=RATE, latency_s=LATENCY_S + 0.01, at_s=0.0)
    assert with_other_latency(window(longer(wire.spans, 0.01)), NODES, estimate) == []
    assert with_other_latency(window(wire.spans), NODES, estimate) == [("a", "b")]


PORT = SharedLink(name="out-of-a", bandwidth_bytes_per_s=RATE, members=(("a", "b"), ("a", "c")))


def both_at_once(rate: float) -> list[Span]:
    """Two devices of a node, which do not know of each other, at half of its port's rate each."""
    spans: list[Span] = []
    for target in (1, 2):
        wire = Wire(rate=rate / 2)
        wire.carry(0, target, [CHUNK] * 40)
        spans += wire.spans
    return spans


def test_transfers_that_share_a_port_tell_what_it_carries_at_most() -> None:
    found = chunk_transfers(window(both_at_once(RATE)), NODES, known(shared=[PORT]))
    for transfer in found:
        assert rate_of(transfer.num_bytes, transfer.seconds) == pytest.approx(RATE / 2)
        assert rate_of(transfer.most_bytes, transfer.seconds) == pytest.approx(RATE, rel=0.05)


def test_a_shared_port_changes_no_estimate_until_it_falls() -> None:
    estimate = known(shared=[PORT])
    for _ in range(20):
        assert estimate.observe(chunk_transfers(window(both_at_once(RATE)), NODES, estimate)) == []
    assert estimate.links["a", "b"].bandwidth_bytes_per_s == pytest.approx(RATE, rel=0.05)
    assert set(estimate.observe(chunk_transfers(window(both_at_once(0.4 * RATE)), NODES, estimate))) == {("a", "b"), ("a", "c")}
    assert estimate.links["a", "b"].bandwidth_bytes_per_s == pytest.approx(0.4 * RATE, rel=0.1)


def test_a_link_that_falls_in_the_middle_of_a_sum_is_followed() -> None:
    estimate, wire = known(), Wire()
    wire.carry(0, 1, [CHUNK] * 40)
    wire.rate = 0.4 * RATE
    wire.carry(0, 1, [CHUNK] * 40)
    assert estimate.observe(chunk_transfers(window(wire.spans), NODES, estimate)) == [("a", "b")]
    assert estimate.links["a", "b"].bandwidth_bytes_per_s == pytest.approx(0.4 * RATE, rel=0.1)


def test_chunks_that_are_read_late_now_and_then_change_no_estimate() -> None:
    late = random.Random(0)
    for seed in range(5):
        estimate = known()
        for _ in range(20):
            wire = Wire(rate=RATE * late.uniform(0.98, 1.02))
            for update in range(4):
                wire.carry(0, 1, [CHUNK] * 24, at_s=0.3 * update)
            spans = [span._replace(end_s=span.end_s + min(late.expovariate(1 / 3e-4), 5e-3)) for span in wire.spans]
            assert estimate.observe(chunk_transfers(window(spans), NODES, estimate)) == [], seed
        assert estimate.links["a", "b"].bandwidth_bytes_per_s == pytest.approx(RATE, rel=0.05)


def test_bounds_that_hold_an_estimate_leave_it_as_it_is() -> None:
    link = LinkEstimate()
    link.observe(50, 1.0, at_s=1.0, most_bytes=100)
    assert link.bandwidth_bytes_per_s is None, "between bounds nothing is known"
    link.set(bandwidth_bytes_per_s=80.0, latency_s=0.0, at_s=2.0)
    for at_s in range(3, 50):
        assert not link.observe(50, 1.0, at_s=float(at_s), most_bytes=100)
    assert link.bandwidth_bytes_per_s == pytest.approx(80.0)
    assert link.seen_at_s == 49.0
    for _ in range(50):
        link.observe(20, 1.0, at_s=50.0, most_bytes=40)
    assert link.bandwidth_bytes_per_s == pytest.approx(40.0, rel=0.05)


def test_uses_of_links_are_by_nodes_and_dimensions() -> None:
    wire = Wire()
    wire.carry(0, 1, [CHUNK] * 2)
    wire.carry(0, 2, [CHUNK], item=MESSAGE)
    trace = window([*wire.spans, Span(0, SpanKind.RECV, MESSAGE, 0.0, 0.1, 8)])
    uses = link_uses(trace, NODES, {(0, 1): 700, (1, 0): 5})
    assert uses.keys() == {("a", "b"), ("a", "c")}
    assert uses["a", "b"].num_bytes == {Dimension.SUM: 2 * CHUNK}
    assert uses["a", "c"].num_bytes == {Dimension.MESSAGE: CHUNK}
    assert uses["a", "b"].queued_bytes == 700
    assert uses["a", "b"].busy_ratio == pytest.approx((2 * CHUNK / RATE + LATENCY_S) / 0.1)
    assert math.isclose(link_uses(trace, ("a", "b", "b"))["a", "b"].busy_ratio, (3 * CHUNK / RATE + LATENCY_S) / 0.1)


def test_parts_that_are_passed_on_as_they_come_do_not_make_their_link_look_slow() -> None:
    slow, fast = Wire(rate=0.4 * RATE), Wire()
    slow.carry(1, 0, [9_000] * 200)
    for span in slow.spans:
        fast.carry(0, 1, [9_000], at_s=span.end_s)
    spans = [span._replace(end_s=span.end_s + 5e-3) for span in fast.spans]  # a long way
    estimate = NetworkEstimate(NODES)
    estimate.suppose_latency(("a", "b"), LATENCY_S + 5e-3)
    estimate.observe(chunk_transfers(window(spans), NODES, estimate))
    assert estimate.links["a", "b"].bandwidth_bytes_per_s is None
    estimate.suppose_latency(("a", "b"), 1.0)
    assert estimate.links["a", "b"].latency_s == LATENCY_S + 5e-3, "what is known stays"
