"""The figures of schedules and traces, as `--json` prints them."""

from __future__ import annotations

import math
from typing import Any

from raypipe.analysis.idle import IDLE, Division
from raypipe.artifacts.trace import Trace
from raypipe.errors import InputError
from raypipe.schedules.ir import Schedule
from raypipe.schedules.metrics import metrics


def schedule_figures(schedule: Schedule, trace: Trace, *, steady_update_s: float) -> dict[str, Any]:
    """The figures of a valid schedule and its simulated trace; the keys are a contract.

    Args:
        schedule: the order.
        trace: of the same order.
        steady_update_s: time per update far from the ends of a long window.
    """
    known = metrics(schedule)
    _require_finite(trace)
    return {
        "schedule": schedule.name,
        "num_devices": schedule.num_workers,
        "num_stages": schedule.num_stages,
        "num_pipelines": len(schedule.pipelines),
        "num_microbatches": schedule.num_microbatches,
        "num_updates": schedule.num_updates,
        "update_scope": str(schedule.update_scope),
        "weight_rule": str(schedule.weight_rule),
        "makespan_s": trace.makespan_s,
        "busy_s": list(trace.busy_s),
        "span_s": list(trace.span_s),
        "idle_s": list(trace.idle_s),
        "bubble_ratio": trace.bubble_ratio,
        "peak_in_flight": list(known.peak_in_flight),
        "weight_copies": list(known.weight_copies),
        "max_mismatch": known.max_mismatch,
        "max_delay": known.max_delay,
        "mean_delay": known.mean_delay,
        "steady_update_s": steady_update_s,
    }


def trace_figures(trace: Trace) -> dict[str, Any]:
    """The figures of a trace; the keys are a contract."""
    _require_finite(trace)
    return {
        "name": trace.name,
        "source": str(trace.source),
        "devices": list(trace.devices),
        "num_updates": trace.num_updates,
        "makespan_s": trace.makespan_s,
        "update_s": trace.update_s,
        "bubble_ratio": trace.bubble_ratio,
        "device_bubble_ratios": list(trace.device_bubble_ratios),
        "busy_s": list(trace.busy_s),
        "wait_s": list(trace.wait_s),
        "span_s": list(trace.span_s),
        "peak_memory_bytes": list(trace.peak_memory_bytes),
    }


def idle_figures(division: Division) -> dict[str, Any]:
    """Where the time of each device went; for each device the seconds of computing and of all causes sum to the makespan."""
    kinds = sorted({kind for row in division.compute_s for kind in row})
    return {
        "compute_s": {kind: [row.get(kind, 0.0) for row in division.compute_s] for kind in kinds},
        "causes_s": {str(cause): [row.get(cause, 0.0) for row in division.by_cause_s] for cause in IDLE},
        "waits": [{"device": wait.device, "for": wait.peer, "wait_s": wait.wait_s} for wait in division.waits],
        "traced_back": [
            {"to": str(culprit.root), "device": culprit.device, "sender": culprit.sender, "wait_s": culprit.wait_s}
            for culprit in division.culprits
        ],
    }


def _require_finite(trace: Trace) -> None:
    """Refuses a trace of durations that are numbers each, but whose sum is none.

    Raises:
        InputError: says so.
    """
    if not all(map(math.isfinite, (trace.makespan_s, *trace.busy_s, *trace.wait_s))):
        raise InputError(f"{trace.name}: its times add up to more than a number can hold; use shorter times, or faster devices and links")
