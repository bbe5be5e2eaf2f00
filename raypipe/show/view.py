"""A trace on a page, and the parts of its time: kinds of Ops, and causes of idleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypipe.analysis.idle import IDLE, Cause, Division, divide
from raypipe.artifacts.trace import Trace
from raypipe.schedules.ir import OpKind
from raypipe.show.causes import NAMES
from raypipe.show.differences import names
from raypipe.show.labels import KIND_NAMES

CAUSES: Mapping[str, Cause] = {str(cause): cause for cause in IDLE}


@dataclass(frozen=True)
class View:
    """A trace on a page; `word` names it beside another, such as `predicted`."""

    word: str
    division: Division
    num_microbatches: int

    @property
    def trace(self) -> Trace:
        """Trace that was divided."""
        return self.division.trace


def views_of(traces: Sequence[Trace]) -> list[View]:
    """Divide one trace, or two."""
    words = names(*traces) if len(traces) == 2 else [str(traces[0].source)]
    counts = [len({op.index for span in trace.spans for op in span.ops if not op.kind.per_update}) for trace in traces]
    return [View(word, divide(trace), count) for word, trace, count in zip(words, traces, counts, strict=True)]


def has_memory(trace: Trace) -> bool:
    """Return whether memory over time is known."""
    return any(len(steps) > 1 for steps in trace.memory) and max(trace.peak_memory_bytes) > 0


def parts_of(views: Sequence[View]) -> list[str]:
    """Return kinds of Ops, then causes."""
    kinds = {kind for view in views for row in view.division.compute_s for kind in row}
    causes = [cause for cause in IDLE if any(row.get(cause) for view in views for row in view.division.by_cause_s)]
    return [*sorted(kinds, key=lambda kind: ("&" in kind, list(OpKind).index(OpKind(kind[0])))), *map(str, causes)]


def part_s(view: View, device: int, part: str) -> float:
    """Return a device's seconds in a part."""
    if part in CAUSES:
        return view.division.by_cause_s[device].get(CAUSES[part], 0.0)
    return view.division.compute_s[device].get(part, 0.0)


def part_words(part: str) -> str:
    """Return the name of a part."""
    return NAMES[CAUSES[part]] if part in CAUSES else " and ".join(KIND_NAMES[OpKind(kind)] for kind in part.split("&"))
