"""The two ends of a channel over a TCP connection."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError, Prepared, check_tensors, wait_until_empty
from raypipe.actors.transport.protocol import Expected
from raypipe.actors.transport.shm_channel import Description
from raypipe.actors.transport.tcp_holds import NEVER_DUE
from raypipe.actors.transport.tcp_link import HEADER, Kind, Link, Memory
from raypipe.actors.transport.tcp_receiver import Receiver
from raypipe.actors.transport.tcp_sender import Sender
from raypipe.communication.policy import Traffic
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message

_READY_BYTES = 4 << 20
"""Bytes of a window's messages that are allocated when it begins; the others when they arrive or are awaited."""


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous memory that holds its numbers as they are: not lazily conjugated or negated."""
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # `detach` costs 30 us where caches are cold.
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous()


class Arrival:
    """A message that comes or has come, and its memory.

    Attributes:
        tensors: What it was announced as; `None` if another message came, or none was announced yet.
    """

    __slots__ = ("memory", "tensors", "text")

    def __init__(self, description: Description | None, text: bytes, num_bytes: int) -> None:
        self.text = text
        self.tensors: tuple[Tensor, ...] | None = None
        if description is None:
            self.memory = [memoryview(bytearray(num_bytes))]
        else:
            self.tensors = tuple([torch.empty(shape, dtype=dtype) for shape, dtype, _, _ in description.places])
            self.memory = [memory_of(tensor) for tensor in self.tensors if tensor.nbytes]


class Incoming:
    """The receiving end; `timeout_s` limits the wait for each message."""

    def __init__(self, link: Link, receiver: Receiver, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.due = NEVER_DUE
        """See `MessageSink`."""
        self._link = link
        self._receiver = receiver
        self._prepared = Prepared(Description)
        self._left: list[Description] = []
        """Messages to be received; the last is the next."""
        self._to_come: deque[tuple[Description, Arrival | None]] = deque()
        """Those of them that have not begun to come."""
        self._unannounced = 0
        """Messages that came before their window."""
        self._coming: Arrival | None = None
        self._arrived: deque[Arrival] = deque()
        link.messages = self

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window took all its messages"
        descriptions = self._prepared.of(messages)
        self._left = descriptions[::-1]
        num_bytes = 0
        with self._link.lock:
            for description in descriptions:
                if self._unannounced:
                    self._unannounced -= 1
                    if not self._unannounced and self._coming is not None and self._link.holds is not None:
                        self._link.holds.is_due(self._link.peer, description.expected.due)
                    continue
                num_bytes += description.num_bytes
                ready = Arrival(description, description.packet, 0) if num_bytes <= _READY_BYTES else None
                self._to_come.append((description, ready))

    def recv(self) -> tuple[Tensor, ...]:
        """See `IncomingChannel`."""
        if not self._arrived:
            self._receiver.wait(self._link, self._has_arrived, self.timeout_s)
            if not self._arrived:
                if self._link.ended is not None:
                    raise ChannelError(self._link.ended)
                problem = f"it did not come within {self.timeout_s:g} s; the peer is stuck"
                raise ChannelError(problem, kind=TransportTimeoutError)
        description, arrival = self._left.pop(), self._arrived.popleft()
        if arrival.text != description.packet:
            raise ChannelError(f"expected {description.text}, got {arrival.text.decode(errors='replace')}")
        if arrival.tensors is not None:
            return arrival.tensors
        announced = Arrival(description, arrival.text, 0)
        (came,) = arrival.memory
        for memory in announced.memory:
            memory[:] = came[: len(memory)]
            came = came[len(memory) :]
        assert announced.tensors is not None, "it was announced"
        return announced.tensors

    def _has_arrived(self) -> bool:
        return bool(self._arrived)

    def begin(self, text: bytes, num_bytes: int) -> list[memoryview]:
        """See `MessageSink`."""
        description, ready = self._to_come.popleft() if self._to_come else (None, None)
        self.due = description.expected.due if description is not None else NEVER_DUE
        if description is None:
            self._unannounced += 1
        elif description.packet != text:
            description = ready = None
        self._coming = ready or Arrival(description, text, num_bytes)
        return self._coming.memory

    def complete(self) -> None:
        """See `MessageSink`."""
        assert self._coming is not None, "it has begun"
        self._arrived.append(self._coming)
        self._coming = None

    def close(self) -> None:
        """See `IncomingChannel`."""
        self._link.messages = None
        self._left.clear()
        self._to_come.clear()
        self._arrived.clear()


class _Announced(Description):
    """A message to be sent: its header and text, and for each tensor the type of its memory."""

    __slots__ = ("arrays", "frame_bytes", "head", "sent_bytes")

    def __init__(self, expected: Expected) -> None:
        super().__init__(expected)
        self.sent_bytes = sum(num_bytes for _, _, _, num_bytes in self.places)
        self.head = HEADER.pack(Kind.MESSAGE, len(self.packet), 0, 0, self.sent_bytes) + self.packet
        self.frame_bytes = len(self.head) + self.sent_bytes
        self.arrays = [ctypes.c_ubyte * num_bytes for _, _, _, num_bytes in self.places]

    def carried(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors with memory that can be sent as it is; raise `ChannelError` if they are not those announced."""
        if len(tensors) != len(self.places):
            check_tensors(self.expected, tensors)
        for tensor, (shape, dtype, _, _) in zip(tensors, self.places, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                check_tensors(self.expected, tensors)
        return [tensor if self.is_real and tensor.is_contiguous() and not tensor.is_neg() else plain(tensor) for tensor in tensors]

    def buffers(self, carried: Sequence[Tensor]) -> list[Memory]:
        """Return the frame."""
        return [self.head, *[array.from_address(tensor.data_ptr()) for array, tensor in zip(self.arrays, carried, strict=True)]]


class _Sent:
    """A message in the queue of its way."""

    __slots__ = ("announced", "channel", "link", "ready", "sent", "sequence", "tensors")
    traffic = Traffic.MESSAGE
    collective: Collective | None = None
    deadline = 0
    turn = 0
    unit = 1

    def __init__(self, channel: Outgoing, announced: _Announced, carried: Sequence[Tensor]) -> None:
        self.channel = channel
        self.link = channel.link
        self.announced = announced
        self.tensors = [tensor.detach() for tensor in carried]
        self.ready = announced.sent_bytes
        self.sent = 0
        self.sequence = -1

    def frame(self, num_bytes: int) -> list[memoryview]:
        """See `Entry`."""
        return [memoryview(buffer).cast("B") for buffer in self.announced.buffers(self.tensors)]

    def left(self, num_bytes: int) -> None:
        """See `Entry`."""
        self.channel.left()

    def fail(self, problem: str) -> None:
        """See `Entry`."""
        self.channel.fail(problem)


class Outgoing:
    """The sending end."""

    def __init__(self, link: Link, sender: Sender) -> None:
        self.link = link
        self.error: ChannelError | None = None
        """See `OutgoingChannel`."""
        self._sender = sender
        self._prepared = Prepared(_Announced)
        self._left: list[_Announced] = []
        """The last is the next."""
        self._condition = threading.Condition()
        self._unsent: deque[_Sent] = deque()
        self._flushing = False

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`."""
        assert not self._left, "the last window sent all its messages"
        self._left = self._prepared.of(messages)[::-1]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        announced, link = self._left.pop(), self.link
        carried = announced.carried(tensors)
        if link.ended is not None:
            raise ChannelError(CLOSED_BY_PEER)
        self._sender.send(link, announced.buffers(carried), announced.frame_bytes, lambda: self._queued(announced, carried))
        if self.error is not None:
            raise self.error

    def _queued(self, announced: _Announced, carried: Sequence[Tensor]) -> _Sent:
        entry = _Sent(self, announced, carried)
        self._unsent.append(entry)
        return entry

    def left(self) -> None:
        """See that the first unsent message has left; they leave in order."""
        self._unsent.popleft()
        if self._flushing:
            self.wake()

    def fail(self, problem: str) -> None:
        """See that no message leaves any more."""
        self.error = self.error or ChannelError(problem)
        self.wake()

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`."""
        if not self._unsent:
            return None

        def given_up() -> bool:
            return self.error is not None or aborted.is_set()

        with self._condition:
            self._flushing = True
            wait_until_empty(self._condition, self._unsent, given_up=given_up, timeout_s=timeout_s)
            self._flushing = False
            unsent = list(self._unsent)
            return unsent[0].announced.message if unsent else None

    def wake(self) -> None:
        """See `OutgoingChannel`."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """See `OutgoingChannel`."""
        self._left.clear()
        self._unsent.clear()
