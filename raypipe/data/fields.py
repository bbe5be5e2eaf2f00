"""Files of named fields (`raypipe.fields/1`, Parquet): one row per sample with `row` (its name), `split`, and a column per field.

A field is a number (a column of its type) or an array (a column of its bytes, little-endian, C order). Metadata: `format`, `source`,
`license`, and `fields`, JSON that names type, shape and labels of each. Other columns are for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as attribute
from enum import StrEnum
from math import prod
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import PositiveInt

from raypipe.artifacts.record import record
from raypipe.artifacts.syntax import json_tree
from raypipe.artifacts.validation import from_tree
from raypipe.data.samples import Split, check_seed, name_hash, places
from raypipe.errors import ConfigError, FormatError, suggestion

FORMAT = "raypipe.fields/1"
TEST = "test"
"""Split of the rows that no run reads: for the figures of the trained model."""

_REMEDY = "make such a file with `raypipe data prepare glyphs` or raypipe.data.fields.write_rows"


class NumberType(StrEnum):
    """The types of a field's numbers, all of which torch has."""

    UINT8 = "uint8"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The type in numpy, little-endian."""
        return np.dtype(self.value).newbyteorder("<")


@record()
class Field:
    """What each row has under a name.

    Attributes:
        dtype: Type of its numbers.
        shape: Shape of a row's array; empty for one number.
        labels: What the numbers 0, 1, ... stand for, where they are names, such as words or answers.
    """

    dtype: NumberType
    shape: tuple[PositiveInt, ...] = ()
    labels: tuple[str, ...] = ()


class Repeated(NamedTuple):
    """A field whose rows repeat a few values: `values[indices]`, stored once each."""

    values: npt.NDArray[Any]
    indices: npt.NDArray[np.int64]


Values: TypeAlias = "npt.NDArray[Any] | Repeated"


@dataclass(frozen=True)
class Rows:
    """Rows to write; the first dimension of each field is the row.

    Attributes:
        splits: Split of each row: `train`, `validation` or any other.
        names: Name of each row; left out for its number.
        labels: By field, what its numbers 0, 1, ... stand for.
    """

    fields: Mapping[str, Values]
    splits: Sequence[str]
    names: Sequence[str] = ()
    labels: Mapping[str, Sequence[str]] = attribute(default_factory=dict)
    source: str = "unknown to raypipe"
    license: str = "unknown to raypipe"


def write_rows(path: str | PathLike[str], rows: Rows) -> None:
    """Write a file of named fields, rows in the order of the hashes of their names: the first rows of a split are a fair sample of it.

    Raises:
        ConfigError: A field is called `row` or `split`, has another number of rows than `splits`, or a type that is no `NumberType`.
    """
    names = rows.names or [str(number) for number in range(len(rows.splits))]
    order = np.array(sorted(range(len(names)), key=lambda row: name_hash(names[row])), dtype=np.int64)
    fields = {name: _described(name, values, rows) for name, values in rows.fields.items()}
    columns = {"row": pa.array(names, pa.string()), "split": pa.array(rows.splits, pa.string())}
    table = pa.table({name: column.take(order) for name, column in columns.items()})
    for name, values in rows.fields.items():
        table = table.append_column(name, _column(values, fields[name], order))
    repeated = ["split", *(name for name, values in rows.fields.items() if isinstance(values, Repeated))]
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        use_dictionary=repeated,
        dictionary_pagesize_limit=2**30,  # beyond it, values would be stored again and again
        write_statistics=["split"],
        store_schema=False,  # it would hide the metadata that is added below from those who read the file as an Arrow table
    ) as writer:
        writer.write_table(table, row_group_size=max(len(names), 1))
        described = {name: asdict(field) for name, field in fields.items()}
        writer.add_key_value_metadata({
            "format": FORMAT,
            "fields": json.dumps(described),
            "source": rows.source,
            "license": rows.license,
        })


def _described(name: str, values: Values, rows: Rows) -> Field:
    if name in {"row", "split"}:
        raise ConfigError(f"a field is called {name!r}, as the column that every file of fields has; call it otherwise")
    array, length = (values.values, len(values.indices)) if isinstance(values, Repeated) else (values, len(values))
    if length != len(rows.splits) or len(rows.names) not in {0, length}:
        raise ConfigError(f"the field {name!r} has {length} rows, for {len(rows.splits)} splits and {len(rows.names)} names of rows")
    if array.dtype.name not in tuple(NumberType):
        raise ConfigError(f"the field {name!r} has numbers of type {array.dtype.name}; convert them to one of {', '.join(NumberType)}")
    return Field(dtype=NumberType(array.dtype.name), shape=array.shape[1:], labels=tuple(rows.labels.get(name, ())))


def _column(values: Values, field: Field, order: npt.NDArray[np.int64]) -> Any:
    if isinstance(values, Repeated):
        each = _column(values.values, field, np.arange(len(values.values)))
        return pa.DictionaryArray.from_arrays(values.indices[order].astype(np.int32), each)
    ordered = np.ascontiguousarray(values[order], dtype=field.dtype.numpy)
    return pa.array([row.tobytes() for row in ordered], pa.binary()) if field.shape else pa.array(ordered)


def holds_fields(path: str | PathLike[str]) -> bool:
    """Return whether a file says that it holds named fields; not for one that is missing or damaged."""
    try:
        with pa.memory_map(fspath(path)) as mapped, pq.ParquetFile(mapped) as file:
            return bool((file.metadata.metadata or {}).get(b"format") == FORMAT.encode())
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return False


class FieldDataset:
    """The rows of one split of a file of named fields, as an endless stream; held in memory, values that repeat once.

    Each epoch shuffles the training split anew by `seed`; other splits stay in the file's order.

    Raises:
        FormatError: The file is missing, holds no named fields, contradicts itself, or has no row of the split.
        ConfigError: `seed` is less than 0.
    """

    def __init__(self, path: str | PathLike[str], *, seed: int, split: str = Split.TRAIN) -> None:
        check_seed(seed)
        self.path = fspath(path)
        self.split = split
        self.seed = seed
        self.fields, self.values = _load(self.path, split)
        self.num_rows = len(next(iter(self.values.values())).indices)

    def rows(self, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """Return the fields of the samples from `first` on; their order is that of `samples.places`."""
        at = places(first, count, size=self.num_rows, seed=self.seed, split=self.split)
        return {name: repeated.values[repeated.indices[at]] for name, repeated in self.values.items()}


def _load(path: str, split: str) -> tuple[dict[str, Field], dict[str, Repeated]]:
    try:
        with pa.memory_map(path) as mapped, pq.ParquetFile(mapped) as file:
            fields = _check_header(path, file)
            arrays = [name for name, field in fields.items() if field.shape]
        # Values that repeat are decoded once where the reader is told to keep them apart from their places.
        with pa.memory_map(path) as mapped, pq.ParquetFile(mapped, read_dictionary=arrays) as file:
            table = file.read(columns=["split", *fields])
        splits = pc.unique(table["split"]).to_pylist()
        if split not in splits:
            near = suggestion(split, [name for name in splits if name])
            raise FormatError(path, "split", f"holds no row of {split!r}{near}; its splits are {', '.join(map(str, splits)) or 'none'}")
        table = table.filter(pc.equal(table["split"], split)).unify_dictionaries().combine_chunks()
        return fields, {name: _read(path, name, field, table[name].chunk(0)) for name, field in fields.items()}
    except FileNotFoundError as error:
        raise FormatError(path, "", f"there is no such file; {_REMEDY}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for damaged names of columns
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(path, "", f"it cannot be read as Parquet ({problem}); {_REMEDY}") from error


def _check_header(path: str, file: pq.ParquetFile) -> dict[str, Field]:
    metadata: Mapping[bytes, bytes] = file.metadata.metadata or {}
    stated = metadata.get(b"format", b"").decode(errors="replace")
    if stated != FORMAT:
        raise FormatError(path, "metadata.format", f"expected {FORMAT!r}, got {stated!r}; {_REMEDY}")
    tree = json_tree(metadata.get(b"fields", b"").decode(errors="replace"), path=f"{path}: metadata.fields")
    fields: dict[str, Field] = from_tree(dict[str, Field], tree, path=f"{path}: metadata.fields")
    if not fields:
        raise FormatError(path, "metadata.fields", f"names no field; {_REMEDY}")
    types = {name: pa.binary() if field.shape else pa.from_numpy_dtype(field.dtype.numpy) for name, field in fields.items()}
    for name, expected in {"split": pa.string(), **types}.items():
        index = file.schema_arrow.get_field_index(name)
        got = file.schema_arrow.field(index).type if index >= 0 else "no such column"
        if got != expected:
            raise FormatError(path, name, f"expected a column of type {expected}, got {got}; {_REMEDY}")
    return fields


def _read(path: str, name: str, field: Field, column: Any) -> Repeated:
    if column.null_count:
        raise FormatError(path, name, f"{column.null_count} rows have no value; leave them out")
    if not field.shape:
        return Repeated(column.to_numpy(zero_copy_only=False), np.arange(len(column)))
    used, indices = np.unique(column.indices.to_numpy(), return_inverse=True)
    values = column.dictionary.take(pa.array(used))
    num_bytes = field.dtype.numpy.itemsize * prod(field.shape)
    if not pc.all(pc.equal(pc.binary_length(values), num_bytes)).as_py():
        raise FormatError(path, name, f"a value has not the {num_bytes} bytes of {list(field.shape)} {field.dtype}; {_REMEDY}")
    array = np.frombuffer(values.buffers()[2], dtype=field.dtype.numpy, count=len(values) * prod(field.shape))
    return Repeated(array.reshape(-1, *field.shape), indices)
