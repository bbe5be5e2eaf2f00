"""Reads token files (`raypipe.tokens/1`, Parquet): one row per document with `document`, `split` and `tokens` (little-endian).

Metadata: `format`, `tokenizer`, `vocabulary_size`, `token_bytes` (1, 2 or 4; 1 if absent), `separator`, `source`, `license`,
`num_train_tokens`, `num_validation_tokens`. Sequences of T + 1 tokens overlap by one: inputs are the first T, targets the last T.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.data.flat import FlatCopyError, mapped_tokens
from raypipe.data.samples import Split, check_seed, places
from raypipe.errors import ConfigError, FormatError, UnknownNameError

_LOG = logging.getLogger("raypipe.data")
FORMAT = "raypipe.tokens/1"
SCHEMA = pa.schema([
    pa.field("document", pa.string(), nullable=False),
    pa.field("split", pa.string(), nullable=False),
    pa.field("tokens", pa.binary(), nullable=False),
])

_TYPES: Mapping[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4"}

_MAPPED_BYTES = 2**28  # splits of as many are mapped, not held in memory

# Names another file than the one at hand: that may be a text, which the command would replace.
_REMEDY = "make a token file with `raypipe data prepare python-stdlib -o tokens.parquet`"


def bytes_of_token(vocabulary_size: int) -> int:
    """Return the fewest bytes that hold each token; raise `ConfigError` for more than 2**32 tokens."""
    for num_bytes in _TYPES:
        if vocabulary_size <= 256**num_bytes:
            return num_bytes
    raise ConfigError(f"a token file holds tokens of at most {max(_TYPES)} bytes, not a vocabulary of {vocabulary_size}")


class TokenDataset:
    """The tokens of one split of a token file, as an endless stream of sequences of `sequence_length` + 1 tokens.

    Each epoch shuffles the training split anew by `seed`; the validation split stays in order. Sequences cross document ends. A split
    of 256 MiB or more is mapped (`raypipe.data.flat`) if possible. A shuffled epoch takes 8 bytes per sequence, twice that while drawn.

    Raises:
        FormatError: The file is missing, is no token file, contradicts itself or is too short for one sequence.
        ConfigError: `sequence_length` is less than 1 or `seed` less than 0.
        UnknownNameError: There is no such split.
    """

    def __init__(self, path: str | PathLike[str], *, sequence_length: int, seed: int, split: str = Split.TRAIN) -> None:
        if sequence_length < 1:
            raise ConfigError(f"sequence_length must be at least 1, not {sequence_length}")
        check_seed(seed)
        if split not in tuple(Split):
            raise UnknownNameError("split", split, tuple(Split))
        self.path = fspath(path)
        self.split = Split(split)
        self.sequence_length = sequence_length
        self.seed = seed
        self._tokens, self.vocabulary_size = _load(self.path, self.split)
        self.num_tokens = len(self._tokens)
        self.num_sequences = (self.num_tokens - 1) // sequence_length
        if self.num_sequences < 1:
            more = " or a larger validation fraction" if self.split is Split.VALIDATION else ""
            raise FormatError(
                self.path,
                "",
                f"its {self.split} split has {self.num_tokens} tokens, too few for one sequence of {sequence_length} + 1; "
                f"lower sequence_length, or prepare more text{more}",
            )

    def rows(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the samples from `first` on, one per row: [count, sequence_length + 1].

        Their order is that of `samples.places`.
        """
        sequences = places(first, count, size=self.num_sequences, seed=self.seed, split=self.split)
        positions = sequences[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        rows: npt.NDArray[np.int64] = self._tokens[positions].astype(np.int64)
        return rows


class _Header(NamedTuple):
    vocabulary_size: int
    num_tokens: int
    token_bytes: int


def _load(path: str, split: Split) -> tuple[npt.NDArray[Any], int]:
    try:
        with pa.memory_map(path) as mapped, pq.ParquetFile(mapped) as file:
            header = _check_header(path, file, split)
            num_bytes = header.num_tokens * header.token_bytes
            if num_bytes >= _MAPPED_BYTES:
                try:
                    return _mapped(path, file, split, header), header.vocabulary_size
                except FlatCopyError as error:
                    why = "%s: %.1f GB of tokens are held in memory, since there can be no flat copy of them: %s"
                    _LOG.warning(why, path, num_bytes / 1e9, error)
            tokens = np.empty(header.num_tokens, dtype=_TYPES[header.token_bytes])
            filled = 0
            for part in _checked_parts(path, file, split, header):
                tokens[filled : filled + len(part)] = part
                filled += len(part)
            return tokens, header.vocabulary_size
    except FileNotFoundError as error:
        raise FormatError(path, "", f"there is no such file; make it with `raypipe data prepare python-stdlib -o {path}`") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for damaged names of columns
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(path, "", f"it cannot be read as Parquet ({problem}); {_REMEDY}") from error


def _mapped(path: str, file: pq.ParquetFile, split: Split, header: _Header) -> npt.NDArray[Any]:
    def write(copy: BinaryIO) -> None:
        for part in _checked_parts(path, file, split, header):
            copy.write(part.data)

    now = os.stat(path)
    with open(path, "rb") as whole:  # the end tells row groups, with their sizes and some of what is in them
        whole.seek(-min(now.st_size, file.metadata.serialized_size + 8), os.SEEK_END)
        content = f"{now.st_size} {now.st_mtime_ns} ".encode() + whole.read()
    num_bytes = header.num_tokens * header.token_bytes
    return mapped_tokens(path, split=split, content=content, num_bytes=num_bytes, write=write).view(_TYPES[header.token_bytes])


def _checked_parts(path: str, file: pq.ParquetFile, split: Split, header: _Header) -> Iterator[npt.NDArray[Any]]:
    found = largest = 0
    for part in _parts(path, file, split, header.token_bytes):
        largest = max(largest, int(part.max(initial=0)))
        # Counts past the end too, so that the message below tells how many there are.
        yield part[: max(header.num_tokens - found, 0)]
        found += len(part)
    if found != header.num_tokens:
        raise FormatError(path, f"metadata.{split.count_key}", f"states {header.num_tokens}, but the rows hold {found}; {_REMEDY}")
    if largest >= header.vocabulary_size:
        raise FormatError(path, "tokens", f"holds token {largest}, but the vocabulary has {header.vocabulary_size}; {_REMEDY}")


def _check_header(path: str, file: pq.ParquetFile, split: Split) -> _Header:
    metadata: Mapping[bytes, bytes] = file.metadata.metadata or {}
    stated = metadata.get(b"format", b"").decode(errors="replace")
    if stated != FORMAT:
        raise FormatError(path, "metadata.format", f"expected {FORMAT!r}, got {stated!r}; {_REMEDY}")
    for field in SCHEMA:
        index = file.schema_arrow.get_field_index(field.name)
        got = str(file.schema_arrow.field(index).type) if index >= 0 else "no such column"
        if got != str(field.type):
            raise FormatError(path, field.name, f"expected a column of type {field.type}, got {got}; {_REMEDY}")
    token_bytes = _count(path, metadata, "token_bytes", maximum=max(_TYPES)) if b"token_bytes" in metadata else 1
    if token_bytes not in _TYPES:
        raise FormatError(path, "metadata.token_bytes", f"expected one of {', '.join(map(str, _TYPES))}, got {token_bytes}; {_REMEDY}")
    return _Header(
        _count(path, metadata, "vocabulary_size", maximum=256**token_bytes),
        # Tokens may be held in memory, so this bound only keeps a damaged count from asking for all of it.
        _count(path, metadata, split.count_key, maximum=2**40),
        token_bytes,
    )


def _count(path: str, metadata: Mapping[bytes, bytes], key: str, *, maximum: int) -> int:
    text = metadata.get(key.encode(), b"").decode(errors="replace")
    # At most 19 digits, because int() refuses thousands of them with an error of its own.
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= maximum):
        raise FormatError(path, f"metadata.{key}", f"expected a whole number from 0 to {maximum}, got {text!r}; {_REMEDY}")
    return int(text)


def _parts(path: str, file: pq.ParquetFile, split: Split, token_bytes: int) -> Iterator[npt.NDArray[Any]]:
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=["split", "tokens"])
        for chunk in table.filter(pc.equal(table["split"], split.value))["tokens"].chunks:
            if chunk.null_count:
                raise FormatError(path, "tokens", f"row group {group} holds a document without tokens; {_REMEDY}")
            found, whole = _bytes_of(chunk, token_bytes)
            if not whole:
                raise FormatError(path, "tokens", f"a document of row group {group} ends within a token of {token_bytes} bytes; {_REMEDY}")
            yield found.view(_TYPES[token_bytes])


def _bytes_of(chunk: Any, unit: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """Return all bytes of a pyarrow binary array, and whether each value has whole units."""
    _, offsets_buffer, data_buffer = chunk.buffers()
    if not len(chunk) or data_buffer is None:
        return np.empty(0, dtype=np.uint8), True
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    found = np.frombuffer(data_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return found, not np.any((offsets - offsets[0]) % unit)
