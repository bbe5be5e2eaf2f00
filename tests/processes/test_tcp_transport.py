"""Channels and sums over TCP: several ends in this process, one a thread, and one in each of several processes where some fail."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.actors.transport import tcp
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.rendezvous import AbortGroup, Rendezvous
from raypipe.actors.transport.secret import StoreAddress
from raypipe.actors.transport.tcp_port import Port
from raypipe.actors.transport.tcp_way import Departure
from raypipe.communication import policy
from raypipe.communication.policy import Communication, Traffic
from raypipe.errors import AbortedError, TransportError, TransportTimeoutError
from raypipe.schedules.collectives import Collective, CollectiveKind
from tests.processes.process_ends import INTERFACE, Make, Peers, connect_and_send_half, connected, members_of, ring_sum
from tests.processes.transport_contract import (
    ALL,
    MEGABYTE,
    NAMES,
    PAIR,
    Connect,
    TransportContract,
    activation,
    announced,
    becomes_true,
    gradient,
    gradients,
    open_both,
    seconds_until_raised,
    together,
)

MANY = 8 * MEGABYTE
"""Numbers of a tensor of 32 MB, which the buffers of a connection do not hold."""
UNSCHEDULED = Communication(scheduled=False)


class TestChannelsOverTcp(TransportContract):
    @pytest.fixture(params=[True, False], ids=["scheduled", "unscheduled"])
    def connect(self, make: Make, request: pytest.FixtureRequest) -> Connect:
        communication = Communication(scheduled=request.param)

        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            settings: dict[str, Any] = {"timeout_s": timeout_s, "connect_timeout_s": 20.0, "communication": communication}
            ends = [make(device, num_devices, **settings) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected


def port_of(end: ProcessTransport) -> Port:
    port = end._endpoints.port
    assert port is not None
    return port


# Connecting


def test_devices_of_ipv6_addresses_connect(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    monkeypatch.delenv(INTERFACE)
    ends = connected(make, host_ip="::1")
    assert port_of(ends[0]).links[1].end.family is socket.AF_INET6
    open_both(ends[0], ends[1], [announced(activation(0), torch.tensor(0))])
    ends[0].send(activation(0), 1, [torch.tensor(5)])
    assert int(ends[1].recv(activation(0), 0)[0]) == 5


def test_a_device_without_an_address_takes_the_interface_that_leads_to_the_store(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE)
    assert port_of(connected(make)[0]).links[1].end.getsockname()[0] == "127.0.0.1"


def test_strangers_are_not_taken_for_peers(store: StoreAddress, loopback: None) -> None:
    def rendezvous(device: int) -> Rendezvous:
        return Rendezvous(device, names=NAMES, address=store, prefix="strangers", timeout_s=20.0, aborting=AbortGroup())

    with rendezvous(0) as first, rendezvous(1) as second:
        answers: list[tcp.Connections] = []
        answering = threading.Thread(target=lambda: answers.append(tcp.connect(second, [0], others=[], host_ip=None)))
        answering.start()
        host, port, *_ = json.loads(first.wait_for("tcp", [1])[0])
        silent, wrong = (socket.create_connection((host, port)) for _ in range(2))
        wrong.sendall(bytes(68))
        called = tcp.connect(first, [1], others=[], host_ip=None)
        answering.join()
        answered = answers[0]
        called.ends[1].end.send(b"x")
        answered.ends[0].end.settimeout(5.0)
        assert answered.ends[0].end.recv(1) == b"x"
        for end in (silent, wrong, called.ends[1].end, answered.ends[0].end, called.datagrams, answered.datagrams):
            end.close()


def test_a_device_that_comes_but_does_not_call_is_named(make: Make, store: StoreAddress) -> None:
    end = make(1, connect_timeout_s=0.5)
    other = Rendezvous(0, names=NAMES, address=store, prefix=end.prefix, timeout_s=20.0, aborting=AbortGroup())
    with other:
        other.publish("here")
        other.publish("tcp", json.dumps(["127.0.0.1", 1, 1, "00"]))
        with pytest.raises(TransportTimeoutError, match=r"connecting with device alpha: it did not call within 0\.5 s"):
            end.connect()


def test_connecting_again_leaves_no_descriptor_open(make: Make) -> None:
    def cycle(attempt: int) -> None:
        for end in connected(make, 3, prefix=f"tcp descriptors/{attempt}"):
            end.close()

    cycle(0)
    before = len(os.listdir("/dev/fd"))
    for attempt in range(1, 4):
        cycle(attempt)
    assert becomes_true(lambda: len(os.listdir("/dev/fd")) <= before, within_s=2.0)


# Sums


@pytest.mark.combined
@pytest.mark.parametrize("num_members", [2, 3, 4])
@pytest.mark.parametrize(
    ("chunk_bytes", "communication", "numel"),
    [
        (1, Communication(chunk_s=1e-15), 1003),
        (1001, Communication(chunk_s=1e-15), 10_007),
        (1, Communication(chunk_s=100.0), 500_001),
        (1, UNSCHEDULED, 500_001),
    ],
    ids=["a-number", "odd", "huge", "unscheduled"],
)
def test_a_sum_does_not_depend_on_chunks(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_members: int, chunk_bytes: int, communication: Communication, numel: int
) -> None:
    monkeypatch.setattr(policy, "LEAST_CHUNK_BYTES", chunk_bytes)
    ends = connected(make, num_members, communication=communication, **members_of(num_members))
    everybody = tuple(range(num_members))
    for update, dtype in enumerate((torch.float32, torch.bfloat16)):
        torch.manual_seed(update)
        tensors = [torch.randn(numel).to(dtype) for _ in ends]
        expected = ring_sum(tensors)
        pending = [end.start(gradients(everybody, update=update), tensor) for end, tensor in zip(ends, tensors, strict=True)]
        for part in pending:
            assert torch.equal(part.wait(), expected)
    if chunk_bytes == 1 and communication.chunk_s < 1e-9:
        assert {departure.num_bytes for departure in ends[0].departures} == {4}


@pytest.mark.parametrize("communication", [Communication(), UNSCHEDULED], ids=["scheduled", "unscheduled"])
def test_members_start_sums_in_any_order(make: Make, communication: Communication) -> None:
    ends = connected(make, 3, communication=communication)
    collectives = [gradients(members, update=update) for members in (ALL, PAIR, (1, 2)) for update in range(4)]
    values = {
        (collective, device): torch.randn(1000 * collective.update + 5) for collective in collectives for device in collective.devices
    }
    expected = {one: ring_sum([values[one, device] for device in one.devices]) for one in collectives}

    def member(device: int) -> None:
        order = [collective for collective in collectives if device in collective.devices]
        chance = random.Random(device)
        chance.shuffle(order)
        pending = {one: ends[device].start(one, values[one, device].clone(), deadline=chance.randrange(9)) for one in order}
        chance.shuffle(order)
        for one in order:
            assert torch.equal(pending[one].wait(), expected[one]), one

    together(*(lambda device=device: member(device) for device in ALL))


def test_a_collective_that_comes_again_is_another_sum(make: Make) -> None:
    ends = connected(make)
    early = [ends[0].start(gradients(PAIR), torch.full((3,), float(turn))) for turn in range(3)]
    late = [ends[1].start(gradients(PAIR), torch.full((3,), 10.0 * turn)) for turn in range(3)]
    for turn, (one, other) in enumerate(zip(early, late, strict=True)):
        assert one.wait().tolist() == other.wait().tolist() == [11.0 * turn] * 3


def test_members_that_bring_different_tensors_are_told_so(make: Make) -> None:
    ends = connected(make)
    pending = [ends[0].start(gradients(PAIR), torch.ones(4)), ends[1].start(gradients(PAIR), torch.ones(2, 2))]
    with pytest.raises(TransportError, match=r"its members brought different things: float32\[4\], float32\[2, 2\]"):
        pending[0].wait()


def test_a_member_that_has_its_sum_may_leave(make: Make) -> None:
    ends = connected(make, 3)
    tensors = [torch.full((MEGABYTE,), 10.0**device) for device in ALL]

    def member(device: int) -> None:
        ends[device].start(gradients(ALL), tensors[device]).wait()
        ends[device].close()

    together(*(lambda device=device: member(device) for device in ALL))
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((MEGABYTE,), 111.0))


# What goes first


def stop(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)


def go_on(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)


def all_has_left(end: ProcessTransport, num_bytes: int) -> Callable[[], bool]:
    return lambda: sum(departure.num_bytes for departure in end.departures) == num_bytes


def sum_and_message(mine: ProcessTransport, peer: BaseProcess) -> tuple[list[Departure], int]:
    """Sends a message behind a sum whose peer does not read; returns what left in order, and how much of it before the message came."""
    mine.open_window({}, {1: [announced(activation(0), torch.ones(10))]})
    stop(peer)
    mine.start(gradients(PAIR), torch.ones(MANY))
    before = len(mine.departures)
    mine.send(activation(0), 1, [torch.ones(10)])
    go_on(peer)
    assert becomes_true(all_has_left(mine, 2 * MANY + 40), within_s=20.0)
    return list(mine.departures), before


def test_a_message_overtakes_a_sum(peers: Peers) -> None:
    mine, (peer,) = peers()
    left, before = sum_and_message(mine, peer)
    at = [departure.traffic for departure in left].index(Traffic.MESSAGE)
    assert at <= before + 2  # the chunk that was leaving, and one that began as the message came
    assert at < len(left) - 5
    assert all(departure.num_bytes <= 4 * MEGABYTE for departure in left)
    assert all(one.start_s <= one.end_s <= other.end_s for one, other in itertools.pairwise(left))


def test_without_scheduling_a_message_waits_for_a_sum(peers: Peers) -> None:
    mine, (peer,) = peers(communication=UNSCHEDULED)
    left, _ = sum_and_message(mine, peer)
    assert [departure.traffic for departure in left] == [Traffic.SUM, Traffic.MESSAGE]


def test_a_norm_overtakes_a_sum_and_the_sum_due_first_goes_first(peers: Peers) -> None:
    mine, (peer,) = peers()
    mine.open_window({}, {})
    stop(peer)
    sizes = {8: MANY, 5: MANY + 2, 2: MANY + 4}  # by deadline
    for deadline, numel in sizes.items():
        mine.start(gradients(PAIR, update=deadline), torch.ones(numel), deadline=deadline)
    mine.start(Collective(CollectiveKind.NORM, 0, 0, 0, PAIR), torch.ones(2, dtype=torch.float64), deadline=9)
    go_on(peer)
    assert becomes_true(all_has_left(mine, 2 * sum(sizes.values()) + 16), within_s=20.0)
    left = list(mine.departures)
    assert [departure.traffic for departure in left].index(Traffic.MESSAGE) <= 3
    # The last to leave is what was due last: less of it than all had left before the others came.
    tail = 0
    while tail < 2 * MANY - 8 * MEGABYTE:
        tail += left.pop().num_bytes
    assert sum(departure.num_bytes for departure in left if departure.traffic is Traffic.SUM) >= 2 * (sizes[5] + sizes[2])


def test_a_peer_that_takes_nothing_does_not_hold_up_others_behind_the_same_port(peers: Peers) -> None:
    mine, (stuck, _) = peers(3, ways={1: "port", 2: "port"})
    mine.open_window({}, {1: [announced(activation(0), torch.ones(MANY))], 2: [announced(activation(0, target=2), torch.ones(3))]})
    stop(stuck)
    mine.send(activation(0), 1, [torch.ones(MANY)])
    mine.send(activation(0, target=2), 2, [torch.ones(3)])
    assert becomes_true(lambda: [departure.peer for departure in mine.departures] == [2], within_s=5.0)
    go_on(stuck)
    mine.close_window()
    assert [departure.peer for departure in mine.departures] == [2, 1]


def test_peers_behind_one_port_take_turns(make: Make) -> None:
    ends = connected(make, 3, ways={1: "port", 2: "port"})
    assert len(port_of(ends[0]).sender.ways) == 1
    assert len(port_of(connected(make, 3, prefix="ways of their own")[0]).sender.ways) == 2


# Errors


def test_another_message_is_named(make: Make) -> None:
    ends = connected(make)
    ends[1].open_window({0: [announced(activation(0), torch.empty(4))]}, {})
    ends[0].open_window({}, {1: [announced(activation(1), torch.empty(8))]})
    ends[0].send(activation(1), 1, [torch.empty(8)])
    problem = r"expected activation 0->1 of microbatch 0 \(float32\[4\]\), got activation 0->1 of microbatch 1 \(float32\[8\]\)"
    with pytest.raises(TransportError, match=problem):
        ends[1].recv(activation(0), 0)


def test_another_message_that_came_before_the_window_is_named(make: Make) -> None:
    ends = connected(make)
    ends[0].open_window({}, {1: [announced(activation(index), torch.empty(4)) for index in (0, 2)]})
    for index in (0, 2):
        ends[0].send(activation(index), 1, [torch.full((4,), float(index))])
    ends[0].close_window()
    port = port_of(ends[1])
    assert becomes_true(lambda: len(ends[1]._incoming[0]._arrived) == 2, within_s=5.0)  # type: ignore[attr-defined]
    assert port.links[0].ended is None
    ends[1].open_window({0: [announced(activation(index), torch.empty(4)) for index in (0, 1)]}, {})
    assert ends[1].recv(activation(0), 0)[0].tolist() == [0.0] * 4
    with pytest.raises(TransportError, match=r"expected activation 0->1 of microbatch 1 .*, got activation 0->1 of microbatch 2"):
        ends[1].recv(activation(1), 0)


def test_what_has_left_is_still_received_when_the_sender_has_closed_its_end(make: Make) -> None:
    ends = connected(make)
    open_both(ends[0], ends[1], [announced(activation(index), torch.ones(1000)) for index in range(4)])
    for index in range(4):
        ends[0].send(activation(index), 1, [torch.full((1000,), float(index))])
    ends[0].close_window()
    ends[0].close()
    assert [float(ends[1].recv(activation(index), 0)[0][0]) for index in range(4)] == [0.0, 1.0, 2.0, 3.0]


def waiting_for_a_message(mine: ProcessTransport) -> Callable[[], object]:
    return lambda: mine.recv(gradient(0), 1)


def waiting_for_a_sum(mine: ProcessTransport) -> Callable[[], object]:
    return mine.start(gradients(PAIR), torch.ones(3)).wait


def in_the_middle_of_a_sum(mine: ProcessTransport) -> Callable[[], object]:
    return mine.start(gradients(PAIR), torch.ones(MANY)).wait


def in_the_middle_of_a_message(mine: ProcessTransport) -> Callable[[], object]:
    mine.send(activation(0), 1, [torch.ones(MANY)])
    return mine.close_window


WAITS = [waiting_for_a_message, waiting_for_a_sum, in_the_middle_of_a_sum, in_the_middle_of_a_message]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("aborts", [False, True], ids=["killed", "aborted"])
def test_a_wait_for_a_peer_that_hangs_ends(peers: Peers, wait: Callable[[ProcessTransport], Callable[[], object]], aborts: bool) -> None:
    mine, (peer,) = peers()
    stop(peer)
    mine.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: [announced(activation(0), torch.ones(MANY))]})
    act = wait(mine)
    if aborts:
        assert seconds_until_raised(AbortedError, act, match="^enough$", when=lambda: mine.abort("enough")) < 1.0
    else:
        problem = "device alpha: .* with device beta: connection closed by peer"
        assert seconds_until_raised(TransportError, act, match=problem, when=peer.kill) < 1.5
    began_s = time.monotonic()
    mine.close()
    assert time.monotonic() - began_s < 1.0


def test_a_peer_that_is_killed_in_the_middle_of_its_message_ends_the_wait(peers: Peers) -> None:
    mine, (peer,) = peers(target=connect_and_send_half)
    mine.open_window({1: [announced(gradient(0), torch.ones(250))]}, {})
    problem = "device alpha: gradient 1->0 of microbatch 0 with device beta: connection closed by peer"
    assert seconds_until_raised(TransportError, lambda: mine.recv(gradient(0), 1), match=problem, when=peer.kill) < 1.5


@pytest.mark.parametrize("killed", [1, 2])  # whichever follows this one in the ring, the sum does not wait for both
def test_a_member_that_is_killed_ends_the_wait_for_a_sum_that_another_member_holds_up(peers: Peers, killed: int) -> None:
    mine, processes = peers(3)
    pending = mine.start(gradients(ALL), torch.ones(3))
    problem = "device alpha: .* with device beta, gamma: connection closed by peer"
    assert seconds_until_raised(TransportError, pending.wait, match=problem, when=processes[killed - 1].kill) < 1.5
    mine.close()


@pytest.mark.parametrize("killed", [1, 2])
def test_a_sum_with_a_member_that_is_gone_does_not_begin(peers: Peers, killed: int) -> None:
    mine, processes = peers(3)
    processes[killed - 1].kill()
    assert becomes_true(lambda: port_of(mine).links[killed].ended is not None, within_s=5.0)
    with pytest.raises(TransportError, match=r"device alpha: .* with device beta, gamma: connection closed by peer"):
        mine.start(gradients(ALL), torch.ones(3))


def test_close_does_not_wait_for_a_peer_that_hangs(peers: Peers) -> None:
    before = set(threading.enumerate())
    mine, (peer,) = peers()
    stop(peer)
    mine.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: [announced(activation(0), torch.ones(MANY))]})
    mine.send(activation(0), 1, [torch.ones(MANY)])
    mine.start(gradients(PAIR), torch.ones(MANY))
    began_s = time.monotonic()
    mine.close()
    assert time.monotonic() - began_s < 1.0
    assert set(threading.enumerate()) <= before


def test_a_peer_that_hangs_is_named_when_time_runs_out(peers: Peers) -> None:
    mine, _ = peers(3, timeout_s=0.5)
    with pytest.raises(TransportTimeoutError, match=r"device alpha: gradients .* with device beta, gamma: .* within 0\.5 s"):
        mine.start(gradients(ALL), torch.ones(3)).wait()


def test_a_message_that_the_peer_does_not_take_is_an_error_at_the_end_of_the_window(peers: Peers) -> None:
    mine, (peer,) = peers(timeout_s=0.5)
    stop(peer)
    mine.open_window({}, {1: [announced(activation(3), torch.ones(MANY))]})
    mine.send(activation(3), 1, [torch.ones(MANY)])
    problem = r"device alpha: activation 0->1 of microbatch 3 with device beta: it was not taken .* 0\.5 s"
    with pytest.raises(TransportTimeoutError, match=problem):
        mine.close_window()


LEAVES_WITHOUT_CLOSE = """
import torch
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from raypipe.actors.transport.process import ProcessTransport
from tests.processes.process_ends import settings
from tests.processes.transport_contract import *
server = StoreServer("127.0.0.1", secret=Secret.new())
first, second = [ProcessTransport(**settings(device, num_devices=2, run=0, store=server.address)) for device in PAIR]
together(first.connect, second.connect)
first.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: [announced(activation(0), torch.ones(2))]})
first.send(activation(0), 1, [torch.ones(2)])
first.start(gradients(PAIR), torch.ones(2))
"""


def test_a_process_ends_without_close() -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_WITHOUT_CLOSE], cwd=root, capture_output=True, text=True, timeout=40.0, check=False
    )
    assert ended.returncode == 0, ended.stderr


# What is noted


@pytest.mark.parametrize("communication", [Communication(), UNSCHEDULED], ids=["scheduled", "unscheduled"])
def test_each_chunk_that_leaves_is_noted_where_it_comes_with_the_same_number(make: Make, communication: Communication) -> None:
    ends = connected(make, 3, communication=communication)
    message = announced(activation(0), torch.ones(10))
    ends[0].open_window({}, {1: [message]})
    ends[1].open_window({0: [message]}, {})
    of_all = gradients(ALL)

    def member(device: int) -> None:
        pending = ends[device].start(of_all, torch.ones(MEGABYTE))
        if device == 0:
            ends[0].send(activation(0), 1, [torch.ones(10)])
        if device == 1:
            ends[1].recv(activation(0), 0)
        pending.wait()

    together(*(lambda device=device: member(device) for device in ALL))
    left = {(device, chunk.peer, chunk.number): chunk for device in ALL for chunk in ends[device].departures}
    came = {(chunk.peer, device, chunk.number): chunk for device in ALL for chunk in ends[device].take_receipts()}
    assert left.keys() == came.keys()
    assert all(left[chunk].start_s < came[chunk].end_s for chunk in left), "one clock serves all devices here"
    carried = {device: [chunk.collective for (sender, *_), chunk in left.items() if sender == device] for device in ALL}
    assert carried[0].count(None) == 1
    assert {*carried[0], *carried[1], *carried[2]} == {None, of_all}
    assert all(chunk.num_bytes >= 0 and chunk.queued_bytes >= 0 for chunk in left.values())
    assert ends[1].take_receipts() == (), "they are taken once"
    assert set(ends[0].round_trips_s) == {1, 2}
    assert all(0 <= trip_s < 0.1 for trip_s in ends[0].round_trips_s.values())
