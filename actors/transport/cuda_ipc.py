"""Channels between processes that compute on one GPU: messages are copied within its memory, which CUDA shares between processes.

    sender's stream     copies a message into a buffer, records `filled`        waits for `taken` before it uses the buffer again
    socket              which buffer, and which message                         how many messages were taken
    receiver's stream   waits for `filled`, copies the message out, records `taken`

* A process may wait for another's event only after that one's host recorded it. So a packet follows each record.
* A send never waits: if no buffer is free, it makes one. A thread writes the packets that find the socket full.
* Memory that another process may have open must not be freed: the next channel of this process uses it.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from raypipe.actors.transport.channel import ChannelError, Prepared, check_tensors
from raypipe.actors.transport.nccl import Library
from raypipe.actors.transport.protocol import Expected
from raypipe.actors.transport.shm import PACKET_BYTES, PacketSocket
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Message

_ALIGNMENT_BYTES = 256
_SLOT_BYTES = 2 << 20
"""Unit of their sizes: CUDA would place smaller ones in memory that it cannot share separately."""
_LOOK_EVERY_S = 0.001
_NEW = b"\0"
_SENT = b"\1"
_SLOT = struct.Struct("<I")
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class SharedBuffer:
    """GPU memory for one message, mapped into one of two processes; events `filled` and `taken` follow the copies in and out."""

    address: int
    num_bytes: int
    filled: Any
    taken: Any
    handles: bytes


class SharingLibrary(Library, Protocol):
    """Also memory and events that other processes can open."""

    def make_buffer(self, num_bytes: int) -> SharedBuffer:
        """Allocate a buffer; raises `torch.OutOfMemoryError` without memory."""

    def keep_buffer(self, slot: SharedBuffer) -> None:
        """Keep a buffer for the next `make_buffer`: another process may still have it open."""

    def open_buffer(self, num_bytes: int, handles: bytes) -> SharedBuffer:
        """Open a buffer that another process made; raises `RuntimeError` if this process cannot."""

    def close_buffer(self, slot: SharedBuffer) -> None:
        """Close an opened buffer."""

    def record(self, event: Any, stream: Any | None) -> None:
        """Record an event on a stream; `None` for the computing stream."""

    def delay(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event as it was last recorded."""

    def copy(self, target: int, source: int, num_bytes: int, stream: Any | None) -> None:
        """Launch a copy between addresses on a stream; `None` for the computing stream."""


class _Description:
    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.places: list[tuple[int, int]] = []
        self.num_bytes = 0
        for spec in expected.tensors:
            size = math.prod(spec.shape) * spec.dtype.itemsize
            self.places.append((self.num_bytes, size))
            self.num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        text = f"{expected} {expected.message.pipeline} {expected.message.rows}"
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()


class Incoming:
    """The receiving end; `timeout_s` limits the wait for each message."""

    def __init__(self, library: SharingLibrary, packets: PacketSocket, *, timeout_s: float) -> None:
        packets.limit(timeout_s)
        self.library = library
        self.packets = packets
        self.timeout_s = timeout_s
        self._slots: list[SharedBuffer] = []
        self._num_taken = 0
        self._prepared = Prepared(_Description)
        self._left: list[_Description] = []
        """The last is the next."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window took all its messages"
        self._left = self._prepared.of(messages)[::-1]

    def recv(self) -> tuple[Tensor, ...]:
        """See `IncomingChannel`; the host waits for the sender's host, the computing stream for the copy."""
        description = self._left.pop()
        slot = self._next_slot(description)
        library = self.library
        tensors = tuple(library.empty(spec.shape, spec.dtype) for spec in description.expected.tensors)
        library.wait(slot.filled, timeout_s=self.timeout_s)
        for tensor, (offset, num_bytes) in zip(tensors, description.places, strict=True):
            if num_bytes:
                library.copy(tensor.data_ptr(), slot.address + offset, num_bytes, None)
        library.record(slot.taken, None)
        self._num_taken += 1
        with suppress(ChannelError, BlockingIOError):  # the sender is gone, or has not read what was said before: the next says it, too
            self.packets.write_number(self._num_taken)
        return tensors

    def _next_slot(self, description: _Description) -> SharedBuffer:
        try:
            packet = self.packets.read()
            while packet[:1] == _NEW:
                self._open_buffer(packet[1:])
                packet = self.packets.read()
        except BlockingIOError:
            raise ChannelError(f"it did not come within {self.timeout_s:g} s; the peer is stuck", kind=TransportTimeoutError) from None
        number: int = _SLOT.unpack(packet[1 : 1 + _SLOT.size])[0]
        if packet[1 + _SLOT.size :] != description.digest:
            raise ChannelError(f"expected {description.expected}, and the peer sent another message, shape or dtype")
        return self._slots[number]

    def _open_buffer(self, packet: bytes) -> None:
        (num_bytes,) = _SIZE.unpack(packet[: _SIZE.size])
        try:
            self._slots.append(self.library.open_buffer(num_bytes, packet[_SIZE.size :]))
        except RuntimeError as error:
            problem = f"it cannot open the peer's memory on the GPU that they share ({error})"
            raise ChannelError(f"{problem}; set scaling.transport to nccl") from error

    def close(self) -> None:
        """See `IncomingChannel`."""
        self.packets.close()
        self._left.clear()
        for slot in self._slots:
            with suppress(RuntimeError):  # a GPU that has failed gives nothing back
                self.library.close_buffer(slot)
        self._slots.clear()


class Outgoing:
    """The sending end; a thread called `name` writes what found the socket full."""

    def __init__(self, library: SharingLibrary, packets: PacketSocket, *, name: str) -> None:
        self.library = library
        self.packets = packets
        self.name = name
        self.stream = library.stream()
        self.error: ChannelError | None = None
        """See `OutgoingChannel`."""
        self._slots: list[SharedBuffer] = []
        self._free: deque[int] = deque()
        self._under_way: deque[tuple[Message, int]] = deque()
        """Buffers of messages that the receiver's host has not acknowledged."""
        self._num_taken = 0
        self._prepared = Prepared(_Description)
        self._left: list[_Description] = []
        """The last is the next."""
        self._condition = threading.Condition()
        self._unwritten: deque[bytes] = deque()
        self._writer: threading.Thread | None = None

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`."""
        assert not self._left, "the last window took all its messages"
        self._left = self._prepared.of(messages)[::-1]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        if self.error is not None:
            raise self.error
        description = self._left.pop()
        check_tensors(description.expected, tensors)
        self._hear()
        number = self._free_slot(description.num_bytes)
        slot, library = self._slots[number], self.library
        library.follow(self.stream)
        library.delay(self.stream, slot.taken)
        for tensor, (offset, num_bytes) in zip(tensors, description.places, strict=True):
            if num_bytes:
                carried = tensor.detach().resolve_conj().resolve_neg().contiguous()
                library.follow(self.stream)  # also what made it contiguous
                library.copy(slot.address + offset, carried.data_ptr(), num_bytes, self.stream)
                library.use(carried, self.stream)
        library.record(slot.filled, self.stream)
        self._under_way.append((description.expected.message, number))
        self._write(_SENT + _SLOT.pack(number) + description.digest)

    def _free_slot(self, num_bytes: int) -> int:
        for number in self._free:
            if self._slots[number].num_bytes >= num_bytes:
                self._free.remove(number)
                return number
        size = max(1, -(-num_bytes // _SLOT_BYTES)) * _SLOT_BYTES
        slot = self.library.make_buffer(size)
        self._slots.append(slot)
        packet = _NEW + _SIZE.pack(size) + slot.handles
        assert len(packet) <= PACKET_BYTES, "handles are of 64 bytes each"
        self._write(packet)
        return len(self._slots) - 1

    def _hear(self) -> None:
        while (taken := self.packets.read_number()) is not None:
            while self._num_taken < taken:
                self._free.append(self._under_way.popleft()[1])
                self._num_taken += 1

    def _write(self, packet: bytes) -> None:
        with self._condition:
            if not self._unwritten:
                try:
                    self.packets.write(packet)
                    return
                except BlockingIOError:
                    self._writer = threading.Thread(target=self._write_all, name=self.name, daemon=True)
                    self._unwritten.append(packet)
                    self._writer.start()
                    return
            self._unwritten.append(packet)

    def _write_all(self) -> None:
        try:
            while True:
                with self._condition:
                    packet = self._unwritten[0]
                self.packets.write_when_there_is_room(packet)
                with self._condition:
                    self._unwritten.popleft()
                    if not self._unwritten:
                        return
        except ChannelError as error:
            self.error = error

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`; a message has left once its packet has, because its memory stays."""
        deadline_s = time.monotonic() + timeout_s
        while self._unwritten and self.error is None:
            if time.monotonic() > deadline_s or aborted.wait(_LOOK_EVERY_S):
                break
        with suppress(ChannelError):  # a receiver that has all it needs may be gone
            self._hear()
        return self._under_way[0][0] if self._unwritten else None

    def wake(self) -> None:
        """See `OutgoingChannel`; `flush` polls."""

    def close(self) -> None:
        """See `OutgoingChannel`."""
        if self._writer is not None:
            self._writer.join()
        self.packets.close()
        self._left.clear()
        for slot in self._slots:
            self.library.keep_buffer(slot)
        self._slots.clear()
        self._under_way.clear()
        self._free.clear()
