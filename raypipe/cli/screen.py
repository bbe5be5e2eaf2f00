"""Where commands write: results to stdout, as text or as one JSON document.

All consoles print texts as they are: the user's names may hold what rich takes for markup, as in `rack[/red]gpu`.
"""

from __future__ import annotations

import json
import shutil

import click
from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 100


def console() -> Console:
    """A console on stdout; without a terminal it is 100 columns wide and has no colours."""
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    return Console(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def progress_console() -> Console:
    """A console on stderr, for what happens meanwhile."""
    return Console(stderr=True, markup=False, emoji=False)


def plain_console(width: int = 160) -> Console:
    """A console on stdout without colours and with a width of its own."""
    return Console(width=width, highlight=False, color_system=None, force_terminal=False, markup=False, emoji=False)


def print_json(document: object) -> None:
    """Writes the one document of `--json`."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))
