"""Figures of simulated schedules."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.analysis.schedule_comparison import ComparedSchedule
from raypipe.analysis.schedule_figures import ScheduleFigures
from raypipe.schedules.metrics import ScheduleMetrics
from raypipe.show.report import Figure, Report
from raypipe.show.traces import require_finite
from raypipe.units import number, ratio, seconds

LEGEND = (
    "over bound: steady update over the least that any order of the stages takes",
    "in flight, weight copies: the most that a device holds, least to most loaded;",
    "  1 is a stage where each device has one, so that smaller stages compare",
    "messages: of an update, and those of the device that sends most;",
    "  volume: of all, 1 is one stage a device",
)


def schedule_report(figures: ScheduleFigures, metrics: ScheduleMetrics | None = None) -> Report:
    """Return the figures of a schedule, by default with the metrics of its window; names are JSON keys."""
    schedule, trace, known = figures.schedule, figures.trace, metrics or figures.metrics
    require_finite(trace)
    stages: list[list[int]] = [[] for _ in range(schedule.num_workers)]
    for holder in schedule.first_pipeline:
        stages[holder.worker].append(holder.stage)
    return Report(
        Figure("schedule", schedule.name),
        Figure("num_devices", schedule.num_workers),
        Figure("num_stages", schedule.num_stages),
        Figure("num_pipelines", len(schedule.pipelines)),
        Figure("num_microbatches", schedule.num_microbatches),
        Figure("num_updates", schedule.num_updates),
        Figure("update_scope", str(schedule.update_scope)),
        Figure("weight_rule", str(schedule.weight_rule)),
        Figure("makespan_s", trace.makespan_s, "makespan", seconds),
        Figure("bubble_ratio", trace.bubble_ratio, "bubble", ratio),
        Figure("steady_update_s", figures.steady_update_s, "steady update", seconds),
        Figure("max_mismatch", known.max_mismatch, "mismatch"),
        Figure("max_delay", known.max_delay, "delay"),
        Figure("mean_delay", known.mean_delay, "mean delay" if known.max_delay else "", "{:.2g}".format),
        Figure("", list(trace.devices), "device"),
        Figure("", [" ".join(map(str, sorted(held))) for held in stages], "stages"),
        Figure("busy_s", list(trace.busy_s), "busy", seconds),
        Figure("span_s", list(trace.span_s)),
        Figure("idle_s", list(trace.idle_s), "idle", seconds),
        Figure("peak_in_flight", list(known.peak_in_flight), "peak in flight"),
        Figure("weight_copies", list(known.weight_copies), "weight copies"),
    )


def comparison_report(compared: ComparedSchedule) -> Report:
    """Return a row of the comparison; names are JSON keys."""
    figures, known = compared.figures, compared.figures.steady_metrics
    schedule, trace = figures.schedule, figures.trace
    return Report(
        *schedule_report(figures, known).silent(),
        Figure("schedule", compared.name, "schedule"),
        Figure("makespan_s", trace.makespan_s, "makespan", seconds),
        Figure("steady_update_s", figures.steady_update_s, "steady\nupdate", seconds),
        Figure("bubble_ratio", trace.bubble_ratio, "bubble", ratio),
        Figure("over_lower_bound", compared.over_lower_bound, "over\nbound", "x{:.2f}".format),
        Figure("max_mismatch", known.max_mismatch, "mis-\nmatch"),
        Figure("max_delay", known.max_delay, "delay"),
        Figure("peak_in_flight_shares", tuple(held * compared.share for held in known.peak_in_flight), "in flight", _range),
        # A terminal of 80 columns goes on here with a second table.
        Figure("weight_copies_shares", tuple(copies * compared.share for copies in known.weight_copies), "weight\ncopies", _range),
        Figure("num_stages", schedule.num_stages, "stages"),
        Figure("num_pipelines", len(schedule.pipelines), "pipe-\nlines"),
        Figure("messages_per_update", sum(compared.num_messages), "messages", number),
        Figure("max_device_messages_per_update", max(compared.num_messages), "most\nsent", number),
        Figure("relative_message_volume", compared.message_volume, "volume", "{:.2f}".format),
        Figure("lower_bound_s", compared.lower_bound_s),
    )


def _range(shares: Sequence[float]) -> str:
    least, most = (f"{share:.3g}" for share in (min(shares), max(shares)))
    return least if least == most else f"{least}..{most}"
