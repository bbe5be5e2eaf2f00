"""Transports between threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from raypipe.actors.transport.local import LocalNetwork
from raypipe.actors.transport.protocol import Transport
from raypipe.errors import TransportError, TransportTimeoutError
from tests.processes.transport_contract import ALL, NAMES, PAIR, Connect, TransportContract, activation, announced, gradients


class TestLocalTransport(TransportContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        made: list[Transport] = []

        def make(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[Transport]:
            network = LocalNetwork(num_devices, timeout_s=timeout_s, names=NAMES[:num_devices])
            made.extend(network.transport(device) for device in range(num_devices))
            return made

        yield make
        for transport in made:
            transport.close()


def test_devices_are_called_by_their_numbers_without_names() -> None:
    receiver = LocalNetwork(2, timeout_s=0.01).transport(1)
    receiver.open_window({0: [announced(activation(0), torch.ones(1))]}, {})
    with pytest.raises(TransportTimeoutError, match=r"device 1: .* with device 0: "):
        receiver.recv(activation(0), 0)


def test_both_what_was_expected_and_what_came_are_named() -> None:
    network = LocalNetwork(2, timeout_s=1.0)
    sender, receiver = network.transport(0), network.transport(1)
    receiver.open_window({0: [announced(activation(0), torch.ones(2, 3))]}, {})
    sender.send(activation(1), 1, [torch.arange(4), torch.tensor(True)])
    with pytest.raises(
        TransportError,
        match=r"expected activation .* microbatch 0 \(float32\[2, 3\]\), got activation .* microbatch 1 \(int64\[4\], bool\[\]\)",
    ):
        receiver.recv(activation(0), 0)


def test_a_message_does_not_change_when_the_sender_changes_the_tensor() -> None:
    network = LocalNetwork(2, timeout_s=1.0)
    sender, receiver = network.transport(0), network.transport(1)
    receiver.open_window({0: [announced(activation(0), torch.ones(2))]}, {})
    tensor = torch.ones(2)
    sender.send(activation(0), 1, [tensor])
    tensor.zero_()
    assert receiver.recv(activation(0), 0)[0].tolist() == [1.0, 1.0]


def test_sums_follow_the_order_of_the_members_whoever_comes_first() -> None:
    values = (1e16, 1.0, -1e16)  # in float64 only the sums in another order than this one give 1
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        network = LocalNetwork(3, timeout_s=1.0)
        ends = [network.transport(device) for device in ALL]
        pending = [ends[device].start(gradients(ALL), torch.tensor(values[device], dtype=torch.float64)) for device in order]
        assert [float(part.wait()) for part in pending] == [0.0] * 3


def test_members_that_bring_different_things_are_all_told() -> None:
    network = LocalNetwork(2, timeout_s=1.0)
    ends = [network.transport(device) for device in PAIR]
    for brought in (
        [ends[0].start(gradients(PAIR), torch.ones(2)), ends[1].start(gradients(PAIR), torch.ones(3))],
        [ends[0].start(gradients(PAIR), torch.ones(2)), ends[1].start(gradients(PAIR, update=1), torch.ones(2))],
    ):
        for part in brought:
            with pytest.raises(TransportError, match="its members brought different things: "):
                part.wait()


def test_abort_of_one_device_leaves_the_others_alone() -> None:
    network = LocalNetwork(3, timeout_s=1.0)
    ends = [network.transport(device) for device in ALL]
    ends[2].abort("enough")
    ends[1].open_window({0: [announced(activation(0), torch.tensor(0))]}, {})
    ends[0].send(activation(0), 1, [torch.tensor(5)])
    assert int(ends[1].recv(activation(0), 0)[0]) == 5


def test_what_was_sent_before_the_end_was_closed_is_still_received() -> None:
    network = LocalNetwork(2, timeout_s=1.0)
    sender, receiver = network.transport(0), network.transport(1)
    receiver.open_window({0: [announced(activation(index), torch.tensor(0)) for index in range(2)]}, {})
    sender.send(activation(0), 1, [torch.tensor(5)])
    sender.close()
    assert int(receiver.recv(activation(0), 0)[0]) == 5
    with pytest.raises(TransportError, match="the peer has closed its end"):
        receiver.recv(activation(1), 0)
