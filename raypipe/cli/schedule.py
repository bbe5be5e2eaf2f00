"""`raypipe schedule`: builds, validates and simulates one schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import click
from rich.console import Console

from raypipe import schedule_registry
from raypipe.artifacts import codec
from raypipe.artifacts import schedule as schedule_file
from raypipe.artifacts.files import write_text
from raypipe.artifacts.schedule import ScheduleFile
from raypipe.artifacts.trace import Trace
from raypipe.cli.figures import schedule_figures
from raypipe.cli.options import COUNT, SECONDS, FiniteRange, check_folder, check_not_input, example, json_option, output_suffix
from raypipe.cli.screen import console, plain_console, print_json
from raypipe.errors import InputError, ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.staleness import StalenessLimits
from raypipe.schedules.text import to_csv, to_torch_csv
from raypipe.schedules.validate import validate
from raypipe.show.grid import timed_grid
from raypipe.show.tables import schedule_table
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs
from raypipe.units import counted, ratio, seconds

_STEADY_UPDATES = 9
# Two million Ops take some two minutes and two gigabytes; what all updates wait for grows with the square of the stages.
_MOST_OPS = 2_000_000
_MOST_STAGES = 1024


class ScheduleFormat(StrEnum):
    """What a schedule can be written as."""

    GRID = "grid"
    CSV = "csv"
    TORCH_CSV = "torch-csv"
    JSON = "json"
    SVG = "svg"
    HTML = "html"


_FORMATS = {
    "txt": ScheduleFormat.GRID,
    "csv": ScheduleFormat.CSV,
    "json": ScheduleFormat.JSON,
    "svg": ScheduleFormat.SVG,
    "html": ScheduleFormat.HTML,
}


@dataclass(frozen=True)
class StageSeconds:
    """The times of a schedule's equal stages.

    Attributes:
        forward_s: of F.
        backward_s: of B.
        weight_grad_s: of W; I takes the rest of B.
        latency_s: of every dependency between devices.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_grad_s: float = 1.0
    latency_s: float = 0.0

    @property
    def searched(self) -> StageTimes:
        """What a schedule that is searched for is given."""
        return StageTimes(self.forward_s, self.backward_s - self.weight_grad_s, self.weight_grad_s)


def stage_seconds(forward_s: float, backward_s: float, weight_grad_s: float | None, latency_s: float) -> StageSeconds:
    """The times of the options; the weight gradient takes half of the backward where it is left out.

    Raises:
        InputError: it takes more than the backward, of which it is a part.
    """
    if weight_grad_s is not None and weight_grad_s > backward_s:
        raise InputError(f"--weight-grad {weight_grad_s:g} is more than --backward {backward_s:g}, of which it is a part")
    return StageSeconds(forward_s, backward_s, backward_s / 2 if weight_grad_s is None else weight_grad_s, latency_s)


def simulated(schedule: Schedule, times: StageSeconds) -> Trace:
    """The trace of a valid schedule with equal stages."""
    cost = equal_stages(
        schedule,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_grad_s=times.weight_grad_s,
        latency_s=times.latency_s,
    )
    return simulate_programs(lower(schedule), cost, name=schedule.name, num_updates=schedule.num_updates, with_memory=False)


@click.command(
    epilog=example(
        "raypipe schedule 1f1b --devices 4 --microbatches 8",
        "raypipe schedule zb-h1 --devices 8 --microbatches 24 --latency 0.01 -o zb-h1.svg",
    )
)
@click.argument("name")
@click.option("--devices", type=COUNT, required=True, help="Devices, one worker each.")
@click.option("--microbatches", type=COUNT, required=True, help="Microbatches of one update, over all pipelines.")
@click.option("--updates", type=COUNT, default=1, show_default=True, help="Updates of the window.")
@click.option("--chunks", type=COUNT, help="Stages a device, for schedules that take several.  [default: the schedule's own]")
@click.option("--pipelines", type=COUNT, help="Layings of the stages, for schedules that have several.  [default: the schedule's own]")
@click.option("--update-scope", type=click.Choice([str(scope) for scope in UpdateScope]), help="What an update waits for.")
@click.option("--forward", type=SECONDS, default=1.0, show_default=True, help="Seconds of a stage's forward.")
@click.option("--backward", type=SECONDS, default=2.0, show_default=True, help="Seconds of its full backward.")
@click.option("--weight-grad", type=SECONDS, help="Seconds of that for the weight gradient.  [default: half of it]")
@click.option("--latency", type=SECONDS, default=0.0, show_default=True, help="Seconds between devices: a pure delay.")
@click.option("--max-in-flight", type=float, help="Most stage activations a device may hold, for schedules that are searched for.")
@click.option("--max-mean-staleness", type=FiniteRange(0), help="Most updates that gradients may be late on average.")
@click.option(
    "--weight-grad-share",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of an activation that is kept from I to W, for schedules that are searched for.",
)
@click.option(
    "--format", "format_name", type=click.Choice([str(choice) for choice in ScheduleFormat]), help="What to write.  [default: grid]"
)
@click.option(
    "-o", "--output", type=click.Path(), metavar="FILE", help="Where to write it; .csv, .json, .svg, .html and .txt name the format."
)
@json_option
def schedule(
    name: str,
    *,
    devices: int,
    microbatches: int,
    updates: int,
    chunks: int | None,
    pipelines: int | None,
    update_scope: str | None,
    forward: float,
    backward: float,
    weight_grad: float | None,
    latency: float,
    max_mean_staleness: float | None,
    max_in_flight: float | None,
    weight_grad_share: float,
    format_name: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Build, validate and simulate the schedule NAME with equal stages.

    Times are per stage: with two chunks a device has two stages of these times. `raypipe schedules` lists the names; a schedule of
    your own is named by its file, order.csv or order.json, or by its function, file.py:function or module:function.
    """
    if as_json and format_name and not output:
        raise click.UsageError("--json and --format both write to stdout; give --format a file with -o, or leave one of them out")
    if output:
        if not format_name:
            output_suffix(output, *_FORMATS)
        check_folder(output)
        check_not_input(output, name if schedule_registry.is_file(name) else None)
    spec = schedule_registry.spec(name)
    times = stage_seconds(forward, backward, weight_grad, latency)
    size = ScheduleRequest(
        num_devices=devices,
        num_microbatches=microbatches,
        num_updates=updates,
        num_chunks=chunks or spec.default_chunks,
        num_pipelines=pipelines or 0,
        update_scope=UpdateScope(update_scope) if update_scope else None,
        times=(times.searched,),
        latency_s=times.latency_s,
        max_in_flight=max_in_flight,
        max_mean_staleness=max_mean_staleness,
        weight_grad_share=weight_grad_share,
    )
    refuse_large(spec, size)
    built = catalogue.of_size(spec, size)
    validate(built)
    limits = StalenessLimits(max_mean_staleness=max_mean_staleness)
    if too_stale := limits.exceeded_by(metrics(built)):
        needed = too_stale["max_mean_staleness"]
        problem = f"{name} is {needed:g} updates late on average; use --max-mean-staleness {needed:g}"
        raise ScheduleError(f"{problem}, more microbatches, or the schedule 'amdp-auto'")
    trace = simulated(built, times)
    figures = _figures(spec, built, size, trace, times)
    if output:
        wanted = ScheduleFormat(format_name) if format_name else _FORMATS[output_suffix(output, *_FORMATS)]
        write_text(output, text_of(wanted, built, trace, figures))
        if wanted in {ScheduleFormat.CSV, ScheduleFormat.TORCH_CSV} and built.weight_rule.overlaps_updates:
            text = f"{output} holds the order alone: read again, it is a synchronous schedule"
            click.echo(f"{text}; a .json file keeps how {name} finds its weights", err=True)
    if as_json:
        print_json(figures)
    elif not output:
        wanted = ScheduleFormat(format_name or ScheduleFormat.GRID)
        if wanted is ScheduleFormat.GRID:
            print_schedule(console(), built, trace, figures)
        else:
            click.echo(text_of(wanted, built, trace, figures), nl=False)


def long_window(spec: ScheduleSpec, size: ScheduleRequest) -> ScheduleRequest:
    """The same for 9 updates at least, and for so many that a quarter of them fills the pipeline twice where updates overlap.

    With a flush and the scope `global`, the default of all schedules with a flush, each update takes as long as the first.
    """
    num_updates = max(size.num_updates, _STEADY_UPDATES)
    if spec.weight_rule.overlaps_updates or size.update_scope not in {None, UpdateScope.GLOBAL}:
        num_updates = max(num_updates, 8 * math.ceil(size.num_devices * size.num_chunks / size.num_microbatches))
    return replace(size, num_updates=num_updates)


def refuse_large(spec: ScheduleSpec, size: ScheduleRequest) -> None:
    """Refuses what would take minutes to simulate.

    Raises:
        InputError: names the most.
    """
    num_stages, num_updates = size.num_devices * size.num_chunks, long_window(spec, size).num_updates
    if num_stages > _MOST_STAGES:
        raise InputError(f"{num_stages} stages are too many to simulate; use at most {_MOST_STAGES}")
    if (num_copies := num_stages * size.num_pipelines) > _MOST_STAGES:
        raise InputError(
            f"{size.num_pipelines} pipelines of {num_stages} stages are {num_copies} copies of a stage, too many to simulate; "
            f"use at most {_MOST_STAGES}"
        )
    # Three Ops a stage and microbatch at most: F, I and W; halves of a microbatch are done in four.
    num_ops = 3 * num_stages * size.num_microbatches * num_updates
    if num_ops > _MOST_OPS:
        raise InputError(
            f"{num_stages} stages with {size.num_microbatches} microbatches for {num_updates} updates, which the steady time per update "
            f"needs, are up to {num_ops} Ops, and {_MOST_OPS} are the most; use fewer devices, microbatches or updates"
        )


def _figures(spec: ScheduleSpec, schedule: Schedule, size: ScheduleRequest, trace: Trace, times: StageSeconds) -> dict[str, Any]:
    longer = long_window(spec, size)
    try:
        steady = trace if longer == size else simulated(catalogue.of_size(spec, longer), times)
    except ScheduleError:  # an order that is written for this window alone
        steady = trace
    return schedule_figures(schedule, trace, steady_update_s=steady.steady_update_s)


def text_of(wanted: ScheduleFormat, schedule: Schedule, trace: Trace, figures: Mapping[str, Any]) -> str:
    """A schedule as the text of a file."""
    match wanted:
        case ScheduleFormat.CSV:
            return to_csv(schedule.programs)
        case ScheduleFormat.TORCH_CSV:
            return to_torch_csv(schedule.programs)
        case ScheduleFormat.JSON:
            return codec.to_json(ScheduleFile.of(schedule), format_name=schedule_file.FORMAT)
        case ScheduleFormat.SVG:
            from raypipe.show.svg import draw_traces  # noqa: PLC0415  # slow to load, and the grid does without

            return draw_traces([trace])
        case ScheduleFormat.HTML:
            from raypipe.show.page import draw_page  # noqa: PLC0415  # likewise

            return draw_page([trace])
        case ScheduleFormat.GRID:
            with (paper := plain_console()).capture() as capture:
                print_schedule(paper, schedule, trace, figures)
            return capture.get()


def print_schedule(to: Console, schedule: Schedule, trace: Trace, figures: Mapping[str, Any]) -> None:
    """Draws a simulated schedule and its figures."""
    chunks = "" if schedule.num_stages == schedule.num_workers else f", {schedule.num_stages} stages"
    pipelines = "" if len(schedule.pipelines) == 1 else f", {len(schedule.pipelines)} pipelines"
    to.print(
        f"{schedule.name}: {counted(schedule.num_workers, 'device')}{chunks}{pipelines}, "
        f"{counted(schedule.num_microbatches, 'microbatch')} an update, {counted(schedule.num_updates, 'update')}",
        style="bold",
        soft_wrap=True,
    )
    to.print()
    to.print(timed_grid(trace, width=to.width), soft_wrap=True)
    to.print()
    to.print(schedule_table(schedule, trace, figures))
    to.print()
    to.print(
        f"makespan {seconds(trace.makespan_s)}, bubble {ratio(trace.bubble_ratio)}, "
        f"{seconds(figures['steady_update_s'])} an update far from the ends; "
        f"mismatch {figures['max_mismatch']}, delay {figures['max_delay']}, on average {figures['mean_delay']:.2g}",
        soft_wrap=True,
    )
