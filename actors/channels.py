"""What channels between processes have in common, whatever carries their messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from raypipe.actors.transport import Expected
from raypipe.errors import TransportError
from raypipe.schedules.lower import Message

CLOSED_BY_PEER = "connection closed by peer: its process ended, or gave up after an error of its own"


class ChannelError(Exception):
    """Why a channel or a sum failed. The transport, which knows of what and with whom, makes an error for its users of it.

    Args:
        problem: what happened.
        kind: of the error that it becomes.
    """

    def __init__(self, problem: str, *, kind: type[TransportError] = TransportError) -> None:
        super().__init__(problem)
        self.problem = problem
        self.kind = kind


class IncomingChannel(Protocol):
    """The receiving end of a channel."""

    def open(self, messages: Sequence[Expected]) -> None:
        """Begins a window that will bring these messages."""

    def recv(self, timeout_s: float) -> tuple[Tensor, ...]:
        """Waits for the next message.

        Raises:
            ChannelError: it did not come, or is not as announced.
        """

    def close(self) -> None:
        """Gives back what it holds; its lines were cut before."""


class OutgoingChannel(Protocol):
    """The sending end of a channel."""

    def open(self) -> None:
        """Begins a window."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Begins to send a message.

        Raises:
            ChannelError: it, or one before it, cannot be delivered.
        """

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """Waits until all has left, and ends the window; returns the first message that did not leave, if there is one.

        Args:
            timeout_s: for each message.
            aborted: ends the wait, after `wake`.
        """

    @property
    def error(self) -> ChannelError | None:
        """Why messages do not leave any more."""

    def wake(self) -> None:
        """Lets `flush` see that it was aborted."""

    def close(self) -> None:
        """Gives back what it holds and ends its threads; its lines were cut before."""
