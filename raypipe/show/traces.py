"""Figures of traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from raypipe.analysis.idle import IDLE, Cause, Division
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Trace
from raypipe.errors import InputError
from raypipe.show.devices import device_labels, labels_of
from raypipe.show.report import Figure, Report
from raypipe.units import ratio, seconds, size


def trace_report(trace: Trace, memory_bytes: Sequence[int | None] = ()) -> Report:
    """Return the figures of a trace, with the memory of each device beside its peak; names are JSON keys."""
    require_finite(trace)
    limits = memory_bytes or [None] * len(trace.devices)
    peaks = [
        size(peak) + (f" of {size(limit)}" if limit is not None else "")
        for peak, limit in zip(trace.peak_memory_bytes, limits, strict=bool(trace.memory))
    ]
    return Report(
        Figure("name", trace.name),
        Figure("source", str(trace.source)),
        Figure("num_updates", trace.num_updates),
        Figure("update_s", trace.update_s, "update", seconds),
        Figure("bubble_ratio", trace.bubble_ratio, "bubble", ratio),
        Figure("makespan_s", trace.makespan_s, "makespan", seconds),
        Figure("devices", list(trace.devices)),
        Figure("", labels_of(trace), "device"),
        Figure("busy_s", list(trace.busy_s), "busy", seconds),
        Figure("wait_s", list(trace.wait_s), "waiting", seconds),
        Figure("device_bubble_ratios", list(trace.device_bubble_ratios), "bubble", ratio),
        Figure("span_s", list(trace.span_s)),
        Figure("peak_memory_bytes", list(trace.peak_memory_bytes)),
        Figure("branches", list(trace.branches)),
        *([Figure("", peaks, "peak memory")] if peaks else []),
    )


def plan_trace_report(plan: Plan, trace: Trace) -> Report:
    """Return the figures of a plan's simulated trace."""
    return Report(
        Figure("plan", plan.name),
        Figure("planner", plan.planner),
        Figure("schedule", plan.schedule.name),
        Figure("topology", plan.topology.name),
        *trace_report(trace, [plan.topology.device(name).memory_bytes for name in plan.devices]).figures,
    )


def require_finite(trace: Trace) -> None:
    """Raise `InputError` if times add up to infinity."""
    if not all(map(math.isfinite, (trace.makespan_s, *trace.busy_s, *trace.wait_s))):
        raise InputError(f"{trace.name}: its times add up to more than a number can hold; use shorter times, or faster devices and links")


_IDLE_COLUMNS: Mapping[str, Sequence[Cause]] = {
    "comput-\ning": [Cause.COMPUTE],
    "warm-\nup": [Cause.WARM_UP],
    "acti-\nvation": [Cause.ACTIVATION],
    "gra-\ndient": [Cause.GRADIENT],
    "another\nbranch": [Cause.OTHER_BRANCH],
    "collec-\ntive": [Cause.COLLECTIVE],
    "trans-\nfer": [cause for cause in Cause if cause.is_transfer],
    "over-\nhead": [Cause.OVERHEAD],
    "drain": [Cause.DRAIN],
}
_LEAST_SHARE = 0.0005


def idle_report(division: Division) -> Report:
    """Return where the time of each device went: seconds in the document; shares and the longest wait's peer in the table."""
    whole_s = division.trace.makespan_s or 1.0
    columns = {
        name: [sum(row.get(cause, 0.0) for cause in causes) / whole_s for row in division.by_cause_s]
        for name, causes in _IDLE_COLUMNS.items()
    }
    kinds = sorted({kind for row in division.compute_s for kind in row})
    labels = device_labels(division.trace.devices, division.stages)
    longest = {wait.device: labels[wait.peer] for wait in reversed(division.waits)}  # the last to be set is the longest
    return Report(
        Figure("compute_s", {kind: [row.get(kind, 0.0) for row in division.compute_s] for kind in kinds}),
        Figure("causes_s", {str(cause): [row.get(cause, 0.0) for row in division.by_cause_s] for cause in IDLE}),
        Figure("waits", [dict(zip(("device", "for", "wait_s"), wait, strict=True)) for wait in division.waits]),
        Figure("traced_back", [dict(zip(("to", "device", "sender", "wait_s"), culprit, strict=True)) for culprit in division.culprits]),
        Figure("", labels, "device"),
        *(
            Figure("", shares, name, ratio)
            for name, shares in columns.items()
            if Cause.COMPUTE in _IDLE_COLUMNS[name] or any(share >= _LEAST_SHARE for share in shares)
        ),
        Figure("", [longest.get(device) for device in range(len(labels))], "waits for"),
    )
