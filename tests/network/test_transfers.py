"""What spans tell of links: played windows with known links, as stage actors would log them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, SharedLink
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.network.estimate import NetworkEstimate, Transfer
from raypipe.network.transfers import transfers
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Await, Collective, CollectiveKind, Start
from raypipe.schedules.ir import StageGraph, UpdateScope
from raypipe.schedules.lower import Compute, DeviceProgram, Item, Message, Recv, Send, lower
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest

LATENCY_S = 1e-3
COMPUTE_S = 5e-3
TAKE_S = 5e-5


@dataclass(frozen=True)
class Played:
    """A window as a run notes it."""

    trace: Trace
    programs: Sequence[DeviceProgram]
    nodes: Sequence[str]

    def told(self, known: NetworkEstimate | None = None) -> list[Transfer]:
        return transfers(self.trace, self.programs, self.nodes, known or NetworkEstimate(set(self.nodes)))


def measured(programs: Sequence[DeviceProgram], nodes: Sequence[str], spans: Sequence[Span]) -> Played:
    return Played(Trace("played", Source.MEASURED, tuple(map(str, range(len(nodes)))), 1, tuple(spans)), programs, nodes)


def play(
    programs: Sequence[DeviceProgram],
    nodes: Sequence[str],
    *,
    bandwidth: dict[tuple[str, str], float],
    num_bytes: int,
    shared: Sequence[Sequence[tuple[str, str]]] = (),
) -> Played:
    """A window: Ops of 5 ms, messages first come first served on the one wire between two nodes, or that such wires share."""
    wire_of = {pair: pairs[0] for pairs in shared for pair in pairs}
    heads, clocks, ends = ([0.0] * len(programs) for _ in range(3))
    head = [int(value) for value in heads]
    spans: list[Span] = []
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
        item = programs[device].items[head[device]]
        head[device] += 1
        match item:
            case Compute():
                spans.append(Span(device, SpanKind.COMPUTE, item.ops, clocks[device], clocks[device] + COMPUTE_S))
                clocks[device] = ends[device] = clocks[device] + COMPUTE_S
            case Send():
                wire = (nodes[device], nodes[item.device])
                wire = wire_of.get(wire, wire)
                begin_s = max(free.get(wire, 0.0), ends[device])
                free[wire] = begin_s + num_bytes / bandwidth.get(wire, 1e12)
                arrivals[item.message] = free[wire] + LATENCY_S
            case Recv():
                done_s = max(clocks[device] + TAKE_S, arrivals[item.message])
                spans.append(Span(device, SpanKind.RECV, item.message, clocks[device], done_s, num_bytes, item.device))
                clocks[device] = done_s
    return measured(programs, nodes, spans)


def programs(name: str = "1f1b", *, num_devices: int = 4) -> tuple[DeviceProgram, ...]:
    return lower(catalogue.build(name, ScheduleRequest(num_devices, 8, 3, update_scope=UpdateScope.STAGE)))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_awaited_messages_tell_the_bandwidth_of_their_links(name: str) -> None:
    bandwidth = {("a", "b"): 1e7, ("b", "a"): 2e7, ("b", "c"): 4e7, ("c", "b"): 5e6}
    played = play(programs(name), ["a", "b", "b", "c"], bandwidth=bandwidth, num_bytes=100_000)
    found = played.told()
    seen: dict[tuple[str, str], list[float]] = {}
    for transfer in found:
        pair = (transfer.source, transfer.target)
        seen.setdefault(pair, []).append(transfer.num_bytes / (transfer.seconds - LATENCY_S))
    assert seen.keys() <= bandwidth.keys(), "within a node there is no link"
    assert {("b", "a"), ("c", "b")} <= seen.keys(), "gradients are waited for"
    for pair, rates in seen.items():
        assert rates == pytest.approx([bandwidth[pair]] * len(rates), rel=1e-6), pair


def test_transfers_arrive_by_the_clock_of_the_estimates() -> None:
    played = play(programs(num_devices=2), "ab", bandwidth={("a", "b"): 1e7, ("b", "a"): 1e7}, num_bytes=100_000)
    found = transfers(played.trace, played.programs, played.nodes, NetworkEstimate("ab"), began_s=50.0)
    assert [transfer.at_s - 50.0 for transfer in found] == pytest.approx([transfer.at_s for transfer in played.told()])
    # Of messages in a row, the wire may rest for as long as the one before is still on its way.
    assert all(-1e-9 < transfer.seconds - LATENCY_S - transfer.num_bytes / 1e7 < LATENCY_S for transfer in found)


def message(index: int) -> Message:
    return Message(next(iter(programs())).items[1].message.direction, 0, 1, index)  # type: ignore[union-attr]


Handmade = Sequence[tuple[Item, float, float]]
"""Items with their times; those that take no time have equal start and end."""


def told(sender: Handmade, receiver: Handmade, *, num_bytes: int = 100_000) -> list[Transfer]:
    """The transfers of a window of two devices on two nodes."""
    spans: list[Span] = []
    made: list[DeviceProgram] = []
    for device, steps in enumerate((sender, receiver)):
        for item, start_s, end_s in steps:
            match item:
                case Compute():
                    spans.append(Span(device, SpanKind.COMPUTE, item.ops, start_s, end_s))
                case Recv():
                    spans.append(Span(device, SpanKind.RECV, item.message, start_s, end_s, num_bytes, item.device))
                case Await():
                    spans.append(Span(device, SpanKind.COLLECTIVE, item.collective, start_s, end_s))
        made.append(replace(programs()[device], device=device, items=tuple(item for item, _, _ in steps)))
    return measured(made, "ab", spans).told()


COMPUTE = next(item for item in programs()[0].items if isinstance(item, Compute))
FIRST, SECOND = message(0), message(1)


def test_a_message_whose_receiver_came_late_tells_nothing() -> None:
    sender: Handmade = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0)]
    assert told(sender, [(COMPUTE, 0.0, 5.0), (Recv(FIRST, 0), 5.0, 5.0001)]) == []
    slowly_taken: Handmade = [(COMPUTE, 0.0, 1.05), (Recv(FIRST, 0), 1.05, 1.051)]
    assert told(sender, slowly_taken) == [], "a millisecond of 51 may be that of taking what was there"
    (found,) = told(sender, [(Recv(FIRST, 0), 0.0, 1.25)])
    assert found.seconds == pytest.approx(0.25)
    assert (found.num_bytes, found.at_s) == (100_000, 1.25)


def test_messages_in_each_others_way_count_as_one() -> None:
    sender: Handmade = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0), (COMPUTE, 1.0, 1.1), (Send(SECOND, 1), 1.1, 1.1)]
    (found,) = told(sender, [(Recv(FIRST, 0), 0.0, 1.25), (Recv(SECOND, 0), 1.25, 1.5)])
    assert found.num_bytes == 200_000
    assert found.seconds == pytest.approx(0.5)


def test_a_message_behind_one_that_arrived_unseen_tells_nothing() -> None:
    sender: Handmade = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0), (COMPUTE, 1.0, 1.1), (Send(SECOND, 1), 1.1, 1.1)]
    receiver: Handmade = [(COMPUTE, 0.0, 1.2), (Recv(FIRST, 0), 1.2, 1.2001), (Recv(SECOND, 0), 1.2001, 1.5)]
    assert told(sender, receiver) == []


def test_small_messages_tell_nothing_of_the_bandwidth() -> None:
    sender: Handmade = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0)]
    assert told(sender, [(Recv(FIRST, 0), 0.0, 1.25)], num_bytes=400) == []


def test_what_a_collective_was_in_the_way_of_does_not_count() -> None:
    collective = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
    sender: Handmade = [(COMPUTE, 0.0, 1.0), (Send(FIRST, 1), 1.0, 1.0), (Start(collective), 1.0, 1.0), (Await(collective), 1.0, 1.2)]
    receiver: Handmade = [(COMPUTE, 0.0, 0.9), (Start(collective), 0.9, 0.9), (Recv(FIRST, 0), 0.9, 1.25), (Await(collective), 1.25, 1.3)]
    assert told(sender, receiver) == []


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
    played = play(branches, "abcd", bandwidth=wires, num_bytes=100_000, shared=[(("a", "b"), ("a", "c"))])
    apart = NetworkEstimate("abcd")
    apart.seed(replace(topology, shared_links=()))
    together = NetworkEstimate("abcd")
    together.seed(topology)
    wrong, told = played.told(apart), played.told(together)
    assert any(one.num_bytes / (one.seconds - LATENCY_S) < 0.7 * bandwidth for one in wrong if one.source == "a")
    assert {(one.source, one.target) for one in told} >= {("b", "d"), ("c", "d"), ("d", "b"), ("d", "c")}
    # Of messages in a row, the wire may rest for as long as the one before is still on its way.
    assert all(one.num_bytes / (one.seconds - LATENCY_S) > 0.8 * bandwidth for one in told)
