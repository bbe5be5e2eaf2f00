"""Sums over devices, whose slices take the ways of a pattern (`raypipe.communication.patterns`).

    slice 1 of 3, ring    member 1 -- share --> 2 -- share --> 0 -- total --> 1 -- total --> 2

A share that comes before its turn waits, so that the order in which a number's shares are added depends on the pattern and its place alone,
not on what comes when and in how large chunks. Of a small tensor, such as a norm, all members' numbers go to all, and each adds them in
the order of the members. A tensor that leaves out zeros of a longer one is cut where the longer one would be, so that its numbers are
added as they would be there.

Of a tensor that owners divide, each number's share takes the same way, and its total goes to its owner alone; or nothing is added and each
owner's numbers go to all (`raypipe.communication.shards`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.protocol import Places, TensorSpec, summing_dtype
from raypipe.actors.transport.tcp_channel import plain
from raypipe.actors.transport.tcp_link import HEADER, Kind, Link
from raypipe.actors.transport.tcp_receiver import Receiver
from raypipe.actors.transport.tcp_sender import Sender
from raypipe.actors.transport.tcp_way import ARRIVALS
from raypipe.communication.patterns import Part, Pattern, Route
from raypipe.communication.policy import Traffic
from raypipe.communication.shards import Segment, gathered, reduced, slice_owners
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.collectives import Collective, CollectiveKind

_GRACE_S = 0.3
"""A member that has all it needs of a sum may leave before this one has: how long nothing may come then."""
_LOOK_EVERY_S = 0.25
"""How long who waits for a sum reads one member without looking whether another one has gone."""
_SMALL_BYTES = 1024


class TcpSumGroup:
    """A set of devices that sums.

    Attributes:
        position: Position of this device among the members.
        slice_owners: See `SumGroup`; by the pattern when the members connected.
        pattern: Pattern of the sums that start from now on; all members change it between the same two sums.
        exchange: Pattern by whose totals the numbers of small tensors go to all.
        links: Connections with the other members, by position; of all or of those that the patterns need.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        position: int,
        *,
        pattern: Pattern,
        exchange: Pattern,
        links: Mapping[int, Link],
        sender: Sender,
        receiver: Receiver,
    ) -> None:
        self.members = members
        self.position = position
        self.pattern = pattern
        self.slice_owners = slice_owners(pattern)
        self.exchange = exchange
        self.links = links
        self.sender = sender
        self.receiver = receiver
        self._num_sums: Counter[Collective] = Counter()

    def sum(
        self,
        tensor: Tensor,
        *,
        collective: Collective,
        deadline: int,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> TcpSum:
        """See `SumGroup`. Members may start sums in any order."""
        identity = _identity(collective, self._num_sums[collective])
        self._num_sums[collective] += 1
        total = TcpSum(self, tensor, identity=identity, collective=collective, deadline=deadline, places=places, segments=segments)
        total.start()
        return total


def _identity(collective: Collective, number: int) -> int:
    text = f"{collective.kind} {collective.stage} {collective.update} {collective.part} {collective.rows} {collective.devices} {number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class _Ways(NamedTuple):
    """Where the slices of a vector start, with its end, what a member does with each, and in which order it begins with them.

    Attributes:
        pipelined: Whether all members pass one slice after the other.
    """

    starts: Sequence[int]
    parts: tuple[Part, ...]
    order: tuple[int, ...]
    pipelined: bool


@lru_cache(maxsize=256)
def _ways(pattern: Pattern, position: int, numel: int, segments: tuple[Segment, ...], *, item_bytes: int, gathers: bool) -> _Ways:
    pipelined = False
    if not segments:
        starts, routes = pattern.starts(numel), pattern.routes
        pipelined = pattern.is_pipelined(numel * item_bytes)
    else:
        pieces = gathered(pattern, segments) if gathers else reduced(pattern, numel, segments)
        starts, routes = [*(piece.start for piece in pieces), numel], tuple(piece.route for piece in pieces)
    order = tuple(range(len(routes))) if pipelined else _order(pattern, position, routes)
    return _Ways(starts, tuple(route.part(position) for route in routes), order, pipelined)


def _order(pattern: Pattern, position: int, routes: Sequence[Route]) -> tuple[int, ...]:
    # Each member begins with another slice, so that they do not all send to one; along a tree with that whose total comes from farthest,
    # so that totals come back while shares of others still leave.
    first = position * len(routes) // pattern.num_members
    order = (*range(first, len(routes)), *range(first))
    if not pattern.trees:
        return order
    return tuple(sorted(order, key=lambda number: -routes[number].num_hops(position)))


@lru_cache(maxsize=256)
def _exchanged(pattern: Pattern, position: int) -> tuple[Part, ...]:
    """Return the ways of the totals of each member."""
    parts = [route.part(position) for route in sorted(pattern.routes, key=lambda route: route.owner)]
    return tuple(Part((), (), part.total_from, part.totals_to) for part in parts)


class _Flow:
    """What goes to another member of one slice, as share or as total, in the queue of its way."""

    __slots__ = ("collective", "deadline", "first", "kind", "link", "ready", "sent", "sequence", "total", "traffic", "turn", "unit")

    def __init__(self, total: TcpSum, kind: Kind, link: Link, *, first: int, turn: int) -> None:
        self.total = total
        self.link = link
        self.collective: Collective | None = total.collective
        self.traffic = total.traffic
        self.deadline = total.deadline
        self.sequence = total.sequence
        self.turn = turn
        self.kind = kind
        self.first = first
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


class _Slice:
    """One slice of a sum on this device.

    Attributes:
        ends: For each member whose share is added here, in turn, the byte up to which that is done.
        early: Of each of them, bytes behind that which came before their turn.
        on: What goes on when the last one's are added.
        totals: What goes on of the total.
    """

    __slots__ = ("early", "ends", "first", "on", "part", "totals")

    def __init__(self, part: Part, first: int, on: Sequence[_Flow], totals: Sequence[_Flow]) -> None:
        self.part = part
        self.first = first
        self.on = on
        self.totals = totals
        self.ends = [first] * len(part.sources)
        self.early: list[deque[memoryview]] = [deque() for _ in part.sources]


class _Source:
    """What comes for a sum from one member; see `SumSink`.

    Attributes:
        left: Bytes that have not come.
    """

    def __init__(self, total: TcpSum, position: int, link: Link, *, num_bytes: int) -> None:
        self.sum = total
        self.position = position
        self.link = link
        self.left = num_bytes
        self.text = total.text
        self.item_bytes = total.item_bytes

    def add(self, offset: int, piece: memoryview) -> None:
        """See `SumSink`."""
        self.sum.add(self.position, offset, piece)
        self._came(len(piece))

    def total(self, offset: int, num_bytes: int) -> memoryview:
        """See `SumSink`."""
        return self.sum.memory[offset : offset + num_bytes]

    def arrived(self, offset: int, num_bytes: int) -> None:
        """See `SumSink`."""
        self.sum.arrived(offset + num_bytes)
        self._came(num_bytes)

    def _came(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if not self.left:
            self.link.forget(self.sum.identity)
        self.sum.received(num_bytes)

    def differs(self, text: bytes) -> None:
        """See `SumSink`."""
        self.sum.fail(f"its members brought different things: {self.text.decode()}, {text.decode(errors='replace')}")

    def lose(self, problem: str) -> None:
        """See `SumSink`."""
        if self.left:
            self.sum.fail(problem)


class TcpSum:
    """A sum under way. 16-bit floats are summed in float32 and rounded once, at the cost of twice the bytes.

    Attributes:
        text: See `SumSink`.
        memory: The numbers: this member's, then shares that it has added to, then totals.
        sequence: See `Entry`; negative where slices do not pass one after the other.
    """

    def __init__(
        self,
        group: TcpSumGroup,
        tensor: Tensor,
        *,
        identity: int,
        collective: Collective,
        deadline: int,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> None:
        self.group = group
        self.tensor = tensor
        self.identity = identity
        self.collective = collective
        # Members of an empty tensor sum a stand-in, as they wait for each other all the same. The tensor's own memory where it will do.
        sent = plain(tensor) if tensor.numel() else torch.zeros(1)
        gathers = bool(segments) and collective.kind is CollectiveKind.WEIGHTS
        self._summed = (sent if gathers else sent.to(summing_dtype(sent.dtype))).contiguous().view(-1)
        num_members, numel = len(group.members), self._summed.numel()
        places = places or Places(numel, int)
        self._shares: Tensor | None = None
        """Of a small tensor, all members' numbers."""
        text = str(TensorSpec(tuple(tensor.shape), tensor.dtype))
        if places.numel * self._summed.itemsize <= _SMALL_BYTES and not gathers:
            starts = [number * numel for number in range(num_members + 1)]
            parts = _exchanged(group.exchange, group.position)
            self._order, pipelined = tuple(range(num_members)), False
            self._shares = self._summed.new_zeros(num_members, numel)
            self._shares[group.position] = self._summed
        else:
            ways = _ways(group.pattern, group.position, places.numel, segments, item_bytes=self._summed.itemsize, gathers=gathers)
            starts, parts, self._order, pipelined = [places.num_before(start) for start in ways.starts], *ways[1:]
            text += f" ({group.pattern}{', to owners' if segments else ''})"
        # Numpy has no bfloat16, to which nothing is added.
        numbers = self._summed.view(torch.uint8) if gathers else self._summed
        self._numbers = (numbers if self._shares is None else self._shares.view(-1)).numpy()
        self.memory = self._numbers.data.cast("B")
        self.item_bytes = self._summed.itemsize
        self.text = text.encode()
        self.failure: str | None = None
        self._changed = threading.Condition()
        """Held by who changes anything; several links may bring numbers at a time, and several ways take them."""
        self._finished = False
        self._lost_s: float | None = None
        self._thread = threading.get_ident()
        self._starts = [self.item_bytes * start for start in starts]
        self._to_receive = self._to_send = 0
        self.traffic, self.deadline = (Traffic.MESSAGE, 0) if collective.kind.is_norm else (Traffic.SUM, deadline)
        self.sequence = next(ARRIVALS) if pipelined else -1
        coming: Counter[int] = Counter()
        self._slices = [self._slice(number, part, coming) for number, part in enumerate(parts)]
        self._sources = [_Source(self, peer, group.links[peer], num_bytes=num_bytes) for peer, num_bytes in coming.items() if num_bytes]

    def _slice(self, number: int, part: Part, coming: Counter[int]) -> _Slice:
        first = self._starts[number]
        num_bytes = self._starts[number + 1] - first

        def flows(kind: Kind, targets: Sequence[int]) -> list[_Flow]:
            self._to_send += num_bytes * len(targets)
            links = self.group.links
            return [_Flow(self, kind, links[peer], first=first, turn=number if self.sequence >= 0 else 0) for peer in targets]

        for peer in (*part.sources, *part.total_from):
            coming[peer] += num_bytes
            self._to_receive += num_bytes
        totals = flows(Kind.TOTAL, part.totals_to)
        return _Slice(part, first, flows(Kind.SHARE, part.share_to) or totals, totals)

    def start(self) -> None:
        """Send the shares that wait for nobody's, and take what comes."""
        group, slices = self.group, self._slices
        targets = {flow.link for each in slices for flow in (*each.on, *each.totals)}
        sources = [source.link for source in self._sources]
        if any(link.ended is not None for link in (*targets, *sources)) or any(link.broken is not None for link in targets):
            raise ChannelError(CLOSED_BY_PEER)
        for link in targets:
            link.sending.add(self)
            if (problem := link.ended) is not None:  # just now
                self.lose(problem)
        for source in self._sources:
            source.link.expect(self.identity, source)
        if any(link.tasks for link in sources):
            group.receiver.wake()
        for number in self._order:
            each = slices[number]
            if not each.part.sources and (each.part.share_to or not each.part.total_from):
                self._forward(each.on, self._starts[number + 1])

    # Called by who reads

    def _slice_of(self, offset: int) -> _Slice:
        return self._slices[bisect_right(self._starts, offset) - 1]

    def add(self, source: int, offset: int, piece: memoryview) -> None:
        """Add shares of a member in its turn."""
        each = self._slice_of(offset)
        turn, ends = each.part.sources.index(source), each.ends
        with self._changed:
            before = ends[-1]
            count = self._add_in_turn(each, turn, piece) if not each.early[turn] else 0
            if count < len(piece):
                each.early[turn].append(memoryview(bytes(piece[count:])))
            for later in range(turn + 1, len(ends)):
                early = each.early[later]
                while early and (count := self._add_in_turn(each, later, early[0])):
                    if count == len(early[0]):
                        early.popleft()
                    else:
                        early[0] = early[0][count:]
            end = ends[-1]
        if end > before:
            self._forward(each.on, end)

    def _add_in_turn(self, each: _Slice, turn: int, piece: memoryview) -> int:
        """Add as much as the members before have been added of; return how many bytes."""
        start = each.ends[turn]
        count = min(len(piece), each.ends[turn - 1] - start) if turn else len(piece)
        if count:
            own = self._numbers[start // self.item_bytes : (start + count) // self.item_bytes]
            np.add(own, np.frombuffer(piece[:count], dtype=own.dtype), out=own)
            each.ends[turn] += count
        return count

    def arrived(self, end: int) -> None:
        """Pass on a part of a total, which is in its memory, up to a byte."""
        self._forward(self._slice_of(end - 1).totals, end)

    def _forward(self, flows: Sequence[_Flow], end: int) -> None:
        # Never while `_changed` is held: who submits may write for another sum, which holds its own then.
        for flow in flows:
            if end > flow.first:
                self.group.sender.submit(flow, end - flow.first)

    def received(self, num_bytes: int) -> None:
        """See that these bytes have come."""
        with self._changed:
            self._to_receive -= num_bytes
            self._check()

    # Called by who writes

    def left(self, num_bytes: int) -> None:
        """See that these bytes have left."""
        with self._changed:
            self._to_send -= num_bytes
            self._check()

    # Called by both

    def lose(self, problem: str) -> None:
        """See that a member to whom numbers go reads no more."""
        with self._changed:
            self._lost_s = time.monotonic()
            self._changed.notify_all()

    def fail(self, problem: str) -> None:
        """End the wait with a problem."""
        with self._changed:
            self.failure = self.failure or problem
            self._changed.notify_all()

    def _check(self) -> None:
        if not self._to_receive and not self._to_send:
            self._finished = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """See `SumUnderWay`. Who started the sum of a small tensor reads what comes itself, so that it wakes no other thread first."""
        deadline_s = time.monotonic() + timeout_s
        # Another thread would keep the connection from the first one, which may wait for a message.
        reads = self._shares is not None and threading.get_ident() == self._thread
        while not self._finished and self.failure is None:
            now_s = time.monotonic()
            left_s = deadline_s - now_s
            if self._lost_s is not None:
                moved_s = max([self._lost_s, *(source.link.moved_s for source in self._sources)])
                grace_s = moved_s + _GRACE_S - now_s
                if grace_s <= 0:
                    raise ChannelError(CLOSED_BY_PEER)
                left_s = min(left_s, grace_s)
            if left_s <= 0:
                raise ChannelError(f"nothing came within {timeout_s:g} s; a member is stuck", kind=TransportTimeoutError)
            source = next((each for each in self._sources if each.left and each.link.ended is None), None) if reads else None
            if source is not None:
                self._read(source, min(left_s, _LOOK_EVERY_S))
                continue
            with self._changed:
                if not self._finished and self.failure is None:
                    self._changed.wait(left_s)
        if self.failure is not None:
            raise ChannelError(self.failure)
        for each in self._slices:
            for flow in (*each.on, *each.totals):
                flow.link.sending.discard(self)
        # They refer to this sum, whose memory is to be free as soon as nobody has it, not when cycles are collected.
        self._slices, self._sources = [], []
        if self._shares is not None:
            self._summed.copy_(self._shares[0])
            for share in self._shares[1:]:
                self._summed += share
        if self.tensor.numel() and self.tensor.data_ptr() != self._summed.data_ptr():
            target = self.tensor.detach()
            target.copy_(self._summed.view(target.shape))

    def _read(self, source: _Source, timeout_s: float) -> None:
        self.group.receiver.wait(source.link, lambda: not source.left or self.failure is not None, timeout_s)
