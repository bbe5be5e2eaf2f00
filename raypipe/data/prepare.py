"""Writes text as a token file (`raypipe.data.tokens`), one row per document.

The same text gives the same bytes under one version of pyarrow: documents are sorted, and neither dates nor folder paths are kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import runpy
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.data.tokenizers import Bytes, Tokenizer
from raypipe.data.tokens import FORMAT, SCHEMA, Split, bytes_of_token
from raypipe.errors import ConfigError, FormatError, InputError, suggestion

PYTHON_STDLIB = "python-stdlib"
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
    validation_fraction: float = 0.05,
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
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction must be at least 0 and less than 1, not {validation_fraction}")
    path = Path(output)
    if path.is_dir():
        raise InputError(f"{path}: the output is a folder; name a file in it, such as {path / 'tokens.parquet'}")
    texts = _open_source(source, tuple(suffixes))
    if any(isinstance(text.content, Path) and path.exists() and path.samefile(text.content) for text in texts.texts):
        raise InputError(f"{path}: the output would replace the text that it is made from; choose another output")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        counts = _write(temporary, texts, validation_fraction, tokenizer or Bytes())
        temporary.replace(path)
        file_bytes = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); choose an output in a folder that can be written") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return PreparedData(
        path=str(path),
        source=texts.name,
        license=texts.license,
        num_documents=counts["documents"],
        num_train_tokens=counts[Split.TRAIN],
        num_validation_tokens=counts[Split.VALIDATION],
        file_bytes=file_bytes,
    )


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
        group.append({"document": name, "split": _split(name, validation_fraction).value, "tokens": tokens})
        num_bytes += len(tokens)
        if num_bytes >= _ROW_GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _split(name: str, validation_fraction: float) -> Split:
    digest = hashlib.sha256(name.encode()).digest()
    return Split.VALIDATION if int.from_bytes(digest[:8], "big") < validation_fraction * 2**64 else Split.TRAIN


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
        f"there is no text source {os.fspath(source)!r}{suggestion(os.fspath(source), [PYTHON_STDLIB])}; "
        f"give {PYTHON_STDLIB}, or the path of a text file or of a folder with files that end with {' '.join(suffixes)}"
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
