"""Schedules side by side at one size."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.analysis.schedule_comparison import ComparedSchedule
from raypipe.show.report import Figure, Report
from raypipe.show.schedules import schedule_report
from raypipe.units import number, ratio, seconds

LEGEND = (
    "in flight, weight copies: the most that a device holds, from the least to the most loaded device;",
    "  1 is one stage where each device has one, so that schedules with smaller stages compare",
    "messages: sent for one update, and by the busiest device; volume: 1 is that of one stage a device",
    "over bound: time of an update over the least that any order of these stages could take",
)


def comparison_report(compared: ComparedSchedule) -> Report:
    """Return a row of the comparison; the names of its figures are a contract."""
    figures, known = compared.figures, compared.figures.steady_metrics
    schedule, trace = figures.schedule, figures.trace
    return Report(
        *schedule_report(figures, known).silent(),
        Figure("schedule", compared.name, "schedule"),
        Figure("num_stages", schedule.num_stages, "stages"),
        Figure("num_pipelines", len(schedule.pipelines), "pipe-\nlines"),
        Figure("makespan_s", trace.makespan_s, "makespan", seconds),
        Figure("steady_update_s", figures.steady_update_s, "steady\nupdate", seconds),
        Figure("bubble_ratio", trace.bubble_ratio, "bubble", ratio),
        Figure("over_lower_bound", compared.over_lower_bound, "over\nbound", "x{:.2f}".format),
        Figure("peak_in_flight_shares", tuple(held * compared.share for held in known.peak_in_flight), "in flight", _range),
        Figure("weight_copies_shares", tuple(copies * compared.share for copies in known.weight_copies), "weight\ncopies", _range),
        Figure("messages_per_update", sum(compared.num_messages), "messages", number),
        Figure("max_device_messages_per_update", max(compared.num_messages), "most\nsent", number),
        Figure("relative_message_volume", compared.message_volume, "volume", "{:.2f}".format),
        Figure("max_mismatch", known.max_mismatch, "mis-\nmatch"),
        Figure("max_delay", known.max_delay, "delay"),
        Figure("lower_bound_s", compared.lower_bound_s),
    )


def _range(shares: Sequence[float]) -> str:
    least, most = (f"{share:.3g}" for share in (min(shares), max(shares)))
    return least if least == most else f"{least}..{most}"
