"""Traces: their figures, worked out by hand, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.trace import FORMAT, Source, Span, SpanKind, Trace, ops_named
from raypipe.errors import FormatError, ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, ScheduleRequest, UpdateScope
from raypipe.schedules.lower import lower
from raypipe.simulation.cost import StageCost, equal_stages
from raypipe.simulation.simulator import simulate

# Two devices, two updates of one microbatch:
#   device 0   0F0 .... 0B0 0U0 0F1 .... 0B1 0U1        F from 0 to 1, B from 3 to 5, U to 5.5; again 6 s later
#   device 1   .... 1F0 1B0 1U0                         F from 1 to 1.5, B from 1.5 to 3
HAND = Trace(
    name="by hand",
    source=Source.MEASURED,
    devices=("left", "right"),
    num_updates=2,
    spans=(
        Span(0, SpanKind.COMPUTE, "0F0", 0.0, 1.0),
        Span(1, SpanKind.TRANSFER, "activation 0->1 of microbatch 0", 1.0, 1.25, 100),
        Span(1, SpanKind.RECV, "activation 0->1 of microbatch 0", 0.0, 1.0, 100),
        Span(1, SpanKind.COMPUTE, "(1F0;1B0)", 1.0, 3.0),
        Span(0, SpanKind.RECV, "gradient 1->0 of microbatch 0", 1.0, 3.0, 100),
        Span(0, SpanKind.COMPUTE, "0B0", 3.0, 5.0),
        Span(0, SpanKind.COLLECTIVE, "norm for update 0", 5.0, 5.25, 8),
        Span(0, SpanKind.COMPUTE, "0U0", 5.25, 5.5),
        Span(1, SpanKind.COMPUTE, "1U0", 5.0, 5.0),
        Span(0, SpanKind.COMPUTE, "0U1", 11.0, 11.5),
        Span(1, SpanKind.COMPUTE, "1U1", 5.0, 11.0),
    ),
    memory=(((0.0, 10), (1.0, 30), (5.0, 10)), ((0.0, 5),)),
)


def empty(**more: Any) -> Trace:
    return replace(Trace("empty", Source.SIMULATED, ("a",), 1, ()), **more)


def test_the_figures_of_a_trace_are_those_of_its_spans() -> None:
    assert HAND.makespan_s == 11.5
    assert HAND.busy_s == (1 + 2 + 0.25 + 0.5, 2.0 + 6.0)
    assert HAND.wait_s == (2.25, 1.0)
    assert HAND.span_s == (11.5, 10.0)
    assert list(HAND.idle_s) == [11.5 - 3.75, 10.0 - 8.0]
    assert HAND.bubble_ratio == pytest.approx(1 - (3.75 + 8) / 2 / 11.5)
    assert HAND.device_bubble_ratios == pytest.approx((1 - 3.75 / 11.5, 1 - 8 / 11.5))
    assert HAND.update_ends_s == (5.5, 11.5)
    assert HAND.update_s == 6.0
    assert HAND.peak_memory_bytes == (30, 5)


def test_rows_are_sorted_and_without_transfers() -> None:
    assert [span.name for span in HAND.by_device[1]] == ["activation 0->1 of microbatch 0", "(1F0;1B0)", "1U0", "1U1"]
    assert all(span.kind is not SpanKind.TRANSFER for row in HAND.by_device for span in row)


def test_ops_without_duration_do_not_lengthen_the_span_of_a_device() -> None:
    late = Span(0, SpanKind.COMPUTE, "0U0", 9.0, 9.0)
    trace = empty(spans=(Span(0, SpanKind.COMPUTE, "0F0", 1.0, 3.0), late))
    assert trace.span_s == (2.0,)
    assert trace.makespan_s == 9.0


def test_a_trace_without_spans_has_figures_all_the_same() -> None:
    trace = empty()
    assert trace.makespan_s == trace.bubble_ratio == trace.update_s == trace.steady_update_s == 0.0
    assert trace.busy_s == trace.span_s == trace.idle_s == (0.0,)


def with_updates(*ends_s: float) -> Trace:
    return empty(spans=tuple(Span(0, SpanKind.COMPUTE, f"0U{update}", end - 1, end) for update, end in enumerate(ends_s)))


def test_the_time_of_the_only_update_is_all_of_it() -> None:
    assert with_updates(7.0).update_s == with_updates(7.0).steady_update_s == 7.0


def test_the_steady_time_leaves_out_the_ends_of_the_window() -> None:
    # Nine updates: the middle ones take 2 s, those at the ends longer. A quarter, two, is left out at each end.
    trace = with_updates(10, 15, 17, 19, 21, 23, 25, 30, 40)
    assert trace.steady_update_s == 2.0
    assert trace.update_s == 30 / 8


def test_without_updates_the_whole_trace_counts_as_one() -> None:
    assert empty(spans=(Span(0, SpanKind.COMPUTE, "0F0", 0.0, 4.0),)).update_ends_s == (4.0,)


def test_a_part_of_a_trace_counts_its_time_from_its_own_begin() -> None:
    schedule = catalogue.build("1f1b", ScheduleRequest(3, 4, num_updates=3, update_scope=UpdateScope.GLOBAL))
    cost = replace(equal_stages(schedule), stages=dict.fromkeys(equal_stages(schedule).stages, StageCost(1, 2, 1, saved_bytes=4)))
    trace = simulate(lower(schedule), cost, name="run", num_updates=3)
    part = trace.of_updates(1, 3)
    assert part.name == "run, updates 1 to 2"
    assert part.num_updates == 2
    assert part.makespan_s == trace.update_ends_s[2] - trace.update_ends_s[0]
    assert part.update_ends_s == tuple(end - trace.update_ends_s[0] for end in trace.update_ends_s[1:])
    assert sum(part.busy_s) == pytest.approx(sum(trace.busy_s) * 2 / 3)
    # Device 0 begins with a forward, the others wait.
    assert [steps[0] for steps in part.memory] == [(0.0, 4), (0.0, 0), (0.0, 0)]
    assert part.peak_memory_bytes == trace.peak_memory_bytes
    assert trace.of_updates(0, 3).busy_s == trace.busy_s


def test_an_update_that_takes_no_time_is_part_of_what_it_ends() -> None:
    schedule = catalogue.build("gpipe", ScheduleRequest(2, 2, num_updates=4))
    trace = simulate(lower(schedule), equal_stages(schedule), name="run", num_updates=4)
    assert len(trace.of_updates(1, 3).update_ends_s) == 2
    assert trace.of_updates(1, 3).update_s == trace.update_s


# Names


def test_the_name_of_a_computing_span_gives_its_ops() -> None:
    assert ops_named("2B5.1@1") == (Op(OpKind.BACKWARD, 2, 5, 1, 1),)
    assert ops_named("(0F1;1B0)") == (Op(OpKind.FORWARD, 0, 1), Op(OpKind.BACKWARD, 1, 0))


@pytest.mark.parametrize("name", ["", "F0", "0Z1", "activation 0->1 of microbatch 0;"])
def test_a_name_that_is_no_op_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError):
        ops_named(name)


# Files

NUMBERS = st.floats(0, 1e9, allow_nan=False)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    devices = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3))
    spans = []
    for _ in range(draw(st.integers(0, 6))):
        start_s, end_s = sorted((draw(NUMBERS), draw(NUMBERS)))
        kind = draw(st.sampled_from(SpanKind))
        name = (
            str(Op(draw(st.sampled_from(OpKind)), 1, draw(st.integers(0, 99)))) if kind is SpanKind.COMPUTE else draw(st.text(max_size=9))
        )
        spans.append(Span(draw(st.integers(0, len(devices) - 1)), kind, name, start_s, end_s, draw(st.integers(0, 2**62))))
    steps = st.lists(st.tuples(NUMBERS, st.integers(0, 2**62)), max_size=3).map(tuple)
    memory = tuple(draw(steps) for _ in devices) if draw(st.booleans()) else ()
    return Trace(draw(st.text(max_size=9)), draw(st.sampled_from(Source)), tuple(devices), draw(st.integers(1, 9)), tuple(spans), memory)


@given(traces())
def test_a_saved_trace_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.save(path)
    assert Trace.load(path) == trace


def test_a_trace_opens_with_its_format_and_has_one_list_a_column(tmp_path: Path) -> None:
    HAND.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["format"] == FORMAT
    assert content["spans"]["name"] == [span.name for span in HAND.spans]
    assert content["spans"]["bytes"][1] == 100


@pytest.mark.parametrize("trace", [HAND, empty()], ids=["by hand", "empty"])
def test_parquet_has_a_row_a_span_with_the_device_by_name(tmp_path: Path, trace: Trace) -> None:
    trace.save(tmp_path / "trace.parquet")
    table = pq.read_table(tmp_path / "trace.parquet")
    assert table.column_names == list(Span._fields)
    assert [str(kind) for kind in table.schema.types] == ["string", "string", "string", "double", "double", "int64"]
    rows = [Span(trace.devices.index(row["device"]), SpanKind(row["kind"]), *list(row.values())[2:]) for row in table.to_pylist()]
    assert tuple(rows) == trace.spans
    assert table.schema.metadata[b"format"] == FORMAT.encode()
    assert table.schema.metadata[b"name"] == trace.name.encode()


def test_chrome_events_hold_every_span_in_microseconds() -> None:
    events = HAND.to_chrome()
    json.dumps(events, allow_nan=False)
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in drawn] == [
        (span.name, span.start_s * 1e6, (span.end_s - span.start_s) * 1e6) for span in HAND.spans
    ]
    assert drawn[1]["args"] == {"bytes": 100}
    # Transfers have a track of their own, below that of their device.
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {0: "device left", 1: "device left incoming", 2: "device right", 3: "device right incoming"}
    assert [drawn[1]["tid"], drawn[2]["tid"]] == [3, 2]
    assert [event["args"]["bytes"] for event in events if event["name"] == "memory left"] == [10, 30, 10]


def test_predicted_and_measured_are_two_processes_in_one_chrome_file() -> None:
    pids = {replace(HAND, source=source).to_chrome()[0]["pid"] for source in Source}
    assert len(pids) == len(Source)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_path_that_cannot_be_written_is_an_input_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FormatError, match="cannot be written"):
        HAND.save(tmp_path / "missing" / f"trace.{suffix}")


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ({"device": 2}, r"spans.device\[0\]: names device 2; there are 2"),
        ({"device": -1}, r"spans.device\[0\]"),
        ({"end_s": -1.0}, r"spans.end_s\[0\]: -1.0 lies before the start, 0.0"),
        ({"end_s": 1e300}, r"spans.start_s\[0\]: lasts from 0.0 to 1e\+300, which are no times"),
        ({"name": "sleep"}, r"spans.name\[0\]: 'sleep' is no Op"),
        ({"kind": "rest"}, r"spans.kind\[0\]: expected"),
        ({"start_s": "0"}, r"spans.start_s\[0\]: expected a number"),
        ({"bytes": 1.5}, r"spans.bytes\[0\]: expected a whole number"),
    ],
)
def test_a_span_that_cannot_be_is_named(tmp_path: Path, edit: dict[str, Any], where: str) -> None:
    HAND.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    for column, value in edit.items():
        content["spans"][column][0] = value
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match=where):
        Trace.load(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("memory", [[[0.0, 1]]], "memory: has 1 devices, the trace 2"),
        ("source", "guessed", "source: expected"),
        ("spans", {"device": [0]}, "this key is missing"),
        ("colour", "red", "unknown key"),
        ("format", "raypipe.trace/2", "expected 'raypipe.trace/1'"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_place(tmp_path: Path, key: str, value: object, problem: str) -> None:
    HAND.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text()) | {key: value}
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match=problem):
        Trace.load(tmp_path / "trace.json")


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    HAND.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    content["spans"]["name"].pop()
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match="its columns have different lengths"):
        Trace.load(tmp_path / "trace.json")


def test_orders_without_updates_have_their_windows_divided_by_the_number_of_updates() -> None:
    spans = (Span(0, SpanKind.COMPUTE, "0F0", 0.0, 6.0),)
    forward = Trace(name="f", source=Source.SIMULATED, devices=("d",), num_updates=3, spans=spans)
    assert (forward.makespan_s, forward.update_s) == (6.0, 2.0)


def test_a_short_window_of_an_asynchronous_order_is_no_faster_than_its_busiest_device() -> None:
    schedule = catalogue.build("amdp", ScheduleRequest(4, 4, num_updates=2))
    trace = simulate(lower(schedule), equal_stages(schedule), name="run", num_updates=2)
    assert trace.update_s < trace.steady_update_s == 12.0
