"""Command `raypipe show`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from raypipe.analysis.idle import divide
from raypipe.analysis.schedule_figures import ScheduleFigures, StageSeconds, simulated
from raypipe.artifacts import codec
from raypipe.artifacts import plan as plan_file
from raypipe.artifacts import profile as profile_file
from raypipe.artifacts import schedule as schedule_file
from raypipe.artifacts import topology as topology_file
from raypipe.artifacts import trace as trace_file
from raypipe.artifacts.files import write_text
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.schedule import SizedSchedule
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.cli.options import example, json_option, output_suffix
from raypipe.cli.schedule import print_schedule
from raypipe.cli.screen import console, print_json
from raypipe.errors import FormatError, InputError, suggestion
from raypipe.show.causes import findings
from raypipe.show.differences import difference_reports, names
from raypipe.show.grid import timed_grid, timed_grids
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.run_sections import RunData
from raypipe.show.schedules import schedule_report
from raypipe.show.tables import link_table, node_table, plan_table, profile_report, profile_table, topology_report
from raypipe.show.traces import idle_report, link_report, plan_trace_report, trace_report
from raypipe.simulation.simulator import simulate
from raypipe.units import seconds

Content = SizedSchedule | Plan | ClusterTopology | ModelProfile | Trace

_LOADERS: Mapping[str, Callable[[str], Content]] = {
    schedule_file.FORMAT: schedule_file.load_schedule,
    plan_file.FORMAT: Plan.load,
    topology_file.FORMAT: ClusterTopology.load,
    profile_file.FORMAT: ModelProfile.load,
    trace_file.FORMAT: Trace.load,
}


@dataclass(frozen=True)
class _Drawing:
    report: Report
    text: Callable[[Console], None]
    traces: tuple[Trace, ...] = ()
    run: RunData | None = None


@click.command(
    epilog=example(
        "raypipe show schedule.csv",
        "raypipe show cluster_configs/laptop.yaml -o laptop.svg",
        "raypipe show trace.json -o trace.html",
        "raypipe show predicted.json measured.json -o both.html",
        "raypipe show runs/gpt -o gpt.html",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="FILE|RUN [FILE]", type=click.Path())
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="OUT",
    help="File to draw to in place of the terminal: .html for an interactive page, .svg for a picture.",
)
@json_option
def show(files: tuple[str, ...], *, output: str | None, as_json: bool) -> None:
    """Draw a schedule, plan, topology, profile, trace or the folder of a run; two traces one above the other, with their differences.

    Schedules, which have no times, are drawn with F = 1 s and B = 2 s, times the work of a stage where the file states it.
    """
    suffix = output_suffix(output, "svg", "html") if output else ""
    if len(files) > 2:
        raise click.UsageError(f"{len(files)} files; show one, or two traces")
    if os.path.isdir(files[0]) and len(files) == 1:
        drawing = _of_run(files[0])
        content: Content = drawing.traces[-1]
    else:
        contents = [_load(path) for path in files]
        drawing, content = _of_pair(files, contents) if len(files) == 2 else _of_one(contents[0]), contents[0]
    if output:
        write_text(output, _document(content, drawing, suffix))
    if as_json:
        print_json(drawing.report.document())
    elif not output:
        drawing.text(console())


def _load(path: str) -> Content:
    if path.endswith(".csv"):
        return schedule_file.load_csv(path)
    name = codec.read_format(path)
    if name not in _LOADERS:
        choices = ", ".join(_LOADERS)
        raise FormatError(path, "format", f"cannot show {name!r}{suggestion(name, _LOADERS)}; what can be shown: {choices}")
    return _LOADERS[name](path)


def _document(content: Content, drawing: _Drawing, suffix: str) -> str:
    # Slow to load, and the terminal does without.
    from raypipe.show.network import draw_topology  # noqa: PLC0415
    from raypipe.show.page import draw_page  # noqa: PLC0415
    from raypipe.show.svg import draw_traces  # noqa: PLC0415

    if drawing.traces:
        return draw_page(drawing.traces, drawing.run) if suffix == "html" else draw_traces(drawing.traces)
    if not isinstance(content, ClusterTopology):
        raise InputError("a profile is drawn to the terminal only; leave -o out")
    if suffix == "html":
        raise InputError("a page shows times, and a topology has none; write an SVG file")
    return draw_topology(content)


def _of_one(content: Content) -> _Drawing:
    match content:
        case SizedSchedule():
            return _of_schedule(content)
        case Plan():
            return _of_plan(content)
        case ClusterTopology():
            return _of_topology(content)
        case ModelProfile():
            return _of_profile(content)
        case Trace():
            return _of_trace(content)


def _of_run(path: str) -> _Drawing:
    from raypipe.training.run_data import read_run  # noqa: PLC0415  # slow to load

    shown = read_run(Path(path))
    run, traces = shown.data, shown.traces or (simulate(shown.data.plan),)
    losses, validations, speeds = run.points("loss"), run.points("validation_loss"), run.points(run.speed)
    report = Report(
        Figure("run", run.name),
        Figure("updates", losses[-1][0] if losses else 0, "updates"),
        Figure("first_loss", losses[0][1] if losses else None, "first loss", "{:.4g}".format),
        Figure("loss", losses[-1][1] if losses else None, "last loss", "{:.4g}".format),
        Figure("validation_loss", validations[-1][1] if validations else None, "validation loss", "{:.4g}".format),
        Figure(run.speed, speeds[-1][1] if speeds else None, "speed", lambda speed: f"{speed:,.0f} {run.unit}"),
        Figure("notes", list(run.notes)),
        Figure("traces", [_with_idle(trace_report(trace), trace) for trace in traces]),
    )

    def text(screen: Console) -> None:
        screen.print(f"run {run.name}", style="bold")
        screen.print(f"{report.sentence()}\n")
        for note in run.notes:
            screen.print(f"{note}\n")
        screen.print(plan_table(run.plan))
        screen.print()
        _print_trace(screen, traces[-1].of_updates(0, 1) if shown.traces else traces[-1])
        if len(traces) == 2:
            screen.print("\npredicted and measured", style="bold")
            screen.print(rows_table(difference_reports(*traces)))

    return _Drawing(report, text, traces, run)


def _of_schedule(sized: SizedSchedule) -> _Drawing:
    trace = simulated(sized.schedule, StageSeconds(), sized.work)
    figures = ScheduleFigures(sized.schedule, trace, None, trace.steady_update_s, sized.work)

    def text(screen: Console) -> None:
        print_schedule(screen, figures)
        _print_idle(screen, trace)

    return _Drawing(_with_idle(schedule_report(figures), trace), text, (trace,))


def _with_idle(report: Report, trace: Trace) -> Report:
    links = [Figure("links", link_report(trace))] if trace.by_link else []
    return Report(*report.figures, Figure("idle", idle_report(divide(trace))), *links)


def _of_plan(plan: Plan) -> _Drawing:
    trace = simulate(plan)

    def text(screen: Console) -> None:
        screen.print(f"plan {plan.name}, made by {plan.planner}: {plan.schedule.name} on {plan.topology.name}", style="bold")
        screen.print(plan_table(plan))
        screen.print()
        _print_trace(screen, trace)

    return _Drawing(_with_idle(plan_trace_report(plan, trace), trace), text, (trace,))


def _of_trace(trace: Trace) -> _Drawing:
    return _Drawing(_with_idle(trace_report(trace), trace), lambda screen: _print_trace(screen, trace), (trace,))


def _print_trace(screen: Console, trace: Trace) -> None:
    _print_grid(screen, f"{trace.source}: {trace.name}", timed_grid(trace, width=screen.width))
    report = trace_report(trace)
    screen.print(report.table())
    screen.print(f"\n{report.sentence()}")
    _print_idle(screen, trace)


def _print_grid(screen: Console, title: str, grid: Text) -> None:
    screen.print(title, style="bold")
    screen.print()
    screen.print(grid)
    screen.print()


def _print_idle(screen: Console, trace: Trace) -> None:
    division = divide(trace)
    screen.print(f"\nwhere the {seconds(trace.makespan_s)} of each device went", style="bold")
    screen.print(idle_report(division).table())
    for sentence in findings(division):
        screen.print(f"\n{sentence}")
    if trace.by_link:
        screen.print("\nwhat passed between devices", style="bold")
        screen.print(link_report(trace).table())


def _of_topology(topology: ClusterTopology) -> _Drawing:
    report = topology_report(topology)

    def text(screen: Console) -> None:
        screen.print(f"topology {topology.name}", style="bold")
        for table in (node_table(topology), link_table(topology)):
            if table.rows:
                screen.print(table)
                screen.print()
        screen.print(report.sentence())

    return _Drawing(report, text)


def _of_profile(profile: ModelProfile) -> _Drawing:
    report = profile_report(profile)

    def text(screen: Console) -> None:
        screen.print(f"profile {profile.name}, microbatches of {profile.microbatch_size}", style="bold")
        screen.print(profile_table(profile))
        screen.print(f"\n{report.sentence()}")

    return _Drawing(report, text)


def _of_pair(files: tuple[str, ...], contents: list[Content]) -> _Drawing:
    traces = []
    for path, content in zip(files, contents, strict=True):
        if not isinstance(content, Trace):
            raise InputError(f"{path}: two files are compared only where both are traces; `raypipe simulate PLAN -o trace.json` makes one")
        traces.append(content)
    first, second = traces
    compared = difference_reports(first, second)

    def text(screen: Console) -> None:
        for trace, word, grid in zip(traces, names(first, second), timed_grids(traces, width=screen.width), strict=True):
            _print_grid(screen, f"{word}: {trace.name}", grid)
        screen.print(rows_table(compared))

    report = Report(Figure("traces", [_with_idle(trace_report(trace), trace) for trace in traces]), Figure("differences", compared))
    return _Drawing(report, text, (first, second))
