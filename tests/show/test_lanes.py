"""Lanes of links, and figures of what passed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.analysis.idle import divide
from raypipe.artifacts.trace import Dimension, Span, SpanKind, Trace
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.show.lanes import Lane, lanes_to
from raypipe.show.page import draw_page
from raypipe.show.svg import draw_traces
from raypipe.show.traces import idle_report, link_report
from tests.show.test_page import data_of
from tests.show.test_show import boxes, parsed, words
from tests.spans import ACTIVATION, NORM, TWO_UPDATES

SUM = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
CHUNKS = (
    Span(1, SpanKind.TRANSFER, SUM, 5.0, 5.5, 70, 0),
    Span(1, SpanKind.TRANSFER, SUM, 5.25, 6.0, 70, 0),
    Span(1, SpanKind.TRANSFER, SUM, 8.0, 8.5, 30, 0),
)
MESSAGE = Span(1, SpanKind.TRANSFER, ACTIVATION, 1.0, 1.25, 100, 0)
BACK = Span(0, SpanKind.TRANSFER, NORM, 5.0, 5.25, 8, 1)


def measured() -> Trace:
    known = tuple(span for span in TWO_UPDATES.spans if span.kind is not SpanKind.TRANSFER)
    return replace(TWO_UPDATES, spans=(*known, MESSAGE, *CHUNKS, BACK))


def test_chunks_that_follow_each_other_are_one_bar() -> None:
    joined = CHUNKS[0]._replace(end_s=6.0, bytes=140)
    assert lanes_to(measured()) == [[Lane(1, (BACK,))], [Lane(0, (MESSAGE, joined, CHUNKS[2]))]]


def test_messages_and_sums_have_bars_of_their_own() -> None:
    root = parsed(draw_traces([measured()]))
    assert [len(boxes(root, style)) for style in ("move", "sum")] == [1, 3]
    assert {"message under way", "sum or norm under way"} <= set(words(root))
    (drawn,) = data_of(draw_page([measured()]))["traces"]
    assert [[lane["from"] for lane in lanes] for lanes in drawn["messages"]] == [[1], [0]]
    assert drawn["messages"][1][0]["name"] == ["A0>1:0", f" {SUM}", f" {SUM}"]


def test_a_link_is_busy_while_something_is_on_its_way() -> None:
    found = link_report(measured()).document()
    assert (found["from"], found["to"]) == ([0, 1], [1, 0])
    assert (found["message_bytes"], found["sum_bytes"], found["norm_bytes"]) == ([100, 0], [170, 0], [0, 8])
    assert found["busy_s"] == [0.25 + 1.0 + 0.5, 0.25]
    assert found["busy_ratio"] == pytest.approx([1.75 / 11.5, 0.25 / 11.5])


def test_exposed_communication_is_told_by_dimension() -> None:
    # Device 0 waits from 5 to 5.25 for a norm to which all have brought their parts, and from 1 to 3 for a gradient that is not made.
    division = divide(measured())
    assert division.exposed_s[0] == {Dimension.NORM: 0.25}
    spans = (*measured().spans, Span(0, SpanKind.COLLECTIVE, SUM, 5.5, 7.0, 70), Span(0, SpanKind.RECV, ACTIVATION, 7.0, 7.5, 70))
    later = divide(replace(measured(), spans=spans))
    assert later.exposed_s[0][Dimension.SUM] == 1.5
    document = idle_report(later).document()["exposed_s"]
    assert document.keys() == {"message", "sum", "norm"}
    assert document["sum"][0] == 1.5
