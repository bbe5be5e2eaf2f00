"""Two traces figure by figure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.trace import Source, Trace
from raypipe.schedules.ir import Op, OpKind
from raypipe.units import ratio, seconds, size

_WORDS = {Source.SIMULATED: "predicted", Source.REHEARSED: "rehearsed", Source.MEASURED: "measured"}


def differences(first: Trace, second: Trace) -> list[ComparedFigure]:
    """Compare two traces and the devices of both; the first is `predicted`, the second `measured`."""
    figures = [
        ("update time", "s", first.update_s, second.update_s),
        ("makespan", "s", first.makespan_s, second.makespan_s),
        ("bubble", "ratio", first.bubble_ratio, second.bubble_ratio),
    ]
    for device, bare_name in enumerate(first.devices[: len(second.devices)]):
        name = f"device {bare_name}" if bare_name.isdigit() else bare_name
        figures += [
            (f"{name}: busy", "s", first.busy_s[device], second.busy_s[device]),
            (f"{name}: waiting", "s", first.wait_s[device], second.wait_s[device]),
            (f"{name}: bubble", "ratio", first.device_bubble_ratios[device], second.device_bubble_ratios[device]),
        ]
        if any(first.peak_memory_bytes) and any(second.peak_memory_bytes):
            figures.append((f"{name}: peak memory", "bytes", first.peak_memory_bytes[device], second.peak_memory_bytes[device]))
    return [ComparedFigure(*figure, spread=0.0) for figure in figures]


class OpDifference(NamedTuple):
    """Median duration in two traces of a slot, or of `num_slots` slots of one kind and stage; `ops` are of one of these."""

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


def header(first: Trace, second: Trace) -> tuple[str, ...]:
    """Return the headings of `rows`."""
    return "figure", *names(first, second), "difference" if first.source is second.source else "error"


def rows(figures: Sequence[ComparedFigure]) -> list[tuple[str, ...]]:
    """Return the figures as texts; differences of ratios are in points, others relative."""
    show = {"s": seconds, "bytes": size, "ratio": ratio}
    return [(each.name, *(show[each.unit](value) for value in (each.predicted, each.measured)), _error(each)) for each in figures]


def _error(figure: ComparedFigure) -> str:
    if not figure.is_amount:
        return f"{100 * figure.error:+.1f} points"
    # Adding zero makes -0.0 positive.
    return f"{round(figure.error, 3) + 0.0:+.1%}" if figure.measured or not figure.predicted else "-"
