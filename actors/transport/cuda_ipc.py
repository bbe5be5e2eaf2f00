"""Channels between processes that compute on one GPU: messages are copied within its memory, by CUDA's own sharing between processes.

    sender's stream     copies a message into a slot, records `filled`          waits for `taken` before it uses the slot again
    socket              says which slot, and of which message                   says how many messages were taken
    receiver's stream   waits for `filled`, copies the message out, records `taken`

What shapes the code:

* An event of another process counts from when it was recorded, which only that process's host knows. So a packet follows each record, and
  the receiver's host waits for the packet: until the sender's host has told its GPU of the message, not until that has passed.
* A send never waits: where no slot is free a new one is made. There are so as many as messages were ever under way at once.
* A packet that finds the socket full is written by a thread, which lives only as long as there are such packets.
* Memory that another process may have open must not be given back. What a channel leaves is kept for the next one of this process.
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

from raypipe.actors.transport.channel import ChannelError, Prepared, check_next, check_tensors
from raypipe.actors.transport.nccl import Library
from raypipe.actors.transport.protocol import NO_MORE, Expected
from raypipe.actors.transport.shm import PACKET_BYTES, Line
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Message

_ALIGNMENT_BYTES = 256
_SLOT_BYTES = 2 << 20
"""Slots have a multiple of it: CUDA would carve smaller ones out of memory that it does not share alone."""
_LOOK_EVERY_S = 0.001
_NEW = b"\0"
_SENT = b"\1"
_SLOT = struct.Struct("<I")
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class Slot:
    """Memory for one message, as one of its ends sees it.

    Attributes:
        address: of the memory.
        num_bytes: of it.
        filled: the event behind a message's way in.
        taken: the event behind its way out.
        handles: by which another process opens all three.
    """

    address: int
    num_bytes: int
    filled: Any
    taken: Any
    handles: bytes


class SharingLibrary(Library, Protocol):
    """What is used of CUDA besides: memory and events that other processes can open."""

    def make_slot(self, num_bytes: int) -> Slot:
        """A slot of the device.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """

    def keep_slot(self, slot: Slot) -> None:
        """Keeps a slot that was made for the next that is asked for: another process may still have it open."""

    def open_slot(self, num_bytes: int, handles: bytes) -> Slot:
        """A slot that another process made.

        Raises:
            RuntimeError: this one cannot open it.
        """

    def close_slot(self, slot: Slot) -> None:
        """Gives an opened slot back."""

    def record(self, event: Any, stream: Any | None) -> None:
        """Records an event behind what a stream, or the computing one, was told until now."""

    def delay(self, stream: Any, event: Any) -> None:
        """Lets a stream begin what comes next behind an event as it was last recorded."""

    def copy(self, target: int, source: int, num_bytes: int, stream: Any | None) -> None:
        """Puts a copy from address to address into a stream, or into the computing one."""


class _Description:
    """What an end believes of a message: where its tensors lie in a slot, and a digest of all of it."""

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
    """The receiving end of a channel.

    Args:
        library: what it works with.
        line: to the sender.
        timeout_s: for each message.
    """

    def __init__(self, library: SharingLibrary, line: Line, *, timeout_s: float) -> None:
        line.limit(timeout_s)
        self.library = library
        self.line = line
        self.timeout_s = timeout_s
        self._slots: list[Slot] = []
        self._num_taken = 0
        self._prepared = Prepared(_Description)
        self._left: list[_Description] = []
        """The last is the next."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window was not closed"
        self._left = self._prepared.of(messages)[::-1]

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """See `IncomingChannel`; waits until the sender's host has sent it, and lets the computing stream wait for the rest."""
        if not self._left:
            raise ChannelError(NO_MORE)
        description = self._left.pop()
        check_next(description.expected, message)
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
            self.line.write_number(self._num_taken)
        return tensors

    def _next_slot(self, description: _Description) -> Slot:
        try:
            packet = self.line.read()
            while packet[:1] == _NEW:
                self._open_slot(packet[1:])
                packet = self.line.read()
        except BlockingIOError:
            raise ChannelError(f"it did not come within {self.timeout_s:g} s; the peer is stuck", kind=TransportTimeoutError) from None
        number: int = _SLOT.unpack(packet[1 : 1 + _SLOT.size])[0]
        if packet[1 + _SLOT.size :] != description.digest:
            raise ChannelError(f"expected {description.expected}, and the peer sent another message, shape or dtype")
        return self._slots[number]

    def _open_slot(self, packet: bytes) -> None:
        (num_bytes,) = _SIZE.unpack(packet[: _SIZE.size])
        try:
            self._slots.append(self.library.open_slot(num_bytes, packet[_SIZE.size :]))
        except RuntimeError as error:
            problem = f"it cannot open the peer's memory on the GPU that they share ({error})"
            raise ChannelError(f"{problem}; set scaling.transport to nccl") from error

    def end(self) -> list[Expected]:
        """See `IncomingChannel`."""
        left = [description.expected for description in reversed(self._left)]
        self._left.clear()
        return left

    def close(self) -> None:
        """See `IncomingChannel`."""
        self.line.close()
        self._left.clear()
        for slot in self._slots:
            with suppress(RuntimeError):  # a GPU that has failed gives nothing back
                self.library.close_slot(slot)
        self._slots.clear()


class Outgoing:
    """The sending end of a channel.

    Args:
        library: what it works with.
        line: to the receiver.
        name: of the thread that writes what found the socket full.
    """

    def __init__(self, library: SharingLibrary, line: Line, *, name: str) -> None:
        self.library = library
        self.line = line
        self.name = name
        self.stream = library.stream()
        self.error: ChannelError | None = None
        """See `OutgoingChannel`."""
        self._slots: list[Slot] = []
        self._free: deque[int] = deque()
        self._under_way: deque[tuple[Message, int]] = deque()
        """The slots of messages of which the receiver's host has not said that it took them."""
        self._num_taken = 0
        self._prepared = Prepared(_Description)
        self._left: list[_Description] = []
        """The last is the next."""
        self._condition = threading.Condition()
        self._packets: deque[bytes] = deque()
        self._writer: threading.Thread | None = None

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`."""
        assert not self._left, "the last window was not closed"
        self._left = self._prepared.of(messages)[::-1]

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        if self.error is not None:
            raise self.error
        if not self._left:
            raise ChannelError(NO_MORE)
        description = self._left.pop()
        check_next(description.expected, message)
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
        self._under_way.append((message, number))
        self._write(_SENT + _SLOT.pack(number) + description.digest)

    def _free_slot(self, num_bytes: int) -> int:
        for number in self._free:
            if self._slots[number].num_bytes >= num_bytes:
                self._free.remove(number)
                return number
        size = max(1, -(-num_bytes // _SLOT_BYTES)) * _SLOT_BYTES
        slot = self.library.make_slot(size)
        self._slots.append(slot)
        packet = _NEW + _SIZE.pack(size) + slot.handles
        assert len(packet) <= PACKET_BYTES, "handles are of 64 bytes each"
        self._write(packet)
        return len(self._slots) - 1

    def _hear(self) -> None:
        """Frees the slots of what was taken."""
        while (taken := self.line.read_number()) is not None:
            while self._num_taken < taken:
                self._free.append(self._under_way.popleft()[1])
                self._num_taken += 1

    def _write(self, packet: bytes) -> None:
        with self._condition:
            if not self._packets:
                try:
                    self.line.write(packet)
                    return
                except BlockingIOError:
                    self._writer = threading.Thread(target=self._write_all, name=self.name, daemon=True)
                    self._packets.append(packet)
                    self._writer.start()
                    return
            self._packets.append(packet)

    def _write_all(self) -> None:
        """What the thread does."""
        try:
            while True:
                with self._condition:
                    packet = self._packets[0]
                self.line.write_when_there_is_room(packet)
                with self._condition:
                    self._packets.popleft()
                    if not self._packets:
                        return
        except ChannelError as error:
            self.error = error

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`; what was said to the receiver has left, for its memory stays."""
        deadline_s = time.monotonic() + timeout_s
        while self._packets and self.error is None:
            if time.monotonic() > deadline_s or aborted.wait(_LOOK_EVERY_S):
                break
        with suppress(ChannelError):  # a receiver that has all it needs may be gone
            self._hear()
        return self._under_way[0][0] if self._packets else None

    def end(self) -> list[Expected]:
        """See `OutgoingChannel`."""
        left = [description.expected for description in reversed(self._left)]
        self._left.clear()
        return left

    def wake(self) -> None:
        """See `OutgoingChannel`; `flush` looks by itself."""

    def close(self) -> None:
        """See `OutgoingChannel`."""
        if self._writer is not None:
            self._writer.join()
        self.line.close()
        self._left.clear()
        for slot in self._slots:
            self.library.keep_slot(slot)
        self._slots.clear()
        self._under_way.clear()
        self._free.clear()
