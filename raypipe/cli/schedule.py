"""Command `raypipe schedule`."""

from __future__ import annotations

import click
from rich.console import Console

from raypipe import schedule_registry
from raypipe.analysis.schedule_figures import ScheduleFigures, StageSeconds, figures_of, refuse_large
from raypipe.artifacts.files import write_text
from raypipe.artifacts.schedule import to_json
from raypipe.cli.options import (
    COUNT,
    SECONDS,
    FiniteRange,
    check_output,
    chunks_option,
    example,
    json_option,
    output_suffix,
    weight_grad_option,
)
from raypipe.cli.screen import console, print_json
from raypipe.errors import InputError, ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.staleness import StalenessLimits
from raypipe.schedules.text import to_csv, to_torch_csv
from raypipe.schedules.validate import validate
from raypipe.show.grid import timed_grid
from raypipe.show.schedules import schedule_report
from raypipe.units import counted

_FORMATS = ("grid", "csv", "torch-csv", "json", "svg", "html")
_FORMAT_OF_SUFFIX = {"txt": "grid", "csv": "csv", "json": "json", "svg": "svg", "html": "html"}


def stage_seconds(forward_s: float, backward_s: float, weight_grad_s: float | None, latency_s: float) -> StageSeconds:
    """Return the times of the options; `weight_grad_s` defaults to half of the backward.

    Raises:
        InputError: It is more than the backward.
    """
    if weight_grad_s is not None and weight_grad_s > backward_s:
        raise InputError(f"--weight-grad {weight_grad_s:g} is more than --backward {backward_s:g}, of which it is a part")
    return StageSeconds(forward_s, backward_s, backward_s / 2 if weight_grad_s is None else weight_grad_s, latency_s)


def _branches(_: click.Context, __: click.Parameter, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(","))) if text else ()
    except ValueError:
        raise click.BadParameter(f"{text!r} are not numbers with commas between them, as in 1,2") from None


@click.command(
    epilog=example(
        "raypipe schedule 1f1b --devices 4 --microbatches 8",
        "raypipe schedule zb-h1 --devices 8 --microbatches 24 --latency 0.01 -o zb-h1.svg",
    )
)
@click.argument("name")
@click.option("--devices", type=COUNT, required=True, help="Number of devices.")
@click.option("--microbatches", type=COUNT, required=True, help="Number of microbatches in an optimizer update, summed over all pipelines.")
@click.option("--updates", type=COUNT, default=1, help="Number of consecutive optimizer updates to simulate.")
@chunks_option
@click.option(
    "--pipelines",
    type=COUNT,
    help="Number of pipelines that run at once, for schedules that have several.  [default: depends on the schedule]",
)
@click.option(
    "--update-scope",
    type=click.Choice([str(scope) for scope in UpdateScope]),
    help="Gradients that an update waits for: those of its own stage, of stages that share weights with it, or of all stages.",
)
@click.option("--forward", type=SECONDS, default=1.0, help="Seconds of the forward of one microbatch in one stage.")
@click.option("--backward", type=SECONDS, default=2.0, help="Seconds of the backward of one microbatch in one stage.")
@weight_grad_option
@click.option("--latency", type=SECONDS, default=0.0, help="Seconds that a message between two devices takes.")
@click.option(
    "--max-in-flight",
    type=float,
    help="Largest number of stage activations that a device may hold at once; only for schedules that are found by search.",
)
@click.option("--max-mean-staleness", type=FiniteRange(0), help="Largest allowed mean delay of gradients, in updates.")
@click.option(
    "--weight-grad-share",
    type=float,
    default=1.0,
    help="Share of an activation that stays in memory from the input gradient to the weight gradient; only for schedules found by search.",
)
@click.option(
    "--branches",
    metavar="WORK,WORK,...",
    callback=_branches,
    help="Relative work of each branch of the model, as in 1,1 or 1,2; only for branch-aware. The times are those of one of as many "
    "stages as there are devices of a branch of work 1.",
)
@click.option("--coupled", is_flag=True, help="One loss takes all microbatches of an update; only for branch-aware.")
@click.option("--split", is_flag=True, help="Split backwards into input and weight gradients; only for branch-aware.")
@click.option("--format", "format_name", type=click.Choice(_FORMATS), help="Format of the output.  [default: grid]")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="FILE",
    help="File to write; without --format, its suffix chooses the format: .csv, .json, .svg, .html or .txt (a grid).",
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
    branches: tuple[float, ...],
    coupled: bool,
    split: bool,
    format_name: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Build, validate and simulate the schedule NAME with equal stages.

    Times are per stage: a device with two chunks has two stages, each with these times. `raypipe schedules` lists the names; a schedule of
    your own is named by its file, order.csv or order.json, or by its function, file.py:function or module:function.
    """
    if as_json and format_name and not output:
        raise click.UsageError("--json and --format both write to stdout; give --format a file with -o, or leave one of them out")
    if output:
        if not format_name:
            output_suffix(output, *_FORMAT_OF_SUFFIX)
        check_output(output, name if schedule_registry.is_file(name) else None)
    spec = schedule_registry.spec(name)
    times = stage_seconds(forward, backward, weight_grad, latency)
    request = ScheduleRequest(
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
        branches=branches,
        coupled=coupled,
        split=split,
    )
    if (branches or coupled or split) and (spec.stage_work is None or schedule_registry.is_file(name)):
        raise click.UsageError(f"--branches, --coupled and --split are for branch-aware; {name} has stages of its own")
    refuse_large(spec, request)
    built = catalogue.of_size(spec, request)
    validate(built)
    limits = StalenessLimits(max_mean_staleness=max_mean_staleness)
    if too_stale := limits.exceeded_by(metrics(built)):
        needed = too_stale["max_mean_staleness"]
        problem = f"{name} is {needed:g} updates late on average; use --max-mean-staleness {needed:g}"
        raise ScheduleError(f"{problem}, more microbatches, or the schedule 'amdp-auto'")
    figures = figures_of(spec, built, request, times)
    if output:
        format_name = format_name or _FORMAT_OF_SUFFIX[output_suffix(output, *_FORMAT_OF_SUFFIX)]
        write_text(output, _text_of(format_name, figures))
        if format_name in {"csv", "torch-csv"} and built.weight_rule.overlaps_updates:
            text = f"{output} holds the order alone: read again, it is a synchronous schedule"
            click.echo(f"{text}; a .json file keeps how {name} finds its weights", err=True)
    if as_json:
        print_json(schedule_report(figures).document())
    elif not output:
        if format_name in {None, "grid"}:
            print_schedule(console(), figures)
        else:
            click.echo(_text_of(format_name, figures), nl=False)


def _text_of(format_name: str | None, figures: ScheduleFigures) -> str:
    match format_name:
        case "csv":
            return to_csv(figures.schedule.programs)
        case "torch-csv":
            return to_torch_csv(figures.schedule.programs)
        case "json":
            return to_json(figures.schedule, figures.work)
        case "svg":
            from raypipe.show.svg import draw_traces  # noqa: PLC0415  # slow to load, and the grid does without

            return draw_traces([figures.trace])
        case "html":
            from raypipe.show.page import draw_page  # noqa: PLC0415  # slow to load, and the grid does without

            return draw_page([figures.trace])
        case _:
            with (screen := console(plain=True)).capture() as capture:
                print_schedule(screen, figures)
            return capture.get()


def print_schedule(screen: Console, figures: ScheduleFigures) -> None:
    """Draw a simulated schedule and print its figures."""
    schedule = figures.schedule
    chunks = "" if schedule.num_stages == schedule.num_workers else f", {schedule.num_stages} stages"
    pipelines = "" if len(schedule.pipelines) == 1 else f", {len(schedule.pipelines)} pipelines"
    report = schedule_report(figures)
    screen.print(
        f"{schedule.name}: {counted(schedule.num_workers, 'device')}{chunks}{pipelines}, "
        f"{counted(schedule.num_microbatches, 'microbatch')} an update, {counted(schedule.num_updates, 'update')}",
        style="bold",
    )
    screen.print()
    screen.print(timed_grid(figures.trace, width=screen.width))
    screen.print()
    screen.print(report.table(left=2))
    screen.print(f"\n{report.sentence()}")
