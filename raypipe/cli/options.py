"""The kinds of values and the options that several commands take."""

from __future__ import annotations

import math
import os
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


class FiniteRange(click.FloatRange):
    """A number within limits: `click.FloatRange` lets NaN pass, and infinity where there is no limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; anything else is a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


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
    # These say no, where methods of Path raise, of a name that is too long or a folder that may not be looked into.
    if os.path.isdir(file):
        raise InputError(f"{path}: cannot be written: it is a folder; name a file")
    if not os.path.isdir(file.parent):
        raise InputError(f"{path}: cannot be written: its folder does not exist; make it first")


def check_not_input(output: str | os.PathLike[str], *inputs: str | os.PathLike[str] | None) -> None:
    """Sees that a file that is to be written is none of those that it is made from, which would be lost.

    Args:
        output: the file to write.
        inputs: the files that are read; `None` for one that was not given.

    Raises:
        InputError: it is one of them, whatever each is called.
    """
    for path in inputs:
        # Two names of one terminal or pipe are no loss.
        if path is not None and os.path.isfile(output) and os.path.isfile(path) and os.path.samefile(output, path):
            name, source = os.fspath(output), os.fspath(path)
            raise InputError(f"{name}: the output would replace {source}, which it is made from; choose another output")


def output_suffix(path: str, *choices: str) -> str:
    """The suffix of an output file, without its dot.

    Raises:
        InputError: it is none of the choices.
    """
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in choices:
        raise InputError(f"{path}: cannot tell the format from the name; let it end with {' or '.join('.' + choice for choice in choices)}")
    return suffix
