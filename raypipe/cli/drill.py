"""Command `raypipe drill`."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Console

from raypipe.callbacks.progress import Progress
from raypipe.cli.options import example, json_option
from raypipe.cli.screen import console as stdout_console
from raypipe.cli.screen import print_json
from raypipe.cluster.signals import put_off
from raypipe.config import TrainConfig
from raypipe.units import counted

if TYPE_CHECKING:
    from raypipe.training.drill import Drill


@click.command(epilog=example("raypipe drill examples/gpt_python_stdlib.yaml --kill 1"))
@click.argument("config", type=click.Path())
@click.option("--kill", "kills", type=int, multiple=True, metavar="STAGE", help="Kill the process of a stage. Repeatable.")
@click.option("--stop", "stops", type=int, multiple=True, metavar="STAGE", help="Stop the process of a stage, so that it answers nobody.")
@click.option("--fail", "fails", type=int, multiple=True, metavar="STAGE", help="Let an Op of a stage raise an error. Repeatable.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value, such as schedule.name=zb-h1. Repeatable.")
@json_option
def drill(
    config: str, *, kills: tuple[int, ...], stops: tuple[int, ...], fails: tuple[int, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Try how a run recovers: train what CONFIG describes for some windows, without and with faults.

    The faults strike one after the other, a window each. The runs are called as that of CONFIG, and "-drill".
    """
    if not kills + stops + fails:
        raise click.UsageError("name at least one fault, such as --kill 1")
    loaded = TrainConfig.load(config, overrides=overrides)
    with closing(Progress()) as progress:
        progress.on_notice("loading torch and Ray")
        with put_off():
            # Loads them only once the configuration is known to be good.
            from raypipe.actors.execution.faults import FaultKind  # noqa: PLC0415
            from raypipe.training.drill import drill as run_drill  # noqa: PLC0415

        logging.getLogger("ray").setLevel(logging.WARNING)
        progress.close()
        faults = {FaultKind.KILL: kills, FaultKind.STOP: stops, FaultKind.RAISE: fails}
        found = run_drill(loaded, faults)
    if as_json:
        recoveries = [asdict(failure) for failure in found.struck.recoveries]
        print_json({"recoveries": recoveries, "largest_loss_difference": found.largest_difference})
        return
    _show(found, stdout_console())


def _show(found: Drill, console: Console) -> None:
    for failure in found.struck.recoveries:
        console.print(f"after update {failure.update}: {failure.error}", highlight=False, soft_wrap=True)
        console.print(f"    {failure.text}", highlight=False, soft_wrap=True)
    difference = found.largest_difference
    equal = "equal to the last bit" if difference == 0 else f"equal within {difference:.1e}"
    console.print(
        f"{counted(len(found.struck.recoveries), 'recovered failure')}; the losses of {len(found.calm.losses)} updates are {equal} "
        "with faults and without",
        highlight=False,
        soft_wrap=True,
    )
