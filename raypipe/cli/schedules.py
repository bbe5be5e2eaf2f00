"""`raypipe schedules`: what there is to choose from."""

from __future__ import annotations

import click
from rich.table import Table

from raypipe.cli.options import json_option
from raypipe.cli.screen import console, print_json
from raypipe.schedules.catalogue import FAMILIES

_COLUMNS = ("name", "title", "paper", "bubble", "memory", "mismatch", "delay")


@click.command()
@json_option
def schedules(*, as_json: bool) -> None:
    """List the schedules by name.

    Bubble, memory, mismatch and delay are formulas over D devices, M microbatches, V chunks, the device s, and the seconds
    F, B, I and W of a stage.

    \b
    Example:
      raypipe schedules
    """
    rows = [{column: str(getattr(family, column)) for column in _COLUMNS} for family in FAMILIES]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*row.values())
    console().print(table)
