"""`raypipe train`: trains what a configuration describes and shows how it goes."""

from __future__ import annotations

import dataclasses
import json
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raypipe.cli.options import example, json_option
from raypipe.cli.screen import console as stdout_console
from raypipe.cli.screen import progress_console
from raypipe.cluster.signals import put_off
from raypipe.config import TrainConfig
from raypipe.show.tables import comparison_table
from raypipe.training.run_folder import without_nan

if TYPE_CHECKING:
    from raypipe.training.result import Progress as RunProgress
    from raypipe.training.result import Result


class _Screen:
    """Shows a run on stderr: a moving bar on a terminal, a line a window elsewhere."""

    def __init__(self, console: Console, num_updates: int) -> None:
        self.console = console
        self.num_done = 0
        self.bar = Progress(
            TextColumn("update"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn("loss {task.fields[loss]}  validation {task.fields[validation]}"),
            TextColumn("{task.fields[speed]} tokens/s  bubble {task.fields[bubble]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("", total=num_updates, loss="-", validation="-", speed="-", bubble="-")

    def notice(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def interrupted(self, checkpoint_every: int) -> None:
        """Says what is left of a run that is interrupted."""
        saved = self.num_done // checkpoint_every * checkpoint_every if checkpoint_every else 0
        left = f"--resume goes on from update {saved}" if saved else f"it wrote no checkpoint (run.checkpoint_every is {checkpoint_every})"
        self.notice(f"interrupted after update {self.num_done}; {left}")

    def progress(self, progress: RunProgress) -> None:
        """Moves the bar, or prints a line."""
        self.num_done = progress.update
        validation = "-" if progress.validation_loss is None else f"{progress.validation_loss:.3f}"
        speed = f"{progress.tokens_per_s:,.0f}"
        if not self.console.is_terminal:
            minutes, seconds = divmod(round(progress.seconds_left), 60)
            self.notice(
                f"update {progress.update}/{progress.num_updates}  loss {progress.loss:.3f}  validation {validation}  {speed} tokens/s  "
                f"bubble {progress.bubble_ratio:.1%}  left {minutes}:{seconds:02d}"
            )
            return
        self.bar.update(
            self.task,
            completed=progress.update,
            loss=f"{progress.loss:.3f}",
            validation=validation,
            speed=speed,
            bubble=f"{progress.bubble_ratio:.1%}",
        )


@click.command(
    epilog=example(
        "raypipe train examples/gpt_python_stdlib.yaml --set run.num_updates=50",
        "raypipe train examples/gpt_python_stdlib.yaml --set plan=plan.json",
    )
)
@click.argument("config", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value, such as schedule.name=zb-h1. Repeatable.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of the newest run of this name.")
@json_option
def train(config: str, overrides: tuple[str, ...], *, resume: bool, as_json: bool) -> None:
    """Train what the YAML file CONFIG describes."""
    loaded = TrainConfig.load(config, overrides=overrides)
    if as_json:  # what actors print would come between
        loaded = dataclasses.replace(loaded, cluster=dataclasses.replace(loaded.cluster, log_to_driver=False))
    with put_off():
        from raypipe.training.trainer import Trainer  # noqa: PLC0415  # loads ray and torch: not before the configuration is known to be good

    logging.getLogger("ray").setLevel(logging.WARNING)
    console = progress_console()
    screen = _Screen(console, loaded.run.num_updates)
    trainer = Trainer.of(loaded)
    try:
        with Live(screen.bar, console=console, refresh_per_second=4) if console.is_terminal else nullcontext():
            result = trainer.fit(listener=screen, resume=resume)
    except KeyboardInterrupt:
        screen.interrupted(loaded.run.checkpoint_every)
        raise
    if as_json:
        click.echo(json.dumps(without_nan(_document(result))))
        return
    _show(result, stdout_console())


def _document(result: Result) -> dict[str, object]:
    return {
        "path": result.path,
        "metrics": result.metrics,
        "losses": result.losses,
        "validation_losses": [list(pair) for pair in result.validation_losses],
        "checkpoint": result.checkpoint.path,
        "figures": [dataclasses.asdict(figure) | {"error": figure.error} for figure in result.figures],
        "sample": result.sample,
    }


def _show(result: Result, console: Console) -> None:
    if result.sample:
        console.rule("generated text")
        console.print(result.sample, markup=False, highlight=False)
    console.print(comparison_table(result.figures, title="predicted against measured"))
    losses = f"training loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
    if result.validation_losses:
        losses += f", validation loss {result.validation_losses[0][1]:.3f} -> {result.validation_losses[-1][1]:.3f}"
    console.print(f"{losses}, {result.metrics['tokens_per_s']:,.0f} tokens/s", highlight=False)
    console.print("Everything is in the run folder:", highlight=False)
    for name, what in (
        ("timeline.html", "the timeline to zoom in, predicted above measured; timeline.svg beside it"),
        ("trace.perfetto.json", "the same for https://ui.perfetto.dev"),
        ("metrics.jsonl", "loss, gradient norm, speed of every update"),
        ("config.yaml", "every value, defaults included; versions.json beside it"),
    ):
        console.print(f"  {result.path}/{name}  {what}", highlight=False, soft_wrap=True)
    console.print(f"  {result.checkpoint.path}  the checkpoint", highlight=False, soft_wrap=True)
