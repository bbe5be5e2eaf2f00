"""Traces as SVG, above each other on one time axis, with a row for each device.

The size of a drawing is bounded: where Ops are too many to be seen, neighbors share a box.
"""

from __future__ import annotations

from collections.abc import Sequence

import svg

from raypipe.artifacts.trace import SpanKind, Trace
from raypipe.show.branches import branch_words
from raypipe.show.devices import labels_of
from raypipe.show.differences import difference_reports, names
from raypipe.show.labels import COLOURS, KIND_NAMES, Labels, colour, pipeline_words
from raypipe.show.lanes import lanes_to
from raypipe.show.report import rows_table
from raypipe.show.svg_document import MARGIN, WIDTH, document, place, safe_text
from raypipe.show.svg_rows import LANE, MEMORY, ROW, RowPainter, TimeAxis
from raypipe.show.view import has_memory, has_messages, has_sums
from raypipe.units import ratio, seconds

MOST_DEVICES = 256
_GAP = 5
_LINE = 18
_MOST_TRANSFERS = 5_000
_MOST_DIFFERENCES = 40
_MOST_LETTERS = 24  # of the name of a device

_STYLE = (
    ".l{font-size:10px;text-anchor:middle}.s{font-size:8px;text-anchor:middle}.row{fill:#f4f4f4}.grid{stroke:#ddd}"
    ".box{stroke:#fff;stroke-width:.6}.recv{fill:url(#hatch)}.all{fill:url(#cross)}.move{fill:#35507a;fill-opacity:.55}.sum{fill:#a8497f;fill-opacity:.6}"
    ".held{fill:#e8e0f3;stroke:#8a6fb5;stroke-width:.8}"
    + "".join(f".{kind}{{fill:{colour(kind)}}}.{kind}.odd{{fill:{colour(kind, 1)}}}" for kind in COLOURS)
)

_DATA_STYLE = ".data{fill:#f2c14e}"


def draw_traces(traces: Sequence[Trace]) -> str:
    """Draw traces, the first on top; two have their differences below."""
    return _Drawing(traces).document()


class _Drawing:
    """A sheet that is filled from the top; `y` is how far it is filled."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = traces
        self.labels = Labels(*traces)
        self.branches = list(self.labels.branches.values())
        self.device_names = [labels_of(trace)[:MOST_DEVICES] for trace in traces]
        most_letters = max((len(name) for shown in self.device_names for name in shown), default=0)
        self.axis = TimeAxis(MARGIN + 8 + min(most_letters, _MOST_LETTERS) * 7, max(0.0, *(trace.makespan_s for trace in traces)))
        num_transfers = sum(len(lane.spans) for trace in traces for lanes in lanes_to(trace) for lane in lanes)
        self.shows_transfers = 0 < num_transfers <= _MOST_TRANSFERS
        self.elements: list[svg.Element] = [_patterns()]
        self.y = float(MARGIN)

    def document(self) -> str:
        self.legend()
        words = names(*self.traces) if len(self.traces) == 2 else [str(trace.source) for trace in self.traces]
        for trace, word, shown in zip(self.traces, words, self.device_names, strict=True):
            self.trace(trace, word, shown)
        for x, label in self.axis.ticks():
            self.elements.append(safe_text(label, x, self.y + 4, "m", "g"))
        self.y += 12
        if len(self.traces) == 2:
            self.differences(*self.traces)
        has_data = any(span.kind is SpanKind.DATA for trace in self.traces for span in trace.spans)
        style = (
            _STYLE + (_DATA_STYLE if has_data else "") + "".join(f".b{branch.number}{{fill:{branch.colour}}}" for branch in self.branches)
        )
        return document(self.elements, height=self.y + MARGIN, style=style)

    def legend(self) -> None:
        kinds = {span.kind for trace in self.traces for span in trace.spans}
        entries: list[tuple[tuple[str, ...], str]] = [((str(kind),), f"{kind} {KIND_NAMES[kind]}") for kind in self.labels.kinds]
        if lighter := pipeline_words(self.labels.num_pipelines):
            entries.append(((str(self.labels.kinds[0]), "odd"), lighter))
        entries += [(("recv",), "waits for a message")] if SpanKind.RECV in kinds else []
        entries += [(("all",), "waits for a collective")] if SpanKind.COLLECTIVE in kinds else []
        entries += [(("data",), "waits for rows of the data")] if SpanKind.DATA in kinds else []
        entries += [(("move",), "message under way")] if self.shows_transfers and any(map(has_messages, self.traces)) else []
        entries += [(("sum",), "sum or norm under way")] if self.shows_transfers and any(map(has_sums, self.traces)) else []
        entries += [(("held",), "memory held")] if any(map(has_memory, self.traces)) else []
        entries += [((f"b{branch.number}",), f"{branch.letter} {branch_words(branch, self.traces)}") for branch in self.branches]
        x = float(MARGIN)
        for classes, text in entries:
            width = 20 + len(text) * 7 + 14
            if x + width > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + _LINE
            self.elements += [
                svg.Rect(x=place(x), y=place(self.y), width=14, height=12, class_=list(classes)),
                safe_text(text, x + 20, self.y + 10),
            ]
            x += width
        self.y += 26

    def trace(self, trace: Trace, word: str, shown: Sequence[str]) -> None:
        figures = f"update {seconds(trace.update_s)}, bubble {ratio(trace.bubble_ratio)}, makespan {seconds(trace.makespan_s)}"
        self.elements.append(safe_text(f"{word}: {trace.name[:60]}", MARGIN, self.y + 14, "h"))
        self.elements.append(safe_text(figures, WIDTH - MARGIN, self.y + 14, "r"))
        self.y += 24
        top = self.y
        painter = RowPainter(trace, self.axis, Labels(*self.traces, drawn=trace), num_rows=sum(map(len, self.device_names)))
        rows: list[svg.Element] = []
        for device, name in enumerate(shown):
            rows += [
                svg.Rect(x=place(self.axis.left), y=place(self.y), width=place(self.axis.pixels), height=ROW, class_=["row"]),
                safe_text(name if len(name) <= _MOST_LETTERS else name[: _MOST_LETTERS - 1] + "~", self.axis.left - 8, self.y + 16, "r"),
                safe_text(ratio(trace.device_bubble_ratios[device]), WIDTH - MARGIN, self.y + 16, "r"),
                *painter.spans(device, self.y),
            ]
            self.y += ROW
            if self.shows_transfers:
                rows += painter.transfers(device, self.y)
                self.y += LANE * len(painter.lanes[device])
            if has_memory(trace):
                rows += painter.memory(device, self.y)
                self.y += MEMORY
            self.y += _GAP
        if left_out := len(trace.devices) - len(shown):
            self.y += 12
            rows.append(safe_text(f"{left_out} more devices are left out", self.axis.left, self.y, "g"))
        self.elements += [  # below the rows
            svg.Line(x1=place(x), x2=place(x), y1=place(top - 2), y2=place(self.y), class_=["grid"]) for x, _ in self.axis.ticks()
        ]
        self.elements += rows
        self.y += 10

    def differences(self, first: Trace, second: Trace) -> None:
        table = rows_table(difference_reports(first, second))
        self.y += 22
        edges = (MARGIN, MARGIN + 330, MARGIN + 450, MARGIN + 570)
        for line, row in enumerate([table.columns, *table.rows[:_MOST_DIFFERENCES]]):
            for column, (x, cell) in enumerate(zip(edges, row, strict=True)):
                self.elements.append(safe_text(cell, x, self.y, *(("r",) if column else ()), *(() if line else ("h",))))
            self.y += _LINE
        if left_out := len(table.rows[_MOST_DIFFERENCES:]):
            self.elements.append(safe_text(f"{left_out} more figures are left out", MARGIN, self.y, "g"))
            self.y += _LINE


def _patterns() -> svg.Defs:
    def pattern(name: str, line: str, ground: str, path: list[svg.PathData]) -> svg.Pattern:
        square: list[svg.Element] = [svg.Rect(width=6, height=6, fill=ground), svg.Path(d=path, stroke=line, stroke_width=1)]
        return svg.Pattern(id=name, width=6, height=6, patternUnits="userSpaceOnUse", elements=square)

    rising: list[svg.PathData] = [svg.M(0, 6), svg.L(6, 0)]
    crossed = [*rising, svg.M(0, 0), svg.L(6, 6)]
    return svg.Defs(elements=[pattern("hatch", "#b9b9b9", "#eee", rising), pattern("cross", "#a5a5a5", "#ddd", crossed)])
