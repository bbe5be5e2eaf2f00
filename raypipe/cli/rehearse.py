"""Command `raypipe rehearse`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click
from rich.console import Console

from raypipe.artifacts.plan import Plan
from raypipe.cli.options import COUNT, FiniteRange, check_output, example, json_option
from raypipe.cli.screen import console, notice, prediction_reports, print_json
from raypipe.cluster.signals import put_off
from raypipe.config import ClusterConfig, ScalingConfig, Transport
from raypipe.show.devices import labels_of
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.traces import trace_report
from raypipe.units import counted, seconds

if TYPE_CHECKING:
    from raypipe.training.rehearsal import Rehearsal

_SCALE = FiniteRange(min=0.0, min_open=True, max=1e6)


@click.command(
    epilog=example("raypipe rehearse plan.json", "raypipe rehearse plan.json --address 10.0.0.1:6379 --time-scale 0.1 -o trace.json")
)
@click.argument("plan", type=click.Path())
@click.option("--updates", type=COUNT, metavar="U", help="Updates per window; 4 by default.")
@click.option("--time-scale", type=_SCALE, default=1.0, help="Seconds to wait per second of computation.")
@click.option("--byte-scale", type=_SCALE, default=1.0, help="Bytes to send per byte of the plan.")
@click.option("--address", metavar="A", help="Ray cluster to run on.  [default: RAY_ADDRESS, else a local cluster of one node]")
@click.option("--cpus-per-device", type=FiniteRange(min=0.0), default=1.0, help="CPUs that each device reserves.")
@click.option("--transport", type=click.Choice([str(choice) for choice in Transport]), default="auto", help="What carries the messages.")
@click.option("--stand-ins", is_flag=True, help="Let CPU slots stand in for devices of other kinds, as nothing is computed.")
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Where to write the trace (.json, or .parquet with a row a span).")
@json_option
def rehearse(
    plan: str,
    *,
    updates: int | None,
    time_scale: float,
    byte_scale: float,
    address: str | None,
    cpus_per_device: float,
    transport: str,
    stand_ins: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Run the plan in the file PLAN on its cluster, with a wait for each computation and messages of the real size."""
    check_output(output, plan, suffixes=["json", "parquet"])
    loaded = Plan.load(plan)
    with put_off():
        from raypipe.training.rehearsal import rehearse as run  # noqa: PLC0415  # loads ray and torch: not before the plan is known to be good

    logging.getLogger("ray").setLevel(logging.WARNING)
    done = run(
        loaded,
        num_updates=updates,
        time_scale=time_scale,
        byte_scale=byte_scale,
        cluster=ClusterConfig(address=address, dashboard=False, log_to_driver=False),
        scaling=ScalingConfig(cpus_per_device=cpus_per_device, transport=Transport(transport)),
        stand_ins=stand_ins,
        notice=notice,
    )
    if output:
        done.trace.save(output)
    if as_json:
        print_json(_report(done).document())
    else:
        _show(done, console())


def _report(done: Rehearsal) -> Report:
    return Report(
        Figure("plan", done.plan.name),
        Figure("planner", done.plan.planner),
        Figure("schedule", done.plan.schedule.name),
        Figure("topology", done.plan.topology.name),
        Figure("time_scale", done.time_scale),
        Figure("byte_scale", done.byte_scale),
        Figure("num_windows", len(done.windows)),
        *trace_report(done.trace).figures,
        Figure("predicted", trace_report(done.predicted)),
        Figure("update_error", done.error),
    )


def _show(done: Rehearsal, screen: Console) -> None:
    plan, trace, predicted = done.plan, done.trace, done.predicted
    screen.print(
        f"{plan.name}: {plan.schedule.name} on {counted(len(plan.devices), 'device')} of {plan.topology.name}, "
        f"{counted(len(done.windows), 'window')} of {counted(trace.num_updates, 'update')}",
        style="bold",
    )
    screen.print(f"scales: time {done.time_scale:g}, bytes {done.byte_scale:g}")
    screen.print()
    screen.print(rows_table(prediction_reports(done.figures, plan, measured="rehearsed"), title="predicted against rehearsed"))
    screen.print()
    busy = Report(
        Figure("", labels_of(trace), "device"),
        Figure("", list(predicted.busy_s), "predicted", seconds),
        Figure("", list(trace.busy_s), "rehearsed", seconds),
    )
    screen.print(busy.table(title="busy in a window"))
    screen.print()
    screen.print(f"update {seconds(trace.update_s)}, predicted {seconds(predicted.update_s)}: error of the prediction {done.error:+.1%}")
