"""`raypipe calibrate`: measures what running costs on this machine besides computation."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from raypipe.cli.options import check_folder, example, json_option
from raypipe.cli.screen import console, print_json
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import InputError
from raypipe.units import seconds


@click.command(epilog=example("raypipe calibrate", "raypipe calibrate -o lab.json"))
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Where to write it.  [default: where predictions look for it]")
@click.option("--address", help="Of a running Ray cluster.  [default: a local one]")
@json_option
def calibrate(*, output: str | None, address: str | None, as_json: bool) -> None:
    """Measure what each Op and each message costs on this machine besides computing and carrying.

    Stages that wait instead of computing run for less than a minute; keep the machine quiet meanwhile. Predictions of training
    runs on this machine use the result from then on.
    """
    path = Path(output) if output else calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: its folder cannot be made ({error.strerror}); choose another with -o") from error
    check_folder(str(path))
    from raypipe.profiling.calibrator import TRANSPORTS, calibrate  # noqa: PLC0415  # loads ray and torch

    found = calibrate(ClusterConfig(address=address, dashboard=False), transports=TRANSPORTS)
    found.save(path)
    if as_json:
        costs = {
            name: {
                "overheads": {key: getattr(of.overheads, key) for key in _COLUMNS},
                "latency_s": of.link.latency_s,
                "bandwidth_bytes_per_s": of.link.bandwidth_bytes_per_s,
            }
            for name, of in found.transports.items()
        }
        print_json({"file": str(path), "host": found.host, "date": found.date, "transports": costs})
        return
    table = Table("transport", *(f"{name}" for name in _COLUMNS.values()), "latency", "bandwidth", box=None)
    for name, of in found.transports.items():
        bandwidth = of.link.bandwidth_bytes_per_s
        table.add_row(
            name,
            *(seconds(getattr(of.overheads, key)) for key in _COLUMNS),
            seconds(of.link.latency_s),
            "-" if bandwidth is None else f"{bandwidth / 1e9:.2g} GB/s",
        )
    console().print(table)
    console().print(f"\nwritten to {path}", soft_wrap=True)


_COLUMNS = {"forward_s": "F", "backward_s": "B", "input_grad_s": "I", "weight_grad_s": "W", "send_s": "send", "recv_s": "recv"}
"""The overheads of Ops and messages; what messages cost by their bytes is in the file."""
