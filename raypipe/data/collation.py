"""Collation: fields of a microbatch from rows of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raypipe.errors import ConfigError

IGNORED = -100
"""Label of what no loss counts, as in torch's `cross_entropy` and in transformers."""


@dataclass(frozen=True)
class Pad:
    """Brings the arrays of rows to one length: `Trainer(..., collate=Pad(128))`.

    Rows are mappings from names to numbers, lists or arrays. Of each field with a length that varies along the row, all rows are filled
    behind to `length`, or cut to it.

    Attributes:
        length: Length of the first dimension of each padded field.
        fields: Fields to pad; left out for all that have a dimension.
        values: What fills each field; `labels` and `targets` are filled with `IGNORED` unless they are named here, others with 0.
        mask: Name of a field to add, int64, 1 where a row has a value of its own and 0 where it was filled; left out for none.
        cut: Whether longer rows are cut; otherwise they are an error.

    Raises:
        ConfigError: A row is too long, or lacks a field of the first.
    """

    length: int
    fields: tuple[str, ...] | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    mask: str | None = None
    cut: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the fields; padded ones are [rows, length, ...]."""
        columns = {name: [np.asarray(self._value(row, name)) for row in rows] for name in rows[0]}
        padded = [name for name, values in columns.items() if values[0].ndim and (self.fields is None or name in self.fields)]
        batch = {name: self._padded(name, values) if name in padded else np.stack(values) for name, values in columns.items()}
        if self.mask is not None and padded:
            lengths = np.array([min(len(value), self.length) for value in columns[padded[0]]])
            batch[self.mask] = (np.arange(self.length) < lengths[:, None]).astype(np.int64)
        return batch

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        if name not in row:
            raise ConfigError(f"a row of the data lacks the field {name!r} of the first; it has {', '.join(row)}")
        return row[name]

    def _padded(self, name: str, values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        longest = max(map(len, values))
        if longest > self.length and not self.cut:
            raise ConfigError(
                f"the field {name!r} of a row has the length {longest}, Pad fills to {self.length}; raise it, or set cut=True"
            )
        fill = self.values.get(name, IGNORED if name in {"labels", "targets"} else 0)
        batch = np.full((len(values), self.length, *values[0].shape[1:]), fill, dtype=values[0].dtype)
        for row, value in zip(batch, values, strict=True):
            row[: len(value)] = value[: self.length]
        return batch
