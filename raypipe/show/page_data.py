"""The timeline of a page as JSON: columns and whole ticks, so that 200,000 spans take some four megabytes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from raypipe.analysis.idle import Cause, Division
from raypipe.artifacts.trace import SpanItem, Trace, item_text
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Direction, Message
from raypipe.show.causes import MEANINGS, NAMES
from raypipe.show.labels import KIND_NAMES, Labels, colour
from raypipe.show.lanes import Lane, lanes_to
from raypipe.show.view import View, has_memory

_DIGITS = 9  # of the window's length


def page_data(views: Sequence[View]) -> str:
    """Return JSON that cannot end its HTML element."""
    labels = Labels(*(view.trace for view in views))
    content = {
        "with_stage": labels.with_stage,
        "kinds": {str(kind): {"name": KIND_NAMES[kind], "colour": colour(kind), "odd": colour(kind, 1)} for kind in OpKind},
        "causes": [{"key": str(cause), "name": NAMES[cause], "meaning": MEANINGS[cause]} for cause in Cause],
        "branches": [{"letter": branch.letter, "name": branch.name, "colour": branch.colour} for branch in labels.branches.values()],
        "traces": [_trace_data(view, labels) for view in views],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _trace_data(view: View, labels: Labels) -> dict[str, Any]:
    trace, division = view.trace, view.division
    ticks = _Ticks(trace)
    memory = [{"step": _steps([ticks.of(at_s) for at_s, _ in steps]), "bytes": [held for _, held in steps]} for steps in trace.memory]
    return {
        "word": view.word,
        "name": trace.name,
        "tick_s": ticks.tick_s,
        "end": ticks.of(trace.makespan_s),
        "updates": [ticks.of(end_s) for end_s in trace.update_ends_s],
        "devices": view.labels,
        "branches": [labels.branches[name].number if name else -1 for name in trace.branches],
        "words": view.device_words,
        "bubbles": [round(bubble, 6) for bubble in trace.device_bubble_ratios],
        "rows": [_row_data(division, device, ticks) for device in range(len(trace.devices))],
        "messages": [[_lane_data(lane, ticks) for lane in lanes] for lanes in lanes_to(trace)],
        "memory": memory if has_memory(trace) else [],
    }


class _Ticks:
    # A tick is the longest unit of which all times are multiples.
    def __init__(self, trace: Trace) -> None:
        whole_s = trace.makespan_s
        exponent = math.floor(math.log10(whole_s)) - _DIGITS + 1 if whole_s > 0 else 0
        self._fine_s = 10.0 ** max(exponent, -300)
        self._factor = 1
        times = {time_s for span in trace.spans for time_s in (span.start_s, span.end_s)}
        times.update(at_s for steps in trace.memory for at_s, _ in steps)
        self._factor = math.gcd(*map(self.of, times)) or 1
        self.tick_s = self._fine_s * self._factor

    def of(self, time_s: float) -> int:
        return round(max(time_s, 0.0) / self._fine_s) // self._factor


def _row_data(division: Division, device: int, ticks: _Ticks) -> dict[str, Any]:
    codes = {cause: chr(ord("a") + position) for position, cause in enumerate(Cause)}
    lengths, causes, written, peers, sizes = [], [], [], [], []
    at = 0
    for interval in division.intervals[device]:
        end = ticks.of(interval.end_s)
        if end <= at:  # shorter than can be drawn
            continue
        lengths.append(end - at)
        causes.append(codes[interval.cause])
        written.append(_short(interval.item))
        if interval.cause is not Cause.COMPUTE:
            peers.append(-1 if interval.peer is None else interval.peer)
            sizes.append(interval.bytes)
        at = end
    return {"length": lengths, "cause": "".join(causes), "name": written, "peer": peers, "bytes": _column(sizes)}


def _lane_data(lane: Lane, ticks: _Ticks) -> dict[str, Any]:
    starts = [ticks.of(span.start_s) for span in lane.spans]
    return {
        "from": -1 if lane.sender is None else lane.sender,
        "step": _steps(starts),
        "length": [ticks.of(span.end_s) - start for span, start in zip(lane.spans, starts, strict=True)],
        "name": [_short(span.item) for span in lane.spans],
        "bytes": _column([span.bytes for span in lane.spans]),
    }


def _steps(times: Sequence[int]) -> list[int]:
    return [time - before for time, before in zip(times, [0, *times], strict=False)]


def _column(values: list[int]) -> list[int] | int:
    return values[0] if values and len(set(values)) == 1 else values


def _short(item: SpanItem | None) -> str:
    match item:
        case Message():
            letter = "A" if item.direction is Direction.ACTIVATION else "G"  # such as A0>1:3
            return f"{letter}{item.source}>{item.target}:{item.index}" + (f".{item.part}" if item.part else "")
        case tuple():
            return item_text(item)
        case _:
            return f" {item}" if item else ""
