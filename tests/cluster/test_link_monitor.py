"""What a run makes of its windows: traces by one clock, and what it knows of its links."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from raypipe.actors.actor_info import ActorInfo
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.execution.report import SpanLog, WindowReport
from raypipe.actors.measure.flows import Readings
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.cluster.link_monitor import IDLE_S, LinkMonitor, LinkWatch
from raypipe.cluster.stage_actors import StageActors
from raypipe.cluster.window import WindowResult
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import Direction, Message, Recv, Send
from raypipe.schedules.request import ScheduleRequest

NODES = ("10.0.0.1", "10.0.0.2")
COMPUTE_S, CARRY_S = 0.01, 0.04
NUM_BYTES = 100_000
INFO = ActorInfo(node_id="", ip="10.0.0.1", hostname="host", pid=1, num_cores=2, memory_bytes=1 << 30, shares_memory=True)


def window(*, ahead_s: tuple[float, float] = (0.0, 0.0), offsets_s: tuple[float, ...] = ()) -> WindowResult:
    """A window of two devices in which every message takes 40 ms; the devices' clocks are ahead by so much."""
    programs = executable_programs(build("1f1b", ScheduleRequest(2, 3, 2, update_scope=UpdateScope.STAGE)))
    clocks, heads = [0.0, 0.0], [0, 0]
    handed: dict[tuple[int, int], list[float]] = {(0, 1): [], (1, 0): []}
    taken = {(0, 1): 0, (1, 0): 0}
    logs = [SpanLog(), SpanLog()]
    while any(heads[device] < len(programs[device].items) for device in (0, 1)):
        for device in (0, 1):
            items = programs[device].items
            while heads[device] < len(items):
                item, since_s = items[heads[device]], clocks[device]
                size = 0
                if isinstance(item, Recv):
                    channel = (item.device, device)
                    if taken[channel] == len(handed[channel]):
                        break
                    clocks[device] = max(since_s + 1e-5, handed[channel][taken[channel]] + CARRY_S)
                    taken[channel] += 1
                    size = NUM_BYTES
                elif isinstance(item, Send):
                    handed[device, item.device].append(since_s)
                else:
                    clocks[device] += COMPUTE_S
                if not isinstance(item, Send):
                    logs[device].add(heads[device], since_s, clocks[device], size)
                heads[device] += 1
    began_s = 1000.0
    reports = tuple(WindowReport(device, began_s + ahead_s[device], log) for device, log in enumerate(logs))
    return WindowResult(reports, 1.0, "run", tuple(f"{node}/0" for node in NODES), 2, programs, offsets_s)


def observe(watch: LinkWatch, result: WindowResult, *, now_s: float) -> None:
    watch.observe(result.trace, result.programs, NODES, began_s=min(result.began_s), now_s=now_s)


def watching(now_s: float = 0.0) -> LinkWatch:
    return LinkWatch(run="test", nodes=NODES, now_s=now_s)


def test_clock_offsets_put_the_spans_of_all_devices_on_one_clock() -> None:
    ahead_s = (3.5, -120.25)
    right, wrong = window(ahead_s=ahead_s, offsets_s=ahead_s).trace, window(ahead_s=ahead_s).trace
    assert right.spans == window().trace.spans
    assert wrong.makespan_s > 120
    first = {span.device: span.start_s for span in reversed(right.spans)}
    assert min(first.values()) == 0.0
    received = [span for span in right.spans if span.kind is SpanKind.RECV]
    assert all(span.end_s >= span.start_s for span in received)


def test_no_message_arrives_before_it_was_sent_on_corrected_clocks() -> None:
    ahead_s = (0.0, 7.0)
    watch = watching()
    observe(watch, window(ahead_s=ahead_s, offsets_s=ahead_s), now_s=1001.0)
    link = watch.estimate.links[NODES]
    assert link.num_transfers > 0
    assert link.bandwidth_bytes_per_s == pytest.approx(NUM_BYTES / CARRY_S, rel=0.3)
    uncorrected = watching()
    observe(uncorrected, window(ahead_s=ahead_s), now_s=1001.0)
    assert uncorrected.estimate.links[NODES].bandwidth_bytes_per_s != pytest.approx(NUM_BYTES / CARRY_S, rel=0.3)


def test_a_run_begins_with_what_its_plan_says_of_the_links() -> None:
    nodes = tuple(Node(name=f"n{number}", devices=(Device(f"{node}/0", "cpu"),)) for number, node in enumerate(NODES))
    topology = ClusterTopology(name="lab", nodes=nodes, links=(Link(source="n0", target="n1", bandwidth_bytes_per_s=5e6, latency_s=1e-3),))
    watch = watching()
    watch.seed(topology, [f"{node}/0" for node in NODES], now_s=5.0)
    assert watch.estimate.links[NODES].bandwidth_bytes_per_s == pytest.approx(5e6)
    assert watch.estimate.links[NODES].latency_s == 1e-3
    other = watching()
    other.seed(topology, ["some/0", "other/0"], now_s=5.0)
    assert other.estimate.links[NODES].bandwidth_bytes_per_s is None


def pinged(bandwidth: float, *, latency_s: float = 1e-4) -> Readings:
    readings = Readings()
    for size in (1024, 50_000, 100_000, 200_000):
        readings.add(size, 10.0, 10.0 + 2 * latency_s + size / bandwidth)
    return readings


def test_a_link_that_is_not_seen_is_probed_now_and_then() -> None:
    watch = watching()
    assert watch.due(now_s=IDLE_S / 2) is None
    first = watch.due(now_s=IDLE_S + 1)
    assert first == NODES
    assert watch.devices(first) == (0, 1)
    watch.probed(first, pinged(3e6), now_s=IDLE_S + 1)
    assert watch.estimate.links[first].bandwidth_bytes_per_s == pytest.approx(3e6)
    assert watch.estimate.links[first].latency_s == pytest.approx(1e-4)
    assert watch.due(now_s=IDLE_S + 2) is None, "probes are rare"
    assert watch.due(now_s=IDLE_S + 40) == NODES[::-1]
    assert watch.due(now_s=10 * IDLE_S) == NODES[::-1], "it still was not seen"


def test_a_link_that_cannot_be_probed_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    watch = watching()
    problem = TransportTimeoutError("a", "b", "connecting", "it did not come")
    with caplog.at_level(logging.WARNING):
        watch.failed(NODES, problem, now_s=100.0)
        watch.probed(NODES[::-1], Readings(), now_s=100.0)
    assert "10.0.0.1 -> 10.0.0.2 could not be probed" in caplog.text
    assert "0 messages came back" in caplog.text
    assert watch.due(now_s=130.0) is None
    assert watch.due(now_s=710.0) is not None


def carried(seconds: float) -> Trace:
    """A window in which every one of some messages takes so long."""
    message = Message(Direction.ACTIVATION, 0, 1, 0)
    spans = tuple(Span(1, SpanKind.TRANSFER, message, 0.1 * number, 0.1 * number + seconds, 40_000, 0) for number in range(8))
    return Trace("by hand", Source.MEASURED, ("a/0", "b/0"), 1, spans)


def test_a_link_that_may_have_become_longer_is_probed() -> None:
    watch = watching()
    watch.probed(NODES, pinged(2e7), now_s=0.0)
    for now_s, seconds, doubted in ((1.0, 0.002, []), (2.0, 0.03, [NODES])):
        watch.observe(carried(seconds), [], NODES, began_s=now_s, now_s=now_s)
        assert watch.doubted(now_s=now_s) == doubted
        assert watch.doubted(now_s=now_s) == [], "once for a while"
    watch.probed(NODES, pinged(2e7, latency_s=0.028), now_s=42.0)
    assert watch.estimate.links[NODES].latency_s == pytest.approx(0.028)
    watch.observe(carried(0.03), [], NODES, began_s=90.0, now_s=90.0)
    assert watch.doubted(now_s=90.0) == []


def test_a_link_that_changes_in_the_middle_of_a_window_is_probed_and_keeps_its_rate_if_it_is_not_longer() -> None:
    watch = watching()
    watch.probed(NODES, pinged(2e7), now_s=0.0)
    watch.observe(carried(0.002), [], NODES, began_s=1.0, now_s=1.0)
    spans = carried(0.002).spans + tuple(span._replace(start_s=span.start_s + 1, end_s=span.end_s + 1) for span in carried(0.02).spans)
    watch.observe(replace(carried(0.002), spans=spans), [], NODES, began_s=2.0, now_s=2.0)
    assert watch.doubted(now_s=2.0) == [NODES]
    told = watch.estimate.links[NODES].bandwidth_bytes_per_s
    watch.probed(NODES, pinged(1e7), now_s=2.0)
    assert watch.estimate.links[NODES].bandwidth_bytes_per_s == told, "the chunks tell more"


def test_a_link_whose_probe_has_failed_is_not_probed_again_soon() -> None:
    watch = watching()
    watch.probed(NODES, pinged(2e7), now_s=0.0)
    watch.observe(carried(0.03), [], NODES, began_s=1.0, now_s=1.0)
    assert watch.doubted(now_s=1.0) == [NODES]
    watch.failed(NODES, "no answer", now_s=6.0)
    watch.observe(carried(0.06), [], NODES, began_s=40.0, now_s=40.0)
    assert watch.doubted(now_s=40.0) == []
    watch.observe(carried(0.12), [], NODES, began_s=610.0, now_s=610.0)
    assert watch.doubted(now_s=610.0) == [NODES]


def test_a_run_on_one_node_watches_nothing() -> None:
    watch = LinkWatch(run="test", nodes=["10.0.0.1"] * 2, now_s=0.0)
    watch.observe(Trace("none", Source.MEASURED, (), 1, ()), [], [], began_s=0.0, now_s=1e6)
    assert watch.due(now_s=1e6) is None


def test_a_link_whose_probe_fails_is_probed_by_other_devices_of_its_nodes() -> None:
    watch = LinkWatch(run="r", nodes=["a", "a", "b"], now_s=0.0)
    pair = ("a", "b")
    assert watch.devices(pair) == (0, 2)
    watch.failed(pair, "device a/0 does not answer", now_s=0.0)
    assert watch.devices(pair) == (1, 2)
    watch.failed(pair, "device a/1 does not answer", now_s=0.0)
    assert watch.devices(pair) == (0, 2)


@pytest.mark.parametrize("gpus", [(), ("GPU-1",)], ids=["CPU devices", "GPUs"])
def test_links_of_gpus_are_not_probed_over_tcp(monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...]) -> None:
    members = [SimpleNamespace(slot=SimpleNamespace(name=f"{node}/0", node=SimpleNamespace(address=node))) for node in NODES]
    infos = [replace(INFO, node_id=node, gpus=gpus) for node in NODES]
    monitor = LinkMonitor(cast("StageActors", SimpleNamespace(run="run", launched=members, members=members, infos=infos)))
    probed: list[tuple[str, str]] = []
    monkeypatch.setattr(monitor, "probe", lambda *pair: probed.append(pair))
    monkeypatch.setattr(LinkWatch, "doubted", lambda *_, **__: [NODES])
    monkeypatch.setattr(LinkWatch, "due", lambda *_, **__: NODES[::-1])
    monitor.after_window(window())
    assert probed == ([] if gpus else [NODES, NODES[::-1]])
    assert monitor.estimate.links[NODES].num_transfers, "its messages tell of it all the same"
