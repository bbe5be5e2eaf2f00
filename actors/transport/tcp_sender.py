"""What a device sends over TCP: queues for each way out, from which the policy takes chunk by chunk."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.tcp import ALIGNMENT_BYTES, HEADER, Frame, FrameKind, PeerSocket
from raypipe.communication.policy import Traffic, Transfer, next_chunk

_FIRST_RATE = 50e6  # Bytes per second of a way of which nothing is known.
_LEAST_BUSY_S = 0.01  # Shorter times of work tell of the kernel's memory and not of the link.
_KERNEL_S = 0.002  # Seconds of the link's work that the kernel may hold.
_LEAST_KERNEL_BYTES = 64 << 10
_MOST_VIEWS = 64  # Of a call of sendmsg; the system takes 1024.
_MOST_RECORDS = 10_000


@dataclass(eq=False, slots=True)
class Outbound:
    """Bytes for a peer: a message, or a slice of a sum of which more and more is ready.

    Attributes:
        frame: Header; of a slice, for the bytes from `offset` on.
        views: Description and payload of a message; the slice.
        ready: Bytes of a slice that may leave.
        on_left: Called, with the lock held, whenever the last ready byte has left.
    """

    peer: int
    traffic: Traffic
    frame: Frame
    views: Sequence[memoryview]
    ready: int
    on_left: Callable[[], None]
    deadline: int = 0
    sequence: int = 0
    sent: int = 0
    queued: bool = False


@dataclass(frozen=True, slots=True)
class SentChunk:
    """A chunk that has left, in seconds of `time.monotonic`."""

    peer: int
    traffic: Traffic
    num_bytes: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Way:
    queue: list[Outbound] = field(default_factory=list)
    current: Outbound | None = None
    left: deque[memoryview] = field(default_factory=deque)
    chunk: int = 0
    start_s: float = 0.0
    rate: float = _FIRST_RATE
    limited_for: float = 0.0
    busy_since_s: float = 0.0
    busy_bytes: int = 0


class Sender:
    """The sending side of all connections of a device, with a thread for what does not leave at once.

    `lock` guards everything of a device's connections; `records` are the last chunks that left.
    """

    def __init__(
        self,
        sockets: Mapping[int, PeerSocket],
        *,
        lock: threading.Condition,
        chunk_s: float,
        ways: Mapping[int, Hashable],
        on_broken: Callable[[int], None],
        name: str,
    ) -> None:
        self.lock = lock
        self.records: deque[SentChunk] = deque(maxlen=_MOST_RECORDS)
        self._sockets = sockets
        self._chunk_s = chunk_s
        self._way_of = {peer: ways.get(peer, peer) for peer in sockets}
        self._ways: dict[Hashable, _Way] = {way: _Way() for way in self._way_of.values()}
        for way in self._ways.values():
            self._limit(way)
        self._on_broken = on_broken
        self._sequence = 0
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def push(self, outbound: Outbound) -> None:
        """Queue what is ready, with the lock held, and send what the kernel takes at once."""
        if not outbound.queued:
            outbound.queued = True
            self._sequence += 1
            outbound.sequence = self._sequence
            self._ways[self._way_of[outbound.peer]].queue.append(outbound)
        way = self._ways[self._way_of[outbound.peer]]
        if way.current is None and self._advance(way):
            os.eventfd_write(self._wake, 1)

    def _limit(self, way: _Way) -> None:
        """Let the kernel hold what the link carries in a short time; called again where its rate has changed."""
        if not 0.5 < way.rate / max(way.limited_for, 1.0) < 2.0:
            way.limited_for = way.rate
            for peer, name in self._way_of.items():
                if self._ways[name] is way:
                    with suppress(OSError):  # the peer is gone
                        self._sockets[peer].limit(max(round(way.rate * _KERNEL_S), _LEAST_KERNEL_BYTES))

    def drop(self, peer: int) -> None:
        """Forget what was to be sent to a peer, with the lock held."""
        if peer in self._way_of:
            way = self._ways[self._way_of[peer]]
            way.queue = [outbound for outbound in way.queue if outbound.peer != peer]
            if way.current is not None and way.current.peer == peer:
                way.current = None
                way.left.clear()

    def close(self) -> None:
        """End the thread."""
        with self.lock:
            if self._stopped:
                return
            self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        for way in self._ways.values():
            way.queue.clear()
            way.left.clear()
            way.current = None

    def _run(self) -> None:
        while True:
            with self.lock:
                waiting = {self._sockets[way.current.peer].end.fileno(): way for way in self._ways.values() if way.current is not None}
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for descriptor in waiting:
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLOUT)
            events = poll.poll()
            with self.lock:
                if self._stopped:
                    return
                for descriptor, _ in events:
                    if descriptor == self._wake:
                        os.eventfd_read(self._wake)
                    else:
                        self._advance(waiting[descriptor])

    def _advance(self, way: _Way) -> bool:
        """Send chunk by chunk until the kernel takes no more; return whether something is left."""
        while way.current is not None or self._begin(way):
            outbound = way.current
            assert outbound is not None, "a chunk has begun"
            try:
                count = self._sockets[outbound.peer].end.sendmsg([way.left[at] for at in range(min(len(way.left), _MOST_VIEWS))])
            except BlockingIOError:
                return True
            except OSError:
                self.drop(outbound.peer)
                self._on_broken(outbound.peer)
                continue
            while count:
                view = way.left[0]
                if count < len(view):
                    way.left[0] = view[count:]
                    break
                count -= len(view)
                way.left.popleft()
            if not way.left:
                self._end(way, outbound)
        return False

    def _begin(self, way: _Way) -> bool:
        """Take the next chunk from the queue, if there is one."""
        if not way.queue:
            return False
        transfers = [Transfer(each.traffic, each.deadline, each.sequence, each.ready - each.sent) for each in way.queue]
        chunk = next_chunk(transfers, bytes_per_s=way.rate, chunk_s=self._chunk_s)
        assert chunk is not None, "something is queued"
        position, num_bytes = chunk
        if num_bytes < transfers[position].num_bytes:
            num_bytes -= num_bytes % ALIGNMENT_BYTES  # no number is divided
        outbound = way.queue[position]
        way.start_s = time.monotonic()
        if not way.busy_bytes:
            way.busy_since_s = way.start_s
        way.current, way.chunk = outbound, num_bytes
        frame = outbound.frame
        if frame.kind == FrameKind.MESSAGE:
            way.left.extend([memoryview(HEADER.pack(*frame)), *outbound.views])
        else:
            header = HEADER.pack(*frame._replace(offset=frame.offset + outbound.sent, num_bytes=num_bytes))
            way.left.extend([memoryview(header), outbound.views[0][outbound.sent : outbound.sent + num_bytes]])
        return True

    def _end(self, way: _Way, outbound: Outbound) -> None:
        now_s = time.monotonic()
        self.records.append(SentChunk(outbound.peer, outbound.traffic, way.chunk, way.start_s, now_s))
        way.busy_bytes += way.chunk
        busy_s = now_s - way.busy_since_s
        if busy_s > _LEAST_BUSY_S:
            way.rate = way.busy_bytes / busy_s
            self._limit(way)
        outbound.sent += way.chunk
        way.current = None
        if outbound.sent == outbound.ready:
            outbound.queued = False
            way.queue.remove(outbound)
            outbound.on_left()
        if not way.queue:
            way.busy_bytes = 0


def closed() -> ChannelError:
    """Return the error of a connection that the peer has ended."""
    return ChannelError(CLOSED_BY_PEER)
