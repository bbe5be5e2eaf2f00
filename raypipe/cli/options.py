"""The kinds of values and the options that several commands take."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from raypipe.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

_MOST_SECONDS = 1e9
_MOST = 10**9

COUNT = click.IntRange(1, _MOST)
"""A number of devices, microbatches and the like."""


class _Seconds(click.ParamType[float]):
    """A duration: finite and not negative."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; anything else is a usage error."""
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not (math.isfinite(seconds) and 0 <= seconds <= _MOST_SECONDS):
            self.fail(f"{value} is not a time from 0 to {_MOST_SECONDS:.0e} seconds", param, ctx)
        return seconds


SECONDS = _Seconds()


def json_option(command: F) -> F:
    """Adds `--json`, which every command has."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")(command)


def example(*lines: str) -> str:
    """The end of a command's help: lines that can be copied."""
    # Click keeps the lines of a paragraph that opens with this character as they are.
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def check_folder(path: str) -> None:
    """Sees that a file can be written where it is to be, before what it is to hold takes its time.

    Raises:
        InputError: there is no such folder, or the file is one itself.
    """
    file = Path(path).absolute()
    if file.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if not file.parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; make it first")


def output_suffix(path: str, *choices: str) -> str:
    """The suffix of an output file, without its dot.

    Raises:
        InputError: it is none of the choices.
    """
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in choices:
        raise InputError(f"{path}: cannot tell the format from the name; let it end with {' or '.join('.' + choice for choice in choices)}")
    return suffix
