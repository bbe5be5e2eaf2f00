"""Channels over gloo: several ends in this process, one a thread, and one in each of several processes where some fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.protocol import Pending
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.sockets import connections, interface_of
from raypipe.actors.transport.store import StoreServer
from raypipe.errors import AbortedError, InputError, TransportError, TransportTimeoutError
from tests.processes.process_ends import INTERFACE, Make, Peers
from tests.processes.transport_contract import (
    ALL,
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


@pytest.fixture
def make(make: Make) -> Make:
    return partial(make, over_tcp=False)


@pytest.fixture
def peers(peers: Peers) -> Peers:
    return partial(peers, over_tcp=False)


class TestChannelsOverGloo(TransportContract):
    @pytest.fixture
    def connect(self, make: Make) -> Connect:
        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            ends = [make(device, num_devices, timeout_s=timeout_s, connect_timeout_s=20.0) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected


# Connecting


def test_a_device_that_does_not_come_is_named(make: Make) -> None:
    first, second = make(0, 3, connect_timeout_s=0.3), make(1, 3, connect_timeout_s=0.3)

    def fails(end: ProcessTransport) -> None:
        with pytest.raises(TransportTimeoutError, match=r"connecting with device gamma: it did not come within 0\.3 s"):
            end.connect()

    together(lambda: fails(first), lambda: fails(second))


def test_a_store_that_does_not_answer_is_named(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    end = make(0, store=StoreAddress("127.0.0.1", port, Secret.new()), connect_timeout_s=0.3)
    with pytest.raises(
        TransportTimeoutError, match=rf"device alpha: connecting with device \(store 127.0.0.1:{port}\): there is no answer"
    ):
        end.connect()


def test_abort_ends_the_wait_for_a_device_that_does_not_come(make: Make) -> None:
    end = make(0)
    assert seconds_until_raised(AbortedError, end.connect, match="^enough$", when=lambda: end.abort("enough")) < 1.0


def test_abort_before_connect_is_not_forgotten(make: Make) -> None:
    end = make(0)
    end.abort("enough")
    with pytest.raises(AbortedError, match=r"^enough$"):
        end.connect()


def test_a_transport_that_is_not_connected_says_so(make: Make) -> None:
    with pytest.raises(TransportError, match="it is not connected: call connect"):
        make(0).open_window({}, {})


def test_a_transport_that_could_not_connect_is_out_of_use(make: Make) -> None:
    end = make(0, connect_timeout_s=0.1)
    with pytest.raises(TransportTimeoutError):
        end.connect()
    with pytest.raises(TransportError, match="out of use"):
        end.open_window({}, {})


def test_a_device_alone_connects_at_once(make: Make) -> None:
    end = make(0, 1, groups=[(0,)])
    end.connect()
    end.open_window({}, {})
    end.close_window()


def test_a_run_goes_on_when_the_store_is_gone(make: Make) -> None:
    with StoreServer("127.0.0.1", secret=Secret.new()) as server:
        ends = [make(device, store=server.address) for device in PAIR]
        together(*(end.connect for end in ends))
    open_both(ends[0], ends[1], [announced(activation(0), torch.tensor(0))])
    ends[0].send(activation(0), 1, [torch.tensor(5)])
    assert int(ends[1].recv(activation(0), 0)[0]) == 5
    pending = [end.start(gradients(PAIR), torch.ones(1)) for end in ends]
    assert [float(part.wait()) for part in pending] == [2.0, 2.0]
    for end in ends:
        end.close_window()
        end.close()


def test_connecting_again_leaves_no_descriptor_open(make: Make) -> None:
    def cycle(attempt: int) -> None:
        ends = [make(device, prefix=f"descriptors/{attempt}") for device in PAIR]
        together(*(end.connect for end in ends))
        for end in ends:
            end.close()

    cycle(0)
    before = len(os.listdir("/dev/fd"))
    for attempt in range(1, 4):
        cycle(attempt)
    assert becomes_true(lambda: len(os.listdir("/dev/fd")) <= before, within_s=2.0)


# The interface


def test_the_loopback_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") in {"lo", "lo0"}


def test_an_address_that_no_interface_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no interface of this host has the address 192\.0\.2\.1; there are: lo 127\.0\.0\.1"):
        interface_of("192.0.2.1")


def test_the_interface_of_the_address_is_used_unless_the_user_chose_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE)
    make(0, 1, host_ip="192.0.2.1", prefix="alone").connect()  # needs none
    for number, host_ip in enumerate(("127.0.0.1", "192.0.2.1")):
        together(*(make(device, host_ip=host_ip, prefix=f"chosen/{number}").connect for device in PAIR))
        assert os.environ[INTERFACE] == "lo"


# Errors in one process


def test_after_a_timeout_the_transport_is_out_of_use(make: Make) -> None:
    ends = [make(device, timeout_s=0.2, connect_timeout_s=20.0) for device in PAIR]
    together(*(end.connect for end in ends))
    ends[1].open_window({0: [announced(activation(index), torch.ones(2)) for index in range(2)]}, {})
    with pytest.raises(TransportTimeoutError):
        ends[1].recv(activation(0), 0)
    with pytest.raises(TransportError, match=r"microbatch 1 .* out of use \(device beta: activation 0->1 of microbatch 0 .* within 0.2 s"):
        ends[1].recv(activation(1), 0)
    with pytest.raises(TransportError, match="out of use"):
        ends[1].close_window()


def test_a_message_that_the_peer_does_not_take_is_an_error_at_the_end_of_the_window(make: Make) -> None:
    ends = [make(device, timeout_s=0.3, connect_timeout_s=20.0) for device in PAIR]
    together(*(end.connect for end in ends))
    ends[0].open_window({}, {1: [announced(activation(3), torch.ones(2))]})
    ends[0].send(activation(3), 1, [torch.ones(2)])
    with pytest.raises(
        TransportTimeoutError, match=r"device alpha: activation 0->1 of microbatch 3 with device beta: it was not taken .* 0\.3 s"
    ):
        ends[0].close_window()


def test_the_limit_at_the_end_of_a_window_is_for_each_message(make: Make) -> None:
    ends = [make(device, timeout_s=0.5, connect_timeout_s=20.0, receives_ahead=1) for device in PAIR]
    together(*(end.connect for end in ends))
    open_both(ends[0], ends[1], [announced(activation(index), torch.ones(2)) for index in range(8)])

    def slow_receiver() -> None:
        for index in range(8):
            threading.Event().wait(0.15)  # 1.2 s in all
            ends[1].recv(activation(index), 0)
        ends[1].close_window()

    def sender() -> None:
        for index in range(8):
            ends[0].send(activation(index), 1, [torch.ones(2)])
        ends[0].close_window()

    together(slow_receiver, sender)


def test_what_has_left_is_still_received_when_the_sender_has_closed_its_end(make: Make) -> None:
    ends = [make(device) for device in PAIR]
    together(*(end.connect for end in ends))
    open_both(ends[0], ends[1], [announced(activation(index), torch.ones(1000)) for index in range(4)])
    for index in range(4):
        ends[0].send(activation(index), 1, [torch.full((1000,), float(index))])
    ends[0].close_window()
    ends[0].close()
    assert [float(ends[1].recv(activation(index), 0)[0][0]) for index in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_abort_ends_the_wait_for_what_has_not_left(make: Make) -> None:
    ends = [make(device) for device in PAIR]
    together(*(end.connect for end in ends))
    ends[0].open_window({}, {1: [announced(activation(0), torch.ones(2))]})
    ends[0].send(activation(0), 1, [torch.ones(2)])
    assert seconds_until_raised(AbortedError, ends[0].close_window, match="^enough$", when=lambda: ends[0].abort("enough")) < 1.0


def test_a_descriptor_that_was_given_to_another_socket_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        descriptor = first.fileno()
        recorded = next(connection for connection in connections() if connection.descriptor == descriptor)
        accepted_first = server.accept()[0]
        second = socket.create_connection(server.getsockname())
        accepted_second = server.accept()[0]
        with accepted_first, accepted_second, first, second:
            os.dup2(second.fileno(), descriptor)
            recorded.shut_down()
            second.sendall(b"still open")
            accepted_second.settimeout(5.0)
            assert accepted_second.recv(100) == b"still open"


# Several processes


def _host_store_and_hang(address: Queue[StoreAddress]) -> None:
    with StoreServer("127.0.0.1", secret=Secret.new()) as server:
        address.put(server.address)
        threading.Event().wait(50.0)


def test_abort_ends_the_wait_for_a_store_that_hangs(make: Make) -> None:
    context = multiprocessing.get_context("spawn")
    address: Queue[StoreAddress] = context.Queue()
    process = context.Process(target=_host_store_and_hang, args=(address,), daemon=True)
    process.start()
    try:
        end = make(0, store=address.get(timeout=40.0))
        assert process.pid is not None
        stop = threading.Timer(0.1, os.kill, (process.pid, signal.SIGSTOP))
        stop.start()
        assert seconds_until_raised(AbortedError, end.connect, match="^enough$", when=lambda: end.abort("enough")) < 1.0
        stop.join()
    finally:
        process.kill()
        process.join()
        address.close()
        address.join_thread()


LEAVES_WITHOUT_CLOSE = """
import torch
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from raypipe.actors.transport.process import ProcessTransport
from tests.processes.process_ends import settings
from tests.processes.transport_contract import *
server = StoreServer("127.0.0.1", secret=Secret.new())
first, second = [ProcessTransport(**settings(device, num_devices=2, run=0, store=server.address, over_tcp=False)) for device in PAIR]
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


def waiting_for_a_message(mine: ProcessTransport) -> Callable[[], object]:
    return lambda: mine.recv(gradient(0), 1)


def waiting_for_a_sum(mine: ProcessTransport) -> Callable[[], object]:
    pending: Pending = mine.start(gradients(PAIR), torch.ones(3))
    return pending.wait


def waiting_for_a_send(mine: ProcessTransport) -> Callable[[], object]:
    mine.send(activation(0), 1, [torch.ones(MANY)])
    return mine.close_window


MANY = 1 << 20
WAITS = [waiting_for_a_message, waiting_for_a_sum, waiting_for_a_send]


@pytest.mark.parametrize("wait", WAITS)
def test_a_peer_that_is_killed_ends_the_wait_for_it(peers: Peers, wait: Callable[[ProcessTransport], Callable[[], object]]) -> None:
    mine, (peer,) = peers()
    mine.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: [announced(activation(0), torch.ones(MANY))]})
    act = wait(mine)
    assert (
        seconds_until_raised(TransportError, act, match="device alpha: .* with device beta: connection closed by peer", when=peer.kill)
        < 2.0
    )
    mine.close()


@pytest.mark.parametrize("killed", [1, 2])  # whichever follows this one in the ring, the sum does not wait for both
def test_a_member_that_is_killed_ends_the_wait_for_a_sum_that_another_member_holds_up(peers: Peers, killed: int) -> None:
    mine, processes = peers(3)
    pending = mine.start(gradients(ALL), torch.ones(3))
    problem = "device alpha: .* with device beta, gamma: connection closed by peer"
    assert seconds_until_raised(TransportError, pending.wait, match=problem, when=processes[killed - 1].kill) < 2.0
    mine.close()


@pytest.mark.parametrize("wait", WAITS)
def test_abort_ends_the_wait_for_a_peer_that_hangs(peers: Peers, wait: Callable[[ProcessTransport], Callable[[], object]]) -> None:
    mine, (peer,) = peers()
    assert peer.pid is not None
    os.kill(peer.pid, signal.SIGSTOP)
    mine.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: [announced(activation(0), torch.ones(MANY))]})
    act = wait(mine)
    assert seconds_until_raised(AbortedError, act, match="^enough$", when=lambda: mine.abort("enough")) < 1.0
    began_s = time.monotonic()
    mine.close()
    assert time.monotonic() - began_s < 1.0


def test_close_does_not_wait_for_a_peer_that_hangs(peers: Peers) -> None:
    before = set(threading.enumerate())
    mine, (peer,) = peers()
    assert peer.pid is not None
    os.kill(peer.pid, signal.SIGSTOP)
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


def test_the_connections_of_others_outlive_an_abort(peers: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        stop = threading.Event()
        foreign: list[tuple[socket.socket, socket.socket]] = []

        def open_others() -> None:
            while not stop.wait(0.001) and len(foreign) < 300:
                foreign.append((socket.create_connection(server.getsockname()), server.accept()[0]))

        # They come while the groups are made, which is when the transport looks for connections of its own.
        thread = threading.Thread(target=open_others)
        threading.Timer(0.0, thread.start).run()
        mine, _ = peers()
        stop.set()
        thread.join()
        mine.abort("enough")
        for near, far in foreign:
            with near, far:
                near.sendall(b"x")
                far.settimeout(5.0)
                assert far.recv(1) == b"x"
