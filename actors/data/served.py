"""The rows that stages ask readers for, some microbatches ahead of the program."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raypipe.actors.data.reader import unpacked
from raypipe.actors.execution.batches import BatchSource, Piece
from raypipe.errors import AbortedError, RaypipeError, RunError
from raypipe.model import Batch

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Readers:
    """How an actor gets its rows from the readers of a run; see `BatchFunction`.

    Attributes:
        handles: Ray's handles of the readers of each split; microbatches go around among them.
        prefetch: Microbatches that a stage asks for ahead of its program.
        timeout_s: Seconds within which the rows of a microbatch must come.
    """

    handles: dict[str, tuple[Any, ...]]
    microbatch_size: int
    prefetch: int
    timeout_s: float

    def __call__(self, split: str) -> BatchSource:
        """Return the rows of a split."""
        handles = self.handles[split]
        return ServedBatches(handles, microbatch_size=self.microbatch_size, prefetch=self.prefetch, timeout_s=self.timeout_s)


class ServedBatches:
    """Rows of one split for one device."""

    def __init__(self, handles: Sequence[Any], *, microbatch_size: int, prefetch: int, timeout_s: float) -> None:
        self._handles = handles
        self._size = microbatch_size
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._order: Sequence[Piece] = ()
        self._at = 0
        """Place in the order of the piece that is read next."""
        self._asked: dict[int, Any] = {}
        """Replies to what was asked for ahead, by place."""
        self._stopped = threading.Event()

    def expect(self, order: Sequence[Piece]) -> None:
        """Take the order in which the program will read from now on, and ask for the first pieces."""
        self._stopped.clear()
        asked: dict[Piece, list[Any]] = {}
        for place in sorted(self._asked):
            asked.setdefault(self._order[place], []).append(self._asked[place])
        self._order, self._at, self._asked = order, 0, {}
        for place, piece in enumerate(order[: self._prefetch]):
            if asked.get(piece):
                self._asked[place] = asked[piece].pop(0)
        self._ask_ahead()

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return rows of a microbatch, and ask for those that come behind it.

        Raises:
            RaypipeError: They cannot be read, or do not come.
        """
        piece = (microbatch, rows)
        place = next((at for at in range(self._at, len(self._order)) if self._order[at] == piece), None)
        reply = None
        if place is not None:
            reply = self._asked.pop(place, None)
            self._at = place + 1
        if reply is None:
            reply = self._ask(piece)
        self._ask_ahead()
        return unpacked(self._wait(reply, microbatch))

    def abort(self) -> None:
        """End waits. Called from another thread."""
        self._stopped.set()

    def _ask_ahead(self) -> None:
        for place in range(self._at, min(self._at + self._prefetch, len(self._order))):
            if place not in self._asked:
                self._asked[place] = self._ask(self._order[place])

    def _ask(self, piece: Piece) -> Any:
        microbatch, rows = piece
        return self._handles[microbatch % len(self._handles)].rows.remote(microbatch * self._size, self._size, rows)

    def _wait(self, reply: Any, microbatch: int) -> Any:
        until_s = time.monotonic() + self._timeout_s
        while not self._stopped.is_set():
            try:
                return ray.get(reply, timeout=_LOOK_EVERY_S)
            except GetTimeoutError:
                if time.monotonic() > until_s:
                    raise RunError(
                        f"the rows of microbatch {microbatch} did not come within {self._timeout_s:g} s; the data is slower than "
                        "cluster.message_timeout_s allows"
                    ) from None
            except RayTaskError as error:
                raise (
                    error.cause if isinstance(error.cause, RaypipeError) else RunError(f"reading microbatch {microbatch}: {error}")
                ) from error
            except RayError as error:
                raise RunError(f"the process that reads the data is lost: {error}") from error
        raise AbortedError("the run was aborted while rows were read")
