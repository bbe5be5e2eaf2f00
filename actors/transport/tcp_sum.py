"""Sums over TCP: slices go round the members as in a ring, piece by piece.

Slice j of r is added up on its way from member j + 1 round to member j, and its sum is passed on round the ring (Patarasuk and Yuan,
2009). Slices have fixed borders and each number is added in the order of its way, so neither chunks nor times change a bit.

    member m   begins with slice m - 1; adds its own numbers to what arrives of other slices, and passes it on;
               passes on the sums that arrive, but for the last member of their way
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from raypipe.actors.transport.channel import ChannelError
from raypipe.actors.transport.protocol import summing_dtype
from raypipe.actors.transport.tcp import Frame, FrameKind, bytes_of
from raypipe.actors.transport.tcp_receiver import Target
from raypipe.actors.transport.tcp_sender import Outbound, Sender, closed
from raypipe.communication.policy import Traffic
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.collectives import Collective

_ADD, _PASS_ON = 0, 1
"""Phases of a slice."""

SumKey = tuple[int, int]
"""Name of a collective, and how many of that name came before."""


def name_of(collective: Collective) -> int:
    """Return a number that all members have for a collective."""
    text = f"{collective.kind} {collective.stage} {collective.update} {collective.part} {collective.devices}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Sum:
    """A sum under way on one member; 16-bit floats are summed in float32 and rounded once."""

    def __init__(self, sums: Sums, key: SumKey, collective: Collective, tensor: Tensor, deadline: int) -> None:
        self.tensor = tensor
        self.lock = sums.sender.lock
        self.members = collective.devices
        self.error: ChannelError | None = None
        self._sender = sums.sender
        self._size = len(self.members)
        self._me = self.members.index(sums.device)
        self._next = self.members[(self._me + 1) % self._size]
        detached = tensor.detach()
        flat = detached.to(summing_dtype(tensor.dtype)).contiguous()
        self._is_copy = flat.data_ptr() != detached.data_ptr()
        self._work = flat.view(-1)
        self._bytes = bytes_of(self._work)
        count, width = self._work.numel(), self._work.element_size()
        self._borders = [number * count // self._size * width for number in range(self._size + 1)]
        self._num_summed = 0
        self._num_unsent = 0
        is_norm = collective.kind.is_norm
        traffic, deadline = (Traffic.MESSAGE, 0) if is_norm else (Traffic.SUM, deadline)
        self._outbound = {
            (phase, number): Outbound(
                self._next,
                traffic,
                Frame(FrameKind.PIECE, phase, number, key[1], key[0], 0, 0),
                [self._bytes[self._borders[number] : self._borders[number + 1]]],
                0,
                self._left,
                deadline,
            )
            for phase in (_ADD, _PASS_ON)
            for number in range(self._size)
        }

    def begin(self) -> None:
        """Send the slice whose way begins here, with the lock held."""
        number = (self._me - 1) % self._size
        self._pass_on(_ADD, number, self._length(number))

    def _length(self, number: int) -> int:
        return self._borders[number + 1] - self._borders[number]

    def target(self, frame: Frame) -> Target:
        """Return where a piece goes; called by the thread that reads."""
        start = self._borders[frame.slice] + frame.offset
        if frame.phase == _PASS_ON:
            return [self._bytes[start : start + frame.num_bytes]], lambda: self._summed(frame.slice, frame.num_bytes, passed_on=True)
        piece = torch.empty(frame.num_bytes, dtype=torch.uint8)
        return [bytes_of(piece)], lambda: self.add(frame, piece)

    def add(self, frame: Frame, piece: Tensor) -> None:
        """Add a piece that has arrived; only one thread at a time does."""
        first, width = (self._borders[frame.slice] + frame.offset) // self._work.element_size(), self._work.element_size()
        self._work[first : first + frame.num_bytes // width].add_(piece.view(self._work.dtype))
        if frame.slice == self._me:
            self._summed(frame.slice, frame.num_bytes, passed_on=False)
        else:
            with self.lock:
                self._pass_on(_ADD, frame.slice, frame.num_bytes)

    def _summed(self, number: int, num_bytes: int, *, passed_on: bool) -> None:
        with self.lock:
            self._num_summed += num_bytes
            # The member behind the last one of a slice's way has its sum.
            if not passed_on or (self._me + 1) % self._size != number:
                self._pass_on(_PASS_ON, number, num_bytes)
            if self.is_done:
                self.lock.notify_all()

    def _pass_on(self, phase: int, number: int, num_bytes: int) -> None:
        if num_bytes:
            outbound = self._outbound[phase, number]
            if not outbound.queued:
                self._num_unsent += 1
            outbound.ready += num_bytes
            self._sender.push(outbound)

    def _left(self) -> None:
        self._num_unsent -= 1
        if self.is_done:
            self.lock.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether the sum is there and all that others need has left."""
        return self._num_summed == self._borders[-1] and not self._num_unsent

    def wait(self, timeout_s: float) -> None:
        """See `SumUnderWay`."""
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            while not self.is_done:
                if self.error is not None:
                    raise self.error
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0:
                    raise ChannelError(f"it did not end within {timeout_s:g} s; a member is stuck", kind=TransportTimeoutError)
                self.lock.wait(left_s)
            self._outbound.clear()
        if self._is_copy:
            self.tensor.detach().copy_(self._work.view(self.tensor.shape))


class Sums:
    """The sums of one device, by key; pieces that come before this device begins are kept."""

    def __init__(self, device: int, sender: Sender) -> None:
        self.device = device
        self.sender = sender
        self.broken: set[int] = set()
        self._num_begun: dict[int, int] = {}
        self._under_way: dict[SumKey, Sum] = {}
        self._early: dict[SumKey, list[tuple[Frame, Tensor]]] = {}

    def sum(self, tensor: Tensor, collective: Collective, deadline: int) -> Sum:
        """Begin a sum."""
        name = name_of(collective)
        with self.sender.lock:
            key = (name, self._num_begun.get(name, 0))
            self._num_begun[name] = key[1] + 1
            begun = Sum(self, key, collective, tensor, deadline)
            if not self.broken.isdisjoint(begun.members):
                begun.error = closed()
                return begun
            for frame, piece in self._early.pop(key, ()):
                begun.add(frame, piece)
            self._under_way = {known: one for known, one in self._under_way.items() if not one.is_done}
            self._under_way[key] = begun
            begun.begin()
        return begun

    def target(self, frame: Frame) -> Target:
        """Return where a piece goes; called by the thread that reads."""
        key = (frame.key, frame.occurrence)
        with self.sender.lock:
            known = self._under_way.get(key)
        if known is not None:
            return known.target(frame)
        piece = torch.empty(frame.num_bytes, dtype=torch.uint8)

        def keep() -> None:
            with self.sender.lock:
                begun = self._under_way.get(key)
                if begun is None:
                    self._early.setdefault(key, []).append((frame, piece))
                    return
            begun.add(frame, piece)

        return [bytes_of(piece)], keep

    def end(self, peer: int) -> None:
        """End the sums that a peer takes part in, with the lock held: it has left."""
        self.broken.add(peer)
        for one in self._under_way.values():
            if peer in one.members and not one.is_done:
                one.error = one.error or closed()


class TcpSumGroup:
    """A set of devices that sums over TCP."""

    def __init__(self, sums: Sums) -> None:
        self.sum: Callable[[Tensor, Collective, int], Sum] = sums.sum
