"""A trace as lines of text: one row a device, time from left to right.

0 |F0F1F2F3......B0- F4B1- F5B2-      an Op is as wide as it is long,
1 |..F0F1F2....B0- F3B1- F4B2- ..     and a dot is time in which the device waits
   0    5         10        15 s
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from raypipe.artifacts.trace import Span, SpanKind, Trace
from raypipe.show.branches import branch_words
from raypipe.show.devices import labels_of
from raypipe.show.labels import KIND_NAMES, Label, Labels, colour, pipeline_words
from raypipe.units import number, seconds, ticks, time_unit

_MOST_ROWS = 48
_MOST_LINES = 40
_MOST_COLUMNS_A_UNIT = 8
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class _Scale:
    columns_per_s: float
    num_columns: int
    band: int  # columns of one line; a longer trace goes on below
    room: int  # columns that a line may have

    def column(self, time_s: float) -> int:
        return min(round(time_s * self.columns_per_s), self.num_columns)


def timed_grid(trace: Trace, *, width: int) -> Text:
    """Draw a trace with a legend as text; `width` is in columns, and a wider trace goes on in further bands."""
    return timed_grids((trace,), width=width)[0]


def timed_grids(traces: Sequence[Trace], *, width: int) -> tuple[Text, ...]:
    """Draw traces on one time axis."""
    makespan_s = max(trace.makespan_s for trace in traces)
    drawn = [_Drawn(trace) for trace in traces]
    head = max((len(name) for each in drawn for name in each.devices), default=0)
    timed = [each for each in drawn if any(each.rows)]
    if not timed:
        return tuple(Text("no Op takes any time") for _ in traces)
    scale = _scale(timed, makespan_s=makespan_s, columns=max(width - head - 2, 10))
    return tuple(_grid(each, scale, head=head, makespan_s=makespan_s) for each in drawn)


class _Drawn:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.labels = Labels(trace)
        self.devices = labels_of(trace)[:_MOST_ROWS]
        rows = trace.by_device[:_MOST_ROWS]
        self.rows = [[span for span in row if span.kind is SpanKind.COMPUTE and span.end_s > max(span.start_s, 0.0)] for row in rows]


def _grid(drawn: _Drawn, scale: _Scale, *, head: int, makespan_s: float) -> Text:
    trace, labels = drawn.trace, drawn.labels
    if not any(drawn.rows):
        return Text("no Op takes any time")
    lines = [_Line(name, scale, row, labels, trace.makespan_s) for name, row in zip(drawn.devices, drawn.rows, strict=True)]
    out = Text()
    for start in range(0, scale.column(trace.makespan_s), scale.band):
        for line in lines:
            out.append(f"{line.name.rjust(head)} |")
            out.append_text(line.text[start : start + scale.band])
            out.append("\n")
        out.append(" " * (head + 2) + _ruler(scale, makespan_s, start) + "\n")
    return out.append("\n".join(_notes(trace, lines, labels, scale)))


class _Line:
    def __init__(self, name: str, scale: _Scale, spans: Sequence[Span], labels: Labels, end_s: float) -> None:
        self.name = name
        self.unlabelled = self.hidden = 0  # Ops without a label, and without a column
        self.text = Text()
        at = 0
        for span in spans:
            first, end = max(scale.column(span.start_s), at), scale.column(span.end_s)
            if first >= end:
                self.hidden += 1
                continue
            self.text.append("." * (first - at), style="dim")
            for text, part in self._cell(labels.of(span), end - first):
                ground = colour(part.ops[0].kind, part.ops[0].pipeline)
                if part.branch is None:
                    self.text.append(text, style=f"black on {ground}")
                    continue
                lead, letter, rest = text.rpartition(part.branch.letter)
                self.text.append(lead, style=f"black on {ground}")
                self.text.append(letter, style=f"bold white on {part.branch.colour}")
                # Without room for the letter, the kind has the branch's colour.
                self.text.append(rest, style=f"black on {ground}" if letter else f"bold {part.branch.colour} on {ground}")
            at = end
        self.text.append("." * (scale.column(end_s) - at), style="dim")

    def _cell(self, parts: Sequence[Label], width: int) -> Iterator[tuple[str, Label]]:
        texts = _joined([part.text for part in parts])
        if sum(map(len, texts)) > width:
            self.unlabelled += 1
            # The kinds alone, without stage and index; of Ops that overlap the first one's where there is no more room.
            kinds = [str(part.ops[0].kind) for part in parts]
            marked = [f"{part.branch.letter if part.branch else ''}{kind}" for part, kind in zip(parts, kinds, strict=True)]
            shorter = (_joined(marked), _joined(kinds), kinds)
            texts = next((short for short in shorter if sum(map(len, short)) <= width), kinds[:1])
        rest = width - sum(map(len, texts))
        if rest:  # the blank keeps apart what colour does not
            texts[-1] += "-" * (rest - 1) + " "
        return zip(texts, parts, strict=False)


def _joined(texts: list[str]) -> list[str]:
    return [*texts[:1], *(f"&{text}" for text in texts[1:])]


def _scale(drawn: Sequence[_Drawn], *, makespan_s: float, columns: int) -> _Scale:
    # Each span with the length of its label: that depends on the other Ops of its trace.
    lengths = [(span.end_s - span.start_s, len(each.labels.text(span))) for each in drawn for row in each.rows for span in row]
    num_rows = max(len(each.rows) for each in drawn)
    unit_s = _common_unit(sorted(duration_s for duration_s, _ in lengths))
    fitting: list[_Scale] = []
    # With a blank behind each label if possible: in one band, in several; then without; then in one band with few labels.
    for blanks in (1, 0):
        density = sorted((length + blanks) / duration_s for duration_s, length in lengths)
        # Labels that fit all but the shortest few: an update of a microsecond shall not make the drawing endless.
        columns_per_s = density[int((len(density) - 1) * (1 - _LEAST_SHARE))]
        columns_a_unit = max(math.ceil(columns_per_s * unit_s - 1e-6), 1)
        columns_per_s = columns_a_unit / unit_s if unit_s else columns_per_s
        if makespan_s * columns_per_s > _MOST_LINES * columns:
            continue
        needed = math.ceil(makespan_s * columns_per_s - 1e-6)
        band = min(needed, max(columns // columns_a_unit, 1) * columns_a_unit)
        if math.ceil(needed / band) * (num_rows + 1) <= _MOST_LINES:
            fitting.append(_Scale(columns_per_s, needed, band, columns))
    in_one_band = [scale for scale in fitting if scale.num_columns == scale.band]
    if any(each.labels.with_stage or each.labels.branches for each in drawn):
        in_one_band = [scale for scale in in_one_band if scale is fitting[0]]  # 0F00F1 is hard to read, F0F1 is not
    return (in_one_band or fitting or [_Scale(columns / makespan_s, columns, columns, columns)])[0]


def _common_unit(durations: Sequence[float]) -> float:
    # The longest time of which all durations are multiples; 0 if it is too short to draw.
    unit = durations[-1]
    for duration in sorted(set(durations)):
        larger, smaller = max(unit, duration), min(unit, duration)
        while smaller > durations[-1] * 1e-6:
            larger, smaller = smaller, math.fmod(larger, smaller)
            # What lies a hair below a multiple is that multiple.
            smaller = 0.0 if larger - smaller < durations[-1] * 1e-6 else smaller
        unit = larger
    return unit if unit * _MOST_COLUMNS_A_UNIT >= durations[int(len(durations) * _LEAST_SHARE)] else 0.0


def _ruler(scale: _Scale, makespan_s: float, start: int) -> str:
    name, size = time_unit(makespan_s)
    end = min(start + scale.band, scale.num_columns)
    line = ""
    for tick in ticks(makespan_s / size, max(scale.num_columns // 8, 2)):
        at, text = round(tick * size * scale.columns_per_s) - start, number(tick)
        if len(line) + bool(line) <= at <= min(end - start, scale.room - len(f"{text} {name}")):
            line = line.ljust(at) + text
    return f"{line} {name}"


def _notes(trace: Trace, lines: Sequence[_Line], labels: Labels, scale: _Scale) -> Iterator[str]:
    words = (*(f"{kind} {KIND_NAMES[kind]}" for kind in labels.kinds), ". waiting", pipeline_words(labels.num_pipelines))
    yield ", ".join(filter(None, words))
    if labels.branches:
        marked = [f"{branch.letter} {branch_words(branch, [trace])}" for branch in labels.branches.values()]
        yield ", ".join([*marked, *(["no letter: where branches meet"] if labels.has_unmarked else [])])
    if unlabelled := sum(line.unlabelled for line in lines):
        column = seconds(1 / scale.columns_per_s)
        yield f"{unlabelled} Ops are too short for their label at {column} a column; see -o FILE.svg"
    if hidden := sum(line.hidden for line in lines):
        yield f"{hidden} Ops are too short to be seen"
    if left_out := len(trace.devices) - len(lines):
        yield f"{left_out} more devices are left out; see -o FILE.svg"
