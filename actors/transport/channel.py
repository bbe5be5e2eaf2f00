"""What channels between processes have in common, whatever carries their messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from raypipe.actors.transport.protocol import Expected, TensorSpec, not_next
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


P = TypeVar("P")

_MAX_LISTS = 8


class Prepared(Generic[P]):
    """What a channel made of the lists of messages that its windows brought, so that a list that comes again costs nothing.

    Args:
        prepare: what is made of one message.
    """

    def __init__(self, prepare: Callable[[Expected], P]) -> None:
        self._prepare = prepare
        self._lists: dict[int, tuple[Sequence[Expected], list[P]]] = {}

    def of(self, messages: Sequence[Expected]) -> list[P]:
        """What was made of each message; the same list each time, not to be changed."""
        known = self._lists.get(id(messages))
        if known is None:  # none with this identity is another one: those that are known live on here
            if len(self._lists) == _MAX_LISTS:
                del self._lists[next(iter(self._lists))]
            known = self._lists[id(messages)] = messages, [self._prepare(message) for message in messages]
        return known[1]


def check_next(expected: Expected, message: Message) -> None:
    """Nothing, if the next message that was announced is this one.

    Raises:
        ChannelError: it is another one.
    """
    if expected.message is not message and expected.message != message:
        raise ChannelError(not_next(expected))


def check_tensors(expected: Expected, tensors: Sequence[Tensor]) -> None:
    """Nothing, if a message that was announced consists of tensors like these.

    Raises:
        ChannelError: it does not.
    """
    if len(tensors) == len(expected.tensors):
        for tensor, spec in zip(tensors, expected.tensors, strict=True):
            if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                break
        else:
            return
    got = Expected(expected.message, tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors))
    raise ChannelError(
        f"it was announced as {expected}, and not as {got}; what crosses stages has one shape in all microbatches, that of the first one"
    )


def wait_until_empty(condition: threading.Condition, queue: Sized, *, given_up: Callable[[], bool], timeout_s: float) -> None:
    """Waits until a queue is empty or given up, or has not become shorter for so long. The condition is held, and tells of changes."""

    def moved(left: int) -> bool:
        return len(queue) < left or given_up()

    while queue_left := len(queue):
        if given_up() or not condition.wait_for(partial(moved, queue_left), timeout_s):
            return


class IncomingChannel(Protocol):
    """The receiving end of a channel."""

    def open(self, messages: Sequence[Expected]) -> None:
        """Begins a window that will bring these messages."""

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """Waits for the next message, which is this one.

        Raises:
            ChannelError: it did not come, or is not as announced.
        """

    def end(self) -> list[Expected]:
        """Ends the window; returns the messages that were announced and not received."""

    def close(self) -> None:
        """Gives back what it holds; its lines were cut before."""


class OutgoingChannel(Protocol):
    """The sending end of a channel."""

    def open(self, messages: Sequence[Expected]) -> None:
        """Begins a window in which these messages will be sent."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Begins to send the next message, which is this one.

        Raises:
            ChannelError: it, or one before it, cannot be delivered, or is not as announced.
        """

    def end(self) -> list[Expected]:
        """Ends the window; returns the messages that were announced and not sent."""

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """Waits until all that was sent has left; returns the first message that did not leave, if there is one.

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
