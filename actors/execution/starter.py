"""Takes part in the collectives of a window, beside the program: in each when those have ended of whose sums its share is made.

So a norm starts when the sums of gradients are there, not where it is awaited. All collectives start in the order of the program, since
NCCL and gloo pair them by order: what comes behind one that is held up waits with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.execution.steps import StartStep
from raypipe.actors.transport.protocol import Pending, Places, Transport
from raypipe.communication.shards import Segment
from raypipe.schedules.collectives import Collective


class Share(NamedTuple):
    """A device's part of a collective, as `Transport.start` takes it."""

    tensor: Tensor
    places: Places | None = None
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class _Held:
    """A start that a thread makes. `needed` are the collectives behind which it does; `share` is not made of their sums if given."""

    step: StartStep
    share: Share | None
    needed: tuple[tuple[Collective, Pending | Future[Pending], Future[_Ended]], ...]
    started: Future[Pending]
    mark: Any


@dataclass(frozen=True)
class _Ended:
    num_bytes: int
    mark: Any


class Starter:
    """The collectives under way on one device.

    `share` makes this device's part of a collective; `put` brings a sum where it is needed. On a GPU
    both may run on a stream of their own.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        share: Callable[[Collective], Share],
        put: Callable[[Collective, Tensor], None],
        on: torch.device,
        at_rest: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._transport = transport
        self._share = share
        self._put = put
        self._at_rest = at_rest
        self._on = on
        self.pending: dict[Collective, Pending | Future[Pending]] = {}
        self._endings: dict[Collective, Future[_Ended]] = {}
        """Of collectives that the thread ends, because others are behind them."""
        self._held: SimpleQueue[_Held | None] = SimpleQueue()
        self._last: Future[Pending] | None = None
        self._thread: threading.Thread | None = None

    def start(self, step: StartStep) -> None:
        """Start a collective with this device's share, now or as soon as may be; return at once."""
        collective = step.collective
        if not step.after and (self._last is None or self._last.done()):
            self.pending[collective] = self._begin(step, self._share(collective))
            return
        share = None if step.after else self._share(collective)
        needed = tuple((each, self.pending[each], self._endings.setdefault(each, Future())) for each in step.after)
        self._last = self.pending[collective] = Future()
        self._held.put(_Held(step, share, needed, self._last, devices.mark(self._on)))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(devices.own_stream(self._on),), name="raypipe starts collectives", daemon=True
            )
            self._thread.start()

    def finish(self, collective: Collective) -> int:
        """Wait until a collective has ended and its sum is in place; return its bytes. Raises as `Pending.wait`."""
        pending, ending = self.pending.pop(collective), self._endings.pop(collective, None)
        if ending is not None:
            with self._at_rest():
                ended = ending.result()
            if ended.mark is not None:
                ended.mark.wait()
            return ended.num_bytes
        if isinstance(pending, Future):
            with self._at_rest():
                pending = pending.result()
        return self._end(collective, pending)

    def close(self) -> None:
        """End the thread, when it waits for nothing any more."""
        if self._thread is not None:
            self._held.put(None)

    def _begin(self, step: StartStep, share: Share) -> Pending:
        return self._transport.start(step.collective, share.tensor, deadline=step.deadline, places=share.places, segments=share.segments)

    def _end(self, collective: Collective, pending: Pending) -> int:
        total = pending.wait()
        if total.is_cuda:
            total.record_stream(torch.cuda.current_stream())  # its memory may come from the other thread's
        self._put(collective, total)
        return total.nbytes

    def _run(self, on_own_stream: AbstractContextManager[object]) -> None:
        with torch.no_grad(), on_own_stream:
            while (held := self._held.get()) is not None:
                self._start_held(held)
                del held  # It has sums, whose memory would be kept until the next one.

    def _start_held(self, held: _Held) -> None:
        try:
            if held.mark is not None:
                held.mark.wait()
            for collective, pending, ending in held.needed:
                if not ending.done():
                    started = pending.result() if isinstance(pending, Future) else pending
                    ending.set_result(_Ended(self._end(collective, started), devices.mark(self._on)))
            share = self._share(held.step.collective) if held.share is None else held.share
            held.started.set_result(self._begin(held.step, share))
        except BaseException as error:  # raised by who awaits it
            futures: list[Future[Any]] = [*(ending for _, _, ending in held.needed), held.started]
            for future in futures:
                if not future.done():
                    future.set_exception(error)
