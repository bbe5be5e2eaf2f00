"""Figures of traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from raypipe.analysis.idle import IDLE, Cause, Division
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Dimension, Trace, covered_s, dimension
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


_COMPUTING, _OVERHEAD, _DRAIN = "comput-\ning", "over-\nhead", "drain"
_IDLE_COLUMNS: Mapping[str, Sequence[Cause]] = {
    _COMPUTING: [Cause.COMPUTE],
    "warm-\nup": [Cause.WARM_UP],
    "acti-\nvation": [Cause.ACTIVATION],
    "gra-\ndient": [Cause.GRADIENT],
    "another\nbranch": [Cause.OTHER_BRANCH],
    "collec-\ntive": [Cause.COLLECTIVE],
    "data": [Cause.DATA],
    _OVERHEAD: [Cause.OVERHEAD],
    _DRAIN: [Cause.DRAIN],
}
_CARRIED: Mapping[Dimension, str] = {Dimension.MESSAGE: "messages", Dimension.SUM: "sums", Dimension.NORM: "norms"}
_EXPOSED: Mapping[Dimension, str] = {
    Dimension.MESSAGE: "exposed\nmessages",
    Dimension.SUM: "exposed\nsums",
    Dimension.NORM: "exposed\nnorms",
}
_LEAST_SHARE = 0.0005


def link_report(trace: Trace) -> Report:
    """Return what passed each link between two devices, and for how long: bytes and seconds in the document, the busy share in the table.

    A link is busy while something is on its way. Only links whose transfers are known have a row.
    """
    whole_s = trace.makespan_s or 1.0
    labels = labels_of(trace)
    links = {link: [span for span in spans if dimension(span.item) is not None] for link, spans in trace.by_link.items()}
    carried = {kind: [sum(span.bytes for span in spans if dimension(span.item) is kind) for spans in links.values()] for kind in Dimension}
    busy_s = [covered_s((span.start_s, span.end_s) for span in spans) for spans in links.values()]
    totals = map(sum, zip(*carried.values(), strict=True))
    return Report(
        Figure("from", [source for source, _ in links]),
        Figure("to", [target for _, target in links]),
        Figure("", [f"{labels[source]} -> {labels[target]}" for source, target in links], "link"),
        *(
            Figure(f"{kind}_bytes", sizes, _CARRIED[kind] if any(sizes) else "", lambda count: size(count) if count else "-")
            for kind, sizes in carried.items()
        ),
        Figure("busy_s", busy_s),
        Figure("busy_ratio", [lasts_s / whole_s for lasts_s in busy_s], "busy", ratio),
        Figure(
            "", [total / lasts_s if lasts_s else None for total, lasts_s in zip(totals, busy_s, strict=True)], "rate while\nbusy", _rate
        ),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


def idle_report(division: Division) -> Report:
    """Return where the time of each device went: seconds in the document; shares and the longest wait's peer in the table."""
    whole_s = division.trace.makespan_s or 1.0
    columns = {
        name: [sum(row.get(cause, 0.0) for cause in causes) / whole_s for row in division.by_cause_s]
        for name, causes in _IDLE_COLUMNS.items()
    }
    exposed = {name: [row.get(carried, 0.0) / whole_s for row in division.exposed_s] for carried, name in _EXPOSED.items()}
    drained = {name: columns.pop(name) for name in (_OVERHEAD, _DRAIN)}
    columns |= exposed | drained
    kinds = sorted({kind for row in division.compute_s for kind in row})
    labels = device_labels(division.trace.devices, division.stages)
    longest = {wait.device: labels[wait.peer] for wait in reversed(division.waits)}  # the last to be set is the longest
    return Report(
        Figure("compute_s", {kind: [row.get(kind, 0.0) for row in division.compute_s] for kind in kinds}),
        Figure("causes_s", {str(cause): [row.get(cause, 0.0) for row in division.by_cause_s] for cause in IDLE}),
        Figure("exposed_s", {str(carried): [row.get(carried, 0.0) for row in division.exposed_s] for carried in Dimension}),
        Figure("waits", [dict(zip(("device", "for", "wait_s"), wait, strict=True)) for wait in division.waits]),
        Figure("traced_back", [dict(zip(("to", "device", "sender", "wait_s"), culprit, strict=True)) for culprit in division.culprits]),
        Figure("", labels, "device"),
        *(
            Figure("", shares, name, ratio)
            for name, shares in columns.items()
            if name == _COMPUTING or any(share >= _LEAST_SHARE for share in shares)
        ),
        Figure("", [longest.get(device) for device in range(len(labels))], "waits for"),
    )
