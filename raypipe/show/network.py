"""A topology as SVG: nodes as boxes with their devices inside, links as lines with their bandwidth and latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import svg

from raypipe.show.amounts import number, size
from raypipe.show.paper import MARGIN, WIDTH, document, place, safe_text
from raypipe.show.tables import link_words
from raypipe.topology import ClusterTopology, Device, Node

MOST_NODES = 48
"""Boxes of a drawing; further nodes are counted only."""

_MOST_DEVICES = 8
"""Devices drawn in one box."""
_BOX = 190
_DEVICE = 20
_LETTER = 7
_STYLE = (
    ".node{fill:#f4f4f4;stroke:#777}.device{fill:#fff;stroke:#7fb2e5}.link{stroke:#8a6fb5;stroke-width:1.6;fill:none}"
    ".label{fill:#fff;fill-opacity:.9}.s{text-anchor:middle;font-size:11px}"
)


class _Point(NamedTuple):
    x: float
    y: float


class _Box(NamedTuple):
    """A rectangle by its middle and size."""

    middle: _Point
    width: float
    height: float

    def edge_towards(self, other: _Point) -> _Point:
        """Where the line from the middle to a point outside crosses the edge."""
        dx, dy = other.x - self.middle.x, other.y - self.middle.y
        share = min(
            self.width / 2 / abs(dx) if dx else math.inf,
            self.height / 2 / abs(dy) if dy else math.inf,
            1.0,
        )
        return _Point(self.middle.x + dx * share, self.middle.y + dy * share)
