"""Writes text as a token file (`raypipe.data.tokens`), one row per document, and bundled sources as named fields (`raypipe.data.fields`).

The same text gives the same bytes under one version of pyarrow: documents are sorted, and neither dates nor folder paths are kept.
"""

from __future__ import annotations

import io
import os
import platform
import runpy
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.data.easy_vqa import easy_vqa_rows
from raypipe.data.fields import write_rows
from raypipe.data.glyphs import glyph_rows
from raypipe.data.samples import Split, check_fraction, split_of
from raypipe.data.tokenizers import Bytes, Tokenizer
from raypipe.data.tokens import FORMAT, SCHEMA, bytes_of_token
from raypipe.errors import ConfigError, FormatError, InputError, UnknownNameError, suggestion

PYTHON_STDLIB = "python-stdlib"
EASY_VQA = "easy-vqa"
GLYPHS = "glyphs"
FIELD_SOURCES = {EASY_VQA: {"image", "question", "answer"}, GLYPHS: {"glyph", "name"}}
"""The bundled sources of named fields, and the fields that each has."""
DEFAULT_FRACTION = 0.05
"""Share of the documents for validation."""
SUFFIXES = (".txt", ".md", ".py", ".rst")
_FILE_PIECE_BYTES = 4 * 1024  # length of the documents cut from a single text file: short, so that a small file has some for validation
_FOLDER_PIECE_BYTES = 1024 * 1024  # length beyond which a file of a folder is cut, to bound memory and Parquet pages
_ROW_GROUP_BYTES = 16 * 1024 * 1024

_STDLIB_LICENSE = "Python Software Foundation License Version 2, https://docs.python.org/3/license.html"
_STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Not Python's own text: what the installation generated or its owner added differs between machines.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


@dataclass(frozen=True)
class PreparedData:
    """The summary of a token file that `prepare` wrote; tokens include separators."""

    path: str
    source: str
    license: str
    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    file_bytes: int


@dataclass(frozen=True)
class PreparedRows:
    """The summary of a file of named fields that `prepare_rows` wrote; rows by split."""

    path: str
    source: str
    license: str
    num_rows: dict[str, int]
    file_bytes: int


@dataclass(frozen=True)
class _Text:
    name: str
    content: Path | bytes


@dataclass(frozen=True)
class _Source:
    """Texts, and the length beyond which one is cut into documents."""

    name: str
    license: str
    texts: Sequence[_Text]
    piece_bytes: int


def prepare(
    source: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    validation_fraction: float = DEFAULT_FRACTION,
    suffixes: Sequence[str] = SUFFIXES,
    tokenizer: Tokenizer | None = None,
) -> PreparedData:
    """Write the text of a source as the token file `output`, whole or not at all, and return its summary.

    The hash of a document's name decides its split, so the split's share comes near `validation_fraction` only with many documents. A
    single file is cut at line ends into documents of about 4 KiB, a file of a folder into ones of about 1 MiB, called `NAME#0`, `NAME#1`.

    Args:
        source: "python-stdlib" (without its tests), a text file, or a folder with all its folders; without hidden ones and links.
        output: File to write; its folder is created if needed.
        validation_fraction: Share of documents for validation, at least 0 and less than 1.
        suffixes: Suffixes of the text files in a folder.
        tokenizer: Tokenizer; left out for one token per byte.

    Raises:
        ConfigError: `validation_fraction` is out of range.
        FormatError: A file of the source is not text, or cannot be read.
        InputError: The source is unknown or holds no text to train on, or `output` cannot be written.
    """
    check_fraction(validation_fraction)
    texts = _open_source(source, tuple(suffixes))
    path = Path(output)
    if any(isinstance(text.content, Path) and path.exists() and path.samefile(text.content) for text in texts.texts):
        raise InputError(f"{path}: the output would replace the text that it is made from; choose another output")
    with _replaced(path) as temporary:
        counts = _write(temporary, texts, validation_fraction, tokenizer or Bytes())
    return PreparedData(
        path=str(path),
        source=texts.name,
        license=texts.license,
        num_documents=counts["documents"],
        num_train_tokens=counts[Split.TRAIN],
        num_validation_tokens=counts[Split.VALIDATION],
        file_bytes=path.stat().st_size,
    )


def prepare_rows(source: str, *, output: str | os.PathLike[str], validation_fraction: float | None = None) -> PreparedRows:
    """Write a bundled source as the file of named fields `output`, whole or not at all, and return its summary.

    Args:
        source: "easy-vqa" or "glyphs".
        output: File to write; its folder is created if needed.
        validation_fraction: Share of easy-vqa's training images for validation; glyphs keep a whole face for that.

    Raises:
        ConfigError: `validation_fraction` is out of range, or given for glyphs.
        InputError: The source is unknown, a package that it needs is missing, or `output` cannot be written.
    """
    if source == GLYPHS:
        if validation_fraction is not None:
            raise ConfigError("glyphs keeps a whole face for validation, not a share of its pairs; leave the validation fraction out")
        rows = glyph_rows()
    elif source == EASY_VQA:
        fraction = DEFAULT_FRACTION if validation_fraction is None else validation_fraction
        check_fraction(fraction)
        rows = easy_vqa_rows(fraction)
    else:
        raise UnknownNameError("source of named fields", source, FIELD_SOURCES)
    path = Path(output)
    with _replaced(path) as temporary:
        write_rows(temporary, rows)
    return PreparedRows(
        path=str(path), source=rows.source, license=rows.license, num_rows=dict(Counter(rows.splits)), file_bytes=path.stat().st_size
    )


def check_exists(path: str, fields: Set[str]) -> None:
    """Raise `FormatError` if there is no file at `path`; the message says what makes one that has the fields."""
    if Path(path).exists():
        return
    source = next((source for source, has in FIELD_SOURCES.items() if fields and fields <= has), None)
    if source is None and fields <= {"tokens", "targets"}:
        source = PYTHON_STDLIB
    remedy = f"write the fields {', '.join(sorted(fields))} with raypipe.data.fields.write_rows"
    if source is not None:
        remedy = f"make it with `raypipe data prepare {source} -o {path}`"
    raise FormatError(path, "", f"there is no such file; {remedy}")


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that takes its place in the end, or is removed if something fails."""
    if path.is_dir():
        raise InputError(f"{path}: the output is a folder; name a file in it, such as {path / 'data.parquet'}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); choose an output in a folder that can be written") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write(path: Path, source: _Source, validation_fraction: float, tokenizer: Tokenizer) -> Counter[str]:
    counts: Counter[str] = Counter()
    token_bytes = bytes_of_token(tokenizer.vocabulary_size)
    with pq.ParquetWriter(
        path,
        SCHEMA,
        compression="zstd",
        # Nothing looks a document up by its bytes, so that statistics and dictionaries of them would only take room.
        use_dictionary=["split"],
        write_statistics=["split"],
        # A stored Arrow schema would hide the metadata that is added below from those who read the file as an Arrow table.
        store_schema=False,
    ) as writer:
        for group in _row_groups(source, validation_fraction, tokenizer):
            counts["documents"] += len(group)
            for row in group:
                counts[row["split"]] += len(row["tokens"]) // token_bytes
            writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))
        if not counts[Split.TRAIN]:
            problem = (
                "all of its documents fell to the validation split; lower the validation fraction or" if counts else "it holds no text;"
            )
            raise InputError(f"{source.name}: {problem} give more text")
        writer.add_key_value_metadata({
            "format": FORMAT,
            "tokenizer": tokenizer.name,
            "vocabulary_size": str(tokenizer.vocabulary_size),
            "token_bytes": str(token_bytes),
            "separator": str(tokenizer.separator),
            "source": source.name,
            "license": source.license,
            **{split.count_key: str(counts[split]) for split in Split},
        })
    return counts


def _row_groups(source: _Source, validation_fraction: float, tokenizer: Tokenizer) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    num_bytes = 0
    for name, tokens in _documents(source, tokenizer):
        group.append({"document": name, "split": split_of(name, validation_fraction).value, "tokens": tokens})
        num_bytes += len(tokens)
        if num_bytes >= _ROW_GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _documents(source: _Source, tokenizer: Tokenizer) -> Iterator[tuple[str, bytes]]:
    for text in source.texts:
        try:
            with io.BytesIO(text.content) if isinstance(text.content, bytes) else text.content.open("rb") as stream:
                for name, piece in _pieces(text.name, stream, source.piece_bytes):
                    try:
                        yield name, tokenizer.encode(piece)
                    except ValueError as error:
                        raise FormatError(str(text.content), "", f"{error}; convert it to UTF-8 or leave it out") from error
        except OSError as error:
            raise FormatError(str(text.content), "", f"it cannot be read ({error}); leave it out or let it be read") from error


def _pieces(name: str, stream: BinaryIO, piece_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield a short text whole, a longer one cut at the first line end after each `piece_bytes` (or after twice as many bytes)."""

    def read() -> bytes:
        piece = stream.read(piece_bytes)
        return piece + stream.readline(piece_bytes) if len(piece) == piece_bytes and not piece.endswith(b"\n") else piece

    number = 0
    piece = read()
    while piece:
        following = read()
        # A character is not cut: bytes that begin with the bits 10 belong to the one before them.
        cut = next((at for at, byte in enumerate(following[:3]) if byte >> 6 != 0b10), 3)
        piece, following = piece + following[:cut], following[cut:]
        yield (f"{name}#{number}" if number or following else name), piece
        number += 1
        piece = following


def _open_source(source: str | os.PathLike[str], suffixes: tuple[str, ...]) -> _Source:
    if source == PYTHON_STDLIB:
        return _stdlib_source()
    path = Path(source)
    unknown_license = "unknown to raypipe: that of the text"
    if path.is_dir():
        texts = [_Text(_utf8_name(name), path / name) for name in _files(path, suffixes, skipped_folders=frozenset())]
        if not texts:
            raise InputError(f"{path}: the folder holds no file that ends with {' '.join(suffixes)}; name another folder or one text file")
        return _Source(_utf8_name(path.resolve().name), unknown_license, texts, _FOLDER_PIECE_BYTES)
    if path.exists():
        return _Source(_utf8_name(path.name), unknown_license, [_Text(_utf8_name(path.name), path)], _FILE_PIECE_BYTES)
    raise InputError(
        f"there is no text source {os.fspath(source)!r}{suggestion(os.fspath(source), [PYTHON_STDLIB, *FIELD_SOURCES])}; "
        f"give {PYTHON_STDLIB}, or the path of a text file or of a folder with files that end with {' '.join(suffixes)}; "
        f"{' and '.join(FIELD_SOURCES)} are made into named fields"
    )


def _stdlib_source() -> _Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = _files(root, (".py",), skipped_folders=_STDLIB_SKIPPED_FOLDERS) if root.is_dir() else []
    topics_file = "pydoc_data/topics.py"
    texts = [
        _Text(name, root / name)
        for name in names
        if name != topics_file and not any(part.startswith(_STDLIB_SKIPPED_PREFIXES) for part in name.split("/"))
    ]
    if not texts:
        raise InputError(f"{PYTHON_STDLIB}: the sources of this Python are not at {root}; install them, or give a text file or a folder")
    if topics_file in names:
        # The language reference as one dictionary of texts: the texts read better than the source that quotes them.
        topics: dict[str, str] = runpy.run_path(str(root / topics_file))["topics"]
        texts += [_Text(f"pydoc_data/topics/{name}", text.encode()) for name, text in topics.items()]
    name = f"{PYTHON_STDLIB} {platform.python_version()}"
    return _Source(name, f"{_STDLIB_LICENSE}\n{sys.copyright}", sorted(texts, key=lambda text: text.name), _FOLDER_PIECE_BYTES)


def _files(root: Path, suffixes: tuple[str, ...], *, skipped_folders: frozenset[str]) -> list[str]:
    def fail(error: OSError) -> None:
        raise FormatError(str(error.filename), "", f"the folder cannot be read ({error}); leave it out or let it be read") from error

    names: list[str] = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped_folders]
        texts = [name for name in files if name.endswith(suffixes) and not name.startswith(".")]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in texts]
    return sorted(names)


def _utf8_name(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the name of the file {name!r} is not UTF-8; rename it") from error
    return name
