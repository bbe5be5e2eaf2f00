"""Command `raypipe simulate`."""

from __future__ import annotations

import click

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli.options import check_output, example, json_option
from raypipe.cli.screen import console, print_json
from raypipe.show.traces import plan_trace_report
from raypipe.simulation import simulator
from raypipe.units import counted


@click.command(epilog=example("raypipe simulate plan.json", "raypipe simulate plan.json --topology other.yaml -o trace.json"))
@click.argument("plan", type=click.Path())
@click.option(
    "--topology",
    type=click.Path(),
    metavar="FILE",
    help="Simulate on this cluster in place of the plan's own; it must have the devices of the plan.",
)
@click.option(
    "-o", "--output", type=click.Path(), metavar="FILE", help="File to write the trace to: .json, or .parquet with a row for each span."
)
@json_option
def simulate(plan: str, *, topology: str | None, output: str | None, as_json: bool) -> None:
    """Predict how long the plan in the file PLAN takes, without Ray, torch or a cluster."""
    check_output(output, plan, topology, suffixes=["json", "parquet"])
    loaded = Plan.load(plan)
    if topology:
        loaded = loaded.on(ClusterTopology.load(topology))
    trace = simulator.simulate(loaded)
    report = plan_trace_report(loaded, trace)
    if output:
        trace.save(output)
    if as_json:
        print_json(report.document())
        return
    screen = console()
    screen.print(
        f"{loaded.name}: {loaded.schedule.name} on {counted(len(loaded.devices), 'device')} of {loaded.topology.name}",
        style="bold",
    )
    screen.print(report.table())
    screen.print(f"\n{report.sentence()}")
