"""What an SVG shows of one device: its spans, the messages on their way to it, and its memory over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import svg

from raypipe.artifacts.trace import Span, SpanKind, Trace
from raypipe.show.branches import Branch
from raypipe.show.devices import labels_of
from raypipe.show.labels import Labels
from raypipe.show.lanes import is_sum, lanes_to
from raypipe.show.svg_document import MARGIN, WIDTH, escape, place, safe_text
from raypipe.units import number, ratio, seconds, size, ticks, time_unit

ROW = 24  # heights in pixels
MEMORY = 18
LANE = 4
STRIPE = 0.2  # of a box, in the colour of its branch
_RIGHT = 70
_MOST_TICKS = 14
_MOST_BOXES = 24_000
_MOST_MEMORY_POINTS = 20_000
_WAIT_CLASSES = {SpanKind.RECV: "recv", SpanKind.COLLECTIVE: "all", SpanKind.DATA: "data"}
_LEAST_PIXELS = 0.3
_MOST_FIT = 0.75


class TimeAxis(NamedTuple):
    """Pixels of times from 0 to `end_s`; `left` is those of 0."""

    left: float
    end_s: float

    @property
    def pixels(self) -> float:
        """Width of the whole time."""
        return WIDTH - _RIGHT - self.left

    def x(self, time_s: float) -> float:
        """Return the pixels of a time."""
        share = time_s / self.end_s if self.end_s else 0.0
        return self.left + min(max(share, 0.0), 1.0) * self.pixels

    def width(self, span: Span) -> float:
        """Return the width of a span."""
        return self.x(span.end_s) - self.x(span.start_s)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield pixels and labels of round times."""
        name, unit_s = time_unit(self.end_s)
        if self.end_s:
            for tick in ticks(self.end_s / unit_s, _MOST_TICKS):
                yield self.x(tick * unit_s), f"{number(tick)} {name}"


class _LabelForm(NamedTuple):
    index_only: bool
    letter_pixels: float
    style: str  # class of the text
    drop: float  # from the middle of a box to the line that the text stands on

    def fits(self, text: str, width: float) -> bool:
        return len(text) * self.letter_pixels + 1.5 <= width


_LARGE, _SMALL = (6.3, "l", 3.6), (5.2, "s", 3.0)
_LABEL_FORMS = tuple(_LabelForm(index_only, *form) for index_only in (False, True) for form in (_LARGE, _SMALL))


class RowPainter:
    """Draws the rows of one trace; `num_rows` rows share the boxes and points of a drawing."""

    def __init__(self, trace: Trace, axis: TimeAxis, labels: Labels, *, num_rows: int) -> None:
        self.trace = trace
        self.axis = axis
        self.labels = labels
        self.most_boxes = _MOST_BOXES // max(num_rows, 1)
        self.most_points = _MOST_MEMORY_POINTS // max(num_rows, 1)
        self.form = self._label_form()
        self.lanes = lanes_to(trace)

    def _label_form(self) -> _LabelForm:
        # The first form that fits most Ops, so that all labels look alike.
        spans = [span for row in self.trace.by_device for span in row if span.kind is SpanKind.COMPUTE and span.end_s > span.start_s]
        for form in _LABEL_FORMS:
            longest = (max(self._texts(form, span), key=len) for span in spans)
            if sum(map(form.fits, longest, map(self.axis.width, spans))) >= _MOST_FIT * len(spans):
                return form
        return _LABEL_FORMS[0]

    def _texts(self, form: _LabelForm, span: Span) -> list[str]:
        parts = self.labels.of(span)
        return ["+".join(dict.fromkeys(str(op.index) for op in part.ops)) if form.index_only else part.text for part in parts]

    def spans(self, device: int, y: float) -> Iterator[svg.Element]:
        """Draw what a device does."""
        visible = [span for span in self.trace.by_device[device] if self.axis.width(span) > 0]
        is_crowded = len(visible) > self.most_boxes
        for group in self._groups(visible, max(_LEAST_PIXELS, self.axis.pixels / self.most_boxes if is_crowded else 0.0)):
            yield from self._span(group[0], y) if len(group) == 1 else self._group(group, y)

    def _groups(self, spans: Sequence[Span], least_pixels: float) -> Iterator[list[Span]]:
        # Narrow spans are merged with narrow neighbors until they are wide enough.
        group: list[Span] = []
        for span in spans:
            is_wide = self.axis.width(span) >= least_pixels
            if group and (is_wide or self.axis.x(group[-1].end_s) - self.axis.x(group[0].start_s) >= least_pixels):
                yield group
                group = []
            if is_wide:
                yield [span]
            else:
                group.append(span)
        if group:
            yield group

    def _span(self, span: Span, y: float) -> Iterator[svg.Element]:
        title = _hover(span, self.trace)
        if span.kind is not SpanKind.COMPUTE:
            yield self._box(span, y, ROW, _WAIT_CLASSES[span.kind], title=title)
            return
        parts = self.labels.of(span)
        height = ROW / len(parts)
        _, _, style, drop = self.form if len(parts) == 1 else _LABEL_FORMS[1]
        for position, (part, text) in enumerate(zip(parts, self._texts(self.form, span), strict=True)):
            top, op = y + position * height, part.ops[0]
            yield self._box(span, top, height, "box", str(op.kind), *(["odd"] if op.pipeline % 2 else []), title=title)
            yield from self._stripe(span, top, height, part.branch)
            if self.form.fits(text, self.axis.width(span)):
                yield safe_text(text, self.axis.x(span.start_s) + self.axis.width(span) / 2, top + height / 2 + drop, style)

    def _group(self, group: Sequence[Span], y: float) -> Iterator[svg.Element]:
        # A box in the colour of the longest kind, as high as the device is busy in it.
        times: dict[str, float] = defaultdict(float)
        branches: dict[Branch | None, float] = defaultdict(float)
        for span in group:
            if span.kind is SpanKind.COMPUTE:
                times[str(span.ops[0].kind)] += span.end_s - span.start_s
                branches[self.labels.of(span)[0].branch] += span.end_s - span.start_s
        whole = group[0]._replace(end_s=max(span.end_s for span in group))
        if not times:
            yield from self._span(whole._replace(bytes=0), y)
            return
        busy = min(sum(times.values()) / (whole.end_s - whole.start_s), 1.0)
        title = f"{len(group)} spans, busy {ratio(busy)}\nfrom {seconds(whole.start_s)} to {seconds(whole.end_s)}"
        yield self._box(whole, y + ROW * (1 - busy), ROW * busy, max(times, key=lambda kind: times[kind]), title=title)
        yield from self._stripe(whole, y + ROW * (1 - busy), ROW * busy, max(branches, key=lambda branch: branches[branch]))

    def _stripe(self, span: Span, y: float, height: float, branch: Branch | None) -> Iterator[svg.Element]:
        if branch:
            yield svg.Rect(
                x=place(self.axis.x(span.start_s)),
                y=place(y),
                width=max(place(self.axis.width(span)), 0.1),
                height=place(height * STRIPE),
                class_=[f"b{branch.number}"],
            )

    def transfers(self, device: int, y: float) -> Iterator[svg.Element]:
        """Draw what is on its way to a device, a lane for each link."""
        for at, lane in enumerate(self.lanes[device]):
            for span in lane.spans:
                if self.axis.width(span) >= _LEAST_PIXELS:
                    style = "sum" if is_sum(span.item) else "move"
                    yield self._box(span, y + at * LANE + 1, LANE - 1, style, title=_hover(span, self.trace))

    def _box(self, span: Span, y: float, height: float, *classes: str, title: str) -> svg.Element:
        return svg.Rect(
            x=place(self.axis.x(span.start_s)),
            y=place(y),
            width=max(place(self.axis.width(span)), 0.1),
            height=place(height),
            class_=list(classes),
            elements=[svg.Title(text=escape(title))],
        )

    def memory(self, device: int, y: float) -> Iterator[svg.Element]:
        """Draw what a device holds."""
        base, most_held = y + MEMORY - 1, max(self.trace.peak_memory_bytes)
        steps = _envelope([(self.axis.x(at_s), held) for at_s, held in self.trace.memory[device]], self.most_points)
        path: list[svg.PathData] = [svg.M(place(self.axis.left), place(base))]
        for x, held in steps:
            path += [svg.H(place(x)), svg.V(place(base - max(held, 0) / most_held * (MEMORY - 3)))]
        path += [svg.H(place(self.axis.x(self.trace.makespan_s))), svg.V(place(base))]
        peak = size(self.trace.peak_memory_bytes[device])
        yield svg.Path(d=path, class_=["held"], elements=[svg.Title(text=f"peak {peak}")])
        yield safe_text(peak, WIDTH - MARGIN, base - 4, "r", "g")


def _hover(span: Span, trace: Trace) -> str:
    carried = f"\n{size(span.bytes)}" if span.bytes else ""
    lead = "waits for " if span.kind in _WAIT_CLASSES else ""
    sender = f" from {labels_of(trace)[span.sender]}" if span.sender is not None else ""
    tail = f" under way{sender}" if span.kind is SpanKind.TRANSFER else ""
    branches = dict.fromkeys(branch for op in span.ops if (branch := trace.branch(op.stage)))
    tail = f" of {' and '.join(branches)}" if branches else tail
    return f"{lead}{span.name}{tail}\nat {seconds(span.start_s)} for {seconds(span.end_s - span.start_s)}{carried}"


def _envelope(steps: Sequence[tuple[float, int]], most: int) -> Sequence[tuple[float, int]]:
    # Of too many steps, the highest in each of `most` equal widths.
    if len(steps) <= most:
        return steps
    width = max((steps[-1][0] - steps[0][0]) / max(most, 1), 1e-9)
    highest: dict[int, tuple[float, int]] = {}
    for x, held in steps:
        column = int((x - steps[0][0]) / width)
        if column not in highest or held > highest[column][1]:
            highest[column] = (x, held)
    return list(highest.values())
