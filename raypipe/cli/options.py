"""Types of values, options and checks that several commands use."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from raypipe.errors import InputError

_MOST_SECONDS = 1e9

COUNT = click.IntRange(1, 10**9)


class _Seconds(click.ParamType[float]):
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
    """A finite number; `click.FloatRange` admits NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


chunks_option = click.option(
    "--chunks", type=COUNT, help="Number of stages on each device, for schedules that take several.  [default: depends on the schedule]"
)
weight_grad_option = click.option(
    "--weight-grad", type=SECONDS, help="Seconds of the backward that compute the gradient of the weights.  [default: half of --backward]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document in place of text.")


def example(*lines: str) -> str:
    """Return lines to copy, for the end of a help text."""
    # Click keeps the lines of a paragraph that opens with this character as they are.
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def check_output(path: str | None, *inputs: str | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse an output that cannot be written or would replace an input, before the work begins.

    Raises:
        InputError: The path is a folder or an input, has no folder, or ends with none of the suffixes, where some are given.
    """
    if not path:
        return
    file = Path(path).absolute()
    # These say no, where methods of Path raise, of a name that is too long or a folder that may not be looked into.
    if os.path.isdir(file):
        raise InputError(f"{path}: cannot be written: it is a folder; name a file")
    if not os.path.isdir(file.parent):
        raise InputError(f"{path}: cannot be written: its folder does not exist; make it first")
    check_not_input(path, *inputs)
    if suffixes:
        output_suffix(path, *suffixes)


def check_not_input(output: str, *inputs: str | None) -> None:
    """Refuse an output that would replace one of its inputs.

    Raises:
        InputError: Output and input are the same file.
    """
    for path in inputs:
        # Two names of one terminal or pipe are no loss.
        if path is not None and os.path.isfile(output) and os.path.isfile(path) and os.path.samefile(output, path):
            raise InputError(f"{output}: the output would replace {path}, which it is made from; choose another output")


def output_suffix(path: str, *choices: str) -> str:
    """Return the suffix of an output file, without its dot.

    Raises:
        InputError: It is none of the choices.
    """
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in choices:
        raise InputError(f"{path}: cannot tell the format from the name; let it end with {' or '.join('.' + choice for choice in choices)}")
    return suffix
