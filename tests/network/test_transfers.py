"""What spans tell of links: played windows with known links, as stage actors would log them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, SharedLink
from raypipe.network.estimate import NetworkEstimate, Transfer
from raypipe.network.transfers import DeviceLog, transfers
from raypipe.schedules import catalogue
from raypipe.schedules.ir import ScheduleRequest, StageGraph, UpdateScope
from raypipe.schedules.lower import Await, Collective, CollectiveKind, Compute, DeviceProgram, Message, Recv, Send, Start, lower
from raypipe.schedules.passes import over_graph

LATENCY_S = 1e-3
COMPUTE_S = 5e-3
TAKE_S = 5e-5


@dataclass
class Log:
    """Columns as the executor writes them."""

    positions: array[int] = field(default_factory=lambda: array("Q"))
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    sizes_bytes: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, position: int, start_s: float, end_s: float, size_bytes: int = 0) -> None:
        self.positions.append(position)
        self.starts_s.append(start_s)
        self.ends_s.append(end_s)
        self.sizes_bytes.append(size_bytes)


def play(
    programs: Sequence[DeviceProgram],
    nodes: Sequence[str],
    *,
    bandwidth: dict[tuple[str, str], float],
    num_bytes: int,
    began_s: Sequence[float] = (),
    shared: Sequence[Sequence[tuple[str, str]]] = (),
) -> list[DeviceLog]:
    """The logs of a window: Ops of 5 ms, messages first come first served on the one wire between two nodes, or that such wires share."""
    wire_of = {pair: pairs[0] for pairs in shared for pair in pairs}
    heads, clocks, ends = ([0.0] * len(programs) for _ in range(3))
    head = [int(value) for value in heads]
    logs = [Log() for _ in programs]
    free: dict[tuple[str, str], float] = {}
    arrivals: dict[Message, float] = {}
    while any(head[device] < len(program.items) for device, program in enumerate(programs)):
        # Whoever is earliest goes on, so that the wires are taken in the order of time.
        ready = [
            device
            for device, program in enumerate(programs)
            if head[device] < len(program.items)
            and not (isinstance(item := program.items[head[device]], Recv) and item.message not in arrivals)
        ]
        device = min(ready, key=lambda device: clocks[device])
        position = head[device]
        item = programs[device].items[position]
        head[device] += 1
        match item:
            case Compute():
                logs[device].add(position, clocks[device], clocks[device] + COMPUTE_S)
                clocks[device] = ends[device] = clocks[device] + COMPUTE_S
            case Send():
                wire = (nodes[device], nodes[item.device])
                wire = wire_of.get(wire, wire)
                begin_s = max(free.get(wire, 0.0), ends[device])
                free[wire] = begin_s + num_bytes / bandwidth.get(wire, 1e12)
                arrivals[item.message] = free[wire] + LATENCY_S
            case Recv():
                done_s = max(clocks[device] + TAKE_S, arrivals[item.message])
                logs[device].add(position, clocks[device], done_s, num_bytes)
                clocks[device] = done_s
    begins = began_s or [0.0] * len(programs)
    for log, begin_s in zip(logs, begins, strict=True):
        for column in (log.starts_s, log.ends_s):
            for place, value in enumerate(column):
                column[place] = value - begin_s
    return [DeviceLog(*of_device) for of_device in zip(nodes, programs, logs, begins, strict=True)]


def programs(name: str = "1f1b", *, num_devices: int = 4) -> tuple[DeviceProgram, ...]:
    return lower(catalogue.build(name, ScheduleRequest(num_devices, 8, 3, update_scope=UpdateScope.STAGE)))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_awaited_messages_tell_the_bandwidth_of_their_links(name: str) -> None:
    bandwidth = {("a", "b"): 1e7, ("b", "a"): 2e7, ("b", "c"): 4e7, ("c", "b"): 5e6}
    logs = play(programs(name), ["a", "b", "b", "c"], bandwidth=bandwidth, num_bytes=100_000)
    found = transfers(logs, NetworkEstimate({log.node for log in logs}))
    seen: dict[tuple[str, str], list[float]] = {}
    for transfer in found:
        pair = (transfer.source, transfer.target)
        seen.setdefault(pair, []).append(transfer.num_bytes / (transfer.seconds - LATENCY_S))
    assert seen.keys() <= bandwidth.keys(), "within a node there is no link"
    assert {("b", "a"), ("c", "b")} <= seen.keys(), "gradients are waited for"
    for pair, rates in seen.items():
        assert rates == pytest.approx([bandwidth[pair]] * len(rates), rel=1e-6), pair


def test_devices_that_began_at_other_times_are_put_on_one_clock() -> None:
    bandwidth = {("a", "b"): 1e7, ("b", "a"): 1e7}
    logs = play(programs(num_devices=2), "ab", bandwidth=bandwidth, num_bytes=100_000, began_s=[3.0, -2.0])
    found = transfers(logs, NetworkEstimate({log.node for log in logs}))
    assert found
    # Of messages in a row, the wire may rest for as long as the one before is still on its way.
    assert all(-1e-9 < transfer.seconds - LATENCY_S - transfer.num_bytes / 1e7 < LATENCY_S for transfer in found)


def told(logs: Sequence[DeviceLog]) -> list[Transfer]:
    return transfers(logs, NetworkEstimate("ab"))


def message(index: int) -> Message:
    return Message(next(iter(programs())).items[1].message.direction, 0, 1, index)  # type: ignore[union-attr]


def handmade(
    sender: Sequence[tuple[object, float, float]], receiver: Sequence[tuple[object, float, float]], *, num_bytes: int = 100_000
) -> list[DeviceLog]:
    """Two devices on two nodes: items with their spans; those without time have equal start and end."""
    logs = []
    for device, steps in enumerate((sender, receiver)):
        log = Log()
        for position, (item, start_s, end_s) in enumerate(steps):
            if not isinstance(item, Send | Start):
                log.add(position, start_s, end_s, num_bytes if isinstance(item, Recv) else 0)
        items = tuple(item for item, _, _ in steps)
        program = replace(programs()[device], device=device, items=items)  # type: ignore[arg-type]
        logs.append(DeviceLog("ab"[device], program, log, 0.0))
    return logs


COMPUTE = next(item for item in programs()[0].items if isinstance(item, Compute))
FIRST, SECOND = message(0), message(1)


def test_a_message_whose_receiver_came_late_tells_nothing() -> None:
    sender = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0)]
    assert told(handmade(sender, [(COMPUTE, 0.0, 5.0), (Recv(FIRST, 0), 5.0, 5.0001)])) == []
    slowly_taken = [(COMPUTE, 0.0, 1.05), (Recv(FIRST, 0), 1.05, 1.051)]
    assert told(handmade(sender, slowly_taken)) == [], "a millisecond of 51 may be that of taking what was there"
    (found,) = told(handmade(sender, [(Recv(FIRST, 0), 0.0, 1.25)]))
    assert found.seconds == pytest.approx(0.25)
    assert (found.num_bytes, found.at_s) == (100_000, 1.25)


def test_messages_in_each_others_way_count_as_one() -> None:
    sender = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0), (COMPUTE, 1.0, 1.1), (Send(SECOND, 1), 1.1, 1.1)]
    (found,) = told(handmade(sender, [(Recv(FIRST, 0), 0.0, 1.25), (Recv(SECOND, 0), 1.25, 1.5)]))
    assert found.num_bytes == 200_000
    assert found.seconds == pytest.approx(0.5)


def test_a_message_behind_one_that_arrived_unseen_tells_nothing() -> None:
    sender = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0), (COMPUTE, 1.0, 1.1), (Send(SECOND, 1), 1.1, 1.1)]
    receiver = [(COMPUTE, 0.0, 1.2), (Recv(FIRST, 0), 1.2, 1.2001), (Recv(SECOND, 0), 1.2001, 1.5)]
    assert told(handmade(sender, receiver)) == []


def test_small_messages_tell_nothing_of_the_bandwidth() -> None:
    sender = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0)]
    assert told(handmade(sender, [(Recv(FIRST, 0), 0.0, 1.25)], num_bytes=400)) == []


def test_what_a_collective_was_in_the_way_of_does_not_count() -> None:
    collective = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
    sender = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0), (Start(collective), 1.0, 1.0), (Await(collective), 1.0, 1.2)]
    receiver = [(COMPUTE, 0.0, 0.9), (Start(collective), 0.9, 0.9), (Recv(FIRST, 0), 0.9, 1.25), (Await(collective), 1.25, 1.3)]
    assert told(handmade(sender, receiver)) == []


def test_links_that_share_a_bottleneck_are_not_told_by_what_they_do_together() -> None:
    """The first stage sends to two branches through one network card, which carries no more than each link by itself."""
    bandwidth = 1e8
    card = SharedLink(name="card", bandwidth_bytes_per_s=bandwidth, members=(("a", "b"), ("a", "c")))
    nodes = tuple(Node(name=name, devices=(Device(f"{name}0", "cpu"),)) for name in "abcd")
    topology = ClusterTopology(
        name="t", nodes=nodes, default_link=NodeLink(latency_s=LATENCY_S, bandwidth_bytes_per_s=bandwidth), shared_links=(card,)
    )
    graph = StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    branches = lower(over_graph(catalogue.build("gpipe", ScheduleRequest(4, 8, 3, update_scope=UpdateScope.STAGE)), graph))
    wires = dict.fromkeys([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("b", "a"), ("c", "a"), ("d", "b"), ("d", "c")], bandwidth)
    logs = play(branches, "abcd", bandwidth=wires, num_bytes=100_000, shared=[(("a", "b"), ("a", "c"))])
    apart = NetworkEstimate("abcd")
    apart.seed(replace(topology, shared_links=()))
    together = NetworkEstimate("abcd")
    together.seed(topology)
    wrong = transfers(logs, apart)
    told = transfers(logs, together)
    assert any(one.num_bytes / (one.seconds - LATENCY_S) < 0.7 * bandwidth for one in wrong if one.source == "a")
    assert {(one.source, one.target) for one in told} >= {("b", "d"), ("c", "d"), ("d", "b"), ("d", "c")}
    # Of messages in a row, the wire may rest for as long as the one before is still on its way.
    assert all(one.num_bytes / (one.seconds - LATENCY_S) > 0.8 * bandwidth for one in told)
