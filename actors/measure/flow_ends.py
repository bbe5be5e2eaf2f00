"""The two ends of a flow while it runs.

The source of a `Ping` chooses the sizes while it goes, so that a slow link takes no longer than a fast one, and tells the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.measure.flows import MOST_BYTES, SCOUT_BYTES, SMALL_BYTES, Flow, Ping, Readings, Stream, whole_pages
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Direction, Message

SOURCE, TARGET = 0, 1
"""The two ends of a flow, as its transport numbers them."""

_NUM_SMALL = 16
_NUM_SCOUTS = 2
_NUM_AT_ONCE = 4
_SLOW_S = 1.0  # if so many small messages take as long, the link carries so little that more of them would pass for silence
_SHARES = (16, 8, 4, 2)
"""The largest message is so many times as large as the others."""
_NUM_SIZES = len(_SHARES) + 1
_MOST_REPEATS = 12
_REPEATS = 4


def run_flow(flow: Flow, transport: ProcessTransport, *, on: torch.device) -> Readings:
    """Take part in a flow at this device's end of its transport; return what this end noted."""
    is_source, pattern = transport.device == SOURCE, flow.pattern
    if isinstance(pattern, Stream):
        stream = _StreamEnd(transport, on)
        (stream.send if is_source else stream.receive)(pattern)
        return stream.readings
    if is_source:
        source = _PingSource(transport, on)
        source.run(pattern)
        return source.readings
    target = _PingTarget(transport, on)
    target.run()
    return target.readings


class _FlowEnd:
    def __init__(self, transport: ProcessTransport, on: torch.device) -> None:
        self.transport = transport
        self.peer = TARGET if transport.device == SOURCE else SOURCE
        self.on = on
        self.readings = Readings()
        self._epoch_s = _epoch_s()

    def now_s(self) -> float:
        return self._epoch_s + time.perf_counter()

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        transport = self.transport
        tensors = transport.recv(message, self.peer)
        if not devices.wait_for_queued(self.on, timeout_s=transport.timeout_s):
            problem = f"it did not come within {transport.timeout_s:g} s"
            raise TransportTimeoutError(transport.names[transport.device], transport.names[self.peer], str(message), problem)
        return tensors


class _PingSource(_FlowEnd):
    def run(self, pattern: Ping) -> None:
        took_s = 0.0
        while len(self.readings.sizes_bytes) < _NUM_SMALL and took_s < _SLOW_S:
            since_s = self.now_s()
            self._exchange([SMALL_BYTES] * _NUM_AT_ONCE)
            took_s = self.now_s() - since_s
        num_small = len(self.readings.sizes_bytes)
        largest, took_s, left_bytes = self._scout(pattern)
        # What the scouts measured may be an idle path.
        self.readings.keep_first(num_small)
        sizes = [largest, *(whole_pages(largest / share) for share in _SHARES)]
        repeats = int(min(pattern.seconds / (2 * took_s), left_bytes / sum(sizes), _MOST_REPEATS))
        self._exchange(sizes * max(repeats, 1))
        self._announce([])

    def _scout(self, pattern: Ping) -> tuple[int, float, float]:
        """Return the largest size to measure, about the seconds that it takes, and the bytes left to send.

        All sizes together take twice as long as the largest, and shall pass `_REPEATS` times.
        """
        size, left_bytes = SCOUT_BYTES, float(pattern.most_bytes)
        while True:
            self._exchange([size] * _NUM_SCOUTS)
            left_bytes -= size * _NUM_SCOUTS
            times = zip(self.readings.first_s[-_NUM_SCOUTS:], self.readings.second_s[-_NUM_SCOUTS:], strict=True)
            # The quickest: a pause of the machine must not make the messages small.
            took_s = max(min(returned_s - handed_s for handed_s, returned_s in times), 1e-6)
            wanted = size * pattern.seconds / (2 * _REPEATS * took_s)
            most = min(left_bytes / (2 * _REPEATS), MOST_BYTES)
            if wanted <= 2 * size or 2 * size > most:
                largest = whole_pages(max(min(wanted, most), SCOUT_BYTES))
                return largest, took_s * largest / size, left_bytes
            size = whole_pages(min(4 * size, wanted, most))

    def _exchange(self, sizes: Sequence[int]) -> None:
        self._announce(sizes)
        messages, answers = _messages(sizes), _messages([1] * len(sizes))
        memory = torch.ones(max(sizes), dtype=torch.uint8, device=self.on)
        transport, peer = self.transport, self.peer
        transport.open_window({peer: answers}, {peer: messages})
        for expected, size in zip(messages, sizes, strict=True):
            data = (memory[:size],)
            handed_s = self.now_s()
            transport.send(expected.message, peer, data)
            self.recv(expected.message)
            self.readings.add(size, handed_s, self.now_s())
        transport.close_window()

    def _announce(self, sizes: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(sizes))
        announcement = torch.zeros(1 + _NUM_SIZES, dtype=torch.int64)
        announcement[0] = len(sizes)
        announcement[1 : 1 + len(distinct)] = torch.tensor(distinct, dtype=torch.int64)
        transport = self.transport
        transport.open_window({}, {self.peer: _ANNOUNCEMENT})
        transport.send(_ANNOUNCEMENT[0].message, self.peer, (announcement.to(self.on),))
        transport.close_window()


class _PingTarget(_FlowEnd):
    def run(self) -> None:
        transport, peer = self.transport, self.peer
        answer = (torch.ones(1, dtype=torch.uint8, device=self.on),)
        while sizes := self._announced():
            messages, answers = _messages(sizes), _messages([1] * len(sizes))
            transport.open_window({peer: messages}, {peer: answers})
            for expected, size in zip(messages, sizes, strict=True):
                self.recv(expected.message)
                arrived_s = self.now_s()
                # Answered at once: when `send` returns, the answer may have long arrived.
                self.readings.add(size, arrived_s, arrived_s)
                transport.send(expected.message, peer, answer)
            transport.close_window()

    def _announced(self) -> list[int]:
        transport = self.transport
        transport.open_window({self.peer: _ANNOUNCEMENT}, {})
        (announcement,) = self.recv(_ANNOUNCEMENT[0].message)
        transport.close_window()
        count, *sizes = announcement.tolist()
        distinct = [size for size in sizes if size]
        return [distinct[place % len(distinct)] for place in range(count)]


class _StreamEnd(_FlowEnd):
    def send(self, pattern: Stream) -> None:
        messages = _messages([pattern.chunk_bytes] * pattern.num_chunks)
        data = (torch.ones(pattern.chunk_bytes, dtype=torch.uint8, device=self.on),)
        transport, peer = self.transport, self.peer
        transport.open_window({}, {peer: messages})
        for expected in messages:
            handed_s = self.now_s()
            transport.send(expected.message, peer, data)
            self.readings.add(pattern.chunk_bytes, handed_s, handed_s)
        transport.close_window()

    def receive(self, pattern: Stream) -> None:
        messages = _messages([pattern.chunk_bytes] * pattern.num_chunks)
        self.transport.open_window({self.peer: messages}, {})
        for expected in messages:
            self.recv(expected.message)
            arrived_s = self.now_s()
            self.readings.add(pattern.chunk_bytes, arrived_s, arrived_s)
        self.transport.close_window()


def _epoch_s() -> float:
    """Return what turns the steady `perf_counter` into `time.time`, by the reading with the shortest pause between both."""
    readings: list[tuple[float, float]] = []
    for _ in range(10):
        before_s, now_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after_s - before_s, now_s - (before_s + after_s) / 2))
    return min(readings)[1]


def _messages(sizes: Sequence[int]) -> list[Expected]:
    specs = {size: (TensorSpec((size,), torch.uint8),) for size in set(sizes)}
    return [Expected(Message(Direction.ACTIVATION, SOURCE, TARGET, number), specs[size]) for number, size in enumerate(sizes)]


_ANNOUNCEMENT = [Expected(Message(Direction.GRADIENT, SOURCE, TARGET, 0), (TensorSpec((1 + _NUM_SIZES,), torch.int64),))]
