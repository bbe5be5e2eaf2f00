"""Traces as SVG, above each other on one time axis, with a row for each device.

The size of a drawing is bounded: where Ops are too many to be seen, neighbors share a box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import svg

from raypipe.artifacts.trace import Span, SpanKind, Trace
from raypipe.show.differences import differences, header, names, rows
from raypipe.show.labels import COLOURS, KIND_NAMES, Labels, colour, pipeline_words
from raypipe.show.svg_document import MARGIN, WIDTH, document, escape, place, safe_text
from raypipe.show.view import has_memory
from raypipe.units import number, ratio, seconds, size, ticks, time_unit

MOST_DEVICES = 256
_RIGHT = 70
_ROW = 24
_GAP = 5
_MEMORY = 18
_LETTER = 6.3  # width of a letter of the labels, in pixels
_SMALL_LETTER = 5.2
_MOST_BOXES = 24_000
_MOST_MEMORY_POINTS = 20_000
_MOST_TRANSFERS = 5_000
_LEAST_PIXELS = 0.3
_MOST_FIT = 0.75
_MOST_DIFFERENCES = 40

_STYLE = (
    ".l{font-size:10px;text-anchor:middle}.s{font-size:8px;text-anchor:middle}.row{fill:#f4f4f4}.grid{stroke:#ddd}"
    ".box{stroke:#fff;stroke-width:.6}.recv{fill:url(#hatch)}.all{fill:url(#cross)}.move{fill:#35507a;fill-opacity:.55}"
    ".held{fill:#e8e0f3;stroke:#8a6fb5;stroke-width:.8}"
    + "".join(f".{kind}{{fill:{colour(kind)}}}.{kind}.odd{{fill:{colour(kind, 1)}}}" for kind in COLOURS)
)


def draw_traces(traces: Sequence[Trace]) -> str:
    """Draw traces, the first on top; two have their differences below."""
    return _Drawing(traces).document()


class _LabelForm(NamedTuple):
    index_only: bool
    letter_pixels: float


_LABEL_FORMS = tuple(_LabelForm(index_only, letter) for index_only in (False, True) for letter in (_LETTER, _SMALL_LETTER))


class _Drawing:
    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = traces
        self.labels = Labels(*traces)
        self.end_s = max(0.0, *(trace.makespan_s for trace in traces))
        names = [name for trace in traces for name in trace.devices[:MOST_DEVICES]]
        self.left = MARGIN + 8 + min(max((len(name) for name in names), default=0), 24) * 7
        self.pixels = WIDTH - _RIGHT - self.left
        self.num_rows = sum(min(len(trace.devices), MOST_DEVICES) for trace in traces)
        self.num_transfers = sum(span.kind is SpanKind.TRANSFER for trace in traces for span in trace.spans)
        self.form = _LABEL_FORMS[0]
        self.elements: list[svg.Element] = []
        self.y = float(MARGIN)

    def document(self) -> str:
        self.legend()
        words = names(*self.traces) if len(self.traces) == 2 else [str(trace.source) for trace in self.traces]
        for trace, word in zip(self.traces, words, strict=True):
            self.trace(trace, word)
        self.axis()
        if len(self.traces) == 2:
            self.differences()
        return document([_patterns(), *self.elements], height=self.y + MARGIN, style=_STYLE)

    def x(self, time_s: float) -> float:
        share = time_s / self.end_s if self.end_s else 0.0
        return self.left + min(max(share, 0.0), 1.0) * self.pixels

    def legend(self) -> None:
        kinds = {span.kind for trace in self.traces for span in trace.spans}
        entries: list[tuple[tuple[str, ...], str]] = [((str(kind),), f"{kind} {KIND_NAMES[kind]}") for kind in self.labels.kinds]
        if lighter := pipeline_words(self.labels.num_pipelines):
            entries.append(((str(self.labels.kinds[0]), "odd"), lighter))
        entries += [(("recv",), "waits for a message")] if SpanKind.RECV in kinds else []
        entries += [(("all",), "waits for a collective")] if SpanKind.COLLECTIVE in kinds else []
        entries += [(("move",), "message under way")] if self.shows_transfers else []
        entries += [(("held",), "memory held")] if any(map(has_memory, self.traces)) else []
        x = float(MARGIN)
        for classes, text in entries:
            width = 20 + len(text) * 7 + 14
            if x + width > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + 18
            self.elements += [
                svg.Rect(x=place(x), y=place(self.y), width=14, height=12, class_=list(classes)),
                safe_text(text, x + 20, self.y + 10),
            ]
            x += width
        self.y += 26

    @property
    def shows_transfers(self) -> bool:
        return 0 < self.num_transfers <= _MOST_TRANSFERS

    def label_form(self, trace: Trace) -> _LabelForm:
        # The first form that fits most Ops, so that all labels look alike.
        spans = [span for row in trace.by_device for span in row if span.kind is SpanKind.COMPUTE and span.end_s > span.start_s]
        for form in _LABEL_FORMS:
            if sum(self.fits(form, max(self.texts(form, span), key=len), span) for span in spans) >= _MOST_FIT * len(spans):
                return form
        return _LABEL_FORMS[0]

    def texts(self, form: _LabelForm, span: Span) -> list[str]:
        parts = self.labels.of(span)
        return ["+".join(dict.fromkeys(str(op.index) for op in part.ops)) if form.index_only else part.text for part in parts]

    def fits(self, form: _LabelForm, text: str, span: Span) -> bool:
        return len(text) * form.letter_pixels + 1.5 <= self.x(span.end_s) - self.x(span.start_s)

    def trace(self, trace: Trace, word: str) -> None:
        self.form = self.label_form(trace)
        figures = f"update {seconds(trace.update_s)}, bubble {ratio(trace.bubble_ratio)}, makespan {seconds(trace.makespan_s)}"
        self.elements.append(safe_text(f"{word}: {trace.name[:60]}", MARGIN, self.y + 14, "h"))
        self.elements.append(safe_text(figures, WIDTH - MARGIN, self.y + 14, "r"))
        self.y += 24
        top = self.y
        transfers: list[list[Span]] = [[] for _ in trace.devices]
        for span in trace.spans:
            if span.kind is SpanKind.TRANSFER:
                transfers[span.device].append(span)
        most_held = max(trace.peak_memory_bytes, default=0)
        drawn: list[svg.Element] = []
        for device, name in enumerate(trace.devices[:MOST_DEVICES]):
            drawn += [
                svg.Rect(x=place(self.left), y=place(self.y), width=place(self.pixels), height=_ROW, class_=["row"]),
                safe_text(name if len(name) <= 24 else name[:23] + "~", self.left - 8, self.y + 16, "r"),
                safe_text(ratio(trace.device_bubble_ratios[device]), WIDTH - MARGIN, self.y + 16, "r"),
                *self.row(trace.by_device[device], self.y),
                *(self.transfers(transfers[device], self.y) if self.shows_transfers else ()),
            ]
            self.y += _ROW
            if has_memory(trace):
                drawn += self.memory(trace, device, most_held)
                self.y += _MEMORY
            self.y += _GAP
        if len(trace.devices) > MOST_DEVICES:
            self.y += 12
            drawn.append(safe_text(f"{len(trace.devices) - MOST_DEVICES} more devices are left out", self.left, self.y, "g"))
        lines = [svg.Line(x1=place(x), x2=place(x), y1=place(top - 2), y2=place(self.y), class_=["grid"]) for x, _ in self.ticks()]
        self.elements += [*lines, *drawn]
        self.y += 10

    def row(self, spans: Sequence[Span], y: float) -> Iterator[svg.Element]:
        visible = [span for span in spans if self.x(span.end_s) - self.x(span.start_s) > 0]
        boxes = _MOST_BOXES // self.num_rows
        least = _LEAST_PIXELS if len(visible) <= boxes else max(_LEAST_PIXELS, self.pixels / boxes)
        for group in self.groups(visible, least):
            yield from self.span(group[0], y) if len(group) == 1 else self.group(group, y)

    def groups(self, spans: Sequence[Span], least_pixels: float) -> Iterator[list[Span]]:
        # Narrow spans are merged with narrow neighbors until they are wide enough.
        group: list[Span] = []
        for span in spans:
            is_wide = self.x(span.end_s) - self.x(span.start_s) >= least_pixels
            if group and (is_wide or self.x(group[-1].end_s) - self.x(group[0].start_s) >= least_pixels):
                yield group
                group = []
            if is_wide:
                yield [span]
            else:
                group.append(span)
        if group:
            yield group

    def span(self, span: Span, y: float) -> Iterator[svg.Element]:
        x, width = self.x(span.start_s), self.x(span.end_s) - self.x(span.start_s)
        title = svg.Title(text=escape(_hover(span)))
        if span.kind is not SpanKind.COMPUTE:
            classes = ["recv" if span.kind is SpanKind.RECV else "all"]
            yield svg.Rect(x=place(x), y=place(y), width=_wide(width), height=_ROW, class_=classes, elements=[title])
            return
        parts = self.labels.of(span)
        height = _ROW / len(parts)
        small = len(parts) > 1 or self.form.letter_pixels == _SMALL_LETTER
        for position, (part, label) in enumerate(zip(parts, self.texts(self.form, span), strict=True)):
            top, op = y + position * height, part.ops[0]
            classes = ["box", str(op.kind), *(["odd"] if op.pipeline % 2 else [])]
            yield svg.Rect(x=place(x), y=place(top), width=_wide(width), height=place(height), class_=classes, elements=[title])
            if self.fits(self.form, label, span):
                yield safe_text(label, x + width / 2, top + height / 2 + (3 if small else 3.6), "s" if small else "l")

    def group(self, group: Sequence[Span], y: float) -> Iterator[svg.Element]:
        # A box in the colour of the longest kind, as high as the device is busy in it.
        times: dict[str, float] = {}
        for span in group:
            if span.kind is SpanKind.COMPUTE:
                kind = str(span.ops[0].kind)
                times[kind] = times.get(kind, 0.0) + span.end_s - span.start_s
        start_s, end_s = group[0].start_s, max(span.end_s for span in group)
        if not times:
            yield from self.span(Span(*group[0][:4], end_s), y)
            return
        x, width = self.x(start_s), self.x(end_s) - self.x(start_s)
        busy = min(sum(times.values()) / (end_s - start_s), 1.0)
        title = f"{len(group)} spans, busy {ratio(busy)}\nfrom {seconds(start_s)} to {seconds(end_s)}"
        yield svg.Rect(
            x=place(x),
            y=place(y + _ROW * (1 - busy)),
            width=_wide(width),
            height=place(_ROW * busy),
            class_=[max(times, key=lambda kind: times[kind])],
            elements=[svg.Title(text=escape(title))],
        )

    def transfers(self, spans: Sequence[Span], y: float) -> Iterator[svg.Element]:
        for span in spans:
            x, width = self.x(span.start_s), self.x(span.end_s) - self.x(span.start_s)
            if width >= _LEAST_PIXELS:
                title = svg.Title(text=escape(_hover(span)))
                yield svg.Rect(x=place(x), y=place(y + _ROW - 3), width=_wide(width), height=3, class_=["move"], elements=[title])

    def memory(self, trace: Trace, device: int, most_held: int) -> Iterator[svg.Element]:
        base = self.y + _MEMORY - 1
        points = _MOST_MEMORY_POINTS // self.num_rows
        steps = _envelope([(self.x(at), held) for at, held in trace.memory[device]], points)
        path: list[svg.PathData] = [svg.M(place(self.left), place(base))]
        for x, held in steps:
            path += [svg.H(place(x)), svg.V(place(base - max(held, 0) / most_held * (_MEMORY - 3)))]
        path += [svg.H(place(self.x(trace.makespan_s))), svg.V(place(base))]
        peak = f"peak {size(trace.peak_memory_bytes[device])}"
        yield svg.Path(d=path, class_=["held"], elements=[svg.Title(text=peak)])
        yield safe_text(size(trace.peak_memory_bytes[device]), WIDTH - MARGIN, base - 4, "r", "g")

    def ticks(self) -> Iterator[tuple[float, str]]:
        name, unit_s = time_unit(self.end_s)
        if self.end_s:
            for tick in ticks(self.end_s / unit_s, 14):
                yield self.x(tick * unit_s), f"{number(tick)} {name}"

    def axis(self) -> None:
        for x, label in self.ticks():
            self.elements.append(safe_text(label, x, self.y + 4, "m", "g"))
        self.y += 12

    def differences(self) -> None:
        first, second = self.traces
        found = rows(differences(first, second))
        self.y += 22
        edges = (MARGIN, MARGIN + 330, MARGIN + 450, MARGIN + 570)
        for line, row in enumerate([header(first, second), *found[:_MOST_DIFFERENCES]]):
            for column, (x, cell) in enumerate(zip(edges, row, strict=True)):
                self.elements.append(safe_text(cell, x, self.y, *(("r",) if column else ()), *(() if line else ("h",))))
            self.y += 18
        if len(found) > _MOST_DIFFERENCES:
            self.elements.append(safe_text(f"{len(found) - _MOST_DIFFERENCES} more figures are left out", MARGIN, self.y, "g"))
            self.y += 18


def _patterns() -> svg.Defs:
    def pattern(name: str, line: str, ground: str, path: list[svg.PathData]) -> svg.Pattern:
        square: list[svg.Element] = [svg.Rect(width=6, height=6, fill=ground), svg.Path(d=path, stroke=line, stroke_width=1)]
        return svg.Pattern(id=name, width=6, height=6, patternUnits="userSpaceOnUse", elements=square)

    rising: list[svg.PathData] = [svg.M(0, 6), svg.L(6, 0)]
    crossed = [*rising, svg.M(0, 0), svg.L(6, 6)]
    return svg.Defs(elements=[pattern("hatch", "#b9b9b9", "#eee", rising), pattern("cross", "#a5a5a5", "#ddd", crossed)])


def _wide(width: float) -> float:
    return max(place(width), 0.1)


def _hover(span: Span) -> str:
    carried = f"\n{size(span.bytes)}" if span.bytes else ""
    lead = "waits for " if span.kind in {SpanKind.RECV, SpanKind.COLLECTIVE} else ""
    tail = " under way" if span.kind is SpanKind.TRANSFER else ""
    return f"{lead}{span.name}{tail}\nat {seconds(span.start_s)} for {seconds(span.end_s - span.start_s)}{carried}"


def _envelope(steps: Sequence[tuple[float, int]], most: int) -> Sequence[tuple[float, int]]:
    # Of too many steps, the highest in each of `most` equal widths.
    if len(steps) <= most:
        return steps
    width = max((steps[-1][0] - steps[0][0]) / max(most, 1), 1e-9)
    highest: dict[int, tuple[float, int]] = {}
    for x, held in steps:
        stretch = int((x - steps[0][0]) / width)
        if stretch not in highest or held > highest[stretch][1]:
            highest[stretch] = (x, held)
    return list(highest.values())
