"""A simulated schedule in figures."""

from __future__ import annotations

from raypipe.analysis.schedule_figures import ScheduleFigures
from raypipe.schedules.metrics import ScheduleMetrics
from raypipe.show.report import Figure, Report
from raypipe.show.traces import require_finite
from raypipe.units import ratio, seconds


def schedule_report(figures: ScheduleFigures, metrics: ScheduleMetrics | None = None) -> Report:
    """Return the figures of a schedule, by default with the metrics of its window; the names are a contract."""
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
        Figure("steady_update_s", figures.steady_update_s, "update far from the ends", seconds),
        Figure("max_mismatch", known.max_mismatch, "mismatch"),
        Figure("max_delay", known.max_delay, "delay"),
        Figure("mean_delay", known.mean_delay, "mean delay", "{:.2g}".format),
        Figure("", list(trace.devices), "device"),
        Figure("", [" ".join(map(str, sorted(held))) for held in stages], "stages"),
        Figure("busy_s", list(trace.busy_s), "busy", seconds),
        Figure("span_s", list(trace.span_s)),
        Figure("idle_s", list(trace.idle_s), "idle", seconds),
        Figure("peak_in_flight", list(known.peak_in_flight), "peak in flight"),
        Figure("weight_copies", list(known.weight_copies), "weight copies"),
    )
