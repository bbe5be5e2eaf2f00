"""Text files; whatever goes wrong is a `FormatError` with a remedy."""

from __future__ import annotations

import os
from pathlib import Path

from raypipe.errors import FormatError

MOST_BYTES = 512 << 20
"""The largest file that is read whole; larger traces are kept as Parquet."""


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a UTF-8 file, or raise `FormatError`."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(os.fspath(path), f"byte {error.start}", "not UTF-8 text; check that this is the right file") from None


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, or raise `FormatError`: also for one without end, such as a device, as soon as it is too large."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise FormatError(name, "", "there is no such file; check the path") from None
    except IsADirectoryError:
        raise FormatError(name, "", "this is a directory; name a file in it") from None
    except PermissionError:
        raise FormatError(name, "", "reading it is not permitted; change its permissions or copy it") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FormatError(ascii(name), "", f"cannot be read ({_reason(error)}); check the path") from None
    if len(content) > MOST_BYTES:
        raise FormatError(name, "", f"it has more than {MOST_BYTES >> 20} MiB, more than any file that is read whole; check the path")
    return content


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write or replace a UTF-8 file, or raise `FormatError`."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = f"cannot be written ({_reason(error)}); choose a path in a directory that exists and is yours"
        raise FormatError(os.fspath(path), "", problem) from None


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)
