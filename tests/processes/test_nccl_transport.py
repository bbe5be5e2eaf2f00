"""Channels and sums over NCCL, with another library in NCCL's place: what the transport makes of it, without a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.actors.transport.channel import ChannelError
from raypipe.actors.transport.nccl import Sum
from raypipe.actors.transport.process import ProcessTransport
from raypipe.errors import RunError, TransportError, TransportTimeoutError
from raypipe.schedules.lower import Message
from tests.processes.fake_nccl import FakeCommunicator, FakeNccl, Network, Task, _Meeting
from tests.processes.process_ends import Make, all_channels
from tests.processes.transport_contract import (
    PAIR,
    Connect,
    TransportContract,
    activation,
    announced,
    becomes_true,
    gradients,
    open_both,
    together,
)


class TestChannelsOverNccl(TransportContract):
    @pytest.fixture
    def connect(self, make: Make) -> Connect:
        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            network = Network()
            settings: dict[str, Any] = {"timeout_s": timeout_s, "connect_timeout_s": 20.0}
            ends = [make(device, num_devices, library=FakeNccl(network), **settings) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected

    @pytest.mark.skip(reason="NCCL pairs what its ends name without looking at it; lowered programs name the same at both ends")
    def test_what_the_peer_sent_instead_is_never_taken_for_the_message(
        self, connect: Connect, message: Message, tensors: list[Tensor]
    ) -> None:
        """See `TransportContract`."""


class TestChannelsWithinAGpu(TransportContract):
    @pytest.fixture
    def connect(self, make: Make) -> Connect:
        def connected(num_devices: int = 2, *, timeout_s: float = 20.0) -> Sequence[ProcessTransport]:
            network = Network()
            settings: dict[str, Any] = {"timeout_s": timeout_s, "connect_timeout_s": 20.0, "shared": all_channels(num_devices)}
            ends = [make(device, num_devices, library=FakeNccl(network), **settings) for device in range(num_devices)]
            together(*(end.connect for end in ends))
            return ends

        return connected


@pytest.mark.parametrize("shared", [False, True], ids=["over NCCL", "within a GPU"])
def test_what_was_sent_is_read_when_its_turn_comes_even_if_nobody_else_keeps_it(make: Make, shared: bool) -> None:
    network = Network()
    ends = [make(device, library=FakeNccl(network), shared=all_channels(2) if shared else ()) for device in PAIR]
    together(*(end.connect for end in ends))
    open_both(ends[0], ends[1], [announced(activation(index), torch.empty(1 << 16)) for index in range(8)])
    for index in range(8):
        ends[0].send(activation(index), 1, [torch.full((1 << 16,), float(index))])
        torch.full((1 << 16,), -1.0)  # takes the memory, if it is free
    for index in range(8):
        assert torch.equal(ends[1].recv(activation(index), 0)[0], torch.full((1 << 16,), float(index)))
    together(*(end.close_window for end in ends))


def test_a_member_that_comes_and_does_not_answer_over_nccl_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    # Where the machine's DNS loses an answer, meeting takes a second.
    ends = [make(device, library=FakeNccl(network), connect_timeout_s=3.0) for device in PAIR]
    answer = threading.Event()
    of_all = FakeNccl.communicator

    def silent(self: FakeNccl, num_ranks: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        if rank == 1:
            answer.wait(20.0)
        return of_all(self, num_ranks, unique_id, rank)

    monkeypatch.setattr(FakeNccl, "communicator", silent)

    def refused(end: ProcessTransport) -> str:
        with pytest.raises(TransportTimeoutError) as caught:
            end.connect()
        return str(caught.value)

    first, second = together(*(lambda end=end: refused(end) for end in ends))
    answer.set()
    assert "connecting with device beta: it came, but did not answer over NCCL within 3 s" in first
    assert "device alpha" in second


def test_what_nccl_says_of_itself_is_an_error_with_the_peers_name(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    ends = [make(device, library=FakeNccl(network)) for device in PAIR]
    together(*(end.connect for end in ends))
    ends[0].check()
    monkeypatch.setattr(FakeCommunicator, "problem", lambda _: "NCCL failed: remote error")
    with pytest.raises(TransportError, match=r"device alpha: messages with device beta: NCCL failed: remote error"):
        ends[0].check()


def test_a_message_that_does_not_leave_ends_the_window_with_its_name(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    ends = [make(device, library=FakeNccl(network), timeout_s=0.3) for device in PAIR]
    together(*(end.connect for end in ends))
    monkeypatch.setattr(FakeCommunicator, "send", lambda self, *_: self._put(_[-1], lambda: False))
    ends[0].open_window({}, {1: [announced(activation(3), torch.ones(2))]})
    ends[0].send(activation(3), 1, [torch.ones(2)])
    with pytest.raises(TransportTimeoutError, match=r"microbatch 3 with device beta: it was not taken within 0\.3 s"):
        ends[0].close_window()


def test_sums_of_a_dtype_are_what_gloo_makes_of_them(make: Make) -> None:
    network = Network()
    ends = [make(device, 3, library=FakeNccl(network)) for device in range(3)]
    together(*(end.connect for end in ends))
    pending = [
        end.start(gradients((0, 1, 2)), torch.tensor([value], dtype=torch.float16)) for end, value in zip(ends, (2048, 1, 1), strict=True)
    ]
    assert [float(part.wait()[0]) for part in pending] == [2050.0] * 3


def note_kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors whose memory is kept for a stream from now on."""
    kept: list[Tensor] = []
    own = FakeNccl.use

    def use(self: FakeNccl, tensor: Tensor, stream: deque[Task]) -> None:
        kept.append(tensor)
        own(self, tensor, stream)

    monkeypatch.setattr(FakeNccl, "use", use)
    return kept


def test_a_received_tensor_is_free_for_others_before_the_next_message_comes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    ends = [make(device, library=FakeNccl(network)) for device in PAIR]
    together(*(end.connect for end in ends))
    kept = note_kept(monkeypatch)
    open_both(ends[0], ends[1], [announced(activation(index), torch.empty(4)) for index in range(2)])
    ends[0].send(activation(0), 1, [torch.ones(4)])
    (received,) = ends[1].recv(activation(0), 0)
    assert received.tolist() == [1.0] * 4
    assert received.data_ptr() not in {tensor.data_ptr() for tensor in kept}


@pytest.mark.parametrize("num_values", [4, 0], ids=["tensor", "empty"])
def test_memory_of_a_message_that_never_came_is_kept_until_its_communicator_has_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_values: int
) -> None:
    network = Network()
    ends = [make(device, library=FakeNccl(network), timeout_s=0.1) for device in PAIR]
    together(*(end.connect for end in ends))
    written: list[Tensor] = []
    kept, own = note_kept(monkeypatch), FakeCommunicator.recv

    def recv(self: FakeCommunicator, tensors: Sequence[Tensor], peer: int, stream: deque[Task]) -> None:
        written.extend(tensors)
        own(self, tensors, peer, stream)

    monkeypatch.setattr(FakeCommunicator, "recv", recv)
    open_both(ends[0], ends[1], [announced(activation(index), torch.empty(num_values)) for index in range(3)])
    with pytest.raises(TransportTimeoutError):
        ends[1].recv(activation(0), 0)
    assert len(written) == 2, "that which is awaited, and the next"
    ends[1].close()
    assert {id(tensor) for tensor in written} <= {id(tensor) for tensor in kept}


def cannot_connect(end: ProcessTransport) -> None:
    with pytest.raises(RunError):
        end.connect()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raypipe connects over NCCL"]


def test_a_communicator_whose_peer_dies_before_the_first_message_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    network, passing = Network(), threading.Event()
    made: list[FakeCommunicator] = []
    ended: list[FakeCommunicator] = []
    of_all = FakeNccl.communicator

    def noted(self: FakeNccl, num_ranks: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        made.append(of_all(self, num_ranks, unique_id, rank))
        if rank == 1:
            raise ChannelError("it died")
        return made[-1]

    def happened(self: FakeNccl, event: object) -> bool:
        passing.set()
        return False

    def shut_down(self: FakeCommunicator) -> None:
        ended.append(self)

    monkeypatch.setattr(FakeNccl, "communicator", noted)
    monkeypatch.setattr(FakeNccl, "happened", happened)
    monkeypatch.setattr(FakeCommunicator, "shut_down", shut_down)
    ends = [make(device, library=FakeNccl(network), connect_timeout_s=20.0) for device in PAIR]

    def ending() -> None:
        assert passing.wait(20.0)
        ends[0].abort("a device is lost")

    together(*(partial(cannot_connect, end) for end in ends), ending)
    (survivor,) = [one for one in made if one.rank == 0]
    assert survivor in ended
    assert becomes_true(lambda: not threads(), within_s=5.0), "nobody looks for its first message any more"


@pytest.mark.parametrize("aborted", [True, False], ids=["abort", "time is over"])
def test_a_communicator_that_is_made_too_late_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    ends = [make(device, library=FakeNccl(Network()), connect_timeout_s=20.0 if aborted else 2.0) for device in PAIR]
    asked, answer = threading.Event(), threading.Event()
    late = FakeCommunicator(Network(), _Meeting(), 0, 2, deque())

    def slow(self: FakeNccl, num_ranks: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        asked.set()
        answer.wait(20.0)
        return late

    monkeypatch.setattr(FakeNccl, "communicator", slow)

    def ending() -> None:
        assert asked.wait(20.0)
        if aborted:
            for end in ends:
                end.abort("a device is lost")

    together(*(partial(cannot_connect, end) for end in ends), ending)
    answer.set()
    assert becomes_true(lambda: late.meeting.ended and not threads(), within_s=5.0)


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU, and notes the streams that use it."""

    is_cuda = True
    streams: list[object]

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


def test_what_a_sum_of_16_bits_was_made_in_is_kept_for_the_thread_that_ends_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    ends = [make(device, library=FakeNccl(network)) for device in PAIR]
    together(*(end.connect for end in ends))
    tensors = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0)]
    first, second = (
        end._endpoints.groups[PAIR].sum(tensor, collective=gradients(PAIR), deadline=0) for end, tensor in zip(ends, tensors, strict=True)
    )
    assert isinstance(first, Sum)
    computing = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: computing)
    first._summed = first._summed.as_subclass(OnGpu)
    first._summed.streams = []
    for under_way in (first, second):
        under_way.wait(20.0)
    assert first._summed.streams == [computing]
    assert tensors[0].tolist() == [3.0]
