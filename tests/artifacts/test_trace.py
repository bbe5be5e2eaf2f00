"""Traces: their figures, worked out by hand, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given

from raypipe.artifacts.trace import FORMAT, Source, Span, SpanKind, Trace
from raypipe.errors import FormatError
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import Message, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.cost import StageCost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs
from tests import strategies
from tests.spans import ACTIVATION, NORM, TWO_UPDATES, computed, traces


def empty(**more: Any) -> Trace:
    return replace(Trace("empty", Source.SIMULATED, ("a",), 1, ()), **more)


def test_the_figures_of_a_trace_are_those_of_its_spans() -> None:
    assert TWO_UPDATES.makespan_s == 11.5
    assert TWO_UPDATES.busy_s == (1 + 2 + 0.25 + 0.5, 2.0 + 6.0)
    assert TWO_UPDATES.wait_s == (2.25, 1.0)
    assert TWO_UPDATES.span_s == (11.5, 10.0)
    assert list(TWO_UPDATES.idle_s) == [11.5 - 3.75, 10.0 - 8.0]
    assert TWO_UPDATES.bubble_ratio == pytest.approx(1 - (3.75 + 8) / 2 / 11.5)
    assert TWO_UPDATES.device_bubble_ratios == pytest.approx((1 - 3.75 / 11.5, 1 - 8 / 11.5))
    assert TWO_UPDATES.update_ends_s == (5.5, 11.5)
    assert TWO_UPDATES.update_s == 6.0
    assert TWO_UPDATES.peak_memory_bytes == (30, 5)


def test_rows_are_sorted_and_without_transfers() -> None:
    assert [span.name for span in TWO_UPDATES.by_device[1]] == ["activation 0->1 of microbatch 0", "(1F0;1B0)", "1U0", "1U1"]
    assert all(span.kind is not SpanKind.TRANSFER for row in TWO_UPDATES.by_device for span in row)


def test_ops_without_duration_do_not_lengthen_the_span_of_a_device() -> None:
    late = computed(0, "0U0", 9.0, 9.0)
    trace = empty(spans=(computed(0, "0F0", 1.0, 3.0), late))
    assert trace.span_s == (2.0,)
    assert trace.makespan_s == 9.0


def test_a_trace_without_spans_has_figures_all_the_same() -> None:
    trace = empty()
    assert trace.makespan_s == trace.bubble_ratio == trace.update_s == trace.steady_update_s == 0.0
    assert trace.busy_s == trace.span_s == trace.idle_s == (0.0,)


def with_updates(*ends_s: float) -> Trace:
    return empty(spans=tuple(computed(0, f"0U{update}", end - 1, end) for update, end in enumerate(ends_s)))


def test_the_time_of_the_only_update_is_all_of_it() -> None:
    assert with_updates(7.0).update_s == with_updates(7.0).steady_update_s == 7.0


def test_the_steady_time_leaves_out_the_ends_of_the_window() -> None:
    # Nine updates: the middle ones take 2 s, those at the ends longer. A quarter, two, is left out at each end.
    trace = with_updates(10, 15, 17, 19, 21, 23, 25, 30, 40)
    assert trace.steady_update_s == 2.0
    assert trace.update_s == 30 / 8


def test_without_updates_the_whole_trace_counts_as_one() -> None:
    assert empty(spans=(computed(0, "0F0", 0.0, 4.0),)).update_ends_s == (4.0,)


def test_a_part_of_a_trace_counts_its_time_from_its_own_begin() -> None:
    schedule = catalogue.build("1f1b", ScheduleRequest(3, 4, num_updates=3, update_scope=UpdateScope.GLOBAL))
    cost = replace(equal_stages(schedule), stages=dict.fromkeys(equal_stages(schedule).stages, StageCost(1, 2, 1, saved_bytes=4)))
    trace = simulate_programs(lower(schedule), cost, name="run", num_updates=3)
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
    trace = simulate_programs(lower(schedule), equal_stages(schedule), name="run", num_updates=4)
    assert len(trace.of_updates(1, 3).update_ends_s) == 2
    assert trace.of_updates(1, 3).update_s == trace.update_s


# Text


@given(strategies.schedules())
def test_a_file_keeps_ops_messages_and_collectives_but_for_rows_parts_and_members(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    trace = simulate_programs(lower(schedule), equal_stages(schedule, latency_s=0.5), name="run", num_updates=schedule.num_updates)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.save(path)
    loaded = Trace.load(path)
    assert [span.name for span in loaded.spans] == [span.name for span in trace.spans]
    for before, after in zip(trace.spans, loaded.spans, strict=True):
        match before.item:
            case Message():
                assert after.item == before.item._replace(rows=(0.0, 1.0))
                assert before.sender is not None
                assert after.sender == before.sender
            case Collective():
                assert after.item == replace(before.item, part=0, devices=())
            case _:
                assert after.item == before.item


@pytest.mark.parametrize("kind", CollectiveKind)
def test_every_kind_of_collective_is_read_back(tmp_path: Path, kind: CollectiveKind) -> None:
    span = Span(0, SpanKind.COLLECTIVE, Collective(kind, 0, 3, 0, ()), 0.0, 1.0)
    empty(spans=(span,)).save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").spans == (span,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sleep",
        "activation 0->1",
        "gradient 1->0 of microbatch x",
        "sum of stage 1 for update 2",
        "gradient 1->0 of microbatch 1" + "0" * 9,
    ],
)
def test_other_texts_stay_texts(tmp_path: Path, text: str) -> None:
    span = Span(0, SpanKind.RECV, text, 0.0, 1.0)
    empty(spans=(span,)).save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").spans == (span,)


# Files


@given(traces())
def test_a_saved_trace_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.save(path)
    assert Trace.load(path) == trace


def test_a_trace_opens_with_its_format_and_has_one_list_a_column(tmp_path: Path) -> None:
    TWO_UPDATES.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["format"] == FORMAT
    assert content["spans"]["name"] == [span.name for span in TWO_UPDATES.spans]
    assert content["spans"]["bytes"][1] == 100


@pytest.mark.parametrize("trace", [TWO_UPDATES, empty()], ids=["by hand", "empty"])
def test_parquet_has_a_row_a_span_with_the_device_by_name(tmp_path: Path, trace: Trace) -> None:
    trace.save(tmp_path / "trace.parquet")
    table = pq.read_table(tmp_path / "trace.parquet")
    assert table.column_names == ["device", "kind", "name", "start_s", "end_s", "bytes", "sender"]
    assert [str(kind) for kind in table.schema.types] == ["string", "string", "string", "double", "double", "int64", "string"]
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (trace.devices[span.device], span.kind, span.name, span.start_s, span.end_s, span.bytes, None) for span in trace.spans
    ]
    assert table.schema.metadata[b"format"] == FORMAT.encode()
    assert table.schema.metadata[b"name"] == trace.name.encode()


def test_chrome_events_hold_every_span_in_microseconds() -> None:
    events = TWO_UPDATES.to_chrome()
    json.dumps(events, allow_nan=False)
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in drawn] == [
        (span.name, span.start_s * 1e6, (span.end_s - span.start_s) * 1e6) for span in TWO_UPDATES.spans
    ]
    assert drawn[1]["args"] == {"bytes": 100}
    # Transfers have a track of their own, below that of their device.
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {0: "device left", 1: "device left incoming", 2: "device right", 3: "device right incoming"}
    assert [drawn[1]["tid"], drawn[2]["tid"]] == [3, 2]
    assert [event["args"]["bytes"] for event in events if event["name"] == "memory left"] == [10, 30, 10]


def test_transfers_of_known_senders_have_a_thread_for_each_link() -> None:
    of_stage = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
    spans = (
        Span(1, SpanKind.TRANSFER, of_stage, 0.0, 2.0, 70, 0),
        Span(1, SpanKind.TRANSFER, ACTIVATION, 1.0, 3.0, 100, 0),  # it leaves while the sum is on its way
        Span(0, SpanKind.TRANSFER, NORM, 0.5, 0.75, 8, 1),
    )
    trace = replace(TWO_UPDATES, spans=spans)
    assert trace.by_link == {(0, 1): spans[:2], (1, 0): spans[2:]}
    events = trace.to_chrome()
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(tracks) == ["device left", "device right", "link left -> right", "link right -> left"]
    drawn = {event["name"]: (event["tid"], event["ts"], event["dur"], event["args"]) for event in events if event["ph"] == "X"}
    assert drawn == {
        "gradients of stage 0 for update 0": (tracks["link left -> right"], 0.0, 2e6, {"bytes": 70, "traffic": "sum"}),
        str(ACTIVATION): (tracks["link left -> right"], 2e6, 1e6, {"bytes": 100, "traffic": "message"}),
        "norm for update 0": (tracks["link right -> left"], 0.5e6, 0.25e6, {"bytes": 8, "traffic": "norm"}),
    }


def test_predicted_and_measured_are_two_processes_in_one_chrome_file() -> None:
    pids = {replace(TWO_UPDATES, source=source).to_chrome()[0]["pid"] for source in Source}
    assert len(pids) == len(Source)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_path_that_cannot_be_written_is_an_input_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FormatError, match="cannot be written"):
        TWO_UPDATES.save(tmp_path / "missing" / f"trace.{suffix}")


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ({"device": 2}, r"spans.device\[0\]: names device 2; there are 2"),
        ({"device": -1}, r"spans.device\[0\]"),
        ({"end_s": -1.0}, r"spans.end_s\[0\]: -1.0 lies before the start, 0.0"),
        ({"end_s": 1e300}, r"spans.start_s\[0\]: lasts from 0.0 to 1e\+300, which are no times"),
        *(({"name": name}, rf"spans.name\[0\]: '{name}' is no Op") for name in ("", "sleep", "F0", "0Z1", "norm for update 0")),
        ({"kind": "rest"}, r"spans.kind\[0\]: expected"),
        ({"start_s": "0"}, r"spans.start_s\[0\]: expected a number"),
        ({"bytes": 1.5}, r"spans.bytes\[0\]: expected a whole number"),
    ],
)
def test_a_span_that_cannot_be_is_named(tmp_path: Path, edit: dict[str, Any], where: str) -> None:
    TWO_UPDATES.save(tmp_path / "trace.json")
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
    TWO_UPDATES.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text()) | {key: value}
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match=problem):
        Trace.load(tmp_path / "trace.json")


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    TWO_UPDATES.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    content["spans"]["name"].pop()
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match="its columns have different lengths"):
        Trace.load(tmp_path / "trace.json")


def test_orders_without_updates_have_their_windows_divided_by_the_number_of_updates() -> None:
    spans = (computed(0, "0F0", 0.0, 6.0),)
    forward = Trace(name="f", source=Source.SIMULATED, devices=("d",), num_updates=3, spans=spans)
    assert (forward.makespan_s, forward.update_s) == (6.0, 2.0)


def test_a_short_window_of_an_asynchronous_order_is_no_faster_than_its_busiest_device() -> None:
    schedule = catalogue.build("amdp", ScheduleRequest(4, 4, num_updates=2))
    trace = simulate_programs(lower(schedule), equal_stages(schedule), name="run", num_updates=2)
    assert trace.update_s < trace.steady_update_s == 12.0
