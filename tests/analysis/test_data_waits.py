"""A wait for rows of the data is a cause of its own, and no bubble."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.analysis.idle import Cause, Root, divide
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.schedules.lower import Direction, Message
from raypipe.schedules.text import parse_op
from raypipe.show.causes import findings
from raypipe.show.svg import draw_traces


def slow_trace() -> Trace:
    """Two devices; the first waits 3 s for the rows of each of two microbatches."""
    spans = []
    for index in range(2):
        at_s = 4.0 * index
        spans += [
            Span(0, SpanKind.DATA, f"rows of microbatch {index}", at_s, at_s + 3.0),
            Span(0, SpanKind.COMPUTE, (parse_op(f"0F{index}"),), at_s + 3.0, at_s + 4.0),
            Span(1, SpanKind.RECV, Message(Direction.ACTIVATION, 0, 1, index, 0, 0), at_s + index, at_s + 4.0, 8, 0),
            Span(1, SpanKind.COMPUTE, (parse_op(f"1F{index}"),), at_s + 4.0, at_s + 5.0),
        ]
    return Trace("slow", Source.MEASURED, ("a", "b"), 1, tuple(spans))


def test_a_wait_for_rows_has_a_cause_and_is_no_bubble() -> None:
    trace = slow_trace()
    division = divide(trace)
    assert division.by_cause_s[0] == {Cause.DATA: 6.0, Cause.COMPUTE: 2.0, Cause.DRAIN: 1.0}
    assert trace.data_s == (6.0, 0.0)
    assert trace.span_s == (8.0, 5.0)
    assert trace.device_bubble_ratios[0] == 0.0
    assert sum(division.by_cause_s[1].values()) == trace.makespan_s


def test_waits_behind_a_device_without_rows_trace_back_to_the_data() -> None:
    division = divide(slow_trace())
    first = division.culprits[0]
    assert (first.root, first.device) == (Root.DATA, 0)
    assert first.wait_s == pytest.approx(6.0 + 2.0), "of the device, and of the one that waits for it between its Ops"
    assert "rows of the data for" in next(iter(findings(division)))


def test_waits_for_rows_are_kept_in_files_and_drawn(tmp_path: Path) -> None:
    slow_trace().save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert [(span.kind, span.name) for span in again.spans if span.kind is SpanKind.DATA] == [
        (SpanKind.DATA, "rows of microbatch 0"),
        (SpanKind.DATA, "rows of microbatch 1"),
    ]
    assert "waits for rows of microbatch 0" in draw_traces([again])
