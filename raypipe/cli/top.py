"""Command `raypipe top`."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.live import Live

from raypipe.cli.options import example, json_option
from raypipe.cli.screen import console, print_json
from raypipe.config import ClusterConfig
from raypipe.show.report import Figure, Report, rows_table
from raypipe.units import seconds

if TYPE_CHECKING:
    from raypipe.cluster.watching import WatchedDevice


def _row(device: WatchedDevice, devices: list[WatchedDevice]) -> Report:
    status = device.status
    if status is None:
        return Report(Figure("device", device.name, "device"), Figure("doing", "does not answer", "doing"))
    names = {one.status.device: one.name for one in devices if one.status is not None}
    awaited = status.awaited if not status.computes else None
    others = [names.get(number, str(number)) for number in awaited.devices] if awaited is not None else []
    text = f"{', '.join(others)}: {awaited.transfer}" if awaited is not None else None
    return Report(
        Figure("device", device.name, "device"),
        Figure("stages", status.stages, "stages"),
        Figure("doing", status.doing, "doing"),
        Figure("since_s", status.since_s, "in this call for", seconds),
        Figure("computes", status.computes),
        Figure("waits_for", others),
        Figure("transfer", awaited.transfer if awaited is not None else None),
        Figure("", text, "waits for"),
    )


def _document(run: str, devices: list[WatchedDevice]) -> dict[str, Any]:
    from raypipe.cluster.watching import awaited_by  # noqa: PLC0415  # loads Ray

    return {"run": run, "devices": [_row(device, devices).document() for device in devices], "awaited": awaited_by(devices)}


def _screen(run: str, devices: list[WatchedDevice]) -> Group:
    from raypipe.cluster.watching import awaited_by  # noqa: PLC0415  # loads Ray

    ends = awaited_by(devices)
    lines = [f"{', '.join(waiting)} in the end for {end}" for end, waiting in ends.items()]
    table = rows_table([_row(device, devices) for device in devices], left=3, title=f"run {run}")
    return Group(table, *(["", "waiting", *lines] if lines else []))


@click.command(epilog=example("raypipe top", "raypipe top gpt-2 --address 10.0.0.1:6379", "raypipe top gpt-2 --json"))
@click.argument("run", required=False)
@click.option("--address", help="Ray cluster on which the run is.  [default: RAY_ADDRESS, else the one on this machine]")
@click.option("--interval-s", type=click.FloatRange(0.1, 3600), default=1.0, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once; so does output that is no terminal.")
@json_option
def top(run: str | None, *, address: str | None, interval_s: float, once: bool, as_json: bool) -> None:
    """Show what each device of RUN does now, and who waits for whom.

    RUN is the name of the run's folder; without it, the only run on the cluster. Each look asks every device once, in a thread beside
    its work.
    """
    from raypipe.cluster.session import session  # noqa: PLC0415  # loads Ray
    from raypipe.cluster.watching import RunWatch  # noqa: PLC0415

    logging.getLogger("ray").setLevel(logging.WARNING)
    cluster = ClusterConfig(address=address or ClusterConfig().resolved_address or "auto", log_to_driver=False)
    with session(cluster, num_devices=1, cpus_per_device=0.0):
        watch = RunWatch(run)
        devices = watch.look()
        if as_json:
            print_json(_document(watch.run, devices))
            return
        screen = console()
        if once or not screen.is_terminal:
            screen.print(_screen(watch.run, devices))
            return
        with Live(_screen(watch.run, devices), console=screen, auto_refresh=False, screen=True) as live:
            while devices:
                live.update(_screen(watch.run, devices), refresh=True)
                time.sleep(interval_s)
                devices = watch.look()
        screen.print(f"run {watch.run} has ended")
