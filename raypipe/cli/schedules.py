"""`raypipe schedules`: what there is to choose from."""

from __future__ import annotations

import click

from raypipe.cli.options import example, json_option
from raypipe.cli.screen import console, plain_console, print_json
from raypipe.schedules.catalogue import FAMILIES
from raypipe.show.tables import table

_COLUMNS = ("name", "title", "bubble", "memory", "mismatch", "delay", "paper")
_WIDTH = 240


@click.command(epilog=example("raypipe schedules"))
@json_option
def schedules(*, as_json: bool) -> None:
    """List the schedules by name.

    Bubble, memory, mismatch and delay are formulas over D devices, M microbatches, V chunks, the device s, and the seconds
    F, B, I and W of a stage.
    """
    rows = [{column: str(getattr(family, column)) for column in _COLUMNS} for family in FAMILIES]
    if as_json:
        print_json(rows)
        return
    shown = table(("name", "what", "bubble", "memory", "mismatch", "delay", "paper"), (row.values() for row in rows), left=7)
    terminal = console()
    # A line each, so that others can search it; only a terminal breaks what it cannot show.
    (terminal if terminal.is_terminal else plain_console(_WIDTH)).print(shown)
