"""How devices pass tensors: the protocol, and `LocalTransport` between threads of one process.

A transport serves one device. It carries messages on channels (ordered pairs of devices), each channel in the order in
which lowered programs name them, and collectives in one order that all members share. It needs no polling: sends never
wait, receives are posted before they are needed and waited for late.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from raypipe.schedules.lower import Collective, Message

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that will arrive, so that its memory can be there before it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Expected:
    """A message that a channel will bring: what it is and the tensors it consists of."""

    message: Message
    tensors: tuple[TensorSpec, ...]


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Waits for the end; returns the tensor that was given to `Transport.start`, now holding the sum."""


class Transport(Protocol):
    """One device's end of all its channels and collectives."""

    def open_window(self, expected: Mapping[int, Sequence[Expected]]) -> None:
        """Begins a window: for each peer, all messages that it will send, in its order. Receives are posted from here on."""

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """Hands a message to the channel towards `peer` and returns at once; the tensors must not change any more."""

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """Waits for the next message from `peer`, which is `message`.

        Raises:
            TransportTimeoutError: it did not come in time.
            TransportError: the peer is gone, or its message is another one.
            AbortedError: `abort` was called.
        """

    def start(self, collective: Collective, tensor: Tensor) -> Pending:
        """Takes part in summing `tensor`, in place, over the members of a collective, and returns at once."""

    def close_window(self) -> None:
        """Ends a window: waits until all that was sent has left, and checks that nothing is left over.

        Raises:
            TransportError: a message could not be delivered, or was never taken.
        """

    def abort(self, reason: str) -> None:
        """Makes every wait, present and future, end with AbortedError within a second. Called from another thread."""

    def close(self) -> None:
        """Gives back sockets, threads and memory. Does not wait for peers."""
