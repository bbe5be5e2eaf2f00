"""What a page shows of a trace, and the parts that the time of its devices goes to: kinds of Ops, and causes of idleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypipe.analysis.idle import IDLE, Cause, Division, divide
from raypipe.artifacts.trace import Trace
from raypipe.schedules.ir import OpKind
from raypipe.show import palette
from raypipe.show.causes import NAMES
from raypipe.show.differences import names

CAUSES: Mapping[str, Cause] = {str(cause): cause for cause in IDLE}
"""The parts that are causes, by name."""


@dataclass(frozen=True)
class View:
    """A trace on a page.

    Attributes:
        word: Word for the trace beside another, such as `predicted`.
        division: Its time by cause.
        num_microbatches: Microbatches of its window.
    """

    word: str
    division: Division
    num_microbatches: int

    @property
    def trace(self) -> Trace:
        """The trace."""
        return self.division.trace


def views_of(traces: Sequence[Trace]) -> list[View]:
    """Divide the traces by cause and name them by source, or by order if their sources are the same."""
    words = names(*traces) if len(traces) == 2 else [str(traces[0].source)]
    return [View(word, divide(trace), _count_microbatches(trace)) for word, trace in zip(words, traces, strict=True)]


def _count_microbatches(trace: Trace) -> int:
    return len({op.index for span in trace.spans for op in span.ops if not op.kind.per_update})


def has_memory(trace: Trace) -> bool:
    """Return whether the memory over time is known."""
    return any(len(steps) > 1 for steps in trace.memory) and max(trace.peak_memory_bytes) > 0


def parts_of(views: Sequence[View]) -> list[str]:
    """Return what the time of devices goes to: kinds of Ops, then causes."""
    kinds = {kind for view in views for row in view.division.compute_s for kind in row}
    causes = [cause for cause in IDLE if any(row.get(cause) for view in views for row in view.division.by_cause_s)]
    return [*sorted(kinds, key=_kind_order), *map(str, causes)]


def _kind_order(kind: str) -> tuple[int, int]:
    return ("&" in kind, list(OpKind).index(OpKind(kind[0])))


def part_s(view: View, device: int, part: str) -> float:
    """Return the seconds that a device spent on a part."""
    if part in CAUSES:
        return view.division.by_cause_s[device].get(CAUSES[part], 0.0)
    return view.division.compute_s[device].get(part, 0.0)


def part_words(part: str) -> str:
    """Return a part in words."""
    return NAMES[CAUSES[part]] if part in CAUSES else " and ".join(palette.NAMES[OpKind(kind)] for kind in part.split("&"))
