"""Messages and sums between threads of one process."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.transport.protocol import ErrorPlace, Expected, Pending, Places, TensorSpec, own_numbers, summing_dtype
from raypipe.communication.shards import Segment
from raypipe.errors import AbortedError, TransportTimeoutError
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.lower import Message

_CLOSED = "the peer has closed its end"

_SumKey = tuple[tuple[int, ...], int]
"""The members, and how many sums they had before."""


class LocalNetwork:
    """All channels between the devices of one process, each of which runs in a thread of its own; `timeout_s` limits every wait."""

    def __init__(self, num_devices: int, *, timeout_s: float, names: Sequence[str] | None = None) -> None:
        self.names = tuple(names) if names is not None else tuple(map(str, range(num_devices)))
        self.timeout_s = timeout_s
        self.inboxes = [_Inbox() for _ in range(num_devices)]
        self._shares: dict[_SumKey, dict[int, _Share]] = {}
        self._lock = threading.Lock()

    def transport(self, device: int) -> LocalTransport:
        """Return the end of one device; ask once for each."""
        return LocalTransport(self, device)

    def add_share(self, key: _SumKey, device: int, collective: Collective, tensor: Tensor) -> None:
        """Add one member's share to a sum; the last to come sums for all."""
        with self._lock:
            shares = self._shares.setdefault(key, {})
            shares[device] = _Share(collective, tensor, devices.mark(tensor.device))
            if len(shares) < len(collective.devices):
                return
            del self._shares[key]
        total = _sum([shares[member] for member in collective.devices])
        for member in collective.devices:
            self.inboxes[member].put_sum(key, total)


class _Share(NamedTuple):
    """What a member brings, and when its GPU has made it: threads may compute on streams of their own."""

    collective: Collective
    tensor: Tensor
    made: Any


class _Total(NamedTuple):
    tensor: Tensor
    made: Any


def _sum(shares: Sequence[_Share]) -> _Total | str:
    for descriptions in (
        [str(share.collective) for share in shares],
        [str(TensorSpec(tuple(share.tensor.shape), share.tensor.dtype)) for share in shares],
    ):
        if len(set(descriptions)) > 1:
            return f"its members brought different things: {', '.join(descriptions)}"
    for share in shares:
        if share.made is not None:
            share.made.wait()
    first = shares[0].tensor
    total = first.to(summing_dtype(first.dtype), copy=True)
    for share in shares[1:]:
        total += share.tensor
    return _Total(total.to(first.dtype), devices.mark(first.device))


class _Inbox:
    """All that can end a wait of one device comes here, under one condition."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.messages: dict[int, deque[tuple[Message, tuple[Tensor, ...]]]] = {}
        self.sums: dict[_SumKey, _Total | str] = {}
        self.closed_peers: set[int] = set()
        self.abort_reason: str | None = None

    def put_message(self, source: int, message: Message, tensors: tuple[Tensor, ...]) -> None:
        with self.condition:
            self.messages.setdefault(source, deque()).append((message, tensors))
            self.condition.notify_all()

    def put_sum(self, key: _SumKey, total: _Total | str) -> None:
        with self.condition:
            self.sums[key] = total
            self.condition.notify_all()

    def lose(self, peer: int) -> None:
        with self.condition:
            self.closed_peers.add(peer)
            self.condition.notify_all()

    def abort(self, reason: str) -> None:
        with self.condition:
            self.abort_reason = self.abort_reason or reason
            self.condition.notify_all()

    def wait(self, arrived: Callable[[], bool], lost: Callable[[], bool], timeout_s: float) -> bool:
        self.condition.wait_for(lambda: self.abort_reason is not None or arrived() or lost(), timeout_s)
        self.check()
        return arrived()

    def check(self) -> None:
        if self.abort_reason is not None:
            raise AbortedError(self.abort_reason)


class LocalTransport:
    """The end of one device of a `LocalNetwork`.

    Sent tensors are cloned. Sums go in the order of the members, the same at each run. `abort` ends the waits of this device alone. After
    `close`, peers still take what it sent, then get a TransportError.
    """

    def __init__(self, network: LocalNetwork, device: int) -> None:
        self.network = network
        self.device = device
        self.inbox = network.inboxes[device]
        self.error = ErrorPlace(device, network.names)
        self._expected: dict[int, deque[Expected]] = {}
        self._num_sums: Counter[tuple[int, ...]] = Counter()
        self._closed = False

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """See `Transport`."""
        self.inbox.check()
        assert not any(self._expected.values()), "the last window took all its messages"
        self._expected = {peer: deque(messages) for peer, messages in incoming.items()}

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """See `Transport`; the receiver compares the tensors with what was announced."""
        self.inbox.check()
        if peer in self.inbox.closed_peers:
            raise self.error.of_message(message, peer, _CLOSED)
        self.network.inboxes[peer].put_message(self.device, message, tuple(_copy(tensor) for tensor in tensors))

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """See `Transport`."""
        self.inbox.check()
        expected, inbox, timeout_s = self._expected[peer].popleft(), self.inbox, self.network.timeout_s
        with inbox.condition:
            queue = inbox.messages.setdefault(peer, deque())
            if not inbox.wait(lambda: bool(queue), lambda: peer in inbox.closed_peers, timeout_s):
                if peer in inbox.closed_peers:
                    raise self.error.of_message(message, peer, _CLOSED)
                raise self.error.of_message(message, peer, f"it did not come within {timeout_s:g} s", kind=TransportTimeoutError)
            sent, tensors = queue.popleft()
        arrived = Expected(sent, tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        if arrived != expected:
            raise self.error.of_message(message, peer, f"expected {expected}, got {arrived}")
        return tensors

    def slice_owners(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """See `Transport`."""
        return tuple(range(len(members)))

    def start(
        self,
        collective: Collective,
        tensor: Tensor,
        *,
        deadline: int = 0,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> Pending:
        """See `Transport`; nothing is in the way of a sum, members add in one order at all places, and all get all of it."""
        self.inbox.check()
        key = (collective.devices, self._num_sums[collective.devices])
        self._num_sums[collective.devices] += 1
        of_others = segments if collective.kind is CollectiveKind.WEIGHTS else ()
        self.network.add_share(key, self.device, collective, own_numbers(tensor, of_others, collective.devices.index(self.device)))
        return _LocalPending(self, collective, key, tensor)

    def check(self) -> None:
        """See `Transport`; waits report all errors themselves."""

    def close_window(self) -> None:
        """See `Transport`."""
        self.inbox.check()

    def abort(self, reason: str) -> None:
        """See `Transport`."""
        self.inbox.abort(reason)

    def close(self) -> None:
        """See `Transport`."""
        if self._closed:
            return
        self._closed = True
        self.inbox.abort("the transport is closed")
        for peer, inbox in enumerate(self.network.inboxes):
            if peer != self.device:
                inbox.lose(self.device)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class _LocalPending:
    transport: LocalTransport
    collective: Collective
    key: _SumKey
    tensor: Tensor

    def wait(self) -> Tensor:
        inbox, error, timeout_s = self.transport.inbox, self.transport.error, self.transport.network.timeout_s
        with inbox.condition:
            lost = inbox.closed_peers.intersection
            if not inbox.wait(lambda: self.key in inbox.sums, lambda: bool(lost(self.collective.devices)), timeout_s):
                if lost(self.collective.devices):
                    raise error.of_collective(self.collective, "a member has closed its end")
                raise error.of_collective(self.collective, f"its sum was not there within {timeout_s:g} s", kind=TransportTimeoutError)
            total = inbox.sums.pop(self.key)
        if isinstance(total, str):
            raise error.of_collective(self.collective, total)
        if total.made is not None:
            total.made.wait()
        if total.tensor.is_cuda:
            total.tensor.record_stream(torch.cuda.current_stream())
        self.tensor.detach().copy_(total.tensor)
        return self.tensor
