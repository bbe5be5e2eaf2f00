"""A way out of a device: the peers behind one bottleneck, the transfers that wait for it, and the rate at which it takes them."""

from __future__ import annotations

import fcntl
import itertools
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from raypipe.actors.transport.tcp_info import round_trip_s
from raypipe.actors.transport.tcp_link import Link
from raypipe.communication.policy import Communication, Traffic, Transfer, first_come, next_chunk
from raypipe.schedules.collectives import Collective

USUAL_BYTES_PER_S = 125e6
_NOTSENT_LOWAT = 25
"""<linux/tcp.h>: a socket is writable while fewer bytes are unsent; Python has no name for it."""
_LEAST_KERNEL_S = 0.002
_MOST_KERNEL_S = 0.02
"""Seconds of its work that the kernel may hold of a link beyond what is on its way: what has left the process cannot be overtaken.

The least does where threads wake at once. Where cores are busy, the kernel runs empty before one does; then it may hold more, and chunks
are as much longer, since each also takes time from those who compute.
"""
_MORE, _LESS = 1.5, 0.98
_INT = struct.Struct("i")
_LEAST_BUFFER_BYTES = 64 << 10
_MOST_BYTES = 4 << 20
"""Of a buffer, and of a chunk: a larger one gains nothing, and keeps a link for long whose rate falls."""
MOST_BUFFERS = 512
"""Of one system call; the kernel takes 1024."""
_WEIGHT = 0.3
"""Of the newest measurement in the estimated rate."""
ARRIVALS = itertools.count()
"""Numbers what comes to the ways of this process, in turn; sums number themselves where their slices pass one after the other."""


class Departure(NamedTuple):
    """A chunk that has gone into the kernel, by the clock of `time.perf_counter`.

    Attributes:
        number: Number of the chunk among all that have left over this connection.
        collective: Sum or norm that the chunk is of; `None` for a message.
        queued_bytes: Bytes that waited for the same way when it had left.
    """

    peer: int
    num_bytes: int
    start_s: float
    end_s: float
    traffic: Traffic
    number: int = 0
    collective: Collective | None = None
    queued_bytes: int = 0


class Entry(Protocol):
    """What waits for a way out.

    Attributes:
        deadline: See `Transfer`.
        sequence: See `Transfer`; set when it comes to the queue if it is negative.
        turn: See `Transfer`.
        ready: Bytes from its beginning that may leave.
        sent: Those of them that have left, or are leaving.
        unit: Bytes that are not divided.
        collective: Sum or norm that it is of; `None` for a message.
    """

    collective: Collective | None
    link: Link
    traffic: Traffic
    deadline: int
    sequence: int
    turn: int
    ready: int
    sent: int
    unit: int

    def frame(self, num_bytes: int) -> list[memoryview]:
        """Return the frame with the next bytes."""

    def left(self, num_bytes: int) -> None:
        """See that these bytes are in the kernel."""

    def fail(self, problem: str) -> None:
        """See that nothing more can leave."""


class Frame:
    """A chunk on its way into the kernel."""

    __slots__ = ("buffers", "entry", "num_bytes", "start_s")

    def __init__(self, entry: Entry, num_bytes: int, *, start_s: float | None = None, written: int = 0) -> None:
        self.entry = entry
        self.num_bytes = num_bytes
        self.start_s = time.perf_counter() if start_s is None else start_s
        self.buffers = entry.frame(num_bytes)
        self.drop(written)

    def write(self) -> int:
        """Hand the kernel what it takes; return how many bytes it took. No buffers are left if that is all."""
        written = 0
        while self.buffers:
            offered = self.buffers[:MOST_BUFFERS]
            try:
                count = self.entry.link.end.sendmsg(offered, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            written += count
            self.drop(count)
            if count < sum(map(len, offered)):
                break
        return written

    def drop(self, num_bytes: int) -> None:
        """Forget the first bytes, which are in the kernel."""
        while self.buffers and num_bytes >= len(self.buffers[0]):
            num_bytes -= len(self.buffers.pop(0))
        if num_bytes:
            self.buffers[0] = self.buffers[0][num_bytes:]


class Way:
    """The queue of the peers behind one bottleneck.

    Attributes:
        lock: Held by who writes; nobody waits for it.
        arrived: Entries that come to the queue, or have more bytes ready, with the number of these.
        active: The chunk that the kernel has not taken all of.
        draining: The peer of the last chunk of a sum, until the kernel has sent most of it.
        aside: Chunks of peers that take nothing, so that the others need not wait for them.
        paused: Transfers that have stopped in the middle: sums for a message, messages for one of another device.
        moved_s: When the kernel last took something.
        held: Peers at whose end of the link sums make way for others' messages.
        stopped: Peers that receive a message of another device first, and nothing of this one until then.
    """

    def __init__(self, links: Sequence[Link], communication: Communication) -> None:
        self.links = links
        self.lock = threading.Lock()
        self.arrived: deque[tuple[Entry, int]] = deque()
        self.queue: list[Entry] = []
        self.active: Frame | None = None
        self.draining: Link | None = None
        self.aside: dict[Link, Frame] = {}
        self.paused: dict[Link, Frame] = {}
        self.held: set[Link] = set()
        self.stopped: set[Link] = set()
        self.moved_s = time.monotonic()
        self.bytes_per_s = USUAL_BYTES_PER_S
        self.communication = communication
        self._kernel_s = _LEAST_KERNEL_S
        self._limited_for = 0.0
        self._full_s: float | None = None
        self._written = 0
        self._limit()

    @property
    def blocked(self) -> Link | None:
        """The peer for whose kernel buffer the way waits."""
        return self.active.entry.link if self.active is not None else self.draining

    def take_in(self) -> None:
        """Put what has arrived into the queue."""
        while self.arrived:
            entry, ready = self.arrived.popleft()
            link = entry.link
            if link.broken is not None:
                entry.fail(link.broken)
                continue
            entry.ready = max(entry.ready, ready)  # of two threads that bring more, the later one may be first
            has_left = 0 < entry.ready == entry.sent  # a message may have no bytes
            if not has_left and entry not in self.queue:
                if entry.sequence < 0:
                    entry.sequence = next(ARRIVALS)
                self.queue.append(entry)

    def is_idle(self, link: Link) -> bool:
        """Return whether what goes to a peer can leave before anything else."""
        is_free = self.active is None and not self.queue and not self.arrived
        return is_free and not (link in self.aside or link in self.paused or link in self.stopped) and link.broken is None

    def next_frame(self, *, bulk: bool) -> Frame | None:
        """Return the next chunk, as the policy says; `None` if there is none, or it is not a message and not `bulk`."""
        queue = self.queue
        if self.aside or self.held or self.stopped or self.paused:
            if (resumed := self._resumed()) is not None:
                return self.paused.pop(resumed) if bulk else None
            queue = [entry for entry in queue if self._may_begin(entry)]
        if not queue:
            if self.draining is None:
                self._full_s = None
            return None
        if len(queue) == 1 and queue[0].traffic is Traffic.MESSAGE:  # in a hurry, and there is nothing to choose
            entry = queue[0]
            self.queue.remove(entry)
            frame = Frame(entry, entry.ready - entry.sent)
            entry.sent = entry.ready
            return frame
        transfers = [Transfer(entry.traffic, entry.deadline, entry.sequence, entry.turn, entry.ready - entry.sent) for entry in queue]
        if self.communication.scheduled:
            chunk_s = self.communication.chunk_s * self._kernel_s / _LEAST_KERNEL_S
            chunk = next_chunk(transfers, bytes_per_s=min(self.bytes_per_s, _MOST_BYTES / chunk_s), chunk_s=chunk_s)
        else:
            chunk = first_come(transfers)
        assert chunk is not None, "something waits"
        entry = queue[chunk.position]
        if entry.traffic is not Traffic.MESSAGE and (self.draining is not None or not bulk):
            return None
        num_bytes = min(-(-chunk.num_bytes // entry.unit) * entry.unit, entry.ready - entry.sent)
        frame = Frame(entry, num_bytes)
        entry.sent += num_bytes
        if entry.sent == entry.ready:
            self.queue.remove(entry)
        return frame

    def _may_begin(self, entry: Entry) -> bool:
        link = entry.link
        if link in self.aside or link in self.paused or link in self.stopped:
            return False
        return entry.traffic is Traffic.MESSAGE or link not in self.held

    def _resumed(self) -> Link | None:
        """Return the peer whose chunk goes on next: a message, what is in the way of one, or anything if no message can leave."""
        if begun := self._messages_paused():
            return min(begun, key=lambda link: begun[link].entry.sequence)
        paused = {link: frame for link, frame in self.paused.items() if link not in self.stopped}
        messages = {entry.link for entry in self.queue if entry.traffic is Traffic.MESSAGE} - self.aside.keys() - self.stopped
        if not messages <= paused.keys():
            return None
        return next((link for link in paused if link in messages or not (messages or link in self.held)), None)

    @property
    def has_work(self) -> bool:
        """Whether something could leave."""
        paused = self.paused.keys() - self.stopped - self.held
        return bool(self.queue or paused or self._messages_paused())

    def make_way(self) -> None:
        """Stop a chunk of a sum in the middle if a message to another peer waits."""
        active = self.active
        if active is None or active.entry.link in self.paused or not self._may_pause(active):
            return
        others = (entry for entry in self.queue if entry.traffic is Traffic.MESSAGE and entry.link is not active.entry.link)
        if any(map(self._may_begin, others)) or self._messages_paused():
            self._pause(active)

    def _messages_paused(self) -> dict[Link, Frame]:
        """Return the messages that have stopped in the middle and may go on."""
        return {link: frame for link, frame in self.paused.items() if frame.entry.traffic is Traffic.MESSAGE and link not in self.stopped}

    def _may_pause(self, frame: Frame) -> bool:
        return self.communication.scheduled and frame.entry.traffic is not Traffic.MESSAGE

    def _pause(self, frame: Frame) -> None:
        self.paused[frame.entry.link] = frame
        self.active = None
        self._full_s = None  # the kernel runs empty meanwhile

    def departure(self, link: Link, num_bytes: int, start_s: float, traffic: Traffic, collective: Collective | None = None) -> Departure:
        """Return the note of a chunk that has just left."""
        queued_bytes = sum(entry.ready - entry.sent for entry in self.queue)
        number = link.num_left
        link.num_left += 1
        return Departure(link.peer, num_bytes, start_s, time.perf_counter(), traffic, number, collective, queued_bytes)

    def round_trips_s(self) -> dict[int, float]:
        """Return the shortest round trip to each peer so far, as far as this system tells."""
        if sys.platform != "linux":
            return {}
        trips_s: dict[int, float] = {}
        for link in self.links:
            with suppress(OSError):  # it is closed
                trips_s[link.peer] = round_trip_s(link.end)
        return trips_s

    def write(self, frame: Frame) -> bool:
        """Hand the kernel what it takes of a chunk; return whether that is all; raises `OSError`."""
        num_bytes = frame.write()
        if num_bytes:
            self.moved_s = time.monotonic()
        self._written += num_bytes
        if frame.buffers:
            self._measure()
            return False
        if frame.entry.traffic is not Traffic.MESSAGE and self.communication.scheduled:
            self.draining = frame.entry.link
        return True

    def _measure(self) -> None:
        """Estimate the rate: between two moments at which the kernel is full, as much has left it as was written."""
        now_s = time.perf_counter()
        if self._full_s is None:
            self._full_s, self._written = now_s, 0
            return
        seconds = now_s - self._full_s
        if seconds >= max(self.communication.chunk_s / 4, 1e-4):
            self.bytes_per_s += _WEIGHT * (self._written / seconds - self.bytes_per_s)
            self._full_s, self._written = now_s, 0
            self._limit()

    def unblock(self, ready: Container[int], *, stalled_s: float) -> bool:
        """See which sockets are writable; return whether the way is free. A peer that takes nothing for so long is put aside."""
        stalled = time.monotonic() - self.moved_s > stalled_s
        if (blocked := self.blocked) is not None and blocked.descriptor in ready and (self.active is not None or self.queue):
            self._fit_kernel(blocked)
        if self.draining is not None and (stalled or self.draining.descriptor in ready):
            self.draining = None
        if self.active is None or self.active.entry.link.descriptor in ready:
            return True
        if stalled and len(self.links) > 1:
            self.aside[self.active.entry.link] = self.active
            self.active = None
            return True
        return False

    def hold(self, links: Collection[Link], until_s: float, *, with_messages: bool = False) -> None:
        """Send nothing of sums to some peers until a time, and no messages on request."""
        for link in links:
            if with_messages:
                link.stopped_until_s = until_s
            else:
                link.held_until_s = until_s
            active = self.active
            if until_s and active is not None and active.entry.link is link and (with_messages or self._may_pause(active)):
                self._pause(active)
            if until_s and self.draining is link:
                self.draining = None
        if with_messages:
            self.stopped = self.stopped.union(links)
        else:
            self.held = self.held.union(links)
        self.release(time.monotonic())

    def release(self, now_s: float) -> None:
        """See whose time is over."""
        self.held = {link for link in self.held if link.held_until_s > now_s}
        self.stopped = {link for link in self.stopped if link.stopped_until_s > now_s}

    def _fit_kernel(self, link: Link) -> None:
        """Let the kernel hold more if it ran empty before this thread woke, and by and by less if not."""
        if not self.communication.scheduled or sys.platform != "linux":
            return
        with suppress(OSError):  # it is closed
            (left_bytes,) = _INT.unpack(fcntl.ioctl(link.end, termios.TIOCOUTQ, bytes(_INT.size)))
            factor = _MORE if left_bytes <= self.bytes_per_s * round_trip_s(link.end) else _LESS
            self._kernel_s = min(max(self._kernel_s * factor, _LEAST_KERNEL_S), _MOST_KERNEL_S)
            self._limit()

    def _limit(self) -> None:
        """Let the kernel hold little; called again where the rate or the time has changed."""
        held_bytes = self.bytes_per_s * self._kernel_s
        if not self.communication.scheduled or 0.75 < held_bytes / max(self._limited_for, 1.0) < 1.33:
            return
        self._limited_for = held_bytes
        for link in self.links:
            with suppress(OSError):  # it is closed
                # A buffer also holds what is on its way until the peer has said that it is there.
                num_bytes = round(held_bytes + self.bytes_per_s * 2 * round_trip_s(link.end))
                link.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(max(num_bytes, _LEAST_BUFFER_BYTES), _MOST_BYTES) // 2)
                if sys.platform == "linux":
                    # It asks for more when half of this is left, which has to last until the thread wakes.
                    unsent_bytes = round(min(max(held_bytes, _LEAST_BUFFER_BYTES / 2), _MOST_BYTES / 4))
                    link.end.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, unsent_bytes)

    def lose(self, link: Link, problem: str) -> None:
        """Drop what would go over a broken connection."""
        link.broken = link.broken or problem
        stopped = (self.aside.pop(link, None), self.paused.pop(link, None))
        frames = [frame for frame in (self.active, *stopped) if frame is not None and frame.entry.link is link]
        if self.active in frames:
            self.active = None
        if self.draining is link:
            self.draining = None
        lost = [entry for entry in self.queue if entry.link is link]
        self.queue = [entry for entry in self.queue if entry.link is not link]
        for entry in [*(frame.entry for frame in frames), *lost]:
            entry.fail(problem)
