"""The two ends of a channel over gloo: how messages become sends and receives of a process group, and when they end."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError, Prepared, check_tensors, wait_until_empty
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.actors.transport.rendezvous import limit
from raypipe.errors import TransportTimeoutError
from raypipe.schedules.lower import Message

UNLIMITED = timedelta(days=10)
"""For waits that something else ends."""
_REAP_EVERY_S = 0.05


class ProcessGroup(Protocol):
    """The used part of ProcessGroupGloo, which torch's type stubs leave out."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        """Begin to send the one tensor."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        """Begin to receive into the one tensor."""

    def allreduce(self, tensors: list[Tensor], op: ReduceOp.RedOpType, timeout: timedelta, /) -> Work:
        """Begin to combine the one tensor of each rank."""


def cause(error: Exception) -> str:
    """Return what an error of gloo means."""
    text = str(error).splitlines()[0]
    if any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe", "caused pair closure")):
        return CLOSED_BY_PEER
    return f"gloo failed: {text}"


def failure(error: RuntimeError, *, waited_s: float | None = None) -> ChannelError:
    """Return the channel error for an error of gloo; `waited_s` is the limit of the wait if it is over, which gloo does not tell."""
    if waited_s is not None:
        problem = f"nothing came within {waited_s:g} s; the peer is stuck, or sent another message or shape"
        return ChannelError(problem, kind=TransportTimeoutError)
    return ChannelError(cause(error))


class _Description:
    def __init__(self, expected: Expected) -> None:
        message = expected.message
        self.expected = expected
        self.message = message
        stages = f"{message.direction} {message.source} {message.target} {message.pipeline}"
        start = zlib.crc32(f"{stages} {message.index} {message.part} {message.rows}".encode())
        specs = expected.tensors or (_NOTHING,)
        self.marks = [zlib.crc32(f"{place} {spec.shape} {spec.dtype}".encode(), start) for place, spec in enumerate(specs)]

    def tags(self, number: int) -> list[int]:
        shift = number * _STRIDE
        return [(mark + shift) & 0x7FFFFFFF for mark in self.marks]


_STRIDE = 0x9E3779B1
"""Odd: numbers that follow each other give tags that lie far apart, and none twice."""
_NOTHING = TensorSpec((0,), torch.uint8)
"""Stands for the tensors of a message without any, so that it is still a message."""


def _on_the_wire(tensor: Tensor) -> Tensor:
    """Return the contiguous memory that gloo carries for a tensor, or one byte if it is empty."""
    if not tensor.numel():
        return torch.zeros(1, dtype=torch.uint8)
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # Gloo keeps the tensor until it has left, but not what it was computed from. `detach` costs 30 us where caches are cold.
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous()


class Incoming:
    """The receiving end, rank 1 of its group; `ahead` receives are posted ahead, `timeout_s` limits the wait for each message."""

    def __init__(self, group: ProcessGroup, *, ahead: int, timeout_s: float) -> None:
        self.group = group
        self.ahead = ahead
        self.timeout_s = timeout_s
        self.number = 0
        self.later: deque[_Description] = deque()
        self.posted: deque[tuple[tuple[Tensor, ...], list[Work]]] = deque()
        self._prepared = Prepared(_Description)

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`. Posts the first receives."""
        assert not self.posted, "the last window received all its messages"
        self.later.extend(self._prepared.of(messages))
        try:
            for _ in range(self.ahead):
                self._post()
        except RuntimeError as error:
            raise failure(error) from error

    def _post(self) -> None:
        if not self.later:
            return
        description = self.later.popleft()
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in description.expected.tensors)
        carried = [_on_the_wire(tensor) for tensor in tensors] or [_on_the_wire(torch.empty(0))]
        works = [self.group.recv([tensor], 0, tag) for tensor, tag in zip(carried, description.tags(self.number), strict=True)]
        self.posted.append((tensors, works))
        self.number += 1

    def recv(self) -> tuple[Tensor, ...]:
        """See `IncomingChannel`."""
        deadline_s = time.monotonic() + self.timeout_s
        try:
            self._post()  # before the wait: posting takes 20 us, which pass while the message travels
            tensors, works = self.posted.popleft()
            for work in works:
                work.wait(limit(deadline_s - time.monotonic()))
        except RuntimeError as error:
            raise failure(error, waited_s=self.timeout_s if time.monotonic() >= deadline_s else None) from error
        return tensors

    def close(self) -> None:
        """See `IncomingChannel`."""
        self.later.clear()
        self.posted.clear()


class Outgoing:
    """The sending end, rank 0 of its group, with a thread that drops what has left.

    The thread looks every 50 ms while a window is open, and rests after a wait that took time, so that it does not wake for each message.
    """

    def __init__(self, group: ProcessGroup, *, name: str) -> None:
        self.group = group
        self.number = 0
        self.sent: deque[tuple[Message, Work]] = deque()
        self._prepared = Prepared(_Description)
        self._left: list[_Description] = []
        """The last is the next."""
        self.error: ChannelError | None = None
        self._condition = threading.Condition()
        self._in_window = False
        self._flushing = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`. Lets the thread look now and then, until `flush`."""
        assert not self._left, "the last window sent all its messages"
        self._left = self._prepared.of(messages)[::-1]
        with self._condition:
            self._in_window = True
            self._condition.notify_all()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        description = self._left.pop()
        check_tensors(description.expected, tensors)
        carried = [_on_the_wire(tensor) for tensor in tensors] or [_on_the_wire(torch.empty(0))]
        try:
            for tensor, tag in zip(carried, description.tags(self.number), strict=True):
                self.sent.append((description.message, self.group.send([tensor], 1, tag)))  # the Work keeps the tensor
        except RuntimeError as error:
            raise failure(error) from error
        self.number += 1

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`."""

        def given_up() -> bool:
            return self.error is not None or aborted.is_set()

        with self._condition:
            if self.sent:
                self._flushing = True
                self._condition.notify_all()
            wait_until_empty(self._condition, self.sent, given_up=given_up, timeout_s=timeout_s)
            self._flushing = self._in_window = False
            left = self.sent.copy()  # at once: the thread may go on
            return left[0][0] if left else None

    def wake(self) -> None:
        """See `OutgoingChannel`."""
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """See `OutgoingChannel`. The connection is shut down, so the thread does not wait in gloo."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._thread.join()
        self.sent.clear()
        self._left.clear()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._in_window or self._stopped)
                self._condition.wait_for(lambda: self._flushing or self._stopped, _REAP_EVERY_S)
                if self._stopped:
                    return
            try:
                self._reap()
            except RuntimeError as error:
                self.error = failure(error)
                self.wake()
                return

    def _reap(self) -> None:
        while self.sent:
            began_s = time.monotonic()
            self.sent[0][1].wait(UNLIMITED)
            self.sent.popleft()
            if not self._flushing and time.monotonic() - began_s > 0.001:
                return
        self.wake()
