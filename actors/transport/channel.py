"""What channels between processes have in common, whatever carries their messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from raypipe.actors.transport.protocol import Expected, Places, TensorSpec
from raypipe.communication.shards import Segment
from raypipe.errors import TransportError
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message

CLOSED_BY_PEER = "connection closed by peer: its process ended, or gave up after an error of its own"


class ChannelError(Exception):
    """Why a channel or a sum failed. The transport, which knows message and peer, raises an error of class `kind` for it."""

    def __init__(self, problem: str, *, kind: type[TransportError] = TransportError) -> None:
        super().__init__(problem)
        self.problem = problem
        self.kind = kind


P = TypeVar("P")

_MAX_LISTS = 8


class Prepared(Generic[P]):
    """What a channel has prepared for lists of messages, so that a list that comes again costs nothing."""

    def __init__(self, prepare: Callable[[Expected], P]) -> None:
        self._prepare = prepare
        self._lists: dict[int, tuple[Sequence[Expected], list[P]]] = {}

    def of(self, messages: Sequence[Expected]) -> list[P]:
        """Return what was prepared for each message, not to be changed."""
        known = self._lists.get(id(messages))
        if known is None:  # no other list has this id: those that are known are kept alive here
            if len(self._lists) == _MAX_LISTS:
                del self._lists[next(iter(self._lists))]
            known = self._lists[id(messages)] = messages, [self._prepare(message) for message in messages]
        return known[1]


def check_tensors(expected: Expected, tensors: Sequence[Tensor]) -> None:
    """Raise `ChannelError` if tensors of layers differ from what was announced in number, shape or dtype."""
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
    """Wait, with the condition held, until a queue is empty, given up, or not shorter for `timeout_s`."""

    def moved(left: int) -> bool:
        return len(queue) < left or given_up()

    while queue_left := len(queue):
        if given_up() or not condition.wait_for(partial(moved, queue_left), timeout_s):
            return


class IncomingChannel(Protocol):
    """The receiving end of a channel."""

    def open(self, messages: Sequence[Expected]) -> None:
        """Begin a window with these messages; those of the last one were all received."""

    def recv(self) -> tuple[Tensor, ...]:
        """Wait for the next message; raises `ChannelError`."""

    def close(self) -> None:
        """Release everything, after the connection was shut down."""


class OutgoingChannel(Protocol):
    """The sending end of a channel."""

    def open(self, messages: Sequence[Expected]) -> None:
        """Begin a window with these messages; those of the last one were all sent."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send the next message; raises `ChannelError` if it, or one before it, cannot be delivered."""

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """Wait until all that was sent has left, each message within `timeout_s`; return the first that did not leave, if any."""

    @property
    def error(self) -> ChannelError | None:
        """Why messages do not leave any more."""

    def wake(self) -> None:
        """Let `flush` see that it was aborted."""

    def close(self) -> None:
        """Release everything and end the threads, after the connection was shut down."""


class SumUnderWay(Protocol):
    """A sum under way; `tensor` is this member's share, and holds the sum after `wait`."""

    tensor: Tensor

    def wait(self, timeout_s: float) -> None:
        """Wait for the sum (on a GPU the computing stream waits, not the host); raises `ChannelError`."""


class SumGroup(Protocol):
    """The members of sums."""

    @property
    def slice_owners(self) -> tuple[int, ...]:
        """See `Transport.slice_owners`."""

    def sum(
        self,
        tensor: Tensor,
        *,
        collective: Collective,
        deadline: int,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> SumUnderWay:
        """Begin to sum a tensor over the members, in place; see `Transport.start`."""
