"""The two ends of a channel through shared memory, and the ring of slots between them; `shm` says how they work together."""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from raypipe.actors.transport.channel import ChannelError, Prepared, check_tensors, wait_until_empty
from raypipe.actors.transport.protocol import Expected
from raypipe.actors.transport.shm import NEW_RING, PACKET_BYTES, PacketSocket
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Message

MAX_SLOTS = 16
_MIN_SLOTS = 2
_RING_BYTES = 64 << 20
"""Size of a ring with neither the most nor the fewest slots."""

_PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 64
_READY_BYTES = 4 << 20
"""Bytes of a window's messages that are allocated when it begins; the others when they are received."""
_memmove = ctypes.memmove


class Description:
    """A message as announced.

    Attributes:
        places: Shape, dtype, first byte and number of bytes of each tensor in a slot.
        is_real: Whether no tensor is complex, so that none is a lazily conjugated view.
    """

    __slots__ = ("expected", "is_real", "message", "num_bytes", "packet", "places", "text")

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.message = expected.message
        self.places: list[tuple[tuple[int, ...], torch.dtype, int, int]] = []
        self.is_real = not any(spec.dtype.is_complex for spec in expected.tensors)
        self.num_bytes = 0
        for spec in expected.tensors:
            size = math.prod(spec.shape) * spec.dtype.itemsize
            self.places.append((spec.shape, spec.dtype, self.num_bytes, size))
            self.num_bytes = _rounded(self.num_bytes + size, _ALIGNMENT_BYTES)
        whole = self.message.pipeline == 0 and self.message.rows == (0.0, 1.0)
        more = "" if whole else f", rows {self.message.rows} of pipeline {self.message.pipeline}"
        self.text = f"{expected}{more}"
        self.packet = self.text.encode()
        if len(self.packet) > PACKET_BYTES:
            digest = f"... {hashlib.blake2b(self.packet, digest_size=16).hexdigest()}".encode()
            self.packet = self.packet[: PACKET_BYTES - len(digest)] + digest


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Ring:
    """The slots of a channel, mapped into one of the two processes; `first` is the number of the first message in it."""

    def __init__(self, descriptor: int, *, slot_bytes: int, first: int) -> None:
        self.slot_bytes = slot_bytes
        self.first = first
        self.num_slots = num_slots(slot_bytes)
        # How many taken messages the receiver may leave unsaid: the sender still knows of free slots when all were taken.
        self.credit = max(1, self.num_slots // 4)
        self._bytes = mmap.mmap(descriptor, self.num_slots * slot_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        start = self._memory.data_ptr()
        self.addresses = [start + slot * slot_bytes for slot in range(self.num_slots)]

    def close(self) -> None:
        """Unmap the memory, unless the traceback of an error still refers to a tensor in it."""
        del self._memory
        with suppress(BufferError):
            self._bytes.close()

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
        """Return the tensor at an address."""
        start = address - self.addresses[0]
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def num_slots(slot_bytes: int) -> int:
    """Return how many slots of a size a ring has."""
    return min(MAX_SLOTS, max(_MIN_SLOTS, _RING_BYTES // slot_bytes))


Arrival = tuple[Description, tuple[Tensor, ...] | None, list[int] | None]
"""A message to come, its tensors, and their addresses."""


def _memory_for(description: Description) -> tuple[tuple[Tensor, ...], list[int]]:
    tensors = tuple([torch.empty(shape, dtype=dtype) for shape, dtype, _, _ in description.places])
    return tensors, [tensor.data_ptr() for tensor in tensors]


class Incoming:
    """The receiving end; `timeout_s` limits the wait for each message."""

    def __init__(self, packets: PacketSocket, *, timeout_s: float) -> None:
        packets.limit(timeout_s)
        self.packets = packets
        self.timeout_s = timeout_s
        self._read = packets.end.recv
        self._number = 0
        self._unsaid = 0
        self._ring: Ring | None = None
        self._prepared = Prepared(Description)
        self._left: list[Arrival] = []
        """The last is the next."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window took all its messages"
        num_bytes = 0
        for description in self._prepared.of(messages):
            num_bytes += description.num_bytes
            if num_bytes <= _READY_BYTES:
                self._left.append((description, *_memory_for(description)))
            else:
                self._left.append((description, None, None))
        self._left.reverse()

    def recv(self) -> tuple[Tensor, ...]:
        """See `IncomingChannel`."""
        description, tensors, addresses = self._left.pop()
        if tensors is None or addresses is None:
            tensors, addresses = _memory_for(description)
        try:
            packet = self._read(PACKET_BYTES)
        except ConnectionResetError:
            packet = b""
        except BlockingIOError:
            raise self._too_late() from None
        if packet != description.packet:
            self._understand(packet, description)
        ring = self._ring
        assert ring is not None, "a ring comes before its messages"
        start = ring.addresses[(self._number - ring.first) % ring.num_slots]
        for address, (_, _, offset, num_bytes) in zip(addresses, description.places, strict=True):
            _memmove(address, start + offset, num_bytes)
        self._number += 1
        self._unsaid += 1
        if self._unsaid >= ring.credit:
            self._unsaid = 0
            with suppress(ChannelError):  # the sender is gone; its messages were sent nevertheless
                self.packets.write_number(self._number)
        return tensors

    def _too_late(self) -> ChannelError:
        return ChannelError(f"it did not come within {self.timeout_s:g} s; the peer is stuck", kind=TransportTimeoutError)

    def _understand(self, packet: bytes, description: Description) -> None:
        try:
            packet = packet or self.packets.read()
            while packet == NEW_RING:
                slot_bytes, descriptor = self.packets.read_file()
                self._forget_ring()
                try:
                    self._ring = Ring(descriptor, slot_bytes=slot_bytes, first=self._number)
                finally:
                    os.close(descriptor)
                packet = self.packets.read()
        except BlockingIOError:
            raise self._too_late() from None
        if packet != description.packet:
            raise ChannelError(f"expected {description.text}, got {packet.decode(errors='replace')}")

    def _forget_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def close(self) -> None:
        """See `IncomingChannel`."""
        self.packets.close()
        self._left.clear()
        self._forget_ring()


Outbound = tuple[Description, Sequence[Tensor]]
"""A message to be put into the ring."""


class Outgoing:
    """The sending end; a thread called `name` moves what found no free slot."""

    def __init__(self, packets: PacketSocket, *, name: str) -> None:
        self.packets = packets
        self.name = name
        self.error: ChannelError | None = None
        """See `OutgoingChannel`."""
        self._number = 0
        self._end = 0
        """First number for which no slot is known to be free."""
        self._ring: Ring | None = None
        self._prepared = Prepared(Description)
        self._left: list[Description] = []
        """The last is the next."""
        self._condition = threading.Condition()
        self._waiting: deque[Outbound] = deque()
        self._mover: threading.Thread | None = None
        self._moving = False
        """Whether the mover, and not the sending thread, owns the ring and its counters."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`."""
        assert not self._left, "the last window took all its messages"
        self._left = self._prepared.of(messages)[::-1]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        description = self._left.pop()
        if self._moving or not self._place(description, tensors):
            self._defer(description, tensors)

    def _defer(self, description: Description, tensors: Sequence[Tensor]) -> None:
        check_tensors(description.expected, tensors)
        with self._condition:
            if self.error is not None:
                raise self.error
            if self._waiting or not self._place(description, tensors):
                self._waiting.append((description, [tensor.detach() for tensor in tensors]))
                if not self._moving:
                    self._moving = True
                    self._mover = threading.Thread(target=self._move, name=self.name, daemon=True)
                    self._mover.start()

    def _place(self, description: Description, tensors: Sequence[Tensor]) -> bool:
        ring = self._ring
        if ring is None or description.num_bytes > ring.slot_bytes:
            ring = self._make_ring(description.num_bytes)
        elif self._number >= self._end and not self._find_free_slot(ring):
            return False
        places, is_real = description.places, description.is_real
        if len(tensors) != len(places):
            check_tensors(description.expected, tensors)
        start = ring.addresses[(self._number - ring.first) % ring.num_slots]
        for tensor, (shape, dtype, offset, num_bytes) in zip(tensors, places, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                check_tensors(description.expected, tensors)
            if is_real and tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg():
                _memmove(start + offset, tensor.data_ptr(), num_bytes)
            else:
                ring.tensor(start + offset, shape, dtype, num_bytes).copy_(tensor.detach())
        self.packets.write(description.packet)
        self._number += 1
        return True

    def _find_free_slot(self, ring: Ring) -> bool:
        while self._number >= self._end:
            taken = self.packets.read_number()
            if taken is None:
                return False
            self._end = max(taken, ring.first) + ring.num_slots  # what was taken may be of a former ring
        return True

    def _make_ring(self, size: int) -> Ring:
        slot_bytes = _rounded(max(size, 1), _PAGE_BYTES)
        if self._ring is not None:
            # Growing so fast, it stays at a few rings, even if none of their messages is ever taken.
            slot_bytes = max(slot_bytes, 2 * self._ring.slot_bytes)
            self._forget_ring()
        descriptor = os.memfd_create("raypipe")
        try:
            os.posix_fallocate(descriptor, 0, num_slots(slot_bytes) * slot_bytes)
            self.packets.write(NEW_RING)
            self.packets.write_file(slot_bytes, descriptor)
            ring = self._ring = Ring(descriptor, slot_bytes=slot_bytes, first=self._number)
        except OSError as error:
            problem = f"no shared memory for {num_slots(slot_bytes)} messages of {slot_bytes} bytes ({error.strerror})"
            raise ChannelError(f"{problem}; set scaling.transport to tcp") from error
        finally:
            os.close(descriptor)
        self._end = ring.first + ring.num_slots
        return ring

    def _forget_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _move(self) -> None:
        try:
            while True:
                with self._condition:
                    while self._waiting and self._place(*self._waiting[0]):
                        self._waiting.popleft()
                        self._condition.notify_all()
                    if not self._waiting:
                        self._moving = False
                        return
                self.packets.wait()
        except ChannelError as error:
            with self._condition:
                self.error = error
                self._condition.notify_all()

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`."""
        if not self._moving:
            return None

        def given_up() -> bool:
            return self.error is not None or aborted.is_set()

        with self._condition:
            wait_until_empty(self._condition, self._waiting, given_up=given_up, timeout_s=timeout_s)
            return self._waiting[0][0].message if self._waiting else None

    def wake(self) -> None:
        """See `OutgoingChannel`."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """See `OutgoingChannel`."""
        if self._mover is not None:
            self._mover.join()
        self.packets.close()
        self._left.clear()
        self._waiting.clear()
        self._forget_ring()
