"""Two traces figure by figure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.trace import Source, Trace
from raypipe.schedules.ir import Op, OpKind
from raypipe.show.devices import device_words, spoken, stages_of
from raypipe.show.report import Figure, Report
from raypipe.units import ratio, seconds, size

_WORDS = {Source.SIMULATED: "predicted", Source.REHEARSED: "rehearsed", Source.MEASURED: "measured"}


def differences(first: Trace, second: Trace, devices: Sequence[str]) -> list[ComparedFigure]:
    """Compare two traces and those of their devices that both have; the first is `predicted`, `devices` are names for its own."""
    figures = [
        ("update time", "s", first.update_s, second.update_s),
        ("makespan", "s", first.makespan_s, second.makespan_s),
        ("bubble", "ratio", first.bubble_ratio, second.bubble_ratio),
    ]
    for device, name in enumerate(map(spoken, devices[: len(second.devices)])):
        figures += [
            (f"{name}: busy", "s", first.busy_s[device], second.busy_s[device]),
            (f"{name}: waiting", "s", first.wait_s[device], second.wait_s[device]),
            (f"{name}: bubble", "ratio", first.device_bubble_ratios[device], second.device_bubble_ratios[device]),
        ]
        if any(first.peak_memory_bytes) and any(second.peak_memory_bytes):
            figures.append((f"{name}: peak memory", "bytes", first.peak_memory_bytes[device], second.peak_memory_bytes[device]))
    return [ComparedFigure(*figure, spread=0.0) for figure in figures]


def difference_reports(first: Trace, second: Trace) -> list[Report]:
    """Return a row for each difference, with devices in words; names are JSON keys."""
    headings = ("figure", *names(first, second), "difference" if first.source is second.source else "error")
    labelled = differences(first, second, device_words(first.devices, stages_of(first)))
    return [
        _report(figure, label.name, ("first", "second"), headings)
        for figure, label in zip(differences(first, second, first.devices), labelled, strict=True)
    ]


def prediction_report(figure: ComparedFigure, label: str, *, measured: str = "measured") -> Report:
    """Return a row for a predicted and a measured figure; `measured` is a heading, names are JSON keys."""
    spread = Figure("spread", figure.spread, "spread", _TEXTS[figure.unit])
    return _report(figure, label, ("predicted", "measured"), ("figure", "predicted", measured, "error"), spread)


_TEXTS: Mapping[str, Callable[[float], str]] = {"s": seconds, "bytes": size, "ratio": ratio}


def _report(figure: ComparedFigure, label: str, keys: tuple[str, str], headings: Sequence[str], *more: Figure) -> Report:
    text = _TEXTS[figure.unit]
    return Report(
        Figure("name", figure.name),
        Figure("unit", figure.unit),
        Figure("", label, headings[0]),
        Figure(keys[0], figure.predicted, headings[1], text),
        Figure(keys[1], figure.measured, headings[2], text),
        *more,
        Figure("error", figure.error, headings[3], lambda _: _error_text(figure)),
    )


def _error_text(figure: ComparedFigure) -> str:
    # Ratios differ by points; other figures relatively, unless the second is nothing.
    # Adding zero makes -0.0 positive.
    if not figure.is_amount:
        return f"{round(100 * figure.error, 1) + 0.0:+.1f} points"
    return f"{round(figure.error, 3) + 0.0:+.1%}" if figure.measured or not figure.predicted else "-"


class OpDifference(NamedTuple):
    """Median durations in two traces of one slot, or of `num_slots` slots of one kind and stage, with the `ops` of the first."""

    device: int
    ops: tuple[Op, ...]
    num_slots: int
    first_s: float
    second_s: float

    @property
    def difference_s(self) -> float:
        """Second duration minus first."""
        return self.second_s - self.first_s


def op_differences(first: Trace, second: Trace) -> list[OpDifference]:
    """Return the slots of both traces, the largest difference first."""
    ours, theirs = ({(span.device, span.ops): span.end_s - span.start_s for span in trace.spans if span.ops} for trace in (first, second))
    common = (OpDifference(*slot, 1, duration_s, theirs[slot]) for slot, duration_s in ours.items() if slot in theirs)
    return sorted(common, key=lambda op: -abs(op.difference_s))


def kind_differences(ops: Sequence[OpDifference]) -> list[OpDifference]:
    """Group differences by device, kind and stage, the largest difference first."""
    groups: dict[tuple[int, tuple[tuple[OpKind, int], ...]], list[OpDifference]] = defaultdict(list)
    for op in ops:
        groups[op.device, tuple((part.kind, part.stage) for part in op.ops)].append(op)
    medians = [
        OpDifference(
            *group[0][:2], len(group), statistics.median(op.first_s for op in group), statistics.median(op.second_s for op in group)
        )
        for group in groups.values()
    ]
    return sorted(medians, key=lambda op: -abs(op.difference_s))


def kind_text(ops: Sequence[Op]) -> str:
    """Return kinds and stages: `F of stage 1&B of stage 2`."""
    return "&".join(f"{op.kind} of stage {op.stage}" for op in ops)


def names(first: Trace, second: Trace) -> tuple[str, str]:
    """Return the sources of two traces, or `first` and `second` for equal sources."""
    return ("first", "second") if first.source is second.source else (_WORDS[first.source], _WORDS[second.source])
