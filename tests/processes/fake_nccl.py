"""NCCL and CUDA for transports of one process, on the CPU: `Library` as `raypipe.actors.transport.nccl` uses it.

The computing stream is the host. Other streams hold what they were told as tasks, which are done when somebody looks: a send puts its
bytes down when its turn comes, a receive waits for them. Like NCCL it knows memory by its address alone, and nobody but `use` keeps it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.cuda_ipc import SharedBuffer
from raypipe.errors import TransportTimeoutError

Task = Callable[[], bool]
"""Does its work, or returns False where its time has not come."""


class Network:
    """All GPUs of a test."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.streams: list[deque[Task]] = []
        self.ids = itertools.count()
        self.meetings: dict[bytes, _Meeting] = {}
        self.shared: dict[bytes, tuple[SharedBuffer, object]] = {}

    def progress(self) -> None:
        """Does all that can be done."""
        with self.changed:
            moved = True
            while moved:
                moved = False
                for stream in self.streams:
                    while stream and stream[0]():
                        stream.popleft()
                        moved = True
            self.changed.notify_all()


class _Meeting:
    """What the ranks of a communicator have in common."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.sent: dict[tuple[int, int], deque[bytes]] = {}
        self.sums: dict[int, dict[int, Tensor]] = {}
        self.ended = False


class Event:
    """An event of a stream."""

    def __init__(self) -> None:
        self.happened = False
        self.lost = False


class SharedEvent:
    """An event that is recorded again and again; who waits for it waits for the last record before that."""

    def __init__(self) -> None:
        self.last: Event | None = None


class FakeNccl:
    """See `Library` and `SharingLibrary`.

    Args:
        network: that the devices share.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.kept: dict[int, Any] = {}

    def unique_id(self) -> bytes:
        """See `Library`."""
        return next(self.network.ids).to_bytes(8, "big")

    def communicator(self, num_ranks: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        """See `Library`."""
        changed = self.network.changed
        with changed:
            meeting = self.network.meetings.setdefault(unique_id, _Meeting())
            meeting.ranks.add(rank)
            changed.notify_all()
            assert changed.wait_for(lambda: len(meeting.ranks) == num_ranks, 20.0)
        return FakeCommunicator(self.network, meeting, rank, num_ranks, self.stream())

    def stream(self) -> deque[Task]:
        """See `Library`."""
        with self.network.changed:
            self.network.streams.append(deque())
            return self.network.streams[-1]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Library`."""
        return torch.empty(shape, dtype=dtype)

    def follow(self, stream: deque[Task]) -> None:
        """See `Library`; the host has done what it was told."""

    def use(self, tensor: Tensor, stream: deque[Task]) -> None:
        """See `Library`."""
        with self.network.changed:
            stream.append(lambda: tensor is not None)

    def reached(self, stream: deque[Task]) -> Event:
        """See `Library`."""
        event = Event()

        def happens() -> bool:
            event.happened = True
            return True

        with self.network.changed:
            stream.append(happens)
            for task in stream:
                if isinstance(owner := getattr(task, "__self__", None), _Work):
                    owner.events.append(event)
        return event

    def wait(self, event: Event | SharedEvent, *, timeout_s: float) -> None:
        """See `Library`."""
        if isinstance(event, SharedEvent):
            assert event.last is not None, "a packet follows a record"
            event = event.last
        deadline_s = time.monotonic() + timeout_s
        while not self.happened(event):
            if event.lost:
                raise ChannelError(CLOSED_BY_PEER)
            if time.monotonic() > deadline_s:
                raise ChannelError(f"nothing came within {timeout_s:g} s", kind=TransportTimeoutError)
            with self.network.changed:
                self.network.changed.wait(0.005)

    def happened(self, event: Event) -> bool:
        """See `Library`."""
        self.network.progress()
        return event.happened

    # Between processes of one GPU

    def make_buffer(self, num_bytes: int) -> SharedBuffer:
        """See `SharingLibrary`."""
        kept = self.kept.pop(num_bytes, None)
        memory = ctypes.create_string_buffer(num_bytes) if kept is None else kept
        handles = next(self.network.ids).to_bytes(3 * 64, "big")
        slot = SharedBuffer(ctypes.addressof(memory), num_bytes, SharedEvent(), SharedEvent(), handles)
        self.network.shared[handles] = slot, memory
        return slot

    def keep_buffer(self, slot: SharedBuffer) -> None:
        """See `SharingLibrary`."""
        self.kept[slot.num_bytes] = self.network.shared[slot.handles][1]

    def open_buffer(self, num_bytes: int, handles: bytes) -> SharedBuffer:
        """See `SharingLibrary`."""
        slot, _ = self.network.shared[handles]
        assert slot.num_bytes == num_bytes
        return slot

    def close_buffer(self, slot: SharedBuffer) -> None:
        """See `SharingLibrary`."""

    def record(self, event: SharedEvent, stream: deque[Task] | None) -> None:
        """See `SharingLibrary`."""
        with self.network.changed:
            event.last = self.reached(deque() if stream is None else stream)
            event.last.happened = stream is None

    def delay(self, stream: deque[Task], event: SharedEvent) -> None:
        """See `SharingLibrary`."""
        last = event.last
        with self.network.changed:
            stream.append(lambda: last is None or last.happened)

    def copy(self, target: int, source: int, num_bytes: int, stream: deque[Task] | None) -> None:
        """See `SharingLibrary`."""

        def act() -> bool:
            ctypes.memmove(target, source, num_bytes)
            return True

        if stream is None:
            act()
            return
        with self.network.changed:
            stream.append(act)


class _Work:
    """Work of a communicator in a stream; what waits for it is lost when the communicator ends."""

    def __init__(self, meeting: _Meeting, act: Task) -> None:
        self.meeting = meeting
        self.act = act
        self.events: list[Event] = []

    def run(self) -> bool:
        if not self.act():
            if self.meeting.ended:
                for event in self.events:
                    event.lost = True
            return False
        return True


class FakeCommunicator:
    """See `Communicator`."""

    def __init__(self, network: Network, meeting: _Meeting, rank: int, num_ranks: int, stream: deque[Task]) -> None:
        self.network = network
        self.stream = stream
        self.meeting = meeting
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_sums = 0

    def _put(self, stream: deque[Task], act: Task) -> None:
        with self.network.changed:
            stream.append(_Work(self.meeting, act).run)

    def send(self, tensors: Sequence[Tensor], peer: int, stream: deque[Task]) -> None:
        """See `Communicator`."""
        for tensor in tensors:
            start, size = tensor.data_ptr(), tensor.nbytes

            def act(start: int = start, size: int = size) -> bool:
                self.meeting.sent.setdefault((self.rank, peer), deque()).append(ctypes.string_at(start, size))
                return True

            self._put(stream, act)

    def recv(self, tensors: Sequence[Tensor], peer: int, stream: deque[Task]) -> None:
        """See `Communicator`."""
        for tensor in tensors:
            start, size = tensor.data_ptr(), tensor.nbytes

            def act(start: int = start, size: int = size) -> bool:
                queue = self.meeting.sent.setdefault((peer, self.rank), deque())
                if queue:
                    ctypes.memmove(start, queue.popleft(), size)
                    return True
                return False

            self._put(stream, act)

    def all_reduce(self, tensor: Tensor, stream: deque[Task]) -> None:
        """See `Communicator`."""
        number, start, size = self.num_sums, tensor.data_ptr(), tensor.nbytes
        shape, dtype = tensor.shape, tensor.dtype
        self.num_sums += 1
        shares = self.meeting.sums.setdefault(number, {})

        def act() -> bool:
            if self.rank not in shares:
                shares[self.rank] = torch.frombuffer(bytearray(ctypes.string_at(start, size)), dtype=dtype).reshape(shape)
            if len(shares) < self.num_ranks:
                return False
            total = torch.stack([shares[rank] for rank in range(self.num_ranks)]).sum(0, dtype=dtype)
            ctypes.memmove(start, total.data_ptr(), size)
            return True

        self._put(stream, act)

    def to_owners(self, parts: Sequence[tuple[Tensor, int | None]], stream: deque[Task]) -> None:
        """See `Communicator`; what a rank does not own is anything afterwards."""
        for tensor, owner in parts:
            self.all_reduce(tensor, stream)
            if owner not in {None, self.rank}:
                start, size = tensor.data_ptr(), tensor.nbytes

                def spoil(start: int = start, size: int = size) -> bool:
                    ctypes.memset(start, 0x7F, size)
                    return True

                self._put(stream, spoil)

    def from_owners(self, parts: Sequence[tuple[Tensor, int]], stream: deque[Task]) -> None:
        """See `Communicator`."""
        for tensor, owner in parts:
            if owner == self.rank:
                for peer in range(self.num_ranks):
                    if peer != owner:
                        self.send([tensor], peer, stream)
            else:
                self.recv([tensor], owner, stream)

    def problem(self) -> str | None:
        """See `Communicator`."""
        return CLOSED_BY_PEER if self.meeting.ended else None

    def shut_down(self) -> None:
        """See `Communicator`."""
        with self.network.changed:
            self.meeting.ended = True
        self.network.progress()
