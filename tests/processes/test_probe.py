"""Two ends of flows in one process: what they measure over the real transports, without Ray."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest

from raypipe.actors.measure.flows import (
    LEAST_PING_BYTES,
    SMALL_BYTES,
    WARM_UP_BYTES,
    Flow,
    FlowConnection,
    Ping,
    Readings,
    Stream,
    by_device,
    exchanges,
    round_trips,
)
from raypipe.actors.measure.links import Links
from raypipe.actors.transport.secret import StoreAddress
from raypipe.actors.transport.store import StoreClient
from raypipe.cluster.actor_group import ActorGroup, Member
from raypipe.cluster.link_monitor import LinkMonitor
from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.cluster.stage_actors import StageActors
from raypipe.errors import RunError, TransportError, TransportTimeoutError
from raypipe.network.clocks import offset
from raypipe.network.fit import fit
from tests.processes.fake_nccl import FakeNccl, Network
from tests.processes.transport_contract import becomes_true

PING = Ping(seconds=0.05, most_bytes=4 * LEAST_PING_BYTES)
_runs = itertools.count()

Pair = tuple[Links, Links]


def order(store: StoreAddress, *, source: int = 0, target: int = 1, shared: bool = False, timeout_s: float = 10.0) -> FlowConnection:
    return FlowConnection(
        source=source,
        target=target,
        names=("first", "second"),
        shared=shared,
        store=store,
        prefix=f"probe test {next(_runs)}",
        connect_timeout_s=timeout_s,
        timeout_s=timeout_s,
    )


def both(calls: tuple[Callable[[], object], Callable[[], object]]) -> tuple[object, object]:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(calls[0]), threads.submit(calls[1])
    return first.result(), second.result()


@pytest.fixture(params=["cpu", "gpu"])
def pair(loopback: None, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Ends on the CPU, and ends with another library in the place of NCCL."""
    network = Network()
    links = (Links(0), Links(1)) if request.param == "cpu" else (Links(0, library=FakeNccl(network)), Links(1, library=FakeNccl(network)))
    yield links
    for end in links:
        end.close()


def connect(pair: Pair, *orders: FlowConnection) -> None:
    both((lambda: pair[0].connect(orders, host_ip="127.0.0.1"), lambda: pair[1].connect(orders, host_ip="127.0.0.1")))


def run(pair: Pair, *flows: Flow) -> list[tuple[Readings, Readings]]:
    found = both((lambda: pair[0].run(flows), lambda: pair[1].run(flows)))
    first, second = found
    assert isinstance(first, list)
    assert isinstance(second, list)
    return [(a, b) if flow.source == 0 else (b, a) for flow, a, b in zip(flows, first, second, strict=True)]


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
def test_a_ping_tells_latency_bandwidth_and_clock(pair: Pair, store: StoreAddress, shared: bool) -> None:
    connect(pair, order(store, shared=shared))
    ((source, target),) = run(pair, Flow(0, 1, PING))
    found = fit(round_trips(source), link="first -> second")
    assert 0 <= found.latency_s < 0.05
    assert found.bandwidth_bytes_per_s > 1e6
    assert source.sizes_bytes[:16] == target.sizes_bytes[:16] == [SMALL_BYTES] * 16
    assert source.num_bytes <= PING.most_bytes + 2 * (64 << 10), "small messages and answers come on top"
    clock = offset(exchanges(source, target))
    assert abs(clock.offset_s) <= clock.residual_s + 2e-5, "it is one clock"


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
def test_a_stream_tells_when_each_message_came(pair: Pair, store: StoreAddress, shared: bool) -> None:
    connect(pair, order(store, shared=shared))
    stream = Stream(chunk_bytes=65536, num_chunks=20)
    ((source, target),) = run(pair, Flow(0, 1, stream))
    assert target.sizes_bytes == [65536] * 20
    assert source.num_bytes == stream.num_bytes
    assert target.first_s == sorted(target.first_s)
    assert target.first_s[-1] >= source.first_s[0]


def test_flows_run_at_the_same_time_in_both_directions(pair: Pair, store: StoreAddress) -> None:
    connect(pair, order(store), order(store, source=1, target=0))
    flows = (Flow(0, 1, Stream(4096, 30)), Flow(1, 0, PING))
    there, back = run(pair, *flows)
    assert len(there[1].first_s) == 30
    assert fit(round_trips(back[0]), link="back").bandwidth_bytes_per_s > 0
    again, _ = run(pair, *flows)
    assert len(again[1].first_s) == 30


class Actors(ActorGroup):
    """Two stage actors on two nodes, as far as probes of links see them: threads of this process."""

    run = "run"

    def __init__(self, pair: Pair, threads: ThreadPoolExecutor) -> None:
        nodes = [ClusterNode(f"id {end.device}", f"node {end.device}") for end in pair]
        super().__init__([Member(Handle(end, threads), DeviceSlot(node, node.name)) for end, node in zip(pair, nodes, strict=True)])
        self.launched = self.members
        self.launched_infos = [SimpleNamespace(ip="127.0.0.1") for _ in pair]

    def dead(self, numbers: tuple[int, ...], *, timeout_s: float) -> list[int]:
        return []


class Handle:
    def __init__(self, end: Links, threads: ThreadPoolExecutor) -> None:
        self.probe_link = self
        self._end, self._threads = end, threads

    def remote(self, connection: FlowConnection, flow: Flow, *, host_ip: str) -> Future[Readings]:
        def probe() -> Readings:
            self._end.connect([connection], host_ip=host_ip)
            return self._end.run([flow])[0]

        return self._threads.submit(probe)


def test_probes_between_windows_leave_nothing_in_the_store(loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.cluster.actor_group.ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("raypipe.cluster.link_monitor.ray.get", lambda answer, timeout: answer.result(timeout))
    with closing(Links(0)) as first, closing(Links(1)) as second, ThreadPoolExecutor(2) as threads:
        actors = Actors((first, second), threads)
        with closing(StoreClient(actors.open_store(), device=0, check=lambda: None)) as client:
            client.set("run/0/ready/0", "of the run")
            monitor = LinkMonitor(cast(StageActors, actors))
            (link,) = (link for (source, _), link in monitor.estimate.links.items() if source == "node 0")
            for _ in range(3):
                before_s = link.seen_at_s
                monitor.probe("node 0", "node 1")
                assert link.seen_at_s > before_s
                assert becomes_true(lambda: client.num_keys() == 1, within_s=15.0)
            assert client.check(["run/0/ready/0"])
        actors.close_store()


def test_a_device_that_does_not_come_is_named(pair: Pair, store: StoreAddress) -> None:
    with pytest.raises(TransportTimeoutError, match=r"device first: connecting with device second: it did not come within 0\.3 s"):
        pair[0].connect([order(store, timeout_s=0.3)], host_ip="127.0.0.1")


def test_a_flow_whose_other_end_goes_away_can_be_met_again(pair: Pair, store: StoreAddress) -> None:
    connect(pair, order(store))
    threading.Timer(0.1, pair[1].close).start()
    with pytest.raises(TransportError):
        pair[0].run([Flow(0, 1, PING)])
    connect(pair, order(store))
    ((source, _),) = run(pair, Flow(0, 1, PING))
    assert source.sizes_bytes


def test_a_stream_lasts_as_long_as_it_should_and_no_more_than_it_may() -> None:
    stream = Stream.lasting(0.1, bytes_per_s=100e6, most_bytes=1 << 30)
    assert stream.num_bytes == pytest.approx(10e6, rel=0.1)
    assert Stream.lasting(0.1, bytes_per_s=100e6, most_bytes=1 << 20).num_bytes <= 1.1 * (1 << 20)
    slow = Stream.lasting(0.1, bytes_per_s=1e4, most_bytes=1 << 30)
    assert slow.num_bytes >= 2 * WARM_UP_BYTES


def test_each_device_has_its_part_of_the_flows() -> None:
    flows = [Flow(0, 1, PING), Flow(0, 2, PING), Flow(3, 1, PING)]
    assert by_device(flows) == {0: flows[:2], 1: [flows[0], flows[2]], 2: [flows[1]], 3: [flows[2]]}


def test_too_few_messages_make_no_link() -> None:
    with pytest.raises(RunError, match="0 messages came back"):
        fit(round_trips(Readings()), link="first -> second")
