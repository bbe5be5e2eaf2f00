"""The thread of a device that reads all its connections, except those that a waiting thread reads itself."""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from raypipe.actors.transport.tcp_link import Link


class Receiver:
    """Reads the connections of a device in a thread called `name`, once it is told to start."""

    def __init__(self, links: Iterable[Link], *, name: str) -> None:
        self._links = {link.descriptor: link for link in links}
        self._watched = _Epoll() if hasattr(select, "epoll") else _Selector()
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        for descriptor in (self._wakes.fileno(), *self._links):
            self._watched.add(descriptor)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read. Peers send as soon as they are connected, so channels must be there before."""
        self._thread.start()

    def wait(self, link: Link, done: Callable[[], bool], timeout_s: float) -> None:
        """Read a link in the calling thread, until it is `done`, the link has ended, or the time is over.

        A message so wakes the thread that waits for it, and not first one that only reads.
        """
        self._leave(link)
        with link.lock:
            link.wait(done, timeout_s)
            if link.ended is None:
                self._watched.add(link.descriptor)

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
        self._watched.close()
        self._wakes.close()
        self._waker.close()

    def _leave(self, link: Link) -> None:
        with suppress(KeyError, OSError):  # it has ended
            self._watched.remove(link.descriptor)

    def _run(self) -> None:
        while not self._stopped:
            for descriptor in self._watched.ready():
                link = self._links.get(descriptor)
                if link is not None:
                    self._read(link)
                    continue
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)
                for link in self._links.values():
                    if link.tasks:
                        self._read(link)

    def _read(self, link: Link) -> None:
        if not link.lock.acquire(blocking=False):
            return  # whoever reads it will see the rest
        try:
            link.read()
            if link.ended is not None:
                self._leave(link)
        finally:
            link.lock.release()


class _Epoll:
    """Sockets to read; which they are may change while a thread waits for them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def add(self, descriptor: int) -> None:
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)

    def ready(self) -> list[int]:
        return [descriptor for descriptor, _ in self._epoll.poll()]

    def close(self) -> None:
        self._epoll.close()


class _Selector:
    """The same on other systems than Linux, at the cost of more lines for each call."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ)

    def remove(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def ready(self) -> list[int]:
        return [key.fd for key, _ in self._selector.select()]

    def close(self) -> None:
        self._selector.close()
