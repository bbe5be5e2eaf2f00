"""The two ends of a channel through shared memory, and the ring of slots between them; `shm` says how they work together."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from raypipe.actors.channels import ChannelError
from raypipe.actors.shm import Line
from raypipe.actors.transport import Expected, TensorSpec
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Message

MAX_SLOTS = 16
_MIN_SLOTS = 2
_RING_BYTES = 64 << 20
"""Of a ring that has neither the most nor the fewest slots."""

_PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 64
_TEXT_RESERVE_BYTES = 256
"""Room for texts that are longer than that of the message for which a ring is made."""


class Description:
    """All that an end believes of a message, in text.

    Args:
        message: what it is.
        specs: of its tensors.
    """

    def __init__(self, message: Message, specs: tuple[TensorSpec, ...]) -> None:
        self.message = message
        self.specs = specs
        *self.offsets, self.num_bytes = _offsets(specs)
        self.layout = ", ".join(map(str, specs))
        whole = message.pipeline == 0 and message.rows == (0.0, 1.0)
        more = "" if whole else f", rows {message.rows} of pipeline {message.pipeline}"
        self.text = f"{message} ({self.layout or 'no tensors'}){more}".encode()
        self.needed_bytes = self.num_bytes + len(self.text)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it describes tensors like these."""
        if len(tensors) != len(self.specs):
            return False
        return all(tensor.shape == spec.shape and tensor.dtype == spec.dtype for tensor, spec in zip(tensors, self.specs, strict=True))


def _offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor begins in a slot, and where the last one ends."""
    offsets = [0]
    for spec in specs:
        offsets.append(_rounded(offsets[-1] + _num_bytes(spec), _ALIGNMENT_BYTES))
    return offsets


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Ring:
    """The slots of a channel, as one of its ends sees them.

    Args:
        descriptor: of the memory; stays the caller's.
        slot_bytes: the size of each.
        first: number of the first message that goes through them.
    """

    def __init__(self, descriptor: int, *, slot_bytes: int, first: int) -> None:
        self.slot_bytes = slot_bytes
        self.first = first
        self.num_slots = num_slots(slot_bytes)
        # How many taken messages the receiver may leave unsaid: the sender still knows of free slots when all were taken.
        self.credit = max(1, self.num_slots // 4)
        self._bytes = mmap.mmap(descriptor, self.num_slots * slot_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._views: dict[tuple[int, str], tuple[Tensor, ...]] = {}

    def close(self) -> None:
        """Gives the memory back, at once unless a tensor in it is still in use, which can be in the traceback of an error only."""
        self._views.clear()
        del self._memory
        with suppress(BufferError):
            self._bytes.close()

    def tensors(self, number: int, description: Description) -> tuple[Tensor, ...]:
        """The tensors in the slot of a message."""
        slot = (number - self.first) % self.num_slots
        views = self._views.get((slot, description.layout))
        if views is None:
            start = slot * self.slot_bytes
            views = self._views[slot, description.layout] = tuple(
                self._memory[start + offset : start + offset + _num_bytes(spec)].view(spec.dtype).view(spec.shape)
                for spec, offset in zip(description.specs, description.offsets, strict=True)
            )
        return views

    def write_text(self, number: int, text: bytes) -> None:
        """Puts a text into the slot of a message."""
        end = ((number - self.first) % self.num_slots + 1) * self.slot_bytes
        self._bytes[end - len(text) : end] = text

    def text(self, number: int, length: int) -> bytes:
        """The text in the slot of a message."""
        end = ((number - self.first) % self.num_slots + 1) * self.slot_bytes
        return self._bytes[end - length : end]


def num_slots(slot_bytes: int) -> int:
    """How many slots of a size a ring has."""
    return min(MAX_SLOTS, max(_MIN_SLOTS, _RING_BYTES // slot_bytes))


class Incoming:
    """The receiving end of a channel.

    Args:
        line: to the sender.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self._number = 0
        self._unsaid = 0
        self._ring: Ring | None = None
        self._described: dict[Message, Description] = {}
        self._expected: deque[Description] = deque()

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        for expected in messages:
            description = self._described.get(expected.message)
            if description is None or description.specs != expected.tensors:
                description = self._described[expected.message] = Description(expected.message, expected.tensors)
            self._expected.append(description)

    def recv(self, timeout_s: float) -> tuple[Tensor, ...]:
        """See `IncomingChannel`."""
        expected = self._expected.popleft()
        ring, text = self._next(timeout_s)
        if text != expected.text:
            raise ChannelError(f"expected {expected.text.decode()}, got {text.decode()}")
        tensors = tuple(tensor.clone() for tensor in ring.tensors(self._number, expected))
        self._number += 1
        self._unsaid += 1
        if self._unsaid >= ring.credit:
            self._unsaid = 0
            with suppress(ChannelError):  # the sender is gone; its messages were sent nevertheless
                self.line.write(self._number)
        return tensors

    def _next(self, timeout_s: float) -> tuple[Ring, bytes]:
        """The ring in which the next message is, and its text."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            read = self.line.read()
            if read is None:
                if not self.line.wait(deadline_s - time.monotonic()):
                    raise ChannelError(f"it did not come within {timeout_s:g} s; the peer is stuck", kind=TransportTimeoutError)
                continue
            size, descriptor = read  # of the text, or of the slots of a new ring
            if descriptor is None:
                assert self._ring is not None, "a ring comes before its messages"
                return self._ring, self._ring.text(self._number, size)
            self._forget_ring()
            try:
                self._ring = Ring(descriptor, slot_bytes=size, first=self._number)
            finally:
                os.close(descriptor)

    def _forget_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def close(self) -> None:
        """See `IncomingChannel`."""
        self.line.close()
        self._expected.clear()
        self._forget_ring()


Outbound = tuple[Description, tuple[Tensor, ...]]
"""A message to be put into the ring."""


class Outgoing:
    """The sending end of a channel.

    Args:
        line: to the receiver.
        name: of the thread that moves what found no free slot.
    """

    def __init__(self, line: Line, *, name: str) -> None:
        self.line = line
        self.name = name
        self.error: ChannelError | None = None
        self._number = 0
        self._num_taken = 0
        self._ring: Ring | None = None
        self._described: dict[Message, Description] = {}
        self._condition = threading.Condition()
        self._waiting: deque[Outbound] = deque()
        self._mover: threading.Thread | None = None
        self._moving = False

    def open(self) -> None:
        """See `OutgoingChannel`."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        description = self._described.get(message)
        if description is None or not description.matches(tensors):
            specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            description = self._described[message] = Description(message, specs)
        outbound = (description, tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors))
        with self._condition:
            if self.error is not None:
                raise self.error
            if self._waiting or not self._place(outbound):
                self._waiting.append(outbound)
                if not self._moving:
                    self._moving = True
                    self._mover = threading.Thread(target=self._move, name=self.name, daemon=True)
                    self._mover.start()

    def _place(self, outbound: Outbound) -> bool:
        """Puts a message into a free slot and says so; returns whether there was one."""
        description, tensors = outbound
        ring = self._ring
        if ring is None or description.needed_bytes > ring.slot_bytes:
            ring = self._ring = self._make_ring(description.needed_bytes)
        elif not self._has_free_slot(ring):
            return False
        for place, tensor in zip(ring.tensors(self._number, description), tensors, strict=True):
            place.copy_(tensor)
        ring.write_text(self._number, description.text)
        self.line.write(len(description.text))
        self._number += 1
        return True

    def _has_free_slot(self, ring: Ring) -> bool:
        # What was taken may be of a former ring.
        while self._number - max(self._num_taken, ring.first) >= ring.num_slots:
            read = self.line.read()
            if read is None:
                return False
            self._num_taken, _ = read
        return True

    def _make_ring(self, size: int) -> Ring:
        """The ring that follows, for messages of a size; the receiver is told."""
        slot_bytes = _rounded(size + _TEXT_RESERVE_BYTES, _PAGE_BYTES)
        if self._ring is not None:
            # Growing so fast, it stays at a few rings, even if none of their messages is ever taken.
            slot_bytes = max(slot_bytes, 2 * self._ring.slot_bytes)
            self._forget_ring()
        descriptor = os.memfd_create("raypipe")
        try:
            os.posix_fallocate(descriptor, 0, num_slots(slot_bytes) * slot_bytes)
            self.line.write(slot_bytes, descriptor)
            return Ring(descriptor, slot_bytes=slot_bytes, first=self._number)
        except OSError as error:
            problem = f"no shared memory for {num_slots(slot_bytes)} messages of {slot_bytes} bytes ({error.strerror})"
            raise ChannelError(f"{problem}; set scaling.transport to gloo") from error
        finally:
            os.close(descriptor)

    def _forget_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _move(self) -> None:
        """What the thread does: puts the waiting messages into slots as these become free."""
        try:
            while True:
                with self._condition:
                    while self._waiting and self._place(self._waiting[0]):
                        self._waiting.popleft()
                        self._condition.notify_all()
                    if not self._waiting:
                        self._moving = False
                        return
                self.line.wait()
        except ChannelError as error:
            with self._condition:
                self.error = error
                self._condition.notify_all()

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`."""

        def ended() -> bool:
            return not self._waiting or self.error is not None or aborted.is_set()

        def moved(left: int) -> bool:
            return ended() or len(self._waiting) < left

        with self._condition:
            # The limit is for each message, not for all of them.
            while not ended() and self._condition.wait_for(partial(moved, len(self._waiting)), timeout_s):
                pass
            return self._waiting[0][0].message if self._waiting else None

    def wake(self) -> None:
        """See `OutgoingChannel`."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """See `OutgoingChannel`."""
        if self._mover is not None:
            self._mover.join()
        self.line.close()
        self._waiting.clear()
        self._forget_ring()
