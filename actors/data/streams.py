"""Rows of data that can only be iterated: read forward once, epoch after epoch, and again from a known position.

A position is where reading goes on: the number of the row, the epoch, and the state of the iteration as `state_dict` of the data gave it.
Data without `state_dict` is read from the beginning of its epoch, and what was read before is dropped.
"""

from __future__ import annotations

import base64
import copy
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from raypipe.actors.data.collate import Row
from raypipe.actors.data.seeds import seed_all
from raypipe.errors import ConfigError

_MOST_MARKS = 64


@dataclass(frozen=True)
class Position:
    """Where the reading of a stream goes on.

    Attributes:
        row: Number of the next row, counted over all epochs.
        epoch: Epoch of that row.
        state: What `state_dict` of the data returned there; `None` for the beginning of the epoch.
    """

    row: int = 0
    epoch: int = 0
    state: Any = None

    def text(self) -> str:
        """Return the position as text for a checkpoint."""
        content = io.BytesIO()
        torch.save({"row": self.row, "epoch": self.epoch, "state": self.state}, content)
        return base64.b64encode(content.getvalue()).decode()

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Return the position that `text` returned; an empty text stands for the beginning.

        Nothing but numbers, texts, tensors and containers of them is read, so that a checkpoint runs no code.

        Raises:
            ConfigError: The state holds something else.
        """
        if not text:
            return cls()
        try:
            return cls(**torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))
        except Exception as error:  # torch's and pickle's have no common class
            raise ConfigError(f"the position of the data in the checkpoint cannot be read: {error}") from error


class RowStream:
    """The rows of a stream, from a position on.

    Args:
        open_data: Returns the data, called once; or for each epoch if it returns an iterator, which cannot be iterated again.
        seed: Seeds what the iteration draws from the generators of Python, NumPy and torch, by epoch and by row.
        mark_every: Rows between two positions that are remembered.
        start: Where to begin.
        num_rows: Rows of an epoch, where that is known.

    Raises:
        ConfigError: An epoch has no row.
    """

    def __init__(
        self,
        open_data: Callable[[], Any],
        *,
        seed: int,
        mark_every: int,
        start: Position | None = None,
        num_rows: int | None = None,
    ) -> None:
        self.num_rows = num_rows
        self._open = open_data
        self._seed = seed
        self._mark_every = mark_every
        self._marks = {0: Position()}
        """Known positions by row."""
        self._data: Any = None
        self._is_one_shot = self._is_batched = self._has_state = False
        self._iterator: Iterator[Any] | None = None
        self._pending: deque[Row] = deque()
        """Rows of the last batch of a loader."""
        self._put_mark(start or Position())
        self._go_to(start or Position())

    def read(self, first: int, count: int) -> list[Row]:
        """Return `count` rows from number `first` on. What lies between is read and dropped; going back reads again."""
        nearest = self.position(first)
        if first < self._row or nearest.row > self._row:
            self._go_to(nearest)
        while self._row < first:
            self._next()
        return [self._next() for _ in range(count)]

    @property
    def row(self) -> int:
        """Number of the row that comes next."""
        return self._row

    def position(self, row: int) -> Position:
        """Return the newest known position from which a row can be reached."""
        return self._marks[max(mark for mark in self._marks if mark <= row)]

    def _go_to(self, position: Position) -> None:
        # The iteration begins with the next row: a state that is loaded and not used would be there for the iteration after it.
        self._row, self._epoch, self._state = position.row, position.epoch, position.state
        self._pending.clear()
        self._iterator = None

    def _begin(self) -> Iterator[Any]:
        state, self._state = self._state, None
        if self._data is None or self._is_one_shot:
            self._data = self._open()
            self._is_one_shot = isinstance(self._data, Iterator)
            self._has_state = hasattr(self._data, "state_dict") and not _loses_rows(self._data)
            self._is_batched = isinstance(self._data, DataLoader) and self._data.batch_sampler is not None
        for part in _parts(self._data):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        if state is not None:
            self._data.load_state_dict(state)
        self._began = None if state is not None else self._row
        seed_all(self._seed, self._epoch)
        rows = getattr(self._data, "iter_rows", None)
        iterator: Iterator[Any] = iter(rows() if rows is not None else self._data)
        if self._has_state and isinstance(self._data, DataLoader):
            # A loader shuffles by a generator of its own, which another one like it would begin otherwise.
            state = copy.deepcopy(self._data.state_dict())  # type: ignore[attr-defined]
        self._put_mark(Position(self._row, self._epoch, state))
        return iterator

    def _next(self) -> Row:
        while not self._pending:
            if self._iterator is None:
                self._iterator = self._begin()
            self._mark()
            seed_all(self._seed, self._epoch, self._row)
            try:
                item = next(self._iterator)
            except StopIteration:
                if self._began == self._row:
                    raise ConfigError(
                        f"epoch {self._epoch} of the data has no row; give data that can be iterated again, or a function that opens it"
                    ) from None
                self._epoch += 1
                self._iterator = None
                continue
            self._pending.extend(split_rows(item) if self._is_batched else [item])
        self._row += 1
        return self._pending.popleft()

    def _put_mark(self, mark: Position) -> None:
        if mark.state is not None or mark.row not in self._marks:
            self._marks[mark.row] = mark
        while len(self._marks) > _MOST_MARKS:
            # The beginning and the newest stay; of older ones the fewer, the older they are.
            for row in sorted(self._marks)[1 : _MOST_MARKS // 2 : 2]:
                del self._marks[row]

    def _mark(self) -> None:
        # At the end of what the data gave: only there its state is that of the row that comes next.
        period = self._row // self._mark_every
        if self._has_state and period > max(mark for mark in self._marks if mark <= self._row) // self._mark_every:
            # Some data changes the state that it has returned when it goes on.
            state = copy.deepcopy(self._data.state_dict())
            if state is not None:
                self._put_mark(Position(self._row, self._epoch, state))


def _loses_rows(data: Any) -> bool:
    """Return whether a state of the data leaves out rows, as those in the buffer of a shuffled stream of Hugging Face."""
    steps = [step for part in _parts(data) if (step := getattr(part, "_ex_iterable", None)) is not None]
    while steps:
        step = steps.pop()
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return True
        steps += [inner for inner in (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())) if inner is not None]
    return False


def _parts(data: Any) -> Iterator[Any]:
    yield data
    if isinstance(data, DataLoader):
        yield from (data.dataset, data.sampler)


def split_rows(batch: Any) -> list[Row]:
    """Return the rows of a batch of a loader: of each tensor in it."""
    if isinstance(batch, Mapping):
        columns = {name: split_rows(value) for name, value in batch.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(batch, Tensor):
        return list(batch)
    if isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor | Mapping | Sequence) and not isinstance(batch[0], str):
        return list(zip(*map(split_rows, batch), strict=True))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return list(batch)
    raise ConfigError(f"a loader gives batches of type {type(batch).__name__}; expected tensors, or dicts or tuples of them")
