"""The two ends of a channel over TCP."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from raypipe.actors.transport.channel import ChannelError, Prepared, check_tensors, wait_until_empty
from raypipe.actors.transport.protocol import Expected
from raypipe.actors.transport.shm_channel import Description
from raypipe.actors.transport.tcp import Frame, FrameKind, bytes_of
from raypipe.actors.transport.tcp_sender import Outbound, Sender, closed
from raypipe.communication.policy import Traffic
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Message

_PADDING = memoryview(bytes(64))


class Incoming:
    """The receiving end; `arrived` messages are put there by the thread that reads the connection, with the lock held."""

    def __init__(self, lock: threading.Condition, *, timeout_s: float) -> None:
        self.lock = lock
        self.timeout_s = timeout_s
        self.arrived: deque[tuple[bytes, Tensor]] = deque()
        self.is_closed = False
        self._prepared = Prepared(Description)
        self._left: list[Description] = []
        """The last is the next."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window took all its messages"
        self._left = self._prepared.of(messages)[::-1]

    def recv(self) -> tuple[Tensor, ...]:
        """See `IncomingChannel`."""
        description = self._left.pop()
        deadline_s = time.monotonic() + self.timeout_s
        with self.lock:
            while not self.arrived:
                if self.is_closed:
                    raise closed()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0:
                    raise ChannelError(f"it did not come within {self.timeout_s:g} s; the peer is stuck", kind=TransportTimeoutError)
                self.lock.wait(left_s)
            packet, payload = self.arrived.popleft()
        if packet != description.packet:
            raise ChannelError(f"expected {description.text}, got {packet.decode(errors='replace')}")
        return tuple([
            payload[start : start + num_bytes].view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)
            for shape, dtype, start, num_bytes in description.places
        ])

    def close(self) -> None:
        """See `IncomingChannel`."""
        self._left.clear()
        self.arrived.clear()


class Outgoing:
    """The sending end."""

    def __init__(self, sender: Sender, peer: int) -> None:
        self.sender = sender
        self.peer = peer
        self.error: ChannelError | None = None
        """See `OutgoingChannel`."""
        self._unsent: deque[Message] = deque()
        self._prepared = Prepared(Description)
        self._left: list[Description] = []
        """The last is the next."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`."""
        assert not self._left, "the last window sent all its messages"
        self._left = self._prepared.of(messages)[::-1]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        description = self._left.pop()
        check_tensors(description.expected, tensors)
        views, kept = [memoryview(description.packet)], []
        end = 0
        for tensor, (_, _, start, num_bytes) in zip(tensors, description.places, strict=True):
            if not num_bytes:
                continue
            held = tensor.detach()
            if held.is_complex() or held.is_neg():
                held = held.resolve_conj().resolve_neg()
            kept.append(held.contiguous())
            views += [_PADDING[: start - end], bytes_of(kept[-1])] if start > end else [bytes_of(kept[-1])]
            end = start + num_bytes
        if end < description.num_bytes:
            views.append(_PADDING[: description.num_bytes - end])
        frame = Frame(FrameKind.MESSAGE, 0, 0, 0, len(description.packet), 0, description.num_bytes)

        def left() -> None:
            kept.clear()
            if self._unsent:  # not closed
                self._unsent.popleft()
            self.sender.lock.notify_all()

        with self.sender.lock:
            if self.error is not None:
                raise self.error
            self._unsent.append(description.message)
            self.sender.push(Outbound(self.peer, Traffic.MESSAGE, frame, views, description.num_bytes, left))

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`."""

        def given_up() -> bool:
            return self.error is not None or aborted.is_set()

        with self.sender.lock:
            wait_until_empty(self.sender.lock, self._unsent, given_up=given_up, timeout_s=timeout_s)
            return self._unsent[0] if self._unsent else None

    def wake(self) -> None:
        """See `OutgoingChannel`."""
        with self.sender.lock:
            self.sender.lock.notify_all()

    def close(self) -> None:
        """See `OutgoingChannel`."""
        self._left.clear()
        self._unsent.clear()
