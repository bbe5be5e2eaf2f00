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
    """A finite duration that is not negative."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
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
        """Return a finite number within the limits."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def json_option(command: F) -> F:
    """Add `--json`, which every command has."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of text.")(command)


def example(*lines: str) -> str:
    """Return the end of a help text: lines to copy."""
    # Click keeps the lines of a paragraph that opens with this character as they are.
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def check_folder(path: str) -> None:
    """Refuse an output that cannot be written, before the work begins.

    Raises:
        InputError: There is no such folder, or the file is a folder.
    """
    file = Path(path).absolute()
    # These say no, where methods of Path raise, of a name that is too long or a folder that may not be looked into.
    if os.path.isdir(file):
        raise InputError(f"{path}: cannot be written: it is a folder; name a file")
    if not os.path.isdir(file.parent):
        raise InputError(f"{path}: cannot be written: its folder does not exist; make it first")


def check_not_input(output: str | os.PathLike[str], *inputs: str | os.PathLike[str] | None) -> None:
    """Refuse an output that would replace one of the files it is made from.

    Raises:
        InputError: The output is one of the inputs, whatever each is called.
    """
    for path in inputs:
        # Two names of one terminal or pipe are no loss.
        if path is not None and os.path.isfile(output) and os.path.isfile(path) and os.path.samefile(output, path):
            name, source = os.fspath(output), os.fspath(path)
            raise InputError(f"{name}: the output would replace {source}, which it is made from; choose another output")


def output_suffix(path: str, *choices: str) -> str:
    """Return the suffix of an output file, without its dot.

    Raises:
        InputError: The suffix is none of the choices.
    """
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in choices:
        raise InputError(f"{path}: cannot tell the format from the name; let it end with {' or '.join('.' + choice for choice in choices)}")
    return suffix
