"""What a device receives over TCP: one thread reads all connections, straight into the memory that is to hold it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence

from raypipe.actors.transport.tcp import HEADER, Frame, PeerSocket

Target = tuple[Sequence[memoryview], Callable[[], None]]
"""Where the next bytes go, one memory behind the other, and what to do when all of them are there."""
OnFrame = Callable[[int, Frame], Target]
"""Says where what follows a header goes, by peer."""
_MOST_READS = 16  # Of one connection before the others have their turn.


class Receiver:
    """The receiving side of all connections of a device. `on_ended` is called once for each peer that ends its connection."""

    def __init__(self, sockets: Mapping[int, PeerSocket], *, on_frame: OnFrame, on_ended: Callable[[int], None], name: str) -> None:
        self._readers = {peer: _Reader(peer, end, on_frame) for peer, end in sockets.items()}
        self._on_ended = on_ended
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._wake = -1
            self._readers.clear()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_descriptor = {reader.end.end.fileno(): reader for reader in self._readers.values()}
        for descriptor in by_descriptor:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    return
                reader = by_descriptor[descriptor]
                if not reader.read():
                    poll.unregister(descriptor)
                    self._on_ended(reader.peer)


class _Reader:
    def __init__(self, peer: int, end: PeerSocket, on_frame: OnFrame) -> None:
        self.peer = peer
        self.end = end
        self._on_frame = on_frame
        self._header = bytearray(HEADER.size)
        self._left: list[memoryview] = []
        """Memory to be filled, the next one last."""
        self._then: Callable[[], None] | None = None
        """What follows the frame that is being read; `None` for a header."""
        self._expect_header()

    def _expect_header(self) -> None:
        self._left, self._then = [memoryview(self._header)], None

    def read(self) -> bool:
        """Read what is there; return whether the peer may still send."""
        for _ in range(_MOST_READS):
            try:
                count = self.end.end.recv_into(self._left[-1])
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not count:
                return False
            self._left[-1] = self._left[-1][count:]
            while not self._left or not len(self._left[-1]):
                if self._left:
                    self._left.pop()
                if not self._left:
                    self._go_on()
        return True

    def _go_on(self) -> None:
        then = self._then
        if then is None:
            into, self._then = self._on_frame(self.peer, Frame(*HEADER.unpack(self._header)))
            self._left = [memory for memory in reversed(into) if len(memory)]
            if self._left:
                return
            then = self._then
        self._expect_header()
        then()
