"""Branches in drawings: letters, stripes and a legend; nothing for a chain."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raypipe.analysis.idle import divide
from raypipe.analysis.schedule_figures import StageSeconds, figures_of, simulated
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.planning.plan import plan
from raypipe.schedules import catalogue
from raypipe.schedules.lower import Direction, Message
from raypipe.schedules.request import ScheduleRequest
from raypipe.show.branches import branch_words, branches_of
from raypipe.show.grid import timed_grid
from raypipe.show.page import draw_page
from raypipe.show.report import FittedTable
from raypipe.show.svg import draw_traces
from raypipe.show.tables import plan_report, plan_table, stage_table
from raypipe.show.traces import idle_report, trace_report
from raypipe.simulation.simulator import simulate
from tests.planning.towers import node, towers
from tests.spans import computed

SPACE = "{http://www.w3.org/2000/svg}"


@cache
def two_branches(*, latency_s: float = 0.0, work: tuple[float, ...] = (1.0, 1.0)) -> Trace:
    request = ScheduleRequest(4, 4, branches=work)
    schedule = catalogue.build("branch-aware", request)
    return figures_of(catalogue.spec("branch-aware"), schedule, request, StageSeconds(latency_s=latency_s)).trace


def chain() -> Trace:
    return simulated(catalogue.build("interleaved", ScheduleRequest(4, 4, num_chunks=2)), StageSeconds())


@cache
def planned() -> Plan:
    profile = towers([1.0, 1.0], num_layers=4)
    names = {"branch0": "image", "branch1": "text"}
    layers = tuple(replace(layer, branch=names.get(layer.branch or "")) for layer in profile.layers)
    return plan(replace(profile, layers=layers), node(2), 4, schedule="branch-aware")


def printed(drawn: object, *, width: int = 120) -> str:
    with (screen := Console(width=width, color_system=None)).capture() as capture:
        screen.print(drawn)
    return capture.get()


def classes(root: ET.Element) -> list[str]:
    return [name for box in root.iter(f"{SPACE}rect") for name in box.get("class", "").split()]


def data_of(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(found)


# The grid


def test_ops_of_a_branch_begin_with_its_letter_which_tells_the_stages_of_a_device_apart() -> None:
    drawn = timed_grid(two_branches(), width=120).plain
    assert drawn.splitlines()[0].startswith("0 |aF0 aF1 aF2 bF0 bB0---- bF1 ")
    assert drawn.splitlines()[3].startswith("3 |bF0 bF1 bF2 aF0 aB0---- aF1 ")
    assert drawn.endswith("a branch 0 (stages 0-3), b branch 1 (stages 4-7)")


def test_stages_of_one_branch_on_one_device_have_their_numbers_too() -> None:
    drawn = timed_grid(two_branches(work=(2.0, 1.0)), width=120).plain
    assert "a0F0- " in drawn
    assert "b11F0 " in drawn
    assert drawn.endswith("a branch 0 (stages 0-7), b branch 1 (stages 8-11)")


def test_letters_have_the_colour_of_their_branch() -> None:
    trace = two_branches()
    drawn = timed_grid(trace, width=120)
    for branch in branches_of([trace]).values():
        marked = {drawn.plain[span.start : span.end] for span in drawn.spans if span.style == f"bold white on {branch.colour}"}
        assert marked == {branch.letter}


def test_where_branches_meet_is_said_if_it_takes_time() -> None:
    meeting = Trace(
        "by hand", Source.SIMULATED, ("x", "y"), 1, (computed(0, "0F0", 0, 1), computed(1, "1F0", 0, 1), computed(0, "2F0", 1, 2))
    )
    drawn = timed_grid(replace(meeting, branches=("image", "text", "")), width=80).plain
    assert re.search(r"^x \|aF0-* F0-* $", drawn, flags=re.MULTILINE)
    assert drawn.endswith("a image (stage 0), b text (stage 1), no letter: where branches meet")


def test_ops_that_overlap_are_marked_one_by_one() -> None:
    trace = Trace("by hand", Source.SIMULATED, ("x",), 1, (computed(0, "(0F1;1B0)", 0, 1),), branches=("image", "text"))
    drawn = timed_grid(trace, width=80)
    assert drawn.plain.startswith("x |aF1&bB0 ")
    marked = [drawn.plain[span.start : span.end] for span in drawn.spans if str(span.style).startswith("bold white")]
    assert marked == ["a", "b"]


def test_what_is_too_narrow_for_its_letter_keeps_its_kind() -> None:
    trace = replace(two_branches(), spans=(computed(0, "0F0", 0, 1), computed(0, "4B0", 1, 2), computed(0, "0F1", 2, 1000)))
    drawn = timed_grid(trace, width=60).plain
    assert "too short" in drawn


def test_a_chain_is_drawn_without_branches() -> None:
    assert chain().branches == ()
    assert "branch" not in timed_grid(chain(), width=120).plain
    assert "branch" not in draw_traces([chain()])
    assert data_of(draw_page([chain()]))["branches"] == []
    assert "branch" not in printed(trace_report(chain()).table())


# SVG and page


def test_a_drawing_has_a_stripe_for_each_op_of_a_branch() -> None:
    trace = two_branches()
    root = ET.fromstring(draw_traces([trace]))
    found = classes(root)
    assert found.count("b0") == found.count("b1") == 4 * 4 * 2 + 1, "F and B of each stage and microbatch, and the legend"
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert "a branch 0 (stages 0-3)" in texts
    assert "aF3" in texts
    titles = [title.text or "" for title in root.iter(f"{SPACE}title")]
    assert "0F0 of branch 0\nat 0 s for 1 s" in titles


def test_crowded_ops_share_a_stripe() -> None:
    schedule = catalogue.build("branch-aware", ScheduleRequest(2, 4, branches=(1.0, 1.0)))
    trace = simulated(schedule, StageSeconds())
    last = computed(0, "0U0", 1e6, 1e6 + 1)
    found = classes(ET.fromstring(draw_traces([replace(trace, spans=(*trace.spans, last))])))
    assert 0 < found.count("b0") + found.count("b1") < 12


def test_a_trace_with_branches_is_compared_with_one_that_has_none() -> None:
    drawn = draw_traces([two_branches(), chain()])
    assert ET.fromstring(drawn) is not None
    first, second = data_of(draw_page([two_branches(), chain()]))["traces"]
    assert first["branches"] == [0, 0, 0, 0, 1, 1, 1, 1, -1]
    assert second["branches"] == []


def test_a_page_has_letters_colours_and_names_of_branches() -> None:
    trace = replace(two_branches(), branches=tuple("<i>" if name == "branch 0" else name for name in two_branches().branches))
    page = draw_page([trace])
    assert [(branch["letter"], branch["name"]) for branch in data_of(page)["branches"]] == [("a", "<i>"), ("b", "branch 1")]
    assert "&lt;i&gt; (stages 0-3)</li>" in page
    assert "<i>" not in page
    assert ".fill-branch-1 {" in page


def test_the_script_draws_branches_in_a_browser(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("needs a browser")
    path = tmp_path / "page.html"
    path.write_text(draw_page([two_branches(latency_s=0.5), chain()]), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr")
    ran = subprocess.run([browser, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=False, timeout=50)
    assert "CONSOLE" not in ran.stderr
    assert 'aria-label="Timeline of 8 devices' in ran.stdout


# Names and tables


def test_stages_of_a_branch_are_named_as_ranges_unless_traces_disagree() -> None:
    trace = Trace("t", Source.SIMULATED, ("x",), 1, (), branches=("a", "a", "b", "a", "", "b"))
    first, second = branches_of([trace]).values()
    assert branch_words(first, [trace]) == "a (stages 0-1 3)"
    assert branch_words(second, [trace]) == "b (stages 2 5)"
    assert branch_words(first, [trace, chain()]) == "a"
    many = replace(trace, branches=("a", "b") * 10)
    assert branch_words(first, [many]) == "a (10 stages)"


def test_letters_go_on_after_z() -> None:
    trace = Trace("t", Source.SIMULATED, ("x",), 1, (), branches=tuple(f"tower {number}" for number in range(30)))
    found = list(branches_of([trace]).values())
    assert [branch.letter for branch in found][24:28] == ["y", "z", "aa", "bb"]


def test_a_plan_lists_the_branch_of_each_stage() -> None:
    made = planned()
    assert set(made.branches) == {"image", "text", ""}
    for table in (plan_table(made), stage_table(made)):
        assert isinstance(table, FittedTable)
        at = table.columns.index("branch")
        assert [row[at] for row in table.rows] == [name or "-" for name in made.branches]
    assert [stage["branch"] for stage in plan_report(made).document()["stages"]] == list(made.branches)


def test_a_plan_s_trace_has_its_branches_also_in_a_file(tmp_path: Path) -> None:
    trace = simulate(planned())
    assert trace.branches == planned().branches
    assert trace_report(trace).document()["branches"] == list(trace.branches)
    trace.save(tmp_path / "trace.json")
    read = Trace.load(tmp_path / "trace.json")
    assert read.branches == trace.branches
    assert divide(read).by_cause_s == divide(trace).by_cause_s
    assert read.of_updates(0, 1).branches == trace.branches


def test_waits_for_another_branch_have_a_column_and_a_key() -> None:
    # Image and text meet in stage 2. Device 0 waits from 1 s for the text, which device 1 finishes after 3 s.
    spans = (
        computed(0, "0F0", 0.0, 1.0),
        Span(0, SpanKind.RECV, Message(Direction.ACTIVATION, 1, 2, 0), 1.0, 3.0),
        computed(0, "2F0", 3.0, 4.0),
        computed(1, "1F0", 0.0, 3.0),
    )
    trace = Trace("t", Source.SIMULATED, ("x", "y"), 1, spans, branches=("image", "text", ""))
    report = idle_report(divide(trace))
    assert report.document()["causes_s"]["other_branch"] == [2.0, 0.0]
    assert "another" in printed(report.table())
    assert "another branch: it computes" in draw_page([trace])
    plain = idle_report(divide(replace(trace, branches=())))
    assert plain.document()["causes_s"]["other_branch"] == [0.0, 0.0]
    assert plain.document()["causes_s"]["activation"] == [2.0, 0.0]
    assert "another" not in printed(plain.table())
