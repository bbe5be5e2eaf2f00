"""Command `raypipe runs`."""

from __future__ import annotations

from collections import Counter

import click

from raypipe.cli.options import example, json_option
from raypipe.cli.screen import console, print_json
from raypipe.config import RunConfig
from raypipe.show.report import Figure, Report, rows_table
from raypipe.training.runs import RunSummary, summarize_runs
from raypipe.units import seconds


def _row(run: RunSummary) -> Report:
    return Report(
        Figure("name", run.name, "run"),
        Figure("state", str(run.state), "state"),
        Figure("update", run.update),
        Figure("num_updates", run.num_updates),
        Figure("", f"{run.update}/{run.num_updates}", "update"),
        Figure("loss", run.loss, "loss", "{:.3f}".format),
        Figure("checkpoint", run.checkpoint, "checkpoint"),
        Figure("idle_s", run.idle_s, "last window ago", seconds),
        Figure("detail", run.detail, "detail"),
    )


@click.command(epilog=example("raypipe runs", "raypipe runs --storage-path s3://bucket/runs --json"))
@click.option("--storage-path", default=RunConfig().storage_path, help="Folder or URI of the runs, as run.storage_path names it.")
@json_option
def runs(*, storage_path: str, as_json: bool) -> None:
    """List the runs in a folder with their state: running, finished, stopped, failed, or lost without a word."""
    found = summarize_runs(storage_path)
    if as_json:
        print_json({"runs": [_row(run).document() for run in found]})
        return
    screen = console()
    if not found:
        screen.print(f"no run is in {storage_path}")
        return
    screen.print(rows_table([_row(run) for run in found], left=2))
    counts = Counter(str(run.state) for run in found)
    screen.print("\n" + ", ".join(f"{number} {state}" for state, number in counts.items()))
