"""Makes the fields of a microbatch from its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypipe.errors import ConfigError

Row = Any
"""What a table or stream gives for one row; by default a mapping from names of fields to numbers or arrays."""
Collate = Callable[[list[Row]], Mapping[str, Any]]
"""Makes fields from rows; the first dimension of each field is the row."""

_REMEDY = "give `collate`, a function from a list of rows to a dict of tensors"


def stack_rows(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return the fields of rows that are mappings from names to numbers or arrays of one shape.

    Raises:
        ConfigError: A row is no mapping, lacks a field, or has one of another shape, or one that is no number.
    """
    first = rows[0]
    if not isinstance(first, Mapping):
        raise ConfigError(f"a row of the data is of type {type(first).__name__}, not a mapping from names of fields to values; {_REMEDY}")
    for row in rows:
        if row.keys() != first.keys():
            raise ConfigError(f"one row of the data has the fields {', '.join(first)}, another {', '.join(row)}; {_REMEDY}")
    return {name: _stacked(name, [row[name] for row in rows]) for name in first}


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    tensors = [_tensor(name, value) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        some = " and ".join(map(str, sorted(map(list, shapes))[:2]))
        raise ConfigError(
            f"the field {name!r} of rows of one microbatch has the shapes {some}; bring rows to one length with "
            f"`collate=Pad(length, ...)` of raypipe.data.collation, or pack them (raypipe.data.packing)"
        )
    return torch.stack(tensors)


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
        if array.dtype == object or array.dtype.kind in "USO":
            raise TypeError(f"it holds {type(value).__name__}")
        return torch.tensor(array)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the field {name!r} of a row is no number or array ({error}); leave it out of the data, or {_REMEDY}") from None


def batch_of(rows: list[Row], collate: Collate) -> dict[str, Tensor]:
    """Return the fields that `collate` makes of rows, as tensors.

    Raises:
        ConfigError: It makes something else, or another number of rows.
    """
    fields = collate(rows)
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError(f"`collate` returned {type(fields).__name__}; expected a dict from names of fields to tensors")
    batch = {str(name): _tensor(str(name), value) for name, value in fields.items()}
    wrong = [f"{name} {list(tensor.shape)}" for name, tensor in batch.items() if not tensor.dim() or len(tensor) != len(rows)]
    if wrong:
        raise ConfigError(f"`collate` made of {len(rows)} rows the fields {', '.join(wrong)}; the first dimension of each must be the row")
    return batch
