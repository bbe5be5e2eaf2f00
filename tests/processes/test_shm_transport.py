"""Channels through shared memory: several ends in this process, one a thread, and one in each of several processes where some fail."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.actors.transport import gloo, shm
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.shm_channel import MAX_SLOTS
from raypipe.errors import AbortedError, TransportError, TransportTimeoutError
from raypipe.schedules.lower import Direction, Message
from tests.processes.process_ends import INTERFACE, Make, Peers, all_channels
from tests.processes.transport_contract import (
    ALL,
    MEGABYTE,
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

pytestmark = pytest.mark.skipif(not shm.available(), reason="needs memfd_create, which Linux has")

MANY = 3 * MAX_SLOTS
BIG = 4 * MEGABYTE
"""Numbers of a tensor of 16 MB."""


class TestChannelsThroughSharedMemory(TransportContract):
    @pytest.fixture
    def connect(self, make: Make) -> Connect:
        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            settings: dict[str, Any] = {"shared": all_channels(num_devices), "timeout_s": timeout_s, "connect_timeout_s": 20.0}
            ends = [make(device, num_devices, **settings) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected


class TestChannelsOfBothKinds(TransportContract):
    """Up through shared memory, down over gloo."""

    @pytest.fixture
    def connect(self, make: Make) -> Connect:
        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            shared = [(source, target) for source, target in all_channels(num_devices) if source < target]
            settings: dict[str, Any] = {"shared": shared, "timeout_s": timeout_s, "connect_timeout_s": 20.0}
            ends = [make(device, num_devices, **settings) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected


Pair = Callable[..., tuple[ProcessTransport, ProcessTransport]]
"""Makes two connected ends without collectives."""


_pairs = itertools.count()


@pytest.fixture
def pair(make: Make) -> Pair:
    def connected(*, timeout_s: float = 20.0) -> tuple[ProcessTransport, ProcessTransport]:
        settings: dict[str, Any] = {"shared": all_channels(2), "groups": [], "timeout_s": timeout_s, "connect_timeout_s": 20.0}
        settings["prefix"] = f"pair/{next(_pairs)}"
        ends = (make(0, **settings), make(1, **settings))
        together(*(end.connect for end in ends))
        return ends

    return connected


@pytest.fixture(autouse=True)
def nothing_is_left(make: Make) -> Iterator[None]:
    """No test leaves a file in /dev/shm, or a mapping in this process; depends on `make`, to look before the ends are made."""
    files = shared_files()
    yield
    assert shared_files() <= files


def shared_files() -> set[str]:
    """Return the files in /dev/shm, but for those that Python's queues and Ray make for a moment in other processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "plasma"))}


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:raypipe" in line]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("raypipe sends")]


def sent(end: ProcessTransport, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        end.send(activation(index), 1, [tensor])


def received(end: ProcessTransport, count: int) -> list[Tensor]:
    return [end.recv(activation(index), 0)[0] for index in range(count)]


# Connecting


def test_a_device_that_only_shares_memory_has_nothing_of_gloo(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE)
    monkeypatch.setattr(gloo, "make_group", None)
    for end in pair():
        end.open_window({}, {})
        end.close_window()
    assert INTERFACE not in os.environ
    assert not threads()


def test_a_device_that_does_not_come_is_named(make: Make) -> None:
    end = make(0, shared=all_channels(2), connect_timeout_s=0.3)
    with pytest.raises(TransportTimeoutError, match=r"device alpha: connecting with device beta: it did not come within 0\.3 s"):
        end.connect()


def test_ends_that_cannot_reach_each_other_say_what_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # As from a container with a network of its own, where nobody has this name.
    call = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda end, address: call(end, "\0nobody" if end.family == socket.AF_UNIX else address))
    ends = [make(device, shared=all_channels(2), connect_timeout_s=2.0) for device in PAIR]

    def calls() -> None:
        with pytest.raises(
            TransportError,
            match=r"beta: connecting with device alpha: no way through shared memory \(Connection refused\).*transport to tcp",
        ):
            ends[1].connect()
        ends[0].abort("another failed")

    def listens() -> None:
        with pytest.raises(AbortedError):
            ends[0].connect()

    together(calls, listens)


def test_connecting_again_leaves_no_descriptor_and_no_memory(pair: Pair) -> None:
    def cycle() -> None:
        ends = pair()
        open_both(ends[0], ends[1], [announced(activation(0), torch.ones(9))])
        sent(ends[0], [torch.ones(9)])
        received(ends[1], 1)
        assert mappings()
        for end in ends:
            end.close_window()
            end.close()

    cycle()
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        cycle()
    assert becomes_true(lambda: len(os.listdir("/dev/fd")) <= before, within_s=2.0)
    assert not mappings()


# The ring


def test_more_messages_than_slots_neither_wait_nor_change_their_order(pair: Pair) -> None:
    sender, receiver = pair()
    tensors = [torch.full((1000,), float(index)) for index in range(MANY)]
    for _ in range(3):
        open_both(sender, receiver, [announced(activation(index), tensor) for index, tensor in enumerate(tensors)])
        sent(sender, tensors)
        assert threads() == ["raypipe sends 0->1"]
        for got, tensor in zip(received(receiver, MANY), tensors, strict=True):
            assert torch.equal(got, tensor)
        together(sender.close_window, receiver.close_window)
        assert becomes_true(lambda: not threads(), within_s=2.0)


def test_what_found_no_slot_leaves_while_the_sender_waits_for_something_that_needs_it(pair: Pair) -> None:
    ends = pair()
    activations = [announced(activation(index), torch.tensor(0.0)) for index in range(MANY)]
    gradients = [announced(gradient(0), torch.tensor(0.0))]

    def sends_first() -> None:
        ends[0].open_window({1: gradients}, {1: activations})
        sent(ends[0], [torch.tensor(float(index)) for index in range(MANY)])
        assert float(ends[0].recv(gradient(0), 1)[0]) == MANY - 1
        ends[0].close_window()

    def answers_the_last() -> None:
        ends[1].open_window({0: activations}, {0: gradients})
        ends[1].send(gradient(0), 0, [received(ends[1], MANY)[-1]])
        ends[1].close_window()

    together(sends_first, answers_the_last)


def test_messages_of_any_sizes_follow_each_other(pair: Pair) -> None:
    sender, receiver = pair()
    sizes = [1, 100_000, 0, 7, 20, BIG, 3, 2 * BIG, *[5] * MAX_SLOTS, 100_000]
    tensors = [torch.full((size,), float(size)) for size in sizes]
    for read_late in (True, False):
        open_both(sender, receiver, [announced(activation(index), tensor) for index, tensor in enumerate(tensors)])

        def read() -> None:
            for got, tensor in zip(received(receiver, len(sizes)), tensors, strict=True):
                assert torch.equal(got, tensor)

        if read_late:
            sent(sender, tensors)
            read()
        else:
            together(lambda: sent(sender, tensors), read)
        together(sender.close_window, receiver.close_window)


def test_a_thousand_messages_each_larger_than_the_last_make_few_rings(pair: Pair) -> None:
    sender, receiver = pair()
    tensors = [torch.ones(100 * index) for index in range(1000)]
    open_both(sender, receiver, [announced(activation(index), tensor) for index, tensor in enumerate(tensors)])
    before = len(mappings())
    sent(sender, tensors)
    assert len(mappings()) <= before + 2
    for got, tensor in zip(received(receiver, 1000), tensors, strict=True):
        assert got.shape == tensor.shape
    together(sender.close_window, receiver.close_window)


def test_tensors_that_were_received_do_not_change_when_their_slot_is_used_again(pair: Pair) -> None:
    sender, receiver = pair()
    open_both(sender, receiver, [announced(activation(index), torch.tensor(0)) for index in range(MANY)])
    sent(sender, [torch.tensor(index) for index in range(MANY)])
    assert [int(tensor) for tensor in received(receiver, MANY)] == list(range(MANY))
    together(sender.close_window, receiver.close_window)


def test_a_message_of_other_rows_or_another_pipeline_is_refused(pair: Pair) -> None:
    for message in (
        Message(Direction.ACTIVATION, 0, 1, 0, pipeline=1),
        Message(Direction.ACTIVATION, 0, 1, 0, rows=(0.0, 0.5)),
        Message(Direction.ACTIVATION, 0, 1, 0, part=1),
    ):
        sender, receiver = pair()
        receiver.open_window({0: [announced(activation(0), torch.ones(2))]}, {})
        sender.open_window({}, {1: [announced(message, torch.ones(2))]})
        sender.send(message, 1, [torch.ones(2)])
        with pytest.raises(TransportError, match=r"expected activation 0->1 of microbatch 0 \(float32\[2\]\), got activation 0->1"):
            receiver.recv(activation(0), 0)


@pytest.mark.parametrize("shared", [all_channels(2), []], ids=["shm", "gloo"])
@pytest.mark.parametrize(
    ("message", "tensors", "problem"),
    [
        (
            activation(0),
            [torch.ones(3)],
            r"microbatch 0 with device beta: it was announced as .*float32\[2\]\), and not as .*float32\[3\]\)",
        ),
        (activation(0), [torch.ones(2).double()], r"announced as .*float32\[2\]\), and not as .*float64\[2\]\)"),
        (activation(0), [torch.ones(2)] * 2, r"announced as .*float32\[2\]\), and not as .*float32\[2\], float32\[2\]\)"),
        (activation(0), [], r"announced as .*float32\[2\]\), and not as .*no tensors\)"),
    ],
    ids=["shape", "dtype", "more", "fewer"],
)
def test_what_was_not_announced_is_not_sent(
    make: Make, shared: list[tuple[int, int]], message: Message, tensors: list[Tensor], problem: str
) -> None:
    ends = [make(device, shared=shared, groups=[]) for device in PAIR]
    together(*(end.connect for end in ends))
    ends[0].open_window({}, {1: [announced(activation(0), torch.ones(2))]})
    with pytest.raises(TransportError, match=problem):
        ends[0].send(message, 1, tensors)
    with pytest.raises(TransportError, match="out of use"):
        ends[0].close_window()


def test_messages_with_long_descriptions_are_told_apart(pair: Pair) -> None:
    sender, receiver = pair()
    many = [torch.full((2,), float(index)) for index in range(200)]
    open_both(sender, receiver, [announced(activation(index), *many) for index in range(2)])
    sender.send(activation(0), 1, many)
    for got, tensor in zip(receiver.recv(activation(0), 0), many, strict=True):
        assert torch.equal(got, tensor)
    sender.send(activation(1), 1, many)
    receiver.recv(activation(1), 0)
    together(sender.close_window, receiver.close_window)
    receiver.open_window({0: [announced(activation(0), *many)]}, {})
    many[-1] = torch.ones(3)
    sender.open_window({}, {1: [announced(activation(0), *many)]})
    sender.send(activation(0), 1, many)
    with pytest.raises(TransportError, match=r"expected activation 0->1 of microbatch 0 .*, got activation 0->1 of microbatch 0 "):
        receiver.recv(activation(0), 0)


def test_views_that_stand_for_other_numbers_are_sent_as_what_they_stand_for(pair: Pair) -> None:
    sender, receiver = pair()
    number = torch.tensor([1 + 2j, 3 - 4j])
    tensors = [number.conj(), number.conj().imag, torch.ones(3, 4).t(), torch.ones(3, requires_grad=True)]
    assert tensors[0].is_conj()
    assert tensors[1].is_neg()
    open_both(sender, receiver, [announced(activation(0), *tensors)])
    sender.send(activation(0), 1, tensors)
    for got, tensor in zip(receiver.recv(activation(0), 0), tensors, strict=True):
        assert torch.equal(got, tensor)
    together(sender.close_window, receiver.close_window)


NO_MEMORY = """
import resource, pytest
from raypipe.actors.transport.secret import Secret
from raypipe.actors.transport.store import StoreServer
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.shm_channel import MAX_SLOTS
from raypipe.errors import TransportError
from tests.processes.process_ends import all_channels, settings
from tests.processes.transport_contract import *
server = StoreServer("127.0.0.1", secret=Secret.new())
common = {"num_devices": 2, "run": 0, "store": server.address, "shared": all_channels(2), "groups": []}
ends = [ProcessTransport(**settings(device, **common)) for device in PAIR]
together(*(end.connect for end in ends))
ends[0].open_window({}, {1: [announced(activation(0), torch.ones(MEGABYTE // 4))]})
resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, MEGABYTE))
with pytest.raises(TransportError, match="no shared memory for 16 messages of .* bytes .File too large.; set scaling.transport to tcp"):
    ends[0].send(activation(0), 1, [torch.ones(MEGABYTE // 4)])
for end in ends:
    end.close()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """What a new process that runs the code says, when it has ended."""
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=40.0, check=False)


def test_where_memory_lacks_the_send_says_so() -> None:
    ended = python(NO_MEMORY)
    assert ended.returncode == 0, ended.stderr


# Errors


def test_after_a_timeout_the_transport_is_out_of_use(pair: Pair) -> None:
    _, receiver = pair(timeout_s=0.2)
    receiver.open_window({0: [announced(activation(index), torch.ones(2)) for index in range(2)]}, {})
    with pytest.raises(TransportTimeoutError, match=r"microbatch 0 with device alpha: it did not come within 0\.2 s"):
        receiver.recv(activation(0), 0)
    with pytest.raises(TransportError, match=r"microbatch 1 .* out of use .* within 0\.2 s"):
        receiver.recv(activation(1), 0)


def test_what_has_left_is_still_received_when_the_sender_has_closed_its_end(pair: Pair) -> None:
    sender, receiver = pair()
    count = MAX_SLOTS
    receiver.open_window(
        {0: [announced(activation(index), torch.tensor(0)) for index in range(count + 1)]}, {0: [announced(gradient(0), torch.ones(1))]}
    )
    sender.open_window({}, {1: [announced(activation(index), torch.tensor(0)) for index in range(count)]})
    receiver.send(gradient(0), 0, [torch.ones(1)])  # never read: the sender's socket then ends as reset
    sent(sender, [torch.tensor(index) for index in range(count)])
    sender.close_window()
    sender.close()
    assert [int(tensor) for tensor in received(receiver, count)] == list(range(count))
    with pytest.raises(TransportError, match="connection closed by peer"):
        receiver.recv(activation(count), 0)


def test_messages_that_are_never_taken_are_an_error_at_the_end_of_the_window_if_they_found_no_slot(pair: Pair) -> None:
    sender, _ = pair(timeout_s=0.3)
    sender.open_window({}, {1: [announced(activation(index), torch.ones(2)) for index in range(MAX_SLOTS + 2)]})
    sent(sender, [torch.ones(2)] * (MAX_SLOTS + 2))
    with pytest.raises(
        TransportTimeoutError, match=rf"microbatch {MAX_SLOTS} with device beta: it was not taken within 0\.3 s; the peer is stuck"
    ):
        sender.close_window()


def test_the_limit_at_the_end_of_a_window_is_for_each_message(pair: Pair) -> None:
    ends = pair(timeout_s=0.5)
    count = MAX_SLOTS + 8
    open_both(ends[0], ends[1], [announced(activation(index), torch.ones(2)) for index in range(count)])

    def slow_receiver() -> None:
        for index in range(count):
            threading.Event().wait(0.07)  # 1.7 s in all
            ends[1].recv(activation(index), 0)
        ends[1].close_window()

    def sender() -> None:
        sent(ends[0], [torch.ones(2)] * count)
        ends[0].close_window()

    together(slow_receiver, sender)


# Several processes


def waiting_for_a_message(mine: ProcessTransport) -> Callable[[], object]:
    return lambda: mine.recv(gradient(0), 1)


def waiting_for_a_slot(mine: ProcessTransport) -> Callable[[], object]:
    sent(mine, [torch.ones(2)] * MANY)
    return mine.close_window


PAIRS_OF_ONES = [announced(activation(index), torch.ones(2)) for index in range(MANY)]
WAITS = [waiting_for_a_message, waiting_for_a_slot]
SHARED = {"shared": all_channels(2), "groups": []}


@pytest.mark.parametrize("wait", WAITS)
def test_a_peer_that_is_killed_is_noticed_at_once(peers: Peers, wait: Callable[[ProcessTransport], Callable[[], object]]) -> None:
    mine, (peer,) = peers(**SHARED)
    mine.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: PAIRS_OF_ONES})
    act = wait(mine)
    wait_s = seconds_until_raised(
        TransportError, act, match=r"device alpha: .* with device beta: connection closed by peer", when=peer.kill
    )
    assert wait_s < 1.0
    mine.close()
    assert not mappings()


def test_sending_to_a_peer_that_was_killed_is_an_error(peers: Peers) -> None:
    mine, (peer,) = peers(**SHARED)
    mine.open_window({}, {1: PAIRS_OF_ONES})
    sent(mine, [torch.ones(2)])
    peer.kill()
    peer.join()
    with pytest.raises(TransportError, match=r"device alpha: .* with device beta: connection closed by peer"):
        mine.send(activation(1), 1, [torch.ones(2)])


@pytest.mark.parametrize("wait", WAITS)
def test_abort_ends_the_wait_for_a_peer_that_hangs(peers: Peers, wait: Callable[[ProcessTransport], Callable[[], object]]) -> None:
    before = set(threading.enumerate())
    mine, (peer,) = peers(**SHARED)
    assert peer.pid is not None
    os.kill(peer.pid, signal.SIGSTOP)
    mine.open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: PAIRS_OF_ONES})
    act = wait(mine)
    assert seconds_until_raised(AbortedError, act, match="^enough$", when=lambda: mine.abort("enough")) < 1.0
    began_s = time.monotonic()
    mine.close()
    assert time.monotonic() - began_s < 1.0
    assert set(threading.enumerate()) <= before
    assert not mappings()


def test_the_peers_of_an_aborted_device_find_their_connections_closed(peers: Peers, make: Make) -> None:
    ends = [make(device, 3, prefix="cascade/0", shared=all_channels(3), groups=[]) for device in ALL]
    together(*(end.connect for end in ends))
    ends[0].open_window({1: [announced(activation(0, source=1, target=0), torch.ones(2))]}, {})
    wait_s = seconds_until_raised(
        TransportError,
        lambda: ends[0].recv(activation(0, source=1, target=0), 1),
        match="connection closed by peer: its process ended, or gave up",
        when=lambda: ends[1].abort("enough"),
    )
    assert wait_s < 1.0


def test_sums_pass_beside_shared_memory(peers: Peers) -> None:
    mine, _ = peers(shared=all_channels(2), timeout_s=0.5)
    with pytest.raises(TransportTimeoutError, match=r"device alpha: gradients .* with device beta: .* within 0\.5 s"):
        mine.start(gradients(PAIR), torch.ones(3)).wait()


LEAVES_WITHOUT_CLOSE = """
import os, signal
from raypipe.actors.transport.secret import Secret
from raypipe.actors.transport.store import StoreServer
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.shm_channel import MAX_SLOTS
from tests.processes.process_ends import all_channels, settings
from tests.processes.transport_contract import *
server = StoreServer("127.0.0.1", secret=Secret.new())
common = {"num_devices": 2, "run": 0, "store": server.address, "shared": all_channels(2), "groups": []}
ends = [ProcessTransport(**settings(device, **common)) for device in PAIR]
together(*(end.connect for end in ends))
messages = [announced(activation(index), torch.ones(2)) for index in range(50)]
ends[0].open_window({1: [announced(gradient(0), torch.ones(2))]}, {1: messages})
for index in range(50):
    ends[0].send(activation(index), 1, [torch.ones(2)])
"""


def test_a_process_ends_without_close() -> None:
    ended = python(LEAVES_WITHOUT_CLOSE)
    assert ended.returncode == 0, ended.stderr


def test_a_process_that_is_killed_leaves_nothing() -> None:
    # What it could leave are files in /dev/shm, which the fixture looks for.
    assert python(LEAVES_WITHOUT_CLOSE + "os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL
