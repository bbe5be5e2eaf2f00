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


@click.command(
    epilog=example(
        "raypipe drill examples/gpt_python_stdlib.yaml --kill stage=1",
        "raypipe drill examples/gpt_python_stdlib.yaml --cut stage=0,before=0B2 --stop device=1,before=save",
    )
)
@click.argument("config", type=click.Path())
@click.option("--kill", multiple=True, metavar="PLACE", help="Kill the process of a stage or device.")
@click.option("--stop", multiple=True, metavar="PLACE", help="Stop its process, so that it answers nobody.")
@click.option("--cut", multiple=True, metavar="PLACE", help="Close its connections with others.")
@click.option("--hang", multiple=True, metavar="PLACE", help="Let it do nothing, for=SECONDS or until it is missed.")
@click.option("--fail", multiple=True, metavar="PLACE", help="Let it raise an error.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value, such as schedule.name=zb-h1. Repeatable.")
@json_option
def drill(
    config: str,
    *,
    kill: tuple[str, ...],
    stop: tuple[str, ...],
    cut: tuple[str, ...],
    hang: tuple[str, ...],
    fail: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Try how a run recovers: train what CONFIG describes for some windows, without and with faults.

    The faults strike one after the other, a window each. The runs are called as that of CONFIG, and "-drill".

    A PLACE is stage=2, for any Op of the stage, or names behind the stage or a device=1 what the fault strikes before: before=2B1 an Op,
    "before=activation 1->2 of microbatch 0" a message or a sum, before=save the writing of a checkpoint, before=connect the meeting of
    the devices when the run recovers. All options can be repeated.
    """
    if not kill + stop + cut + hang + fail:
        raise click.UsageError("name at least one fault, such as --kill stage=1")
    loaded = TrainConfig.load(config, overrides=overrides)
    with closing(Progress()) as progress:
        progress.on_notice("loading torch and Ray")
        with put_off():
            # Loads them only once the configuration is known to be good.
            from raypipe.actors.execution.faults import FaultKind  # noqa: PLC0415
            from raypipe.training.drill import DrillFault  # noqa: PLC0415
        from raypipe.training.drill import drill as run_drill  # noqa: PLC0415

        logging.getLogger("ray").setLevel(logging.WARNING)
        progress.close()
        places = {FaultKind.KILL: kill, FaultKind.STOP: stop, FaultKind.CUT: cut, FaultKind.HANG: hang, FaultKind.RAISE: fail}
        found = run_drill(loaded, [DrillFault.parse(kind, text) for kind, of_kind in places.items() for text in of_kind])
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
