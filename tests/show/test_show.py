"""Drawings: what they say, that they fit, and that they are well-formed whatever they are given."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from raypipe import units
from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan, make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, SharedLink
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.planning.balance import balanced_cut
from raypipe.schedules import catalogue
from raypipe.schedules.ir import OpKind, Schedule
from raypipe.schedules.lower import lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.show import tables
from raypipe.show.differences import difference_reports, prediction_report
from raypipe.show.grid import timed_grid, timed_grids
from raypipe.show.labels import COLOURS, KIND_NAMES, Labels, colour
from raypipe.show.network import draw_topology
from raypipe.show.report import FittedTable, rows_table
from raypipe.show.svg import draw_traces
from raypipe.show.traces import trace_report
from raypipe.simulation.cost import StageCost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs
from tests import strategies
from tests.spans import TWO_UPDATES, computed, traces


def traced(schedule: Schedule, *, latency_s: float = 0.0, saved_bytes: int = 0, source: Source = Source.SIMULATED) -> Trace:
    cost = equal_stages(schedule, latency_s=latency_s)
    stage = StageCost(1.0, 2.0, 1.0, saved_bytes=saved_bytes, parameter_bytes=saved_bytes)
    cost = replace(cost, stages=dict.fromkeys(cost.stages, stage))
    trace = simulate_programs(lower(schedule), cost, name=schedule.name, num_updates=schedule.num_updates)
    return replace(trace, source=source)


def spec(name: str, devices: int, microbatches: int, updates: int = 1, chunks: int = 1, pipelines: int = 0) -> Schedule:
    return catalogue.build(name, ScheduleRequest(devices, microbatches, updates, chunks, pipelines))


# Amounts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (33.0, "33 s"),
        (0.018522, "18.52 ms"),
        (1e-6, "1 us"),
        (0.0009999, "999.9 us"),
        (0.99999, "1 s"),
        (3.2e-10, "0.32 ns"),
        (1234.5, "1234 s"),
        (123456789.0, "1.235e+08 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_times_have_four_digits_and_a_fitting_unit(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (999_999, "1 MB"), (141e9, "141 GB"), (1e18, "1e+03 PB")],
)
def test_sizes_have_three_digits_and_a_fitting_unit(value: float, text: str) -> None:
    assert units.size(value) == text


@given(st.floats(1e-9, 1e12), st.integers(2, 40))
def test_ticks_are_round_evenly_spaced_and_no_more_than_wanted(end: float, most: int) -> None:
    found = units.ticks(end, most)
    assert 1 <= len(found) <= most
    assert found[0] == 0
    assert found[-1] <= end * (1 + 1e-9)
    if len(found) > 1:
        step = f"{found[1]:.1e}"
        assert step[0] in "125"
        assert step[2] == "0"


def test_counts_agree_with_their_nouns() -> None:
    assert [units.counted(count, "microbatch") for count in (1, 2)] == ["1 microbatch", "2 microbatches"]
    assert units.counted(0, "device") == "0 devices"


def test_every_kind_has_a_colour_and_a_name_of_its_own() -> None:
    assert set(COLOURS) == set(KIND_NAMES) == set(OpKind)
    assert len(set(COLOURS.values())) == len(COLOURS)


# The grid


def rows(text: str) -> list[str]:
    """The drawn time of each line that shows a device."""
    return [line.partition("|")[2] for line in text.splitlines() if "|" in line]


def test_the_grid_shows_each_op_as_wide_as_it_is_long() -> None:
    drawn = timed_grid(traced(spec("1f1b", 4, 8)), width=100).plain
    assert rows(drawn) == [
        "F0F1F2F3............B0- F4B1- F5B2- F6B3- F7B4- ..B5- ..B6- ..B7- ",
        "..F0F1F2........B0- F3B1- F4B2- F5B3- F6B4- F7B5- ..B6- ..B7- ....",
        "....F0F1....B0- F2B1- F3B2- F4B3- F5B4- F6B5- F7B6- ..B7- ........",
        "......F0B0- F1B1- F2B2- F3B3- F4B4- F5B5- F6B6- F7B7- ............",
    ]
    assert "   0         5         10        15        20        25        30 s" in drawn
    assert drawn.endswith("F forward, B backward, . waiting")


def test_labels_stand_apart_where_there_is_room() -> None:
    drawn = timed_grid(traced(spec("gpipe", 2, 2)), width=100).plain
    assert rows(drawn) == ["F0 F1 .........B0--- B1--- ", "...F0 F1 B0--- B1--- ......"]


def test_stages_are_named_only_where_a_device_has_several() -> None:
    one = timed_grid(traced(spec("1f1b", 2, 2)), width=100).plain
    several = timed_grid(traced(spec("interleaved", 2, 2, chunks=2)), width=100).plain
    assert "0F0" not in one
    for label in ("0F0", "2F1", "3B0"):
        assert label in several


@pytest.mark.parametrize("width", [40, 100, 237])
@pytest.mark.parametrize("size", [(1, 1), (4, 8), (4, 64), (16, 32), (100, 3)], ids=str)
@pytest.mark.parametrize("name", ["gpipe", "zb-h2", "interleaved"])
def test_the_grid_fits_the_width_and_some_screens(name: str, size: tuple[int, int], width: int) -> None:
    schedule = spec(name, *size, chunks=2 if name == "interleaved" else 1)
    drawn = timed_grid(traced(schedule), width=width).plain
    lines = [line for line in drawn.splitlines() if "|" in line]
    assert max(map(len, lines)) <= width
    assert len(lines) <= 60
    assert drawn.isascii()


def test_a_long_grid_goes_on_in_further_bands() -> None:
    trace = traced(spec("1f1b", 2, 12))
    whole, bands = rows(timed_grid(trace, width=300).plain), rows(timed_grid(trace, width=60).plain)
    assert len(whole) == 2
    assert len(bands) > 2
    assert ["".join(bands[device::2]) for device in range(2)] == whole


def test_what_is_left_out_of_a_grid_is_said() -> None:
    crowded = timed_grid(traced(spec("1f1b", 8, 500)), width=80).plain
    assert "Ops are too short for their label at" in crowded
    assert "Ops are too short to be seen" in crowded
    assert "52 more devices are left out" in timed_grid(traced(spec("gpipe", 100, 1)), width=80).plain


def test_grids_of_several_traces_have_one_time_axis() -> None:
    fine = traced(spec("1f1b", 4, 8))
    coarse = replace(
        fine,
        devices=("a longer name", *fine.devices[1:]),
        spans=tuple(span._replace(start_s=span.start_s * 2.3, end_s=span.end_s * 2.3) for span in fine.spans if "0" in span.name),
    )
    drawn = [grid.plain for grid in timed_grids((fine, coarse), width=150)]
    assert len({next(line for line in grid.splitlines() if line.endswith(" s")) for grid in drawn}) == 1
    starts = [{line.index("|") for line in grid.splitlines() if "|" in line} for grid in drawn]
    assert starts[0] == starts[1] == {len("a longer name ")}
    columns = [sum(map(len, rows(grid))) for grid in drawn]
    assert columns[1] / columns[0] == pytest.approx(coarse.makespan_s / fine.makespan_s, rel=0.05)


def test_a_trace_without_time_leaves_the_other_its_grid() -> None:
    still = Trace("still", Source.MEASURED, ("0",), 1, (computed(0, "0F0", 0.0, 0.0),))
    moving = traced(spec("1f1b", 2, 2))
    first, second = timed_grids((still, moving), width=80)
    assert first.plain == "no Op takes any time"
    assert second.plain == timed_grid(moving, width=80).plain


def test_slots_that_overlap_are_drawn_as_one() -> None:
    assert "F0&B0" in timed_grid(replace(TWO_UPDATES, spans=TWO_UPDATES.spans[3:4]), width=100).plain


@pytest.mark.parametrize("times_s", [(0.0, 0.0), (-3.0, -1.0)])
def test_a_trace_without_time_is_no_grid(times_s: tuple[float, float]) -> None:
    trace = Trace("still", Source.MEASURED, ("a",), 1, (computed(0, "0F0", *times_s),))
    assert timed_grid(trace, width=80).plain == "no Op takes any time"


@given(st.one_of(traces(), st.builds(traced, strategies.schedules())), st.integers(20, 200))
def test_any_trace_can_be_drawn_as_a_grid(trace: Trace, width: int) -> None:
    drawn = timed_grid(trace, width=width)
    assert drawn.plain


def test_colours_are_for_terminals_only() -> None:
    drawn = timed_grid(traced(spec("1f1b", 2, 2)), width=80)
    with (plain := Console(width=80, color_system=None)).capture() as capture:
        plain.print(drawn)
    assert "\x1b" not in capture.get()
    with (terminal := Console(width=80, color_system="truecolor", force_terminal=True)).capture() as capture:
        terminal.print(drawn)
    red, green, blue = (int(COLOURS[OpKind.FORWARD][at : at + 2], 16) for at in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}m" in capture.get()


# Traces as SVG

SPACE = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def boxes(root: ET.Element, kind: str) -> list[ET.Element]:
    """The rectangles of a class that stand for spans: they have something to hover over."""
    return [box for box in root.iter(f"{SPACE}rect") if kind in box.get("class", "").split() and box.find(f"{SPACE}title") is not None]


def words(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SPACE}text")]


def overlapping(root: ET.Element) -> Iterator[tuple[ET.Element, ET.Element]]:
    """Pairs of boxes of one row that overlap by more than the rounding."""
    by_row: dict[str, list[ET.Element]] = {}
    for kind in (*map(str, OpKind), "recv", "all"):
        for box in boxes(root, kind):
            by_row.setdefault(box.get("y", ""), []).append(box)
    for row in by_row.values():
        row.sort(key=lambda box: float(box.get("x", 0)))
        for left, right in itertools.pairwise(row):
            if float(left.get("x", 0)) + float(left.get("width", 0)) > float(right.get("x", 0)) + 0.25:
                yield left, right


def test_a_drawing_has_a_box_for_each_op_with_label_and_details() -> None:
    root = parsed(draw_traces([traced(spec("zb-h1", 4, 6), latency_s=0.5)]))
    for kind in "FIW":
        assert len(boxes(root, kind)) == 4 * 6
    first = boxes(root, "F")[0]
    assert first.findtext(f"{SPACE}title") == "0F0\nat 0 s for 1 s"
    assert words(root).count("F3") == 4
    assert list(overlapping(root)) == []


def test_a_drawing_shows_bubbles_axis_and_legend() -> None:
    trace = traced(spec("1f1b", 4, 8))
    found = words(parsed(draw_traces([trace])))
    assert found.count("27.3%") == 4
    assert "update 33 s, bubble 27.3%, makespan 33 s" in found
    assert {"0 s", "10 s", "30 s"} <= set(found)
    assert {"F forward", "B backward", "waits for a message", "waits for a collective"} <= set(found)
    assert not any("weight gradient" in text for text in found)


def test_widths_are_proportional_to_times() -> None:
    root = parsed(draw_traces([traced(spec("gpipe", 2, 3))]))
    forwards = {float(box.get("width", 0)) for box in boxes(root, "F")}
    backwards = {float(box.get("width", 0)) for box in boxes(root, "B")}
    assert min(backwards) == pytest.approx(2 * max(forwards), abs=0.3)
    assert max(forwards) - min(forwards) < 0.2


def test_memory_and_messages_are_drawn_where_the_trace_has_them() -> None:
    with_memory = parsed(draw_traces([traced(spec("1f1b", 3, 4), latency_s=0.5, saved_bytes=10**6)]))
    assert len([path for path in with_memory.iter(f"{SPACE}path") if path.get("class") == "held"]) == 3
    assert "memory held" in words(with_memory)
    # Three activations of a megabyte, and the weights.
    assert "4 MB" in words(with_memory)
    assert len(boxes(with_memory, "move")) == 2 * 2 * 4
    assert "message under way" in words(with_memory)
    without = words(parsed(draw_traces([traced(spec("1f1b", 3, 4))])))
    assert not {"memory held", "message under way"} & set(without)


def test_two_traces_share_one_axis_and_are_compared() -> None:
    schedule = spec("1f1b", 2, 4)
    predicted, measured = traced(schedule), traced(schedule, latency_s=2.0, source=Source.MEASURED)
    root = parsed(draw_traces([predicted, measured]))
    found = words(root)
    assert "predicted: 1f1b" in found
    assert "measured: 1f1b" in found
    columns = ["figure", "predicted", "measured", "error"]
    assert [text for text in found if text in columns] == columns
    assert "device 1 (stage 1): waiting" in found
    # F and B take the same pixels above and below.
    assert len({round(float(box.get("width", 0))) for box in boxes(root, "F")}) == 1
    assert found.index("predicted: 1f1b") < found.index("measured: 1f1b")


def test_slots_that_overlap_share_the_height_of_a_row() -> None:
    root = parsed(draw_traces([replace(TWO_UPDATES, spans=TWO_UPDATES.spans[3:4])]))
    assert [box.get("height") for kind in "FB" for box in boxes(root, kind)] == ["12.0", "12.0"]


@pytest.mark.parametrize("size", [(8, 600, 3), (256, 24, 1), (300, 8, 1)], ids=str)
def test_large_traces_stay_small_files(size: tuple[int, int, int]) -> None:
    devices, microbatches, updates = size
    spans = []
    for device in range(devices):
        for index in range(microbatches * updates):
            start_s = device + 3.0 * index
            spans.append(computed(device, f"{device}F{index}", start_s, start_s + 1))
            spans.append(computed(device, f"{device}B{index}", start_s + 1, start_s + 3))
            spans.append(Span(device, SpanKind.TRANSFER, f"message {index}", start_s, start_s + 2, 1000))
    memory = tuple(tuple((3.0 * index, index % 7) for index in range(microbatches * updates)) for _ in range(devices))
    trace = Trace("large", Source.MEASURED, tuple(map(str, range(devices))), updates, tuple(spans), memory)
    drawn = draw_traces([trace, trace])
    assert len(drawn) < 5_000_000
    root = parsed(drawn)
    assert list(overlapping(root)) == []
    if devices > 256:
        assert words(root).count("44 more devices are left out") == 2
    # The first device is always busy until the last ones go on alone, and is drawn so.
    drawn_boxes = [*boxes(root, "F"), *boxes(root, "B")]
    first_row = min(float(box.get("y", 0)) for box in drawn_boxes)
    busy = sum(float(box.get("width", 0)) for box in drawn_boxes if float(box.get("y", 0)) == first_row)
    ground = next(box for box in root.iter(f"{SPACE}rect") if box.get("class") == "row")
    assert busy == pytest.approx(float(ground.get("width", 0)) * trace.busy_s[0] / trace.makespan_s, rel=0.02)


def test_a_wide_op_keeps_its_label_behind_a_wait_too_short_to_see() -> None:
    wait = Span(0, SpanKind.RECV, "message", 5.0, 5.0001)
    spans = (computed(0, "0F0", 0.0, 5.0), wait, computed(0, "0B0", 5.0001, 10.0))
    assert {"F0", "B0"} <= set(words(parsed(draw_traces([Trace("waiting", Source.MEASURED, ("a",), 1, spans)]))))


@given(st.lists(st.one_of(traces(), st.builds(traced, strategies.schedules())), min_size=1, max_size=2))
def test_any_traces_give_a_well_formed_drawing(given_traces: list[Trace]) -> None:
    root = parsed(draw_traces(given_traces))
    assert root.tag == f"{SPACE}svg"


def test_names_cannot_break_out_of_a_drawing() -> None:
    hostile = '</text><script>alert("1")</script>&\x00\x1b\ud800'
    span = Span(0, SpanKind.RECV, hostile, 0.0, 1.0)
    trace = replace(TWO_UPDATES, name=hostile, devices=(hostile, "b"), spans=(*TWO_UPDATES.spans, span))
    root = parsed(draw_traces([trace]))
    assert not list(root.iter(f"{SPACE}script"))
    node = Node(name="n", devices=(Device("d", "<b>&"),))
    printable = "".join(filter(str.isprintable, hostile))  # of other names there are no topologies
    assert not list(parsed(draw_topology(ClusterTopology(name=printable, nodes=(node,)))).iter(f"{SPACE}script"))


def test_the_same_trace_gives_the_same_drawing() -> None:
    trace = traced(spec("zb-h1", 3, 5), latency_s=0.25)
    assert draw_traces([trace]) == draw_traces([trace])


def test_pipelines_are_told_apart_by_label_and_colour() -> None:
    trace = traced(spec("chimera", 4, 4))
    drawn = timed_grid(trace, width=120)
    assert "F0-- F2--" in drawn.plain
    assert "F1@1 B1@1" in drawn.plain
    assert "lighter: pipeline 1" in drawn.plain
    assert "lighter" not in timed_grid(traced(spec("1f1b", 4, 4)), width=120).plain
    assert "lighter: pipelines 1, 3" in timed_grid(traced(spec("chimera", 4, 4, pipelines=4)), width=120).plain
    colours = {drawn.plain[span.start : span.end].strip("- "): str(span.style) for span in drawn.spans}
    assert colours["F0"] == f"black on {colour(OpKind.FORWARD)}"
    assert colours["F1@1"] == f"black on {colour(OpKind.FORWARD, 1)}"
    assert colour(OpKind.FORWARD) != colour(OpKind.FORWARD, 1) != colour(OpKind.BACKWARD, 1)
    root = parsed(draw_traces([trace]))
    assert [len(boxes(root, kind)) for kind in ("F", "B", "odd")] == [16, 16, 16]
    assert "lighter: pipeline 1" in words(root)


def test_ops_that_overlap_keep_their_own_colours() -> None:
    drawn = timed_grid(traced(spec("dualpipe", 2, 4)), width=120)
    found = [(drawn.plain[span.start : span.end].strip(), str(span.style)[-7:]) for span in drawn.spans]
    first = next(at for at, (text, _) in enumerate(found) if text.startswith("&"))
    assert [text for text, _ in found[first - 1 : first + 1]] == ["F3@1", "&B0-------"]
    assert [shown for _, shown in found[first - 1 : first + 1]] == [colour(OpKind.FORWARD, 1), colour(OpKind.BACKWARD)]


def test_ops_that_share_a_slot_and_a_kind_share_a_label() -> None:
    doubled, halved = (rows(timed_grid(traced(spec(name, 2, 4)), width=200).plain) for name in ("chimera-doubling", "chimera-halving"))
    assert doubled[0].startswith("F0+2-- F1+3@1 B1@1-- ")
    # All the parts of a microbatch are the microbatch.
    assert halved[0].startswith("F0---- F1@1-- B1.1@1 B0.1-- B1.2@1 ")
    root = parsed(draw_traces([traced(spec("chimera-doubling", 2, 4))]))
    assert {"F0+2", "F1+3@1", "B1@1"} <= set(words(root))


def test_kinds_that_overlap_are_shown_where_their_labels_do_not_fit() -> None:
    for num_microbatches, shown in ((40, "F&B"), (60, "FB"), (400, "F")):
        drawn = timed_grid(traced(spec("dualpipe", 8, num_microbatches)), width=100).plain
        assert "Ops are too short for their label" in drawn
        assert shown in rows(drawn)[0]


def test_labels_read_each_name() -> None:
    labels = Labels(TWO_UPDATES)
    assert labels.text(TWO_UPDATES.spans[3]) == "F0&B0"
    assert labels.kinds == (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)


# Topologies as SVG


def nodes(count: int, devices: int = 2) -> tuple[Node, ...]:
    return tuple(
        Node(
            name=f"node{index}",
            devices=tuple(Device(f"gpu{index}.{slot}", "h200", 141 * 10**9, 2.0) for slot in range(devices)),
            link=NodeLink(bandwidth_bytes_per_s=1e11, latency_s=5e-6),
            cores=3,
        )
        for index in range(count)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 11, 60, 75])
@pytest.mark.parametrize("devices", [1, 4, 12])
def test_the_nodes_of_a_drawn_topology_neither_overlap_nor_leave_the_sheet(count: int, devices: int) -> None:
    topology = ClusterTopology(name="some", nodes=nodes(count, devices), default_link=NodeLink(latency_s=1e-3))
    root = parsed(draw_topology(topology))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    drawn = [box for box in root.iter(f"{SPACE}rect") if box.get("class") == "node"]
    assert len(drawn) == min(count, 60)
    edges = [[float(box.get(key, 0)) for key in ("x", "y", "width", "height")] for box in drawn]
    for x, y, w, h in edges:
        assert x >= 0
        assert y >= 40
        assert x + w <= width
        assert y + h <= height
    for position, (x, y, w, h) in enumerate(edges):
        for other_x, other_y, _, _ in edges[:position]:
            assert abs(x - other_x) >= w or abs(y - other_y) >= h
    found = words(root)
    assert f"{units.counted(count, 'node')}, {units.counted(count * devices, 'device')}" in found
    assert "any other pair: no limit, 1 ms" in found
    if devices == 12:
        assert "and 4 more devices" in found
    if count == 75:
        assert "15 more nodes are left out" in found


def test_links_are_lines_with_their_figures_and_arrows_where_one_way() -> None:
    links = (
        Link(source="node0", target="node1", bandwidth_bytes_per_s=1e9, latency_s=1e-5),
        Link(source="node1", target="node2", bandwidth_bytes_per_s=2e9, latency_s=2e-5, one_way=True),
        Link(source="gpu0.0", target="gpu0.1", bandwidth_bytes_per_s=3e9, latency_s=1e-6),
    )
    shared = SharedLink(name="uplink", bandwidth_bytes_per_s=5e9, members=(("node0", "node1"),))
    topology = ClusterTopology(name="three", nodes=nodes(3), links=links, shared_links=(shared,))
    root = parsed(draw_topology(topology))
    lines = [line for line in root.iter(f"{SPACE}line") if line.get("class") == "link"]
    assert len(lines) == 1 + 3
    found = words(root)
    assert {"1 GB/s", "10 us", "2 GB/s", "20 us"} <= set(found)
    assert "gpu0.0 <-> gpu0.1: 3 GB/s, 1 us" in found
    assert "uplink, shared by node0->node1: 5 GB/s" in found
    assert "share 3 cores" in found
    assert "gpu1.0  h200 141 GB x2" in found


def test_many_links_are_told_in_words() -> None:
    links = tuple(Link(source=f"node{a}", target=f"node{b}", latency_s=1e-5) for a in range(20) for b in range(a))
    found = words(parsed(draw_topology(ClusterTopology(name="many", nodes=nodes(20), links=links))))
    assert any(text.startswith("node5 <-> node") for text in found)
    assert f"{20 * 19 // 2 - 40} more" in found


# Tables and differences


def text_of(shown: FittedTable) -> str:
    with (console := Console(width=160, color_system=None)).capture() as capture:
        console.print(shown)
    return capture.get()


def difference_rows(first: Trace, second: Trace) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in rows_table(difference_reports(first, second)).rows}


def test_differences_are_relative_for_times_and_in_points_for_ratios() -> None:
    first = traced(spec("1f1b", 2, 4))
    second = replace(traced(spec("1f1b", 2, 4), latency_s=1.0), source=Source.MEASURED)
    reports = difference_reports(first, second)
    documents = {document["name"]: document for document in (report.document() for report in reports)}
    assert documents["update time"] == {
        "name": "update time",
        "unit": "s",
        "first": first.update_s,
        "second": second.update_s,
        "error": pytest.approx(first.update_s / second.update_s - 1),
    }
    assert documents["bubble"]["error"] == pytest.approx(first.bubble_ratio - second.bubble_ratio)
    assert documents["device 0: busy"]["error"] == 0
    assert rows_table(reports).columns == ("figure", "predicted", "measured", "error")
    shown = difference_rows(first, second)
    assert shown["device 0 (stage 0): busy"] == ("12 s", "12 s", "+0.0%")
    assert shown["bubble"][2].endswith(" points")


def test_memory_is_compared_where_both_traces_know_it() -> None:
    first = traced(spec("1f1b", 2, 4), saved_bytes=10**6)
    second = replace(first, source=Source.MEASURED, memory=(((0.0, 4 * 10**6),), ((0.0, 10**6),)))
    shown = difference_rows(first, second)
    assert shown["device 0 (stage 0): peak memory"] == ("3 MB", "4 MB", "-25.0%")
    assert shown["device 1 (stage 1): peak memory"] == ("2 MB", "1 MB", "+100.0%")
    assert not any("memory" in name for name in difference_rows(first, traced(spec("1f1b", 2, 4))))


def test_the_comparison_gives_each_figure_its_unit() -> None:
    figures = [
        ComparedFigure("update time", "s", 1.5, 1.0, 0.25),
        ComparedFigure("bubble", "ratio", 0.25, 0.5, 0.0),
        ComparedFigure("memory of device 0", "bytes", 99e6, 100e6, 1e6),
    ]
    table = rows_table([prediction_report(figure, figure.name, measured="rehearsed") for figure in figures])
    assert table.columns == ("figure", "predicted", "rehearsed", "spread", "error")
    assert table.rows == [
        ("update time", "1.5 s", "1 s", "250 ms", "+50.0%"),
        ("bubble", "25.0%", "50.0%", "0.0%", "-25.0 points"),
        ("memory of device 0", "99 MB", "100 MB", "1 MB", "-1.0%"),
    ]


def test_only_devices_that_both_traces_have_are_compared() -> None:
    found = difference_rows(traced(spec("1f1b", 2, 4)), traced(spec("1f1b", 4, 4)))
    assert [name for name in found if name.endswith("busy")] == ["device 0 (stage 0): busy", "device 1 (stage 1): busy"]


def test_a_figure_that_was_nothing_has_no_relative_error() -> None:
    still = Trace("still", Source.MEASURED, ("0",), 1, ())
    assert difference_rows(traced(spec("1f1b", 1, 1)), still)["update time"] == ("3 s", "0 s", "-")
    assert {row[2] for row in difference_rows(still, still).values()} == {"+0.0%", "+0.0 points"}


def made_plan() -> Plan:
    profile = ModelProfile.uniform(12, parameter_bytes=1000)
    topology = ClusterTopology.uniform(2)
    return make_plan(
        name="small",
        planner="balanced",
        cut=balanced_cut(profile, 2),
        schedule=spec("1f1b", 2, 2),
        profile=profile,
        topology=topology,
        devices=("device0", "device1"),
        microbatch_size=2,
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: tables.plan_table(made_plan()), "1      device1  layer6 .. layer11 (6)     12 s      24 s    6 kB"),
        (lambda: tables.profile_table(ModelProfile.uniform(2, saved_bytes=1500)), "layer1  ############      1 s       2 s"),
        (lambda: tables.profile_table(ModelProfile.uniform(1, forward_s=0.0, backward_s=0.0)), "layer0            0 s       0 s"),
        (
            lambda: tables.node_table(ClusterTopology(name="t", nodes=nodes(1))),
            "node0  gpu0.0 gpu0.1  h200  141 GB      2       3  100 GB/s, 5 us",
        ),
        (lambda: tables.link_table(ClusterTopology.uniform(2, latency_s=0.5)), "any other pair    no limit, 500 ms"),
        (lambda: trace_report(TWO_UPDATES, (100, None)).table(), "left    3.75 s   2.25 s   67.4%  30 B of 100 B"),
        (lambda: FittedTable(("n",), ([str(row)] for row in range(60))), "(12 more)"),
    ],
)
def test_tables_say_what_they_are_for(make: Callable[[], FittedTable], expected: str) -> None:
    assert expected in text_of(make())
