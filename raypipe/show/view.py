"""A trace on a page, and the parts of its time: kinds of Ops, and causes of idleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from raypipe.analysis.idle import IDLE, Cause, Division, divide
from raypipe.artifacts.trace import Dimension, SpanKind, Trace
from raypipe.schedules.ir import OpKind
from raypipe.show.causes import MEANINGS, NAMES
from raypipe.show.devices import device_labels, device_words
from raypipe.show.differences import names
from raypipe.show.labels import KIND_NAMES
from raypipe.show.lanes import is_sum


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

    @cached_property
    def labels(self) -> list[str]:
        """Short names of the devices."""
        return device_labels(self.trace.devices, self.division.stages)

    @cached_property
    def device_words(self) -> list[str]:
        """Devices with their stages."""
        return device_words(self.trace.devices, self.division.stages)


def views_of(traces: Sequence[Trace]) -> list[View]:
    """Divide one trace, or two."""
    words = names(*traces) if len(traces) == 2 else [str(traces[0].source)]
    counts = [len({op.index for span in trace.spans for op in span.ops if not op.kind.per_update}) for trace in traces]
    return [View(word, divide(trace), count) for word, trace, count in zip(words, traces, counts, strict=True)]


@dataclass(frozen=True)
class Part:
    """A part of a device's time: Ops of a kind, or of kinds that overlap (`F&B`), or idleness of a cause."""

    key: str
    cause: Cause | None = None

    @property
    def fills(self) -> list[str]:
        """Kinds or cause."""
        return [self.key] if self.cause else self.key.split("&")

    @property
    def words(self) -> str:
        """Name of the cause, or of the kinds."""
        return NAMES[self.cause] if self.cause else " and ".join(KIND_NAMES[OpKind(kind)] for kind in self.fills)

    @property
    def meaning(self) -> str:
        """What the cause is; empty for Ops."""
        return MEANINGS[self.cause] if self.cause else ""

    def seconds(self, view: View, device: int) -> float:
        """Return how long the part takes on a device."""
        division = view.division
        return division.by_cause_s[device].get(self.cause, 0.0) if self.cause else division.compute_s[device].get(self.key, 0.0)


@dataclass(frozen=True)
class Exposure:
    """What a device waits for while it is on its way, by dimension, whatever the cause is called."""

    carried: Dimension

    @property
    def words(self) -> str:
        """Name of the column."""
        return f"exposed: {self.carried}s"

    @property
    def meaning(self) -> str:
        """What the column says."""
        return f"all waits for {self.carried}s on their way, which other columns hold too"

    def seconds(self, view: View, device: int) -> float:
        """Return how long a device waits."""
        return view.division.exposed_s[device].get(self.carried, 0.0)


def exposures_of(views: Sequence[View]) -> list[Exposure]:
    """Return the dimensions that some device waits for."""
    return [Exposure(carried) for carried in Dimension if any(row.get(carried) for view in views for row in view.division.exposed_s)]


def parts_of(views: Sequence[View]) -> list[Part]:
    """Return kinds of Ops, then causes."""
    kinds = {kind for view in views for row in view.division.compute_s for kind in row}
    causes = [cause for cause in IDLE if any(row.get(cause) for view in views for row in view.division.by_cause_s)]
    in_order = sorted(kinds, key=lambda kind: ("&" in kind, list(OpKind).index(OpKind(kind[0]))))
    return [*map(Part, in_order), *(Part(str(cause), cause) for cause in causes)]


def has_memory(trace: Trace) -> bool:
    """Return whether memory over time is known."""
    return any(len(steps) > 1 for steps in trace.memory) and max(trace.peak_memory_bytes) > 0


def has_messages(trace: Trace) -> bool:
    """Return whether it is known when messages were on their way."""
    return any(span.kind is SpanKind.TRANSFER and not is_sum(span.item) for span in trace.spans)


def has_sums(trace: Trace) -> bool:
    """Return whether it is known when parts of sums were on their way."""
    return any(span.kind is SpanKind.TRANSFER and is_sum(span.item) for span in trace.spans)
