"""Channels and sums over TCP: the contract of all transports, chunks, turns, and peers that end in the middle."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, says the manual

from raypipe.actors.transport.process import ProcessTransport
from raypipe.communication.policy import Traffic
from raypipe.errors import TransportError
from tests.processes.process_ends import Make, Peers
from tests.processes.transport_contract import (
    MEGABYTE,
    PAIR,
    Connect,
    TransportContract,
    activation,
    announced,
    gradients,
    open_both,
    seconds_until_raised,
    together,
)


class TestChannelsOverTcp(TransportContract):
    @pytest.fixture
    def connect(self, make: Make) -> Connect:
        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            ends = [make(device, num_devices, timeout_s=timeout_s, connect_timeout_s=20.0, over_tcp=True) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected


# Sums


def summed(ends: Sequence[ProcessTransport], shares: Sequence[Tensor], *, num_sums: int, backwards: Collection[int]) -> list[Tensor]:
    """Each member's sums of as many copies of the shares; some members begin them in the other order."""
    members = tuple(range(len(ends)))

    def device(number: int) -> Tensor:
        order = range(num_sums) if number not in backwards else reversed(range(num_sums))
        pending = {update: ends[number].start(gradients(members, update=update), shares[number] * (update + 1)) for update in order}
        return torch.cat([pending[update].wait() for update in range(num_sums)])

    found: list[Tensor] = together(*(partial(device, number) for number in members))
    return found


@pytest.mark.parametrize("num_members", [2, 3])
def test_no_size_of_chunks_changes_a_bit_of_a_sum(make: Make, num_members: int) -> None:
    shares = [torch.randn(100_003, generator=torch.Generator().manual_seed(number)) for number in range(num_members)]
    results: list[Tensor] = []
    for run, chunk_s in enumerate((1e-9, 1e-3, 1e3)):
        prefix = f"chunks {num_members} {run}/0"
        ends = [make(device, num_members, over_tcp=True, chunk_s=chunk_s, prefix=prefix) for device in range(num_members)]
        together(*(end.connect for end in ends))
        results += summed(ends, shares, num_sums=3, backwards=(1,))
        for end in ends:
            end.close()
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0][:100_003], sum(shares, torch.zeros(100_003)), atol=1e-5)


def test_a_message_overtakes_a_sum(make: Make) -> None:
    ends = [make(device, over_tcp=True) for device in PAIR]
    together(*(end.connect for end in ends))
    big = torch.ones(8 * MEGABYTE)
    open_both(ends[0], ends[1], [announced(activation(0), torch.tensor(0.0))])
    pending = [ends[0].start(gradients(PAIR), big.clone())]
    ends[0].send(activation(0), 1, [torch.tensor(1.0)])
    pending.append(ends[1].start(gradients(PAIR), big.clone()))
    assert float(ends[1].recv(activation(0), 0)[0]) == 1.0
    assert all(torch.equal(part.wait(), 2 * big) for part in pending)
    together(ends[0].close_window, ends[1].close_window)
    hub = ends[0]._endpoints.tcp
    assert hub is not None
    traffic = [record.traffic for record in hub.sender.records]
    assert traffic.index(Traffic.MESSAGE) < len(traffic) - 1, "chunks of the sum left behind it"
    assert max(record.num_bytes for record in hub.sender.records) < 16 * MEGABYTE


def test_of_two_sums_the_one_that_is_due_first_leaves_first(make: Make) -> None:
    ends = [make(device, over_tcp=True) for device in PAIR]
    together(*(end.connect for end in ends))
    large, small = [torch.ones(16 * MEGABYTE) for _ in PAIR], [torch.ones(MEGABYTE) for _ in PAIR]
    late = [end.start(gradients(PAIR, update=0), share, deadline=20) for end, share in zip(ends, large, strict=True)]
    early = [end.start(gradients(PAIR, update=1), share, deadline=10) for end, share in zip(ends, small, strict=True)]
    together(*(part.wait for part in early))
    hub = ends[0]._endpoints.tcp
    assert hub is not None
    with hub.sender.lock:
        under_way = [one for one in hub._sums._under_way.values() if not one.is_done]
    together(*(part.wait for part in late))
    assert len(under_way) == 1, "the other one was not waited for"


# Peers that end


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_ends_or_stops_in_the_middle_of_a_sum_is_noticed(peers: Peers, how: signal.Signals) -> None:
    mine, (other,) = peers(2, over_tcp=True, timeout_s=2.0)
    pending = mine.start(gradients(PAIR), torch.ones(16 * MEGABYTE))
    assert other.pid is not None
    wait_s = seconds_until_raised(
        TransportError,
        pending.wait,
        match="device alpha: gradients of stage 3 for update 0 with device beta: ",
        when=partial(os.kill, other.pid, how),
    )
    assert wait_s < (2.0 if how is signal.SIGKILL else 4.0)


def test_a_message_that_a_dead_peer_does_not_take_is_named(peers: Peers) -> None:
    mine, (other,) = peers(2, over_tcp=True, timeout_s=2.0)
    big = torch.ones(16 * MEGABYTE)
    mine.open_window({}, {1: [announced(activation(0), big)]})
    other.kill()
    other.join()

    def send() -> None:
        mine.send(activation(0), 1, [big])
        mine.close_window()

    with pytest.raises(TransportError, match=r"activation 0->1 of microbatch 0 with device beta: .*closed"):
        send()


def test_a_stranger_is_not_let_in(make: Make) -> None:
    ends = [make(device, over_tcp=True, connect_timeout_s=10.0) for device in PAIR]
    stranger = threading.Thread(target=_knock, args=(ends[1].prefix, ends[1]._store_address), daemon=True)
    stranger.start()
    together(*(end.connect for end in ends))
    stranger.join(5.0)
    open_both(ends[0], ends[1], [announced(activation(0), torch.tensor(0))])
    ends[0].send(activation(0), 1, [torch.tensor(5)])
    assert int(ends[1].recv(activation(0), 0)[0]) == 5


def _knock(prefix: str, address: tuple[str, int]) -> None:
    """Call device 1 without its token."""
    store = PrefixStore(prefix, TCPStore(*address, is_master=False))
    host, port, _ = store.get("tcp/1").decode().split()
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as end:
        end.sendall(b"\0" * 20)
        end.recv(1)
