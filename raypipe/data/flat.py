"""Flat copies of large token splits in `~/.cache/raypipe/tokens`, mapped by all processes of a node (compressed Parquet cannot be).

One process writes while others wait; copies of earlier content are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from raypipe.config import cache_folder

_LOG = logging.getLogger("raypipe.data")
_POLL_S = 0.2
_PATIENCE_S = 120.0  # until a copy that another process writes must have grown


class FlatCopyError(Exception):
    """No copy can be written on this node."""


def mapped_tokens(source: str, *, split: str, content: bytes, num_bytes: int, write: Callable[[BinaryIO], None]) -> npt.NDArray[np.uint8]:
    """Return a split's tokens as bytes, mapped from its flat copy, which `write` writes first if needed; `content` changes with the source.

    Raises:
        FlatCopyError: The copy cannot be written here, or another process does not finish writing it.
    """
    digests = (hashlib.sha256(part).hexdigest()[:16] for part in (os.path.realpath(source).encode(), content))
    name = f"{'-'.join(digests)}-{split}"
    folder = cache_folder() / "tokens"
    path = folder / f"{name}.tokens"
    try:
        if not _is_whole(path, num_bytes):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{name}.part"
            with _locked(folder / f"{name}.lock", part, needless=lambda: _is_whole(path, num_bytes)):
                if not _is_whole(path, num_bytes):
                    _write(path, part, source, write)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FlatCopyError(f"{error.filename or folder}: {error.strerror or error}") from error
    mapped.madvise(mmap.MADV_RANDOM)  # rows are read in no order
    return np.frombuffer(mapped, dtype=np.uint8)


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == num_bytes


def _write(path: Path, part: Path, source: str, write: Callable[[BinaryIO], None]) -> None:
    for other in path.parent.glob(f"{path.name.partition('-')[0]}-*-{path.stem.rpartition('-')[2]}.*"):
        if other.stem != path.stem:
            other.unlink(missing_ok=True)  # who has mapped it keeps it
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a name that outlives a power cut stands for what it says
        num_bytes = part.stat().st_size
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _LOG.info("wrote a flat copy of the tokens of %s, to be mapped: %s, %.1f GB", source, path, num_bytes / 1e9)


@contextmanager
def _locked(lock: Path, part: Path, *, needless: Callable[[], bool]) -> Iterator[None]:
    with lock.open("a") as file:
        size, since = -1, time.monotonic()
        while not needless():
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            grown = 0
            with suppress(FileNotFoundError):
                grown = part.stat().st_size
            if grown != size:
                if size < 0:
                    _LOG.info("waiting for another process that writes %s", part)
                size, since = grown, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                raise FlatCopyError(f"another process holds {lock}, and {part.name} has not grown for {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked in between has the file, too
