"""Tables of a page, as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypipe.artifacts.trace import item_text
from raypipe.show.differences import kind_differences, kind_text, op_differences
from raypipe.show.svg_document import escape
from raypipe.show.traces import link_report
from raypipe.show.view import Exposure, Part, View, exposures_of, parts_of
from raypipe.units import counted, ratio, seconds, time_unit

_OPEN_ROWS = 24
_MOST_OPS = 12
_LEAST_CHANGE = 1e-9
_MOST_KINDS = 24
_MOST_WAITS = 12
_MOST_LINKS = 24


def idle_table(views: Sequence[View]) -> Iterator[str]:
    """Yield the time of every kind of Op and cause, for each device and trace."""
    is_pair = len(views) == 2
    unit = _Unit.of(max(view.trace.makespan_s for view in views))
    parts: list[Part | Exposure] = [*parts_of(views), *exposures_of(views)]
    lines = []
    for device in range(max(len(view.trace.devices) for view in views)):
        present = [view for view in views if device < len(view.trace.devices)]
        for view in present:
            texts = [view.device_words[device] if view is present[0] else "", *([view.word] if is_pair else [])]
            whole_s = 0.0 if is_pair else view.trace.makespan_s
            cells = [unit.cell(part.seconds(view, device), whole_s=whole_s) for part in parts]
            lines.append(row(texts, [*cells, ratio(view.trace.device_bubble_ratios[device])], first=view is present[0]))
        if len(present) == 2:
            deltas = [unit.cell(part.seconds(views[1], device) - part.seconds(views[0], device), sign="+") for part in parts]
            bubble = views[1].trace.device_bubble_ratios[device] - views[0].trace.device_bubble_ratios[device]
            lines.append(row(["", "difference"], [*deltas, f"{round(100 * bubble, 1) + 0.0:+.1f} points"], first=False, soft=True))
    head = ["device", *(["trace"] if is_pair else []), *(part.words for part in parts), "bubble"]
    hints = {part.words: part.meaning for part in parts if part.meaning}
    more = f"; the difference is {views[1].word} less {views[0].word}" if is_pair else ", and its share of the window"
    caption = f"Time of each device in {unit.name}{more}"
    yield from _folded(caption, head, lines, hints, num_text=len(views), is_open=len(lines) <= _OPEN_ROWS)


_NONE = '<span class="none">-</span>'


@dataclass(frozen=True)
class _Unit:
    name: str
    size_s: float
    decimals: int

    @classmethod
    def of(cls, longest_s: float) -> _Unit:
        name, size_s = time_unit(longest_s)
        return cls(name, size_s, 3 if longest_s < 10 * size_s else 2 if longest_s < 100 * size_s else 1)

    def cell(self, value_s: float, *, sign: str = "", whole_s: float = 0.0) -> str:
        if not value_s:
            return _NONE
        value, least = value_s / self.size_s, 10.0**-self.decimals
        if abs(value) < least / 2:
            return _NONE if sign else f"&lt;{least:g}"
        share = f" <small>{ratio(value_s / whole_s)}</small>" if whole_s else ""
        return f"{value:{sign}.{self.decimals}f}{share}"


def row(texts: Sequence[str], cells: Sequence[str], *, first: bool = True, soft: bool = False) -> str:
    """Return a row; texts are escaped, cells are HTML; `first` draws a line above, `soft` a lighter text."""
    classes = " ".join(name for name, wanted in (("first", first), ("soft", soft)) if wanted)
    heads = "".join(f'<th scope="row">{escape(text)}</th>' for text in texts)
    return f'<tr class="{classes}">{heads}{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def table(caption: str, head: Sequence[str], lines: Sequence[str], *, num_text: int, num_more: int = 0) -> str:
    """Return a table whose first `num_text` columns are texts; `num_more` rows are left out."""
    if num_more > 0:
        lines = [*lines, row([f"({num_more} more)"], [""] * (len(head) - 1))]
    heads = "".join(f'<th scope="col"{" class=text" if at < num_text else ""}>{escape(name)}</th>' for at, name in enumerate(head))
    body = "\n".join(lines)
    content = f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'


def _folded(
    caption: str, head: Sequence[str], lines: Sequence[str], hints: dict[str, str], *, num_text: int, is_open: bool
) -> Iterator[str]:
    yield f"<details{' open' if is_open else ''}><summary>{escape(caption)}</summary>"
    yield table(caption, head, lines, num_text=num_text)
    if hints:
        yield '<p class="soft meanings">' + ". ".join(f"<b>{escape(name)}</b>: {escape(hint)}" for name, hint in hints.items()) + ".</p>"
    yield "</details>"


def comparison_tables(first: View, second: View) -> Iterator[str]:
    """Yield durations of the same Ops in two traces."""
    ops = op_differences(first.trace, second.trace)
    differing = [op for op in ops if abs(op.difference_s) > _LEAST_CHANGE * max(op.first_s, op.second_s)]
    if not ops:
        return
    count = f"Of {counted(len(ops), 'Op')} that both traces have, {len(differing) or 'none'} took longer in one than in the other."
    yield f'<section><h2>Op by Op</h2><p class="soft">{count}</p><div class="columns">'
    tables = (
        ("Medians by device, kind and stage", kind_differences(differing), kind_text, _MOST_KINDS),
        ("Single Ops", differing, item_text, _MOST_OPS),
    )
    for caption, slots, text, most in tables if differing else ():
        lines = [
            row(
                [first.device_words[op.device], text(op.ops)],
                [seconds(op.first_s), seconds(op.second_s), *_changed(op.first_s, op.second_s)],
            )
            for op in slots[:most]
        ]
        head = ["device", "Op", first.word, second.word, "difference", ""]
        yield table(caption, head, lines, num_text=2, num_more=len(slots) - most)
    yield "</div></section>"


def _changed(first_s: float, second_s: float) -> tuple[str, str]:
    difference_s = second_s - first_s
    relative = f"{difference_s / first_s:+.1%}" if first_s else ""
    return (f"{'+' if difference_s >= 0 else ''}{seconds(difference_s)}", relative)


def link_tables(views: Sequence[View]) -> Iterator[str]:
    """Yield what passed each link, where that is known."""
    if not any(view.trace.by_link for view in views):
        return
    yield '<section><h2>Links</h2><p class="soft">Bytes of each link, and the share of the window in which something was on its way.</p>'
    yield '<div class="columns">'
    for view in views:
        links = link_report(view.trace).table()
        lines = [row(texts[:1], [escape(cell) for cell in texts[1:]]) for texts in links.rows[:_MOST_LINKS]]
        head = [column.replace("\n", " ") for column in links.columns]
        yield table(view.word, head, lines, num_text=1, num_more=len(links.rows) - _MOST_LINKS)
    yield "</div></section>"


def wait_tables(views: Sequence[View]) -> Iterator[str]:
    """Yield who waited for whom, the longest first."""
    if not any(view.division.waits for view in views):
        return
    yield '<section><h2>Who waits for whom</h2><p class="soft">Between warm-up and drain, the longest first.</p><div class="columns">'
    for view in views:
        division = view.division
        whole_s = view.trace.makespan_s
        lines = [
            row(
                [view.device_words[wait.device], view.device_words[wait.peer]],
                [seconds(wait.wait_s), ratio(wait.wait_s / whole_s)],
            )
            for wait in division.waits[:_MOST_WAITS]
        ]
        head = ["device", "waits for", "in all", "of the window"]
        yield table(view.word, head, lines, num_text=2, num_more=len(division.waits) - _MOST_WAITS)
    yield "</div></section>"
