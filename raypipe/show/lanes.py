"""What was on its way to each device, with a lane for each link that leads to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raypipe.artifacts.trace import Dimension, Span, SpanItem, SpanKind, Trace, dimension

_JOINED = 1e-4  # of the window: chunks of one sum that follow each other so closely are one bar


class Lane(NamedTuple):
    """Transfers over one link by start; `sender` is `None` where it is not known."""

    sender: int | None
    spans: tuple[Span, ...]


def lanes_to(trace: Trace) -> list[list[Lane]]:
    """Return the lanes of each device."""
    unknown: list[list[Span]] = [[] for _ in trace.devices]
    for span in trace.spans:
        if span.kind is SpanKind.TRANSFER and span.sender is None:
            unknown[span.device].append(span)
    lanes = [[Lane(None, tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s))))] if spans else [] for spans in unknown]
    for (source, target), spans in trace.by_link.items():
        lanes[target].append(Lane(source, tuple(_joined(spans, _JOINED * trace.makespan_s))))
    return lanes


def is_sum(item: SpanItem) -> bool:
    """Return whether what is on its way is part of a sum, or of a norm."""
    return dimension(item) in {Dimension.SUM, Dimension.NORM}


def _joined(spans: Iterable[Span], pause_s: float) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else None
        if before is not None and before.item == span.item and is_sum(span.item) and span.start_s <= before.end_s + pause_s:
            joined[-1] = before._replace(end_s=max(before.end_s, span.end_s), bytes=before.bytes + span.bytes)
        else:
            joined.append(span)
    return joined
