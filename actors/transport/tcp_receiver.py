"""The thread of a device that reads all its connections, except those that a waiting thread reads itself."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from select import POLLIN, poll

from raypipe.actors.transport.tcp_link import Link

_MOST_BYTES = 1 << 20
"""Bytes that are read from a connection before the others have their turn."""
_UNLIMITED = 1 << 62


def _never() -> bool:
    return False


class Receiver:
    """Reads the connections of a device in a thread called `name`, once it is told to start."""

    def __init__(self, links: Iterable[Link], *, name: str) -> None:
        self._selector = selectors.DefaultSelector()  # epoll and kqueue, unlike poll, see what another thread registers
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ, None)
        self._links = list(links)
        self._polls: dict[Link, poll] = {}
        for link in self._links:
            self._selector.register(link.descriptor, selectors.EVENT_READ, link)
            self._polls[link] = poll()
            self._polls[link].register(link.descriptor, POLLIN)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read. Peers send as soon as they are connected, so channels must be there before."""
        self._thread.start()

    def wait(self, link: Link, done: Callable[[], bool], timeout_s: float) -> None:
        """Read a link in the calling thread, until it is `done`, the link has ended, or the time is over.

        A message so wakes the thread that waits for it, and not first one that only reads.
        """
        deadline_s = time.monotonic() + timeout_s
        self._leave(link)
        with link.lock:
            try:
                while True:
                    link.read(most_bytes=_UNLIMITED, done=done)
                    if done() or link.ended is not None:
                        return
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        return
                    self._polls[link].poll(1000 * left_s)
            finally:
                if link.ended is None:
                    self._selector.register(link.descriptor, selectors.EVENT_READ, link)

    def wake(self) -> None:
        """Let the thread run the tasks of links."""
        with suppress(OSError):  # it has enough to read, or was closed
            self._waker.send(b"\0")

    def close(self) -> None:
        """End the thread, after the connections were shut down."""
        self._stopped = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        self._wakes.close()
        self._waker.close()

    def _leave(self, link: Link) -> None:
        with suppress(KeyError, ValueError, OSError):  # it has ended
            self._selector.unregister(link.descriptor)

    def _run(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._read(key.data)
                    continue
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)
                for link in self._links:
                    if link.tasks:
                        self._read(link)

    def _read(self, link: Link) -> None:
        if not link.lock.acquire(blocking=False):
            return  # whoever reads it will see the rest
        try:
            link.read(most_bytes=_MOST_BYTES, done=_never)
            if link.ended is not None:
                self._leave(link)
        finally:
            link.lock.release()
