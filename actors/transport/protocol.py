"""How devices pass tensors: the protocol, what every transport keeps account of, and `LocalTransport` between threads.

A transport serves one device. It carries messages on channels (ordered pairs of devices), each channel in the order in
which lowered programs name them, and collectives in one order that all members share. It needs no polling: sends never
wait, receives are posted before they are needed and waited for late.

One thread at a time uses a transport; only `abort` may come from another one.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raypipe.errors import AbortedError, TransportError, TransportTimeoutError
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that will arrive, so that its memory can be there before it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Expected:
    """A message that a channel will carry: what it is and the tensors it consists of."""

    message: Message
    tensors: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return f"{self.message} ({', '.join(map(str, self.tensors)) or 'no tensors'})"


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Waits for the end; returns the tensor that was given to `Transport.start`, now holding the sum."""


class Transport(Protocol):
    """One device's end of all its channels and collectives."""

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """Begins a window. Receives are posted from here on.

        What repeats costs least if the same lists are given again: each is prepared once, and known by its identity.

        Args:
            incoming: for each peer, all messages that it will send, in the order of the channel; the lists must not change.
            outgoing: for each peer, all messages that will be sent to it, likewise.
        """

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """Hands a message to the channel towards `peer` and returns at once; the tensors must not change any more.

        Raises:
            TransportError: the peer is gone, or another message was announced.
            AbortedError: `abort` was called.
        """

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """Waits for the next message from `peer`, which is `message`.

        Raises:
            TransportTimeoutError: it did not come in time.
            TransportError: the peer is gone, or its message is another one.
            AbortedError: `abort` was called.
        """

    def start(self, collective: Collective, tensor: Tensor) -> Pending:
        """Takes part in summing `tensor`, in place, over the members of a collective, and returns at once."""

    def check(self) -> None:
        """Looks whether something has gone wrong of which nobody was told, as happens between GPUs. Called from another thread.

        Raises:
            TransportError: it has.
        """

    def close_window(self) -> None:
        """Ends a window: waits until all that was sent has left, and checks that nothing is left over.

        Raises:
            TransportError: a message could not be delivered, or was never taken.
        """

    def abort(self, reason: str) -> None:
        """Makes every wait, present and future, end with AbortedError within a second. Called from another thread."""

    def close(self) -> None:
        """Gives back sockets, threads and memory. Does not wait for peers."""


class Ledger:
    """What one device is still owed in a window: the messages of each channel in order, and the collectives it started.

    Args:
        device: the one concerned.
        names: of all devices, for messages.
    """

    def __init__(self, device: int, names: Sequence[str]) -> None:
        self.device = device
        self.names = names
        self.messages: dict[int, deque[Expected]] = {}
        self.collectives: list[Collective] = []

    def open(self, expected: Mapping[int, Sequence[Expected]]) -> None:
        """Enters what a window will bring."""
        assert not self.messages, "the last window was not closed"
        assert not self.collectives, "the last window was not closed"
        self.messages = {peer: deque(messages) for peer, messages in expected.items() if messages}

    def take(self, message: Message, peer: int) -> Expected:
        """Crosses out the next message from `peer`, which is `message`.

        Raises:
            TransportError: it is another one.
        """
        queue = self.messages.get(peer)
        if not queue:
            raise self.error(message, peer, NO_MORE)
        if queue[0].message is not message and queue[0].message != message:
            raise self.error(message, peer, not_next(queue[0]))
        return queue.popleft()

    def close(self) -> None:
        """Forgets the window.

        Raises:
            TransportError: a message was never taken, or a collective never awaited.
        """
        messages, self.messages = self.messages, {}
        collectives, self.collectives = self.collectives, []
        for peer, queue in messages.items():
            if queue:
                raise self.error(queue[0].message, peer, left_over("taken", len(queue)))
        for collective in collectives:
            raise self.collective_error(collective, "it was started and never awaited in this window")

    def error(self, message: Message, peer: int, problem: str, *, kind: type[TransportError] = TransportError) -> TransportError:
        """The error about a message with `peer`."""
        return kind(self.names[self.device], self.names[peer], str(message), problem)

    def collective_error(self, collective: Collective, problem: str, *, kind: type[TransportError] = TransportError) -> TransportError:
        """The error about a collective with all its other members."""
        others = ", ".join(self.names[member] for member in collective.devices if member != self.device)
        return kind(self.names[self.device], others, str(collective), problem)


NO_MORE = "no more messages were announced for this window"


def not_next(announced: Expected) -> str:
    """The problem of a message that is not the next one."""
    return f"the next one announced on this channel is {announced}"


def left_over(done: str, count: int) -> str:
    """The problem of the first of so many messages with which nothing was done in their window."""
    return f"it was never {done} in this window" + (f", nor were the {count - 1} behind it" if count > 1 else "")


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors are summed: float32 for the 16-bit floats, which are so rounded once, else their own."""
    return torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype


class LocalNetwork:
    """All channels between the devices of one process, each of which runs in a thread of its own.

    Args:
        num_devices: numbered from 0.
        timeout_s: for every wait.
        names: of the devices, for messages; their numbers by default.
    """

    def __init__(self, num_devices: int, *, timeout_s: float, names: Sequence[str] | None = None) -> None:
        self.names = tuple(names) if names is not None else tuple(map(str, range(num_devices)))
        self.timeout_s = timeout_s
        self.inboxes = [_Inbox() for _ in range(num_devices)]
        self.meetings: dict[_MeetingKey, dict[int, tuple[Collective, Tensor]]] = {}
        self.lock = threading.Lock()

    def transport(self, device: int) -> LocalTransport:
        """The end of one device; ask once for each."""
        return LocalTransport(self, device)

    def attend(self, key: _MeetingKey, device: int, collective: Collective, tensor: Tensor) -> None:
        """Brings one member's share to a meeting; the last to come sums for all."""
        with self.lock:
            shares = self.meetings.setdefault(key, {})
            shares[device] = (collective, tensor)
            if len(shares) < len(collective.devices):
                return
            del self.meetings[key]
        total = _sum([shares[member] for member in collective.devices])
        for member in collective.devices:
            self.inboxes[member].put_sum(key, total)


_MeetingKey = tuple[tuple[int, ...], int]
"""The members, and how many collectives they had before."""


def _sum(shares: Sequence[tuple[Collective, Tensor]]) -> Tensor | str:
    """The sum in the order of the members, or in what the shares do not agree."""
    for what in (
        [str(collective) for collective, _ in shares],
        [str(TensorSpec(tuple(tensor.shape), tensor.dtype)) for _, tensor in shares],
    ):
        if len(set(what)) > 1:
            return f"its members brought different things: {', '.join(what)}"
    tensors = [tensor for _, tensor in shares]
    total = tensors[0].to(summing_dtype(tensors[0].dtype), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors[0].dtype)


class _Inbox:
    """What has arrived for one device. All that can end one of its waits comes here, under one condition."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.messages: dict[int, deque[tuple[Message, tuple[Tensor, ...]]]] = {}
        self.sums: dict[_MeetingKey, Tensor | str] = {}
        self.gone: set[int] = set()
        self.abort_reason: str | None = None

    def put_message(self, source: int, message: Message, tensors: tuple[Tensor, ...]) -> None:
        with self.condition:
            self.messages.setdefault(source, deque()).append((message, tensors))
            self.condition.notify_all()

    def put_sum(self, key: _MeetingKey, total: Tensor | str) -> None:
        with self.condition:
            self.sums[key] = total
            self.condition.notify_all()

    def lose(self, peer: int) -> None:
        with self.condition:
            self.gone.add(peer)
            self.condition.notify_all()

    def abort(self, reason: str) -> None:
        with self.condition:
            self.abort_reason = self.abort_reason or reason
            self.condition.notify_all()

    def wait(self, arrived: Callable[[], bool], lost: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something arrived (then True) or will never do so; called with the condition held.

        Raises:
            AbortedError: `abort` was called.
        """
        self.condition.wait_for(lambda: self.abort_reason is not None or arrived() or lost(), timeout_s)
        self.check()
        return arrived()

    def check(self) -> None:
        if self.abort_reason is not None:
            raise AbortedError(self.abort_reason)


class LocalTransport:
    """The end of one device of a `LocalNetwork`.

    Sent tensors are cloned, so that nothing the receiver does to them reaches the sender. A message has left when it is in
    the receiver's hands, which is at once. Sums are made in the order of the members, the same at each run.

    `abort` ends the waits of this device and of no other; after `close`, peers that wait for this device get a
    TransportError, once they have taken what it sent before.
    """

    def __init__(self, network: LocalNetwork, device: int) -> None:
        self.network = network
        self.device = device
        self.inbox = network.inboxes[device]
        self.ledger = Ledger(device, network.names)
        self.num_meetings: Counter[tuple[int, ...]] = Counter()
        self.closed = False

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """See `Transport`. What is sent is compared with what the receiver expects, and not with `outgoing`."""
        self.inbox.check()
        self.ledger.open(incoming)

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """See `Transport`."""
        self.inbox.check()
        if peer in self.inbox.gone:
            raise self.ledger.error(message, peer, _GONE)
        self.network.inboxes[peer].put_message(self.device, message, tuple(_copy(tensor) for tensor in tensors))

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """See `Transport`."""
        self.inbox.check()
        expected = self.ledger.take(message, peer)
        inbox = self.inbox
        with inbox.condition:
            queue = inbox.messages.setdefault(peer, deque())
            if not inbox.wait(lambda: bool(queue), lambda: peer in inbox.gone, self.network.timeout_s):
                if peer in inbox.gone:
                    raise self.ledger.error(message, peer, _GONE)
                problem = f"it did not come within {self.network.timeout_s:g} s"
                raise self.ledger.error(message, peer, problem, kind=TransportTimeoutError)
            got, tensors = queue.popleft()
        came = Expected(got, tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        if came != expected:
            raise self.ledger.error(message, peer, f"expected {expected}, got {came}")
        return tensors

    def start(self, collective: Collective, tensor: Tensor) -> Pending:
        """See `Transport`."""
        self.inbox.check()
        key = (collective.devices, self.num_meetings[collective.devices])
        self.num_meetings[collective.devices] += 1
        self.ledger.collectives.append(collective)
        self.network.attend(key, self.device, collective, _copy(tensor))
        return _LocalPending(self, collective, key, tensor)

    def check(self) -> None:
        """See `Transport`; who waits is told here."""

    def close_window(self) -> None:
        """See `Transport`."""
        self.inbox.check()
        self.ledger.close()

    def abort(self, reason: str) -> None:
        """See `Transport`."""
        self.inbox.abort(reason)

    def close(self) -> None:
        """See `Transport`."""
        if self.closed:
            return
        self.closed = True
        self.inbox.abort("the transport is closed")
        for peer, inbox in enumerate(self.network.inboxes):
            if peer != self.device:
                inbox.lose(self.device)


_GONE = "the peer has closed its end"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class _LocalPending:
    """A sum under way between threads."""

    transport: LocalTransport
    collective: Collective
    key: _MeetingKey
    tensor: Tensor

    def wait(self) -> Tensor:
        transport, inbox = self.transport, self.transport.inbox
        ledger, timeout_s = transport.ledger, transport.network.timeout_s
        with inbox.condition:
            lost = inbox.gone.intersection
            if not inbox.wait(lambda: self.key in inbox.sums, lambda: bool(lost(self.collective.devices)), timeout_s):
                if lost(self.collective.devices):
                    raise ledger.collective_error(self.collective, "a member has closed its end")
                problem = f"its sum was not there within {timeout_s:g} s"
                raise ledger.collective_error(self.collective, problem, kind=TransportTimeoutError)
            total = inbox.sums.pop(self.key)
        ledger.collectives.remove(self.collective)
        if isinstance(total, str):
            raise ledger.collective_error(self.collective, total)
        self.tensor.detach().copy_(total)
        return self.tensor
