"""Command `raypipe calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from raypipe.cli.options import check_output, example, json_option
from raypipe.cli.screen import console, notice, print_json
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import InputError
from raypipe.show.report import FittedTable
from raypipe.units import seconds, size


@click.command(epilog=example("raypipe calibrate", "raypipe calibrate -o lab.json"))
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="File to write.  [default: the one that predictions read]")
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
    check_output(str(path))
    from raypipe.profiling.calibrator import TRANSPORTS, calibrate  # noqa: PLC0415  # loads ray and torch

    notice("measuring for about a minute; keep the machine quiet meanwhile")
    calibration = calibrate(ClusterConfig(address=address, dashboard=False), transports=TRANSPORTS)
    calibration.save(path)
    transports = calibration.transports
    if as_json:
        document = {
            name: {
                "overheads": {key: getattr(costs.overheads, key) for key in _COSTS},
                "latency_s": costs.link.latency_s,
                "bandwidth_bytes_per_s": costs.link.bandwidth_bytes_per_s,
            }
            for name, costs in transports.items()
        }
        print_json({"file": str(path), "host": calibration.host, "date": calibration.date, "transports": document})
        return
    rows = [(label, [seconds(getattr(costs.overheads, key)) for costs in transports.values()]) for key, label in _COSTS.items()]
    rows.append(("latency of a message", [seconds(costs.link.latency_s) for costs in transports.values()]))
    limits = [costs.link.bandwidth_bytes_per_s for costs in transports.values()]
    rows.append(("bandwidth of messages", ["-" if limit is None else f"{size(limit)}/s" for limit in limits]))
    console().print(FittedTable(("cost", *transports), ((label, *values) for label, values in rows)))
    console().print(f"\nwritten to {path}", soft_wrap=True)


_COSTS = {
    "forward_s": "F, beyond its computation",
    "backward_s": "B",
    "input_grad_s": "I",
    "weight_grad_s": "W",
    "send_s": "sending a message",
    "recv_s": "receiving a message",
}
