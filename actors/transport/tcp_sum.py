"""Sums over a ring of devices.

The tensor is cut into as many slices as there are members, the first of which are a number longer where it does not divide. The member
of a slice's number begins: its share goes round the ring, and each member adds its own; the last has the total, which goes round again.

    slice 1 of 3    member 1 -- share --> 2 -- share --> 0 -- total --> 1 -- total --> 2

So the order in which a number's shares are added depends on its place alone, not on what comes when and in how large chunks. Of a small
tensor, such as a norm, all shares go round as they are, in half the steps, and each member adds them in the order of the members. A tensor
that leaves out zeros of a longer one is cut where the longer one would be, so that its numbers are added as they would be there.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.protocol import Places, TensorSpec, summing_dtype
from raypipe.actors.transport.tcp_channel import plain
from raypipe.actors.transport.tcp_link import HEADER, Kind, Link
from raypipe.actors.transport.tcp_receiver import Receiver
from raypipe.actors.transport.tcp_sender import Sender
from raypipe.communication.policy import Traffic
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.collectives import Collective

_GRACE_S = 0.3
"""A member that has all it needs of a sum may leave before this one has: how long nothing may come then."""
_LOOK_EVERY_S = 0.25
"""How long who waits for a sum reads one member without looking whether another one has gone."""
_SMALL_BYTES = 1024


class TcpSumGroup:
    """A set of devices that sums; `members` in the order of the ring, this device at a position of it."""

    def __init__(self, members: tuple[int, ...], position: int, *, before: Link, behind: Link, sender: Sender, receiver: Receiver) -> None:
        self.members = members
        self.position = position
        self.before = before
        self.behind = behind
        self.sender = sender
        self.receiver = receiver
        self._num_sums: Counter[Collective] = Counter()

    def sum(self, tensor: Tensor, *, collective: Collective, deadline: int, places: Places | None = None) -> RingSum:
        """See `SumGroup`. Members may start sums in any order."""
        if self.before.ended is not None or self.behind.ended is not None or self.behind.broken is not None:
            raise ChannelError(CLOSED_BY_PEER)
        number = self._num_sums[collective]
        self._num_sums[collective] += 1
        total = RingSum(self, tensor, identity=_identity(collective, number), collective=collective, deadline=deadline, places=places)
        total.start()
        return total


def _identity(collective: Collective, number: int) -> int:
    text = f"{collective.kind} {collective.stage} {collective.update} {collective.part} {collective.devices} {number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class _Flow:
    """What goes to the next member of one slice, as share or as total, in the queue of its way."""

    __slots__ = ("collective", "deadline", "first", "kind", "link", "num_bytes", "ready", "sent", "sequence", "total", "traffic", "unit")

    def __init__(self, total: RingSum, kind: Kind, *, first: int, num_bytes: int, traffic: Traffic, deadline: int) -> None:
        self.total = total
        self.link = total.group.behind
        self.collective: Collective | None = total.collective
        self.traffic = traffic
        self.deadline = deadline
        self.sequence = -1
        self.kind = kind
        self.first = first
        self.num_bytes = num_bytes
        self.ready = 0
        self.sent = 0
        self.unit = total.item_bytes

    def frame(self, num_bytes: int) -> list[memoryview]:
        """See `Entry`."""
        start, total = self.first + self.sent, self.total
        header = HEADER.pack(self.kind, len(total.text), total.identity, start, num_bytes) + total.text
        return [memoryview(header), total.memory[start : start + num_bytes]]

    def left(self, num_bytes: int) -> None:
        """See `Entry`."""
        self.total.left(num_bytes)

    def fail(self, problem: str) -> None:
        """See `Entry`."""
        self.total.fail(problem)


class RingSum:
    """A sum under way. 16-bit floats are summed in float32 and rounded once, at the cost of twice the bytes.

    Attributes:
        text: See `SumSink`.
        memory: The numbers: this member's, then shares that it has added to, then totals.
    """

    def __init__(
        self, group: TcpSumGroup, tensor: Tensor, *, identity: int, collective: Collective, deadline: int, places: Places | None = None
    ) -> None:
        self.group = group
        self.tensor = tensor
        self.identity = identity
        self.collective = collective
        # Members of an empty tensor sum a stand-in, as they wait for each other all the same. The tensor's own memory where it will do.
        sent = plain(tensor) if tensor.numel() else torch.zeros(1)
        self._summed = sent.to(summing_dtype(sent.dtype)).contiguous().view(-1)
        num_members, numel = len(group.members), self._summed.numel()
        places = places or Places(numel, int)
        self._shares: Tensor | None = None
        """Of a small tensor, all members' numbers."""
        base, longer = divmod(places.numel, num_members)
        starts = [places.num_before(number * base + min(number, longer)) for number in range(num_members + 1)]
        if places.numel * self._summed.itemsize <= _SMALL_BYTES:
            starts = [number * numel for number in range(num_members + 1)]
            self._shares = self._summed.new_zeros(num_members, numel)
            self._shares[group.position] = self._summed
        self._numbers = (self._summed if self._shares is None else self._shares.view(-1)).numpy()
        self.memory = self._numbers.data.cast("B")
        self.item_bytes = self._summed.itemsize
        self.text = str(TensorSpec(tuple(tensor.shape), tensor.dtype)).encode()
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._finished = False
        self._lost_s: float | None = None
        self._thread = threading.get_ident()
        self._starts = [self.item_bytes * start for start in starts]
        self._to_receive = self._to_send = 0
        self._flows: list[tuple[_Flow | None, _Flow | None]] = []
        """For each slice, what is sent on: a share, a total."""
        is_norm = collective.kind.is_norm
        traffic, deadline = (Traffic.MESSAGE, 0) if is_norm else (Traffic.SUM, deadline)
        for number in range(num_members):
            first = self._starts[number]
            num_bytes = self._starts[number + 1] - first
            step = (group.position - number) % num_members
            last = num_members - 1
            if self._shares is not None:
                takes, sends_share, sends_total = int(step > 0), False, step < last
            else:
                takes, sends_share, sends_total = (step > 0) + (step < last), step < last, step == last or step < last - 1
            self._to_receive += num_bytes * takes
            self._to_send += num_bytes * (sends_share + sends_total)

            def flow(kind: Kind, first: int = first, num_bytes: int = num_bytes) -> _Flow:
                return _Flow(self, kind, first=first, num_bytes=num_bytes, traffic=traffic, deadline=deadline)

            self._flows.append((flow(Kind.SHARE) if sends_share else None, flow(Kind.TOTAL) if sends_total else None))

    def start(self) -> None:
        """Send the share of the slice that begins here, and take what comes."""
        group = self.group
        group.behind.sending.add(self)
        if (problem := group.behind.ended) is not None:  # just now
            self.lose(problem, sends=True)
        group.before.expect(self.identity, self)
        if group.before.tasks:
            group.receiver.wake()
        (share, whole), first = self._flows[group.position], self._starts[group.position]
        own = share or whole
        assert own is not None, "it has other members"
        if num_bytes := self._starts[group.position + 1] - first:
            group.sender.submit(own, num_bytes)

    # Called by who reads

    def _slice(self, offset: int) -> int:
        return bisect_right(self._starts, offset) - 1

    def add(self, offset: int, piece: memoryview) -> None:
        """See `SumSink`."""
        first, end = offset // self.item_bytes, (offset + len(piece)) // self.item_bytes
        own = self._numbers[first:end]
        np.add(own, np.frombuffer(piece, dtype=own.dtype), out=own)
        share, total = self._flows[self._slice(offset)]
        self._forward(share or total, offset + len(piece))
        self._received(len(piece))

    def total(self, offset: int, num_bytes: int) -> memoryview:
        """See `SumSink`."""
        return self.memory[offset : offset + num_bytes]

    def arrived(self, offset: int, num_bytes: int) -> None:
        """See `SumSink`."""
        self._forward(self._flows[self._slice(offset)][1], offset + num_bytes)
        self._received(num_bytes)

    def _forward(self, flow: _Flow | None, end: int) -> None:
        if flow is not None:
            self.group.sender.submit(flow, end - flow.first)

    def _received(self, num_bytes: int) -> None:
        self._to_receive -= num_bytes
        if not self._to_receive:
            self.group.before.forget(self.identity)
            self._check()

    def differs(self, text: bytes) -> None:
        """See `SumSink`."""
        self.fail(f"its members brought different things: {self.text.decode()}, {text.decode(errors='replace')}")

    # Called by who writes

    def left(self, num_bytes: int) -> None:
        """See that these bytes have left."""
        self._to_send -= num_bytes
        if not self._to_send:
            self._check()

    # Called by both

    def lose(self, problem: str, *, sends: bool) -> None:
        """See `SumSink`."""
        if not sends:
            if self._to_receive:
                self.fail(problem)
            return
        with self._changed:
            self._lost_s = time.monotonic()
            self._changed.notify_all()

    def fail(self, problem: str) -> None:
        """End the wait with a problem."""
        with self._changed:
            self.failure = self.failure or problem
            self._changed.notify_all()

    def _check(self) -> None:
        if self._to_receive or self._to_send:
            return
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """See `SumUnderWay`. Who started the sum of a small tensor reads what comes itself, so that it wakes no other thread first."""
        deadline_s = time.monotonic() + timeout_s
        before = self.group.before
        # Another thread would keep the connection from the first one, which may wait for a message.
        reads = self._shares is not None and threading.get_ident() == self._thread
        while not self._finished and self.failure is None:
            now_s = time.monotonic()
            left_s = deadline_s - now_s
            if self._lost_s is not None:
                grace_s = max(self._lost_s, before.moved_s) + _GRACE_S - now_s
                if grace_s <= 0:
                    raise ChannelError(CLOSED_BY_PEER)
                left_s = min(left_s, grace_s)
            if left_s <= 0:
                raise ChannelError(f"nothing came within {timeout_s:g} s; a member is stuck", kind=TransportTimeoutError)
            if reads and self._to_receive and before.ended is None:
                self.group.receiver.wait(before, self._has_come, min(left_s, _LOOK_EVERY_S))
                continue
            with self._changed:
                if not self._finished and self.failure is None:
                    self._changed.wait(left_s)
        if self.failure is not None:
            raise ChannelError(self.failure)
        self.group.behind.sending.discard(self)
        if self._shares is not None:
            self._summed.copy_(self._shares[0])
            for share in self._shares[1:]:
                self._summed += share
        if self.tensor.numel() and self.tensor.data_ptr() != self._summed.data_ptr():
            target = self.tensor.detach()
            target.copy_(self._summed.view(target.shape))

    def _has_come(self) -> bool:
        return not self._to_receive or self.failure is not None
