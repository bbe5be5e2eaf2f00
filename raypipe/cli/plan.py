"""Command `raypipe plan`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import click

from raypipe.analysis.rivals import Rivals
from raypipe.analysis.slack import StageCommunication, stage_communication
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.cli.explain import Explanation
from raypipe.cli.interruption import EXIT_INTERRUPTED, Interruption
from raypipe.cli.options import COUNT, FiniteRange, check_output, example, json_option
from raypipe.cli.screen import console, notice, print_json
from raypipe.errors import InputError, NoPlanYetError
from raypipe.planning import plan as planning
from raypipe.planning.evaluator import Evaluation, OnEvaluated
from raypipe.planning.extrapolation import MOST_EXACT
from raypipe.planning.planners import AUTO, PLANNERS
from raypipe.planning.staleness_cost import both_halves, drain_s, stand_in
from raypipe.schedules.metrics import metrics
from raypipe.show.console import progress_console
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.tables import plan_report, prediction, stage_table
from raypipe.simulation.simulator import simulate
from raypipe.units import counted, seconds

_QUICK = 0.05
"""Effort, as a part of the plan's, of each of a dozen plans that explain it."""


@click.command(
    epilog=example(
        "raypipe plan --profile profile.json --topology topology.yaml --microbatches 16 -o plan.json",
        "raypipe plan --profile profile.json --topology topology.yaml --microbatches 16 --compare",
        "raypipe plan --profile profile.json --topology topology.yaml --batch-size 512 -o plan.json",
    )
)
@click.option(
    "--profile", required=True, type=click.Path(), metavar="FILE", help="Profile of the model's layers, as written by `raypipe profile`."
)
@click.option(
    "--topology", required=True, type=click.Path(), metavar="FILE", help="Description of the cluster, as written by `raypipe probe`."
)
@click.option("--microbatches", type=COUNT, help="Number of microbatches in an optimizer update.")
@click.option("--microbatch-size", type=COUNT, help="Number of rows in a microbatch.  [default: that of the profile]")
@click.option(
    "--batch-size",
    type=COUNT,
    help="Number of rows in an optimizer update, in place of --microbatches; the size of microbatches is then chosen, too.",
)
@click.option("--planner", default="raypipe", help=f"Planner to use: {', '.join(planner.name for planner in PLANNERS)}.")
@click.option("--schedule", default=AUTO, help="Name of the schedule (see `raypipe schedules`), or auto to choose one.")
@click.option(
    "--max-staleness",
    type=click.IntRange(0),
    help="Largest allowed delay, in updates, between the weights that a forward uses and the weights that its gradient changes.",
)
@click.option(
    "--max-mismatch",
    type=click.IntRange(0),
    help="Largest allowed number of weight versions between the forward and the backward of a microbatch.",
)
@click.option(
    "--max-mean-staleness",
    type=FiniteRange(0),
    help="Largest allowed mean of the delay that --max-staleness limits, over microbatches and stages.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="Compare plans by seconds to the same loss: late gradients cost this optimizer updates, one that was not measured as many as "
    "nadamw.  [default: by seconds of an update]",
)
@click.option(
    "--synchronous-share",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Share of the run's updates, at its start, that are drained (schedule.synchronous_updates over run.num_updates); counts with "
    "--optimizer.",
)
@click.option(
    "--updates-per-window",
    type=COUNT,
    default=10,
    help="Number of updates after which the pipeline is drained, for schedules whose updates overlap.",
)
@click.option(
    "--recompute/--no-recompute", default=True, help="Allow forwards to run again in the backward pass where memory is short, or forbid it."
)
@click.option(
    "--effort",
    type=FiniteRange(0.01, 100),
    default=1.0,
    help="Search effort as a multiple of the usual effort; more takes longer and may find better plans.",
)
@click.option(
    "--time-limit",
    type=FiniteRange(0),
    metavar="SECONDS",
    help="Seconds after which the search ends with the best plan so far; where none fits yet, with the first that does.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Also show what binds, where the time of each device goes, what single changes would give, the best plans of other kinds and why "
    "they lost, and what each limit costs.",
)
@click.option("--compare", is_flag=True, help="Also show the plans of all other planners.")
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="File to write the plan to (.json).")
@json_option
def plan(
    *,
    profile: str,
    topology: str,
    microbatches: int | None,
    microbatch_size: int | None,
    batch_size: int | None,
    planner: str,
    schedule: str,
    max_staleness: int | None,
    max_mismatch: int | None,
    max_mean_staleness: float | None,
    optimizer: str | None,
    synchronous_share: float,
    updates_per_window: int,
    recompute: bool,
    effort: float,
    time_limit: float | None,
    explain: bool,
    compare: bool,
    output: str | None,
    as_json: bool,
) -> int | None:
    """Choose stages, replication, devices and schedule for a model on a cluster, and say how far from optimal that may be.

    Ctrl-C ends the search with the best plan so far, a second one without a plan.
    """
    check_output(output, profile, topology, suffixes=["json"])
    if (batch_size is None) == (microbatches is None) or (batch_size is not None and microbatch_size is not None):
        raise click.UsageError("give either --microbatches, with --microbatch-size if it is not the profile's, or --batch-size")
    model = (ModelProfile.load(profile), ClusterTopology.load(topology))
    make = partial(
        planning.plan,
        max_staleness=max_staleness,
        max_mismatch=max_mismatch,
        max_mean_staleness=max_mean_staleness,
        optimizer=optimizer,
        synchronous_share=synchronous_share,
        updates_per_window=updates_per_window,
        recompute=recompute,
        effort=effort,
    )
    began_s = time.perf_counter()
    tried = Rivals()
    interrupted = Interruption()
    try:
        with _watched(tried) as on_evaluated, interrupted:
            found = make(
                *model,
                microbatches or 1,
                microbatch_size=microbatch_size,
                batch_size=batch_size,
                planner=planner,
                schedule=schedule,
                time_limit_s=time_limit,
                should_stop=interrupted,
                on_evaluated=on_evaluated,
            )
    except NoPlanYetError:
        notice("interrupted before any plan was found; nothing is written")
        return EXIT_INTERRUPTED
    took_s = time.perf_counter() - began_s
    if output:
        found.save(output)
    # A whole update on very many devices would be simulated for longer than it was planned.
    small = found.schedule.num_microbatches * len(found.devices) <= MOST_EXACT
    trace = simulate(found) if small else None
    communication = stage_communication(found, trace) if trace else []
    report = plan_report(found, communication, planning_s=took_s, optimizer=optimizer, synchronous_share=synchronous_share)
    if interrupted():
        notice("interrupted: this is the best plan so far")
        explain = compare = False
    explanation = None
    if explain:
        with _watched(Rivals()) as on_evaluated:
            options = {"num_microbatches": found.schedule.num_microbatches, "microbatch_size": found.microbatch_size}
            quick = effort * _QUICK
            again = partial(make, planner=planner, schedule=schedule, on_evaluated=on_evaluated, effort=quick, **options)
            explanation = Explanation(found, tried, again)
    others: dict[str, Report] = {}
    if compare:
        with _watched(Rivals()) as on_evaluated:
            again = partial(make, *model, found.schedule.num_microbatches, microbatch_size=found.microbatch_size, on_evaluated=on_evaluated)
            others = {other.name: _compared(again, other.name, found) for other in PLANNERS if other.name != planner}
    if as_json:
        compared = [Figure("compared", Report(*(Figure(name, other) for name, other in others.items())))] if compare else []
        explained = explanation.report().figures if explanation else ()
        print_json(Report(*report.figures, *explained, *compared).document())
        return interrupted.exit_code
    _print(found, report, communication)
    if optimizer is not None:
        _print_late(found, trace, optimizer, synchronous_share)
    if explanation:
        explanation.show(console())
    if others:
        _print_others(others)
    if output:
        console().print(f"\nwritten to {output}", soft_wrap=True)
    return interrupted.exit_code


@contextmanager
def _watched(tried: Rivals) -> Iterator[OnEvaluated]:
    """Show how planning goes; note the best of each kind in `tried`."""
    update_s, num_evaluated = math.inf, 0
    with progress_console().status("planning") as status:

        def on_evaluated(evaluation: Evaluation) -> None:
            nonlocal update_s, num_evaluated
            num_evaluated += 1
            tried.add(evaluation)
            update_s = min(update_s, math.inf if evaluation.missing_bytes else evaluation.update_s)
            best = "none fits yet" if update_s == math.inf else f"the best takes {seconds(update_s)} an update"
            status.update(f"planning: {counted(num_evaluated, 'plan')} simulated, {best}")

        yield on_evaluated


def _compared(make: Callable[..., Plan], planner: str, found: Plan) -> Report:
    try:
        other = make(planner=planner)
    except InputError as error:
        return Report(Figure("", planner, "planner"), Figure("error", str(error)))
    other_s, update_s = prediction(other).update_s, prediction(found).update_s
    return Report(
        Figure("", planner, "planner"),
        Figure("schedule", other.schedule.name, "schedule"),
        Figure("update_s", other_s, "update", seconds),
        Figure("", other_s / update_s if update_s else None, "over this plan's", "{:.3f}".format),
    )


def _print(found: Plan, report: Report, communication: Sequence[StageCommunication]) -> None:
    screen = console()
    screen.print(
        f"{found.name} on {found.topology.name}: {counted(len(found.stages), 'stage')} on {counted(len(found.devices), 'device')}, "
        f"schedule {found.schedule.name}, {counted(found.schedule.num_microbatches, 'microbatch')} "
        f"of {counted(found.microbatch_size, 'row')}",
        style="bold",
    )
    screen.print(stage_table(found, communication))
    figures = report.document()
    if stages := figures["recomputed_stages"]:
        screen.print(f"\nforwards run again in the backward pass, to save memory: stages {', '.join(map(str, stages))}")
    if figures["idle_devices"]:
        screen.print(f"\nidle: {', '.join(figures['idle_devices'])}")
    screen.print(f"\n{report.sentence()}")


def _print_late(found: Plan, trace: Trace | None, optimizer: str, synchronous_share: float) -> None:
    if found.schedule.weight_rule.overlaps_updates:
        count = trace.num_updates if trace else 0
        more_s = drain_s(trace.makespan_s, trace.steady_update_s, count, count) if trace else None
        mean_delay = metrics(found.schedule).mean_delay
        console().print(both_halves(prediction(found).update_s, mean_delay, optimizer, synchronous_share, more_s))
    if line := stand_in(optimizer):
        console().print(line)


def _print_others(others: Mapping[str, Report]) -> None:
    screen = console()
    screen.print()
    screen.print(rows_table(list(others.values()), left=2))
    for name, other in others.items():
        if error := other.document().get("error"):
            screen.print(f"{name}: {error}", style="dim")
