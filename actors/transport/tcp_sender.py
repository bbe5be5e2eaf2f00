"""The thread of a device that writes, chunk by chunk, what could not leave at once."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from select import POLLIN, POLLOUT, poll
from socket import MSG_DONTWAIT

from raypipe.actors.transport.channel import CLOSED_BY_PEER
from raypipe.actors.transport.tcp_holds import Holds, until
from raypipe.actors.transport.tcp_link import MOST_NOTED, Link, Memory
from raypipe.actors.transport.tcp_way import MOST_BUFFERS, Departure, Entry, Frame, Way
from raypipe.communication.policy import Traffic

_STALLED_S = 0.25
"""A peer whose kernel takes nothing for so long does not hold its way."""


class Sender:
    """Writes what a device sends: the calling thread if the way is idle, and a message's turn; else a thread called `name`."""

    def __init__(self, ways: Iterable[Way], *, holds: Holds | None, name: str) -> None:
        self.ways = list(ways)
        self._holds = holds
        self.departures: deque[Departure] = deque(maxlen=MOST_NOTED)
        self._way_of = {link: way for way in self.ways for link in way.links}
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, entry: Entry, ready: int) -> None:
        """Let an entry leave in its turn, of which so many bytes are ready; return at once. Called from any thread."""
        way = self._way_of[entry.link]
        way.arrived.append((entry, ready))
        self._advance(way, bulk=False)

    def send(self, link: Link, buffers: Sequence[Memory], num_bytes: int, make: Callable[[], Entry]) -> None:
        """Send a message's frame: here and now if its way is idle, as the entry that `make` returns if not, or what is left of it."""
        way = self._way_of[link]
        if self._holds is not None:
            self._holds.leaves(link.peer, num_bytes)
        if len(buffers) <= MOST_BUFFERS and not way.arrived and way.lock.acquire(blocking=False):
            try:
                if way.is_idle(link) and self._send_now(way, link, buffers, num_bytes, make):
                    return
            finally:
                way.lock.release()
                if way.arrived:
                    self._advance(way, bulk=False)
        entry = make()
        self.submit(entry, entry.ready)

    def _send_now(self, way: Way, link: Link, buffers: Sequence[Memory], num_bytes: int, make: Callable[[], Entry]) -> bool:
        start_s = time.perf_counter()
        try:
            count = link.end.sendmsg(buffers, (), MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            way.lose(link, CLOSED_BY_PEER)
            return False
        if count == num_bytes:
            self.departures.append(way.departure(link, num_bytes, start_s, Traffic.MESSAGE))
            return True
        entry = make()
        entry.sequence, entry.sent = 0, entry.ready
        way.active = Frame(entry, entry.ready, start_s=start_s, written=count)
        self._wake()
        return True

    def close(self) -> None:
        """End the thread, after the connections were shut down."""
        self._stopped = True
        self._wake()
        self._thread.join()
        self._wakes.close()
        self._waker.close()
        for way in self.ways:
            way.arrived.clear()
            way.queue.clear()
            way.aside.clear()
            way.paused.clear()
            way.active = None

    def _wake(self) -> None:
        with suppress(OSError):  # it has enough to read, or was closed
            self._waker.send(b"\0")

    def _advance(self, way: Way, *, bulk: bool) -> None:
        # Whoever holds the lock takes in what others bring, so that nobody waits for it. What comes before the release is seen behind it.
        while way.lock.acquire(blocking=False):
            try:
                self._write(way, bulk=bulk)
            finally:
                way.lock.release()
            if not way.arrived:
                return

    def _write(self, way: Way, *, bulk: bool) -> None:
        while True:
            way.take_in()
            way.make_way()
            if way.active is None:
                blocked = way.draining is not None
                way.active = way.next_frame(bulk=bulk)
                if way.active is None:
                    if way.has_work and not bulk and not blocked:
                        self._wake()
                    return
            elif not bulk:
                return  # the thread waits for the kernel
            if not self._put(way, way.active):
                if not bulk:
                    self._wake()
                return

    def _put(self, way: Way, frame: Frame) -> bool:
        """Write a chunk; return whether the way is free again."""
        try:
            if not way.write(frame):
                return False
        except OSError:
            way.lose(frame.entry.link, CLOSED_BY_PEER)
            return True
        if frame is way.active:
            way.active = None
        entry = frame.entry
        self.departures.append(way.departure(entry.link, frame.num_bytes, frame.start_s, entry.traffic, entry.collective))
        entry.left(frame.num_bytes)
        return True

    def _run(self) -> None:
        while not self._stopped:
            polling = poll()
            polling.register(self._wakes, POLLIN)
            if self._holds is not None:
                polling.register(self._holds.end, POLLIN)
            limits_s: list[float] = []
            for way in self.ways:
                blocked = way.blocked
                for link in (blocked, *way.aside):
                    if link is not None:
                        polling.register(link.descriptor, POLLOUT)
                limits_s += [_STALLED_S] if blocked is not None else []
                limits_s += [max(link.held_until_s - time.monotonic(), 0.0) for link in way.held]
                limits_s += [max(link.stopped_until_s - time.monotonic(), 0.0) for link in way.stopped]
            ready = {descriptor for descriptor, _ in polling.poll(1000 * min(limits_s) + 0.1 if limits_s else None)}
            with suppress(BlockingIOError):
                self._wakes.recv(4096)
            if self._holds is not None and self._holds.end.fileno() in ready:
                self._hold(self._holds)
            for way in self.ways:
                self._serve(way, ready)

    def _hold(self, holds: Holds) -> None:
        for peer, seconds, with_messages in holds.asked():
            for way in self.ways:
                links = [link for link in way.links if (link.peer == peer if peer is not None else holds.is_far(link.peer))]
                if links:
                    with way.lock:
                        way.hold(links, until(seconds), with_messages=with_messages)

    def _serve(self, way: Way, ready: Container[int]) -> None:
        with way.lock:
            way.release(time.monotonic())
            for link, frame in list(way.aside.items()):
                if link.descriptor in ready and self._put(way, frame):
                    way.aside.pop(link, None)
            if way.unblock(ready, stalled_s=_STALLED_S):
                self._write(way, bulk=True)
            else:
                way.take_in()
        if way.arrived:
            self._advance(way, bulk=True)
