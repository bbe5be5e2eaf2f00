"""Curves as SVG: several panels side by side, each with its axes, and one legend for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import svg

from raypipe.show.svg_document import MARGIN, WIDTH, document, place, safe_text
from raypipe.units import number, ticks

COLOURS = ("#222222", "#d1495b", "#2e86ab", "#edae49", "#3c8d53", "#8a6fb5", "#c46a2b", "#6c757d")
"""Told apart by lightness, too."""
_DASHES = ((1, 0), (7, 3), (2, 3))
MOST_CURVES = len(COLOURS) * len(_DASHES)
"""That can be told apart."""

_HEIGHT = 460
_LEFT = 58
_TOP = 50
_BOTTOM = 44
_STYLE = ".grid{stroke:#ddd}.axis{stroke:#777;fill:none}.curve{fill:none;stroke-width:1.6}"

Curve = Sequence[tuple[float, float]]
"""Points (x, y); those whose y is no number are left out, and the line with them."""


@dataclass(frozen=True)
class Panel:
    """One drawing.

    Attributes:
        title: above it.
        x_label: below it.
        curves: by name; those of one name look the same in all panels.
        low: the smallest y that is shown.
        high: the largest; what is beyond is drawn at the edge.
    """

    title: str
    x_label: str
    curves: Mapping[str, Curve]
    low: float
    high: float


def draw(panels: Sequence[Panel]) -> str:
    """The text of an SVG file.

    Args:
        panels: at least one, from left to right, with at most `MOST_CURVES` names of curves in all.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    looks = {name: (COLOURS[index % len(COLOURS)], _DASHES[index // len(COLOURS)]) for index, name in enumerate(names)}
    width = (WIDTH - 2 * MARGIN) / len(panels)
    elements: list[svg.Element] = []
    for index, panel in enumerate(panels):
        elements += _panel(panel, MARGIN + index * width + _LEFT, MARGIN + (index + 1) * width - 8, looks)
    for index, name in enumerate(names):
        x, y = MARGIN + index % 4 * (WIDTH - 2 * MARGIN) / 4, _HEIGHT + 16 + index // 4 * 18
        colour, dash = looks[name]
        elements.append(
            svg.Line(x1=place(x), x2=place(x + 24), y1=y - 4, y2=y - 4, stroke=colour, stroke_width=2, stroke_dasharray=[*dash])
        )
        elements.append(safe_text(name, x + 30, y))
    return document(elements, height=_HEIGHT + 26 + (len(names) - 1) // 4 * 18, style=_STYLE)


def _panel(panel: Panel, left: float, right: float, looks: Mapping[str, tuple[str, Sequence[float]]]) -> Iterator[svg.Element]:
    bottom = _HEIGHT - _BOTTOM
    end = max((x for curve in panel.curves.values() for x, _ in curve), default=1.0)

    def across(x: float) -> float:
        return place(left + x / end * (right - left))

    def up(y: float) -> float:
        share = (min(max(y, panel.low), panel.high) - panel.low) / (panel.high - panel.low)
        return place(bottom - share * (bottom - _TOP))

    yield safe_text(panel.title, left, _TOP - 16, "h")
    for y in _between(panel.low, panel.high):
        yield svg.Line(x1=place(left), x2=place(right), y1=up(y), y2=up(y), class_=["grid"])
        yield safe_text(number(round(y, 9)), left - 6, up(y) + 4, "r")
    for x in ticks(end, 6):
        yield safe_text(number(x), across(x), bottom + 18, "m")
    yield safe_text(panel.x_label, (left + right) / 2, bottom + 36, "m", "g")
    yield svg.Rect(x=place(left), y=_TOP, width=place(right - left), height=bottom - _TOP, class_=["axis"])
    for name, curve in panel.curves.items():
        colour, dash = looks[name]
        points = [svg.Point(across(x), up(y)) for x, y in curve if math.isfinite(y)]
        yield svg.Polyline(points=points, stroke=colour, stroke_dasharray=[*dash], class_=["curve"])


def _between(low: float, high: float) -> Iterator[float]:
    """Round numbers from `low` to `high`."""
    steps = ticks(high - low, 8)
    step = steps[1] if len(steps) > 1 else high - low
    first = math.ceil(low / step - 1e-9)
    while first * step <= high + 1e-9 * step:
        yield first * step
        first += 1
