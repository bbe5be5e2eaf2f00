"""Output of commands: results on stdout, notices on stderr.

No console reads markup: a name such as `rack[/red]gpu` is printed as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable

import click
from rich.console import Console

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan
from raypipe.errors import visible
from raypipe.show.console import SafeConsole
from raypipe.show.devices import device_words
from raypipe.show.differences import prediction_report
from raypipe.show.report import Report
from raypipe.training.run_schedules import device_stages


def console(*, plain: bool = False) -> Console:
    """Return a console on stdout, 80 columns wide where neither COLUMNS nor a terminal says otherwise; a plain one has no colors."""
    width = shutil.get_terminal_size().columns
    return SafeConsole(width=width, highlight=False, markup=False, emoji=False, color_system=None if plain else "auto")


def notice(text: str) -> None:
    """Print a line about the progress of a command."""
    click.echo(visible(text), err=True)


def print_json(document: object) -> None:
    """Print the document of `--json`."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))


def prediction_reports(figures: Iterable[ComparedFigure], plan: Plan, *, measured: str = "measured") -> list[Report]:
    """Return a row for each figure of a run, with its devices in words; `measured` is a heading."""
    words = dict(zip(plan.devices, device_words(plan.devices, device_stages(plan.schedule, plan.placement)), strict=True))
    reports = []
    for figure in figures:
        quantity, of, device = figure.name.partition(" of device ")
        label = f"{quantity} of {words.get(device, device)}" if of else quantity
        reports.append(prediction_report(figure, label, measured=measured))
    return reports
