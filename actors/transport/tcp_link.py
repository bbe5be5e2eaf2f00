"""One TCP connection between two devices: its frames, and how they are read.

    header: kind, bytes of the text, identity, offset, bytes of the payload | text | payload ...

A message is one frame: its number on the channel, what it is in words, and its tensors. A sum is many: which sum it is, the tensor in
words, and bytes of it from an offset. Reading is a generator, which yields the memory that it wants filled and is sent the number of
bytes that came, so that whoever holds `lock` can go on where another thread stopped.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, Protocol

from raypipe.actors.transport.channel import CLOSED_BY_PEER
from raypipe.actors.transport.tcp_holds import Holds
from raypipe.actors.transport.tcp_info import is_unanswered

HEADER = struct.Struct("<BxHxxxxQQQ")
Reading = Generator[memoryview, int, None]
Memory = bytes | ctypes.Array[ctypes.c_ubyte]
"""What the kernel can send from."""
_STAGING_BYTES = 4096
"""What comes in pieces smaller than this is read together."""
_MOST_BYTES = 1 << 20
"""What is read from a connection before the others have their turn."""
_SCRATCH_BYTES = 256 << 10
"""Numbers are added in pieces that a core's cache holds, and a reader is woken when so many have come, or the chunk: each wake costs."""
MOST_NOTED = 4096
"""Chunks of a window whose departures and receipts are kept, the newest."""


class Kind(IntEnum):
    """What a frame carries."""

    MESSAGE = 0
    SHARE = 1
    """Numbers of a sum to which the receiver adds its own."""
    TOTAL = 2
    """Numbers to which all members have added theirs."""


class Receipt(NamedTuple):
    """The end of a chunk that has come, by the clock of `time.perf_counter`.

    Attributes:
        number: Number of the chunk among all that the peer has sent over this connection.
    """

    peer: int
    number: int
    end_s: float


class MessageSink(Protocol):
    """The receiving end of a channel; called by who holds the lock of the link.

    Attributes:
        due: See `Expected`, of the message that comes; `tcp_holds.NEVER_DUE` if it was not announced, as one of the next window.
    """

    due: int

    def begin(self, text: bytes, num_bytes: int) -> list[memoryview]:
        """Return the memory for the next message."""

    def complete(self) -> None:
        """Take the message, which is in its memory."""


class SendingSum(Protocol):
    """A sum of which parts go to a peer."""

    def lose(self, problem: str) -> None:
        """See that the peer reads no more."""


class SumSink(Protocol):
    """What comes for a sum of this device over a link; called by who holds the lock of the link.

    Attributes:
        text: Number and dtype of the numbers.
        item_bytes: Bytes of a number.
    """

    text: bytes
    item_bytes: int

    def add(self, offset: int, piece: memoryview) -> None:
        """Add to shares, which are whole numbers, this device's."""

    def total(self, offset: int, num_bytes: int) -> memoryview:
        """Return the memory for a part of the total."""

    def arrived(self, offset: int, num_bytes: int) -> None:
        """Take a part of the total, which is in its memory."""

    def differs(self, text: bytes) -> None:
        """Fail, because a member sums something else."""

    def lose(self, problem: str) -> None:
        """See that nothing more comes over the link."""


class _Part(NamedTuple):
    """Numbers of a sum that this device has not started."""

    kind: Kind
    offset: int
    text: bytes
    payload: memoryview


class Link:
    """A connection with a peer.

    Attributes:
        lock: Held by who reads.
        tasks: What the next reader does first.
        ended: Why nothing more will come.
        broken: Why nothing more can be sent.
        holds: Who is asked for room when a message begins to come.
        held_until_s: Until when sums make way for others' messages at the other end, by the clock of `time.monotonic`.
        stopped_until_s: Until when messages do so, too, because one of another device is due earlier.
        sending: Sums of which parts go to the peer.
        num_left: Chunks that have left; counted by who writes.
        receipts: Chunks that have come, the newest.
    """

    def __init__(self, peer: int, end: socket.socket) -> None:
        self.peer = peer
        self.end = end
        self.descriptor = end.fileno()
        self._waits_s: float | None = None
        self._low_bytes = 1
        self.lock = threading.Lock()
        self.tasks: deque[Callable[[], None]] = deque()
        self.ended: str | None = None
        self.broken: str | None = None
        self.messages: MessageSink | None = None
        self.holds: Holds | None = None
        self.held_until_s = 0.0
        self.stopped_until_s = 0.0
        self.sending: set[SendingSum] = set()
        self.num_left = 0
        self.receipts: deque[Receipt] = deque(maxlen=MOST_NOTED)
        self._num_come = 0
        self.moved_s = time.monotonic()
        self._sums: dict[int, SumSink] = {}
        self._early: dict[int, list[_Part]] = {}
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._first = self._end = 0
        """Bytes of `_staging` that came and were not taken."""
        self._scratch: memoryview | None = None
        self._whole = False
        """Whether all of the wanted memory is to be filled."""
        self._reading = self._frames()
        self._wanted = next(self._reading)

    def shut_down(self) -> None:
        """See `Interruptible`."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, after all threads have left it."""
        self.end.close()
        self._reading.close()
        self._sums.clear()
        self._early.clear()
        self.tasks.clear()
        self.sending.clear()

    @property
    def is_unanswered(self) -> bool:
        """Whether the peer's system acknowledges nothing, as far as this system tells. Called from any thread."""
        try:
            return is_unanswered(self.end)
        except OSError:  # it is closed
            return False

    # Sums

    @property
    def is_summing(self) -> bool:
        """Whether numbers of a sum are still to come."""
        return bool(self._sums)

    def expect(self, identity: int, total: SumSink) -> None:
        """Let a sum take what comes for it, as soon as nobody reads; the caller wakes a reader if this returns with `tasks`."""
        self.tasks.append(lambda: self._register(identity, total))
        if self.lock.acquire(blocking=False):
            try:
                if identity not in self._early:  # else the adding is left to a reader
                    self._run_tasks()
            finally:
                self.lock.release()

    def _register(self, identity: int, total: SumSink) -> None:
        self._sums[identity] = total
        for part in self._early.pop(identity, ()):
            if part.text != total.text:
                total.differs(part.text)
            elif part.kind is Kind.SHARE:
                total.add(part.offset, part.payload)
            else:
                total.total(part.offset, len(part.payload))[:] = part.payload
                total.arrived(part.offset, len(part.payload))
        if self.ended is not None:
            total.lose(self.ended)

    def forget(self, identity: int) -> None:
        """Drop a sum for which all has come. Called by its sink, so by who holds the lock."""
        self._sums.pop(identity, None)

    # Reading

    def read(self) -> None:
        """Read what is there, with the lock held, but for so much that others have their turn."""
        self._run_tasks()
        num_bytes = 0
        while num_bytes < _MOST_BYTES and (count := self._receive(socket.MSG_DONTWAIT)):
            num_bytes += count
        self._set_low(self._due_bytes)

    def wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Read, with the lock held, and wait for more, until it is `done`, nothing more will come, or the time is over."""
        self._run_tasks()
        if self._waits_s != timeout_s:
            self._waits_s = timeout_s
            self.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(max(round(1e6 * timeout_s), 1), 10**6)))
        deadline_s = time.monotonic() + timeout_s
        self._set_low(1)  # a larger one would also hold for the last bytes of a read that sleeps
        # The kernel fills the memory of a message, which no other frame can come between, and wakes this thread once.
        while not done() and time.monotonic() < deadline_s and self._receive(0 if self._wanted is self._staging else socket.MSG_WAITALL):
            pass
        self._set_low(self._due_bytes)

    def _receive(self, flags: int) -> int:
        """Read once; return how many bytes came, 0 if none did."""
        if self.ended is not None:
            return 0
        try:
            at_once = flags != socket.MSG_WAITALL or self._whole
            count = self.end.recv_into(self._wanted, 0 if at_once else min(len(self._wanted), _SCRATCH_BYTES), flags)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        if not count:
            self._lose(CLOSED_BY_PEER)
            return 0
        self.moved_s = time.monotonic()
        if self.holds is not None and self.peer in self.holds.resuming:
            self.holds.moves(self.peer)
        try:
            self._wanted = self._reading.send(count)
        except Exception as error:  # a reader must not end without a word: all waits would last
            self._lose(f"what came cannot be read: {error!r}")
        return count

    @property
    def _due_bytes(self) -> int:
        """Bytes that will come whatever this device does, so that nobody waits in vain until they are there."""
        return 1 if self._wanted is self._staging else min(len(self._wanted), _SCRATCH_BYTES)

    def _set_low(self, num_bytes: int) -> None:
        """Say how many bytes must be there before a reader is woken."""
        if num_bytes != self._low_bytes and self.ended is None:
            self._low_bytes = num_bytes
            with suppress(OSError):  # it is closed
                self.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _run_tasks(self) -> None:
        while self.tasks:
            self.tasks.popleft()()

    def _lose(self, problem: str) -> None:
        self.ended = self.ended or problem
        if self.holds is not None:
            self.holds.has_come(self.peer)
        for total in list(self._sums.values()):
            total.lose(problem)
        self._sums.clear()
        for sending in list(self.sending):
            sending.lose(problem)

    def _frames(self) -> Reading:
        header = memoryview(bytearray(HEADER.size))
        while True:
            yield from self._fill(header)
            code, text_bytes, identity, offset, num_bytes = HEADER.unpack(header)
            text = bytearray(text_bytes)
            yield from self._fill(memoryview(text))
            if code == Kind.MESSAGE:
                assert self.messages is not None, "there is a channel"
                memories = self.messages.begin(bytes(text), num_bytes)
                is_long = self.holds is not None and self.holds.comes(self.peer, num_bytes, due=self.messages.due)
                for memory in memories:
                    yield from self._fill(memory)
                self.messages.complete()
                if is_long and self.holds is not None:
                    self.holds.has_come(self.peer)
            else:
                if self.holds is not None:
                    self.holds.sum_comes(self.peer)
                yield from self._part(Kind(code), bytes(text), identity, offset, num_bytes)
            self.receipts.append(Receipt(self.peer, self._num_come, time.perf_counter()))
            self._num_come += 1

    def _part(self, kind: Kind, text: bytes, identity: int, offset: int, num_bytes: int) -> Reading:
        total = self._sums.get(identity)
        if total is None:
            part = _Part(kind, offset, text, memoryview(bytearray(num_bytes)))
            yield from self._fill(part.payload)
            self._early.setdefault(identity, []).append(part)
            if (total := self._sums.get(identity)) is not None:  # it started meanwhile
                self._register(identity, total)
        elif total.text != text:
            total.differs(text)
            yield from self._fill(memoryview(bytearray(num_bytes)))
        elif kind is Kind.SHARE:
            yield from self._add(total, offset, num_bytes)
        else:
            while num_bytes:
                count = yield from self._some(total.total(offset, num_bytes))
                total.arrived(offset, count)
                offset += count
                num_bytes -= count

    def _add(self, total: SumSink, offset: int, num_bytes: int) -> Reading:
        scratch = self._scratch = self._scratch or memoryview(bytearray(_SCRATCH_BYTES))
        kept = 0
        while num_bytes:
            count = yield from self._some(scratch[kept : kept + min(num_bytes, _SCRATCH_BYTES - kept)])
            num_bytes -= count
            kept += count
            whole = kept - kept % total.item_bytes
            if whole:
                total.add(offset, scratch[:whole])
                offset += whole
                kept -= whole
                scratch[:kept] = scratch[whole : whole + kept]

    def _some(self, memory: memoryview) -> Generator[memoryview, int, int]:
        """Fill the beginning of some memory; return how much of it."""
        if self._first == self._end and len(memory) < _STAGING_BYTES:
            self._first, self._end = 0, (yield self._staging)
        if self._first < self._end:
            count = min(self._end - self._first, len(memory))
            memory[:count] = self._staging[self._first : self._first + count]
            self._first += count
            return count
        return (yield memory)

    def _fill(self, memory: memoryview) -> Reading:
        while len(memory):
            self._whole = len(memory) >= _STAGING_BYTES
            count = yield from self._some(memory)
            memory = memory[count:]
        self._whole = False
