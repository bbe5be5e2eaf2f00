"""Command `raypipe schedules`."""

from __future__ import annotations

import click

from raypipe import schedule_registry
from raypipe.analysis.schedule_comparison import compare_schedules
from raypipe.analysis.schedule_figures import StageSeconds
from raypipe.cli.options import COUNT, SECONDS, chunks_option, example, json_option, weight_grad_option
from raypipe.cli.schedule import stage_seconds
from raypipe.cli.screen import console, print_json
from raypipe.schedules.request import ScheduleRequest
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.schedules import LEGEND, comparison_report
from raypipe.units import counted, seconds

_COLUMNS = ("name", "title", "bubble", "memory", "mismatch", "delay", "paper")
_LETTERS = (
    "D devices, M microbatches, V stages a device, N pipelines, K = M/D, s the device; F, B, I and W the seconds of a stage's forward, "
    "backward, and its parts for inputs and weights, F&B of a forward and a backward that overlap; memory in activations of a stage"
)


@click.command(epilog=f"Formulas: {_LETTERS}\n\n{example('raypipe schedules', 'raypipe schedules --devices 8 --microbatches 32')}")
@click.option("--devices", type=COUNT, help="Compare all schedules on this number of devices; needs --microbatches.")
@click.option("--microbatches", type=COUNT, help="Number of microbatches in an optimizer update; needs --devices.")
@click.option("--updates", type=COUNT, help="Number of consecutive optimizer updates to simulate.  [default: 1]")
@chunks_option
@click.option("--forward", type=SECONDS, help="Seconds of the forward of one microbatch on one device.  [default: 1]")
@click.option("--backward", type=SECONDS, help="Seconds of the backward of one microbatch on one device.  [default: 2]")
@weight_grad_option
@click.option("--latency", type=SECONDS, help="Seconds that a message between two devices takes.  [default: 0]")
@click.option("--sort", type=click.Choice(("makespan", "catalogue")), help="Order of the rows.  [default: makespan]")
@json_option
def schedules(
    *,
    devices: int | None,
    microbatches: int | None,
    updates: int | None,
    chunks: int | None,
    forward: float | None,
    backward: float | None,
    weight_grad: float | None,
    latency: float | None,
    sort: str | None,
    as_json: bool,
) -> None:
    """List the schedules by name, or compare all schedules at one size.

    With --devices and --microbatches each schedule is built, validated and simulated on the same model. Times are those of one
    device's share of the model; where a device has two stages, each stage takes half of these times.
    """
    if devices is None or microbatches is None:
        given: dict[str, object] = {"--devices": devices, "--microbatches": microbatches, "--updates": updates, "--chunks": chunks}
        given |= {"--forward": forward, "--backward": backward, "--weight-grad": weight_grad, "--latency": latency, "--sort": sort}
        options = [name for name, value in given.items() if value is not None]
        if options:
            missing = " and ".join(name for name in ("--devices", "--microbatches") if name not in options)
            raise click.UsageError(f"{options[0]} needs {missing}: all schedules are then compared at that size")
        _list(as_json=as_json)
        return
    default = StageSeconds()
    times = stage_seconds(
        default.forward_s if forward is None else forward,
        default.backward_s if backward is None else backward,
        weight_grad,
        default.latency_s if latency is None else latency,
    )
    request = ScheduleRequest(num_devices=devices, num_microbatches=microbatches, num_updates=updates or 1)
    _compare(request, times, num_chunks=chunks, sort=sort or "makespan", as_json=as_json)


def _list(*, as_json: bool) -> None:
    reports = [
        Report(*(Figure(name, str(getattr(spec, name)), "what" if name == "title" else name) for name in _COLUMNS))
        for spec in schedule_registry.specs()
    ]
    if as_json:
        print_json([report.document() for report in reports])
        return
    screen = console()
    screen.print(rows_table(reports, left=len(_COLUMNS)))
    screen.print(f"\n{_LETTERS}")


def _compare(request: ScheduleRequest, times: StageSeconds, *, num_chunks: int | None, sort: str, as_json: bool) -> None:
    found = compare_schedules(schedule_registry.specs(), request, times, num_chunks=num_chunks)
    compared = found.compared
    if sort == "makespan":
        compared = tuple(sorted(compared, key=lambda row: row.figures.trace.makespan_s))
    reports = [comparison_report(each) for each in compared]
    report = Report(
        Figure("num_devices", request.num_devices),
        Figure("num_microbatches", request.num_microbatches),
        Figure("num_updates", request.num_updates),
        Figure("schedules", reports),
        Figure("refused", [{"schedule": name, "reason": reason} for name, reason in found.refused]),
    )
    if as_json:
        print_json(report.document())
        return
    screen = console()
    screen.print(
        f"{counted(request.num_devices, 'device')}, {counted(request.num_microbatches, 'microbatch')} an update, "
        f"{counted(request.num_updates, 'update')}",
        style="bold",
    )
    screen.print(
        f"a device's share: forward {seconds(times.forward_s)}, backward {seconds(times.backward_s)} "
        f"(weight gradient {seconds(times.weight_grad_s)}); latency {seconds(times.latency_s)}"
    )
    for line in LEGEND:
        screen.print(line)
    if reports:
        screen.print()
        screen.print(rows_table(reports))
    if found.refused:
        screen.print()
        for name, reason in found.refused:
            screen.print(f"{name} is left out: {reason}")
