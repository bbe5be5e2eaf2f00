"""Command `raypipe calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from raypipe.artifacts.calibration import TransportCosts
from raypipe.cli.options import check_output, example, json_option
from raypipe.cli.screen import console, notice, print_json
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import InputError
from raypipe.show.report import Figure, Report, columns_table
from raypipe.units import seconds, size


@click.command(epilog=example("raypipe calibrate", "raypipe calibrate -o lab.json"))
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="File to write (.json).  [default: the one that predictions read]")
@click.option("--address", help="Ray cluster to measure.  [default: a local one]")
@json_option
def calibrate(*, output: str | None, address: str | None, as_json: bool) -> None:
    """Measure the overhead of each Op and each message on this machine.

    Runs stages that wait instead of computing, for about a minute; keep the machine quiet meanwhile. From then on predictions
    of training runs on this machine use the result.
    """
    path = Path(output) if output else calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: its folder cannot be made ({error.strerror}); choose another with -o") from error
    check_output(str(path), suffixes=["json"] if output else [])
    from raypipe.profiling.calibrator import TRANSPORTS, calibrate  # noqa: PLC0415  # loads ray and torch

    notice("measuring for about a minute; keep the machine quiet meanwhile")
    calibration = calibrate(ClusterConfig(address=address, dashboard=False), transports=TRANSPORTS)
    calibration.save(path)
    reports = {name: _report(name, costs) for name, costs in calibration.transports.items()}
    report = Report(
        Figure("file", str(path)),
        Figure("host", calibration.host),
        Figure("date", calibration.date),
        Figure("transports", Report(*(Figure(name, costs) for name, costs in reports.items()))),
    )
    if as_json:
        print_json(report.document())
        return
    console().print(columns_table(list(reports.values())))
    console().print(f"\nwritten to {path}", soft_wrap=True)


_COSTS = {
    "forward_s": "F, beyond its computation",
    "backward_s": "B",
    "input_grad_s": "I",
    "weight_grad_s": "W",
    "send_s": "sending a message",
    "recv_s": "receiving a message",
}


def _report(transport: str, costs: TransportCosts) -> Report:
    link = costs.link
    return Report(
        Figure("", transport, "cost"),
        Figure("overheads", Report(*(Figure(key, getattr(costs.overheads, key), label, seconds) for key, label in _COSTS.items()))),
        Figure("latency_s", link.latency_s, "latency of a message", seconds),
        Figure("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, "bandwidth of messages", lambda rate: f"{size(rate)}/s"),
    )
