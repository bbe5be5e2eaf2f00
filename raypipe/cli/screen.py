"""Output of commands: results on stdout, progress on stderr.

No console reads markup: a name such as `rack[/red]gpu` is printed as it is.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator

import click
from rich.console import Console

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan
from raypipe.training.run_schedules import device_stages

_WIDTH_WITHOUT_TERMINAL = 100


def console() -> Console:
    """Return a console on stdout, 100 columns wide where neither a terminal nor COLUMNS says otherwise."""
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    return Console(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def progress_console() -> Console:
    """Return a console on stderr."""
    return Console(stderr=True, markup=False, emoji=False)


def plain_console(width: int = 160) -> Console:
    """Return a console on stdout without colors."""
    return Console(width=width, highlight=False, color_system=None, force_terminal=False, markup=False, emoji=False)


def notice(text: str) -> None:
    """Print a line about the progress of a command."""
    click.echo(text, err=True)


def print_json(document: object) -> None:
    """Print the document of `--json`."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))


def device_labels(plan: Plan) -> dict[str, str]:
    """Return a label of each device: its stages where all are on one node, else its address."""
    if len({plan.topology.node_of(device).name for device in plan.devices}) > 1:
        return {device: f"device {device}" for device in plan.devices}
    stages = device_stages(plan.schedule, plan.placement)
    labels = [f"stage{'s' if len(held) > 1 else ''} {' '.join(map(str, held))}" for held in stages]
    # Devices with the same stages keep their number.
    labels = [f"{label}, device {number}" if labels.count(label) > 1 else label for number, label in enumerate(labels)]
    return dict(zip(plan.devices, labels, strict=True))


def labelled(figures: Iterable[ComparedFigure], plan: Plan) -> Iterator[ComparedFigure]:
    """Yield a run's figures, named after its devices' labels."""
    labels = {f"device {device}": label for device, label in device_labels(plan).items()}
    for figure in figures:
        quantity, of, device = figure.name.partition(" of ")
        yield dataclasses.replace(figure, name=f"{quantity} of {labels[device]}") if of else figure
