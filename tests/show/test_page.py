"""The page: what it holds, that it needs nothing else, and that nothing in a trace can act on it."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.analysis.idle import Cause, divide
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace, item_text
from raypipe.schedules import catalogue
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Direction, Message
from raypipe.show.causes import findings
from raypipe.show.differences import kind_differences, kind_text, op_differences
from raypipe.show.page import draw_page
from tests import strategies
from tests.show.test_show import spec, traced
from tests.spans import TWO_UPDATES, computed, traces

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VOID = {"meta", "br", "hr", "img", "input", "link"}
CAUSES = [str(cause) for cause in Cause]


class Reader(HTMLParser):
    """Elements and text of a page; fails where elements are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text_of(self, tag: str) -> list[str]:
        return [text for at, text in self.texts if at == tag]


def data_of(page: str) -> Any:
    """What the page's script reads."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(found)


def lengths(trace: Any) -> list[int]:
    return [sum(row["length"]) for row in trace["rows"]]


def test_a_page_tells_the_figures_of_its_trace() -> None:
    page = draw_page([traced(spec("1f1b", 4, 8))])
    reader = Reader(page)
    assert reader.text_of("h1") == ["1f1b"]
    assert "simulated \u00b7 4 devices, 4 stages, 8 microbatches, 1 update" in reader.text_of("p")
    assert reader.text_of("b")[:3] == ["33 s", "27.3%", "33 s"]
    assert any("They trace back to device 0 (stage 0) at work, 30.0%" in text for text in reader.text_of("p"))
    # What device 1 does: 8 forwards, 8 backwards, and 9 s of idleness by three causes.
    row = page[page.index('<th scope="row">device 1 (stage 1)</th>') :].split("</tr>")[0]
    cells = [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall("<td>(.*?)</td>", row)]
    assert cells == ["8.00 24.2%", "16.00 48.5%", "1.00 3.0%", "6.00 18.2%", "2.00 6.1%", "27.3%"]


def test_a_page_loads_nothing() -> None:
    page = draw_page([traced(spec("zb-h1", 2, 4), latency_s=0.5, saved_bytes=10**6)])
    reader = Reader(page)
    for tag, attributes in reader.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not {name for name in attributes if name in {"src", "href", "action", "style"} or name.startswith("on")}
    style, script = reader.text_of("style"), reader.text_of("script")[-1]
    assert re.findall(r"url\((?!#)|@import|http", "".join(style)) == []
    assert re.findall(r"https?:|//\w|fetch\(|XMLHttpRequest|WebSocket|import\(|innerHTML|eval\(", script) == []


def test_only_the_page_s_own_script_and_style_may_run() -> None:
    reader = Reader(draw_page([TWO_UPDATES]))
    (policy,) = [attributes["content"] or "" for _, attributes in reader.elements if attributes.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    for name, text in (("style-src", reader.text_of("style")[0]), ("script-src", reader.text_of("script")[-1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy


def test_pieces_fill_the_time_of_each_device() -> None:
    (drawn,) = data_of(draw_page([TWO_UPDATES]))["traces"]
    assert lengths(drawn) == [drawn["end"]] * 2
    assert drawn["end"] * drawn["tick_s"] == pytest.approx(TWO_UPDATES.makespan_s)
    first = drawn["rows"][0]
    # A quarter of a second is the longest unit of all times.
    assert (drawn["tick_s"], first["length"][:2]) == (0.25, [4, 8])
    assert first["name"][:4] == ["0F0", "G1>0:0", "0B0", " norm for update 0"]
    assert [CAUSES[ord(letter) - ord("a")] for letter in first["cause"][:2]] == ["compute", "gradient"]
    assert drawn["messages"] == [[], [{"from": -1, "step": [4], "length": [1], "name": ["A0>1:0"], "bytes": 100}]]
    assert drawn["memory"][0] == {"step": [0, 4, 16], "bytes": [10, 30, 10]}


def test_memory_is_left_out_where_a_trace_has_none() -> None:
    page = draw_page([traced(spec("1f1b", 2, 4))])
    assert data_of(page)["traces"][0]["memory"] == []
    assert "memory" not in Reader(page).text_of("li")
    assert 'data-shows="memory"' not in page


def test_two_traces_stand_above_each_other_with_their_differences() -> None:
    schedule = spec("1f1b", 2, 4)
    predicted, measured = traced(schedule), traced(schedule, latency_s=2.0, source=Source.MEASURED)
    slow = replace(measured, spans=tuple(map(slower, measured.spans)))
    page = draw_page([predicted, slow])
    reader = Reader(page)
    assert [trace["word"] for trace in data_of(page)["traces"]] == ["predicted", "measured"]
    assert "predicted above measured \u00b7 2 devices, 2 stages, 4 microbatches, 1 update" in reader.text_of("p")
    assert reader.text_of("th").count("difference") == 2 + 2
    assert "error -40.0%" in reader.text_of("span")  # 15 s to 25 s
    assert "F of stage 1" in reader.text_of("th")
    assert "+100 ms" in reader.text_of("td")


def slower(span: Span) -> Span:
    """The same, but the forwards of stage 1 take a tenth longer."""
    return span._replace(end_s=span.end_s + 0.1) if span.name.startswith("1F") else span


def test_the_ops_of_two_traces_are_compared_by_device_and_name() -> None:
    schedule = spec("1f1b", 2, 4)
    measured = traced(schedule, source=Source.MEASURED)
    longer = replace(measured, spans=tuple(map(slower, measured.spans)))
    ops = [op for op in op_differences(traced(schedule), longer) if op.first_s]
    assert len(ops) == 2 * 2 * 4
    assert {item_text(op.ops) for op in ops[:4]} == {"1F0", "1F1", "1F2", "1F3"}
    assert ops[0].difference_s == pytest.approx(0.1)
    first, *others = kind_differences(ops)
    assert (first.device, kind_text(first.ops), first.num_slots) == (1, "F of stage 1", 4)
    assert [first.first_s, first.second_s] == pytest.approx([1.0, 1.1])
    assert [op.difference_s for op in others] == [0.0] * 3


def test_findings_name_what_holds_the_others_up() -> None:
    (found,) = findings(divide(traced(spec("gpipe", 2, 4), latency_s=100.0)))
    assert "messages on their way from 1 to 0" in found
    assert "No device or link" in next(findings(divide(traced(spec("gpipe", 60, 1)))))
    assert list(findings(divide(traced(spec("gpipe", 1, 4))))) == []


@pytest.mark.parametrize("name", strategies.SPEC_NAMES)
@given(data=st.data())
@settings(max_examples=8)
def test_every_family_has_a_page(name: str, data: st.DataObject) -> None:
    size = data.draw(strategies.sizes(name, max_devices=4, max_microbatches=6, max_updates=2))
    trace = traced(catalogue.build(name, size), latency_s=0.5, saved_bytes=10)
    page = draw_page([trace])
    Reader(page)
    (drawn,) = data_of(page)["traces"]
    assert lengths(drawn) == [drawn["end"]] * len(trace.devices)
    for device, row in enumerate(drawn["rows"]):
        busy = sum(length for length, letter in zip(row["length"], row["cause"], strict=True) if letter == "a")
        assert busy * drawn["tick_s"] == pytest.approx(trace.busy_s[device])
        assert len(row["name"]) == len(row["length"])
        assert len(row["peer"]) == sum(letter != "a" for letter in row["cause"])


@given(st.lists(st.one_of(traces(), st.builds(traced, strategies.schedules())), min_size=1, max_size=2))
def test_any_traces_give_a_well_formed_page(given_traces: list[Trace]) -> None:
    page = draw_page(given_traces)
    page.encode()
    Reader(page)
    for trace in data_of(page)["traces"]:
        assert lengths(trace) == [trace["end"]] * len(trace["devices"])


def test_a_trace_of_nothing_has_a_page() -> None:
    Reader(draw_page([Trace("", Source.MEASURED, (), 1, ())]))


def test_names_cannot_break_out_of_a_page() -> None:
    hostile = '</script></title><script>alert("1")</script><!--<b onclick=alert(1)>&\u2028\x00\ud800'
    spans = (Span(0, SpanKind.RECV, hostile, 6.0, 7.0), Span(1, SpanKind.TRANSFER, hostile, 6.0, 7.0), *TWO_UPDATES.spans)
    trace = replace(TWO_UPDATES, name=hostile, devices=(hostile, "${style}"), spans=spans)
    for page in (draw_page([trace]), draw_page([trace, trace])):
        page.encode()
        reader = Reader(page)
        assert sum(tag == "script" for tag, _ in reader.elements) == 2
        assert not any("onclick" in attributes for _, attributes in reader.elements)
        assert data_of(page)["traces"][0]["devices"] == [hostile, "${style}"]
        assert any(row["name"].count(f" {hostile}") for row in data_of(page)["traces"][0]["rows"])


def test_large_traces_stay_small_files() -> None:
    spans = []
    for device, index in itertools.product(range(64), range(400)):
        start_s = 0.013 * device + 0.031415926 * index
        spans.append(computed(device, f"{device}F{index}", start_s, start_s + 0.01))
        spans.append(
            Span(device, SpanKind.RECV, Message(Direction.GRADIENT, device + 1, device, index), start_s + 0.01, start_s + 0.011, 10)
        )
        spans.append(computed(device, f"{device}B{index}", start_s + 0.011, start_s + 0.03))
        spans.append(Span(device, SpanKind.TRANSFER, Message(Direction.GRADIENT, device + 1, device, index), start_s, start_s + 0.002, 10))
    trace = Trace("large", Source.MEASURED, tuple(map(str, range(64))), 1, tuple(spans))
    assert len(draw_page([trace])) < 40 * len(spans)


def test_the_same_trace_gives_the_same_page() -> None:
    trace = traced(spec("zb-h1", 3, 5), latency_s=0.25)
    assert draw_page([trace]) == draw_page([trace])


def test_every_kind_and_cause_has_a_fill() -> None:
    page = draw_page([TWO_UPDATES])
    for name in (*OpKind, *CAUSES[1:]):
        assert f".fill-{name} {{" in page
    for cause in CAUSES[1:]:
        assert f'<pattern id="p-{cause}"' in page


@pytest.mark.parametrize("name", ["page.css", "page.html", "page_read.js", "page_draw.js", "page_pointer.js"])
def test_the_parts_of_the_page_are_shipped_and_ascii(name: str) -> None:
    content = files("raypipe.show").joinpath(name).read_bytes()
    assert content.isascii()
    assert len(content.splitlines()) < 500


def test_the_script_draws_in_a_browser(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}")
    path = tmp_path / "page.html"
    path.write_text(draw_page([TWO_UPDATES, replace(TWO_UPDATES, source=Source.SIMULATED)]), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr")
    ran = subprocess.run([browser, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=False, timeout=50)
    assert "CONSOLE" not in ran.stderr
    assert 'aria-label="Timeline of 4 devices over 11.5 s' in ran.stdout
