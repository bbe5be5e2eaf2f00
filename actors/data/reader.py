"""Reads the rows of a split, and serves them to the stages by number. One process reads, so that all stages get the same rows."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ray import cloudpickle
from torch import Tensor

from raypipe.actors.data.collate import Collate, batch_of
from raypipe.actors.data.seeds import seed_all
from raypipe.actors.data.source import DataSource, RowSource
from raypipe.actors.data.streams import Position, RowStream
from raypipe.actors.execution.batches import share_of
from raypipe.errors import ConfigError, RaypipeError
from raypipe.user_code import files_start_at

Packed = dict[str, npt.NDArray[Any] | Tensor]
"""Fields as arrays, which Ray sends without copies within a node; tensors of types that NumPy lacks."""
_COLLATE = 1
"""Beside the number of a row, what tells the seed of a collation from that of the row."""


class NewestPosition:
    """Keeps the newest saved position of a stream, so that a reader that starts again goes on from there."""

    def __init__(self, text: str) -> None:
        self._text = text

    def put(self, text: str) -> None:
        """Take a newer position."""
        self._text = text

    def get(self) -> str:
        """Return the position."""
        return self._text


class RowReader:
    """The rows of one split of the user's data, made into fields.

    Several threads may ask; one at a time reads. What was read last is kept, since each stage asks for it at another time.

    Args:
        source: `DataSource.packed`.
        num_kept: Pieces of rows, as asked for, that are kept.
        mark_every: Rows between two positions of a stream that are remembered.
        start: Returns the `Position.text` where a stream begins; each time that the process starts.
    """

    def __init__(self, source: bytes, split: str, *, num_kept: int, mark_every: int, start: Callable[[], str] = str) -> None:
        self._source: DataSource = cloudpickle.loads(source)
        if self._source.directory != os.getcwd():
            files_start_at(self._source.directory)
        self._split = split
        self._mark_every, self._start = mark_every, start
        self._num_kept = num_kept
        self._kept: OrderedDict[tuple[int, int], dict[str, Tensor]] = OrderedDict()
        self._form: dict[str, tuple[list[int], torch.dtype]] = {}
        self._lock = threading.Lock()

    # Both are made when they are asked for first: an error of the user's functions is an answer, not the end of the process.

    @cached_property
    def _collate(self) -> Collate:
        return self._source.collator()

    @cached_property
    def _rows(self) -> RowSource:
        return self._source.open(self._split, mark_every=self._mark_every, start=Position.from_text(self._start()))

    @property
    def is_stream(self) -> bool:
        """Whether rows can only be read one after the other."""
        return isinstance(self._rows, RowStream)

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; `None` for a stream that does not know."""
        return self._rows.num_rows if isinstance(self._rows, RowStream) else len(self._rows)

    def rows(self, first: int, count: int, share: tuple[float, float]) -> Packed:
        """Return a share of the fields of `count` rows from number `first` on.

        Raises:
            ConfigError: Rows cannot be read, or not made into fields.
        """
        with self._lock:
            if (first, count) not in self._kept:
                self._read(first, count)
            self._kept.move_to_end((first, count))
            batch = self._kept[first, count]
        return {name: _packed(tensor) for name, tensor in share_of(batch, share).items()}

    def position(self, row: int) -> str:
        """Return from where a stream goes on to reach a row, as text; empty for rows that are read by number."""
        with self._lock:
            return self._rows.position(row).text() if isinstance(self._rows, RowStream) else ""

    def _read(self, first: int, count: int) -> None:
        # A stream passes the rows that others will ask for; a later piece may be asked for first.
        since = first
        if isinstance(self._rows, RowStream) and self._rows.row < first and not (first - self._rows.row) % count:
            since = max(self._rows.row, first - self._num_kept // 2 * count)
        for begin in range(since, first + count, count):
            self._kept[begin, count] = self._piece(begin, count)
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)

    def _piece(self, first: int, count: int) -> dict[str, Tensor]:
        where = f"rows {first} to {first + count - 1} of the {self._split} data"
        try:
            rows = self._rows.read(first, count)
            seed_all(self._source.seed, first, _COLLATE)
            batch = batch_of(rows, self._collate)
            self._check_alike(batch)
            return batch
        except RaypipeError as error:
            raise ConfigError(f"{where}: {error}") from error
        except Exception as error:  # whatever the user's data raises
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error

    def _check_alike(self, batch: dict[str, Tensor]) -> None:
        found = {name: (list(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}
        self._form = self._form or found
        for name in sorted(found.keys() | self._form.keys()):
            now, before = (_form_text(form.get(name)) for form in (found, self._form))
            if now != before:
                raise ConfigError(
                    f"the field {name!r} of a row is {now}, but was {before} in the first rows; stages exchange tensors of one shape: "
                    "bring rows to one length, with `collate=Pad(length, ...)` of raypipe.data.collation, or pack them with "
                    "raypipe.data.packing"
                )


def _form_text(form: tuple[list[int], torch.dtype] | None) -> str:
    return "missing" if form is None else f"{str(form[1]).removeprefix('torch.')} {form[0]}"


def _packed(tensor: Tensor) -> npt.NDArray[Any] | Tensor:
    if tensor.dtype is torch.bfloat16 or not tensor.is_cpu:
        return tensor.cpu()
    return np.ascontiguousarray(tensor.detach().numpy())


def unpacked(fields: Packed) -> dict[str, Tensor]:
    """Return fields as tensors of their own memory, which stages may write into."""
    return {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in fields.items()}
