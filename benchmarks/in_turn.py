"""A pipeline in one process whose devices compute in turn: the executor itself, on one core, at the speed of plain PyTorch.

`LocalPipeline` has a thread for each device. Where they share a core they would take it, and the interpreter's lock, from each other
in the middle of Ops. Here one of them computes until it waits for another; its transport then hands the turn on.

    device 0   F0 F1 F2 F3 (waits)                         B0 F4 ...
    device 1               F0 F1 F2 (waits)          B0 F3
    device 2                        F0 F1 (waits) B0 ...

Programs, weights, gradients, sums and updates are those of the executor, because they are the executor's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

from torch import Tensor

from raypipe.actors.local import LocalPipeline
from raypipe.actors.transport.protocol import Expected, Pending, Places, Transport
from raypipe.communication.shards import Segment
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message


def in_turn(pipeline: LocalPipeline) -> LocalPipeline:
    """The same pipeline, of whose devices no two compute at the same time. The numbers do not change."""
    turn = threading.RLock()
    for executor in pipeline.executors:
        executor.transport = _InTurn(executor.transport, turn)
        executor.at_rest = partial(_without, turn)
    return pipeline


@contextmanager
def _without(turn: threading.RLock) -> Iterator[None]:
    turn.release()
    yield
    turn.acquire()


class _InTurn:
    """A transport that lets others compute while its own device waits.

    An error ends the wait without the turn: its device will compute no more.
    """

    def __init__(self, transport: Transport, turn: threading.RLock) -> None:
        self.transport = transport
        self.turn = turn
        self.thread = 0

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """See `Transport`."""
        self.turn.acquire()
        self.thread = threading.get_ident()
        self.transport.open_window(incoming, outgoing)

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """See `Transport`."""
        self.transport.send(message, peer, tensors)

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """See `Transport`."""
        with _without(self.turn):
            return self.transport.recv(message, peer)

    def slice_owners(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """See `Transport`."""
        return self.transport.slice_owners(members)

    def start(
        self,
        collective: Collective,
        tensor: Tensor,
        *,
        deadline: int = 0,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> Pending:
        """See `Transport`."""
        pending = self.transport.start(collective, tensor, deadline=deadline, places=places, segments=segments)
        return _PendingInTurn(pending, self)

    def check(self) -> None:
        """See `Transport`."""
        self.transport.check()

    def close_window(self) -> None:
        """See `Transport`."""
        self.transport.close_window()
        self.turn.release()

    def abort(self, reason: str) -> None:
        """See `Transport`. Called by the device that failed, for all: if it has the turn, this is where it ends."""
        self.transport.abort(reason)
        with suppress(RuntimeError):  # another one has the turn, or nobody
            self.turn.release()

    def close(self) -> None:
        """See `Transport`."""
        self.transport.close()


class _PendingInTurn:
    """A sum for which a device waits without the turn, which its thread that starts collectives never has."""

    def __init__(self, pending: Pending, transport: _InTurn) -> None:
        self.pending = pending
        self.transport = transport

    def wait(self) -> Tensor:
        """See `Pending`."""
        with _without(self.transport.turn) if threading.get_ident() == self.transport.thread else nullcontext():
            return self.pending.wait()
