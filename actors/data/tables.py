"""Rows of data with a length and a place for each row, such as a map-style dataset: a pure function of their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypipe.actors.data.collate import Row
from raypipe.actors.data.seeds import seed_all
from raypipe.data.samples import places
from raypipe.errors import ConfigError


class Columns:
    """A table of columns of one length, by name."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"columns of the data have different lengths: {', '.join(f'{name} {num}' for name, num in lengths.items())}")
        self._columns = columns
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {name: column[place] for name, column in self._columns.items()}


class RowTable:
    """The rows of a table as an endless stream: each epoch shuffles the training split anew by `seed`, others stay in order.

    Whatever a row draws from the generators of Python, NumPy and torch depends on `seed` and the row's number alone.

    Raises:
        ConfigError: There is no row.
    """

    def __init__(self, table: Any, *, seed: int, split: str) -> None:
        self._table = table
        self._size = len(table)
        self._seed = seed
        self._split = split
        if not self._size:
            raise ConfigError(f"the {split} data has no row; it has the length 0")

    def __len__(self) -> int:
        return self._size

    def read(self, first: int, count: int) -> list[Row]:
        """Return `count` rows from number `first` on, counted over all epochs."""
        rows: list[Row] = []
        for number, place in enumerate(places(first, count, size=self._size, seed=self._seed, split=self._split), start=first):
            seed_all(self._seed, number)
            rows.append(self._table[int(place)])
        return rows
