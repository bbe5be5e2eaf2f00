"""`raypipe simulate`: predicts a plan."""

from __future__ import annotations

from typing import Any

import click

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.cli.figures import trace_figures
from raypipe.cli.options import check_folder, check_not_input, example, json_option
from raypipe.cli.screen import console, print_json
from raypipe.show.tables import trace_table
from raypipe.simulation import simulator
from raypipe.units import counted, ratio, seconds


@click.command(epilog=example("raypipe simulate plan.json", "raypipe simulate plan.json --topology other.yaml -o trace.json"))
@click.argument("plan", type=click.Path())
@click.option("--topology", type=click.Path(), metavar="FILE", help="Another cluster to run it on; it has the devices of the plan.")
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Where to write the trace (.json, or .parquet with a row a span).")
@json_option
def simulate(plan: str, *, topology: str | None, output: str | None, as_json: bool) -> None:
    """Predict how long the plan in the file PLAN takes, without Ray, torch or a cluster."""
    if output:
        check_folder(output)
        check_not_input(output, plan, topology)
    loaded = Plan.load(plan)
    if topology:
        loaded = loaded.on(ClusterTopology.load(topology))
    trace = simulator.simulate(loaded)
    figures = plan_figures(loaded, trace)
    if output:
        trace.save(output)
    if as_json:
        print_json(figures)
        return
    limits = [loaded.topology.device(name).memory_bytes for name in loaded.devices]
    screen = console()
    screen.print(
        f"{loaded.name}: {loaded.schedule.name} on {counted(len(loaded.devices), 'device')} of {loaded.topology.name}",
        style="bold",
        markup=False,
    )
    screen.print(trace_table(trace, limits))
    screen.print(f"\nupdate {seconds(trace.update_s)}, bubble {ratio(trace.bubble_ratio)}, makespan {seconds(trace.makespan_s)}")


def plan_figures(plan: Plan, trace: Trace) -> dict[str, Any]:
    """The figures of a plan and its simulated trace; the keys are a contract."""
    return {
        "plan": plan.name,
        "planner": plan.planner,
        "schedule": plan.schedule.name,
        "topology": plan.topology.name,
        **trace_figures(trace),
    }
