"""Consoles of the commands: results go to stdout, as text or as one JSON document, progress to stderr.

No console reads markup: a user's name such as `rack[/red]gpu` is printed as it is.
"""

from __future__ import annotations

import json
import shutil

import click
from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 100


def console() -> Console:
    """Return a console on stdout; without a terminal it is 100 columns wide, unless COLUMNS says otherwise, and has no colors."""
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    return Console(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def progress_console() -> Console:
    """Return a console on stderr."""
    return Console(stderr=True, markup=False, emoji=False)


def plain_console(width: int = 160) -> Console:
    """Return a console on stdout without colors."""
    return Console(width=width, highlight=False, color_system=None, force_terminal=False, markup=False, emoji=False)


def print_json(document: object) -> None:
    """Write the document of `--json` to stdout."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))
