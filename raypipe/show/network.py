"""A topology as SVG: nodes as boxes with devices inside, links as lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import svg

from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node
from raypipe.show.svg_document import MARGIN, WIDTH, document, place, safe_text
from raypipe.show.tables import link_ends, link_words, shared_words
from raypipe.units import counted, number, size

_MOST_NODES = 60
_MOST_DEVICES = 8  # in one box
_MOST_AROUND = 10  # nodes in a ring with their links between them; more stand in rows, with the links in words
_MOST_LABELS = 16
_MOST_LINES = 40
_COLUMNS = 5
_BOX = 200
_ROW = 20
_LETTER = 6.6
_STYLE = (
    ".node{fill:#f4f4f4;stroke:#777}.device{fill:#fff;stroke:#7fb2e5}.link{stroke:#8a6fb5;stroke-width:1.6;fill:none}"
    ".label{fill:#fff;fill-opacity:.9}.s{text-anchor:middle;font-size:11px}"
)


class _Point(NamedTuple):
    x: float
    y: float


class _Box(NamedTuple):
    middle: _Point
    width: float
    height: float

    def edge_towards(self, other: _Point) -> _Point:
        dx, dy = other.x - self.middle.x, other.y - self.middle.y
        share = min(self.width / 2 / abs(dx) if dx else 1.0, self.height / 2 / abs(dy) if dy else 1.0, 1.0)
        return _Point(self.middle.x + dx * share, self.middle.y + dy * share)


def draw_topology(topology: ClusterTopology) -> str:
    """Draw a topology; links without a line are listed below."""
    return _Drawing(topology).document()


class _Drawing:
    def __init__(self, topology: ClusterTopology) -> None:
        self.topology = topology
        self.nodes = topology.nodes[:_MOST_NODES]
        self.in_ring = len(topology.nodes) <= _MOST_AROUND
        self.boxes: dict[str, _Box] = {}
        self.elements: list[svg.Element] = []
        self.bottom = 0.0

    def document(self) -> str:
        counts = f"{counted(len(self.topology.nodes), 'node')}, {counted(self.topology.num_devices, 'device')}"
        title = [safe_text(f"topology: {self.topology.name[:80]}", MARGIN, 30, "h"), safe_text(counts, WIDTH - MARGIN, 30, "r")]
        for node, middle in zip(self.nodes, self.middles(), strict=True):
            self.node(node, middle)
        words = list(self.words())
        links = self.links(words)
        y = self.bottom + 30
        if len(words) > _MOST_LINES:
            words = [*words[:_MOST_LINES], f"{len(words) - _MOST_LINES} more"]
        for line in words:
            self.elements.append(safe_text(line, MARGIN, y, "g"))
            y += 18
        return document([*title, *links, *self.elements], height=y, style=_STYLE)

    def middles(self) -> Iterator[_Point]:
        count = len(self.nodes)
        heights = [_height(node) for node in self.nodes]
        top = 60 + max(heights) / 2
        if count <= 3:
            for position in range(count):
                yield _Point(WIDTH * (position + 0.5) / count, top)
        elif self.in_ring:
            radius = _Point((WIDTH - _BOX) / 2 - MARGIN, max(heights) * count / 5 + 60)
            for position in range(count):
                angle = 2 * math.pi * position / count
                yield _Point(WIDTH / 2 + radius.x * math.sin(angle), top + radius.y * (1 - math.cos(angle)))
        else:
            for position in range(count):
                row, column = divmod(position, _COLUMNS)
                yield _Point(WIDTH * (column + 0.5) / _COLUMNS, top + row * (max(heights) + 20))

    def node(self, node: Node, middle: _Point) -> None:
        height = _height(node)
        left, top = middle.x - _BOX / 2, middle.y - height / 2
        self.boxes[node.name] = _Box(middle, _BOX, height)
        self.bottom = max(self.bottom, top + height)
        self.elements += [
            svg.Rect(x=place(left), y=place(top), width=_BOX, height=height, rx=6, class_=["node"]),
            safe_text(_short(node.name, _BOX - 20), middle.x, top + 17, "m"),
        ]
        y = top + 26
        for device in node.devices[:_MOST_DEVICES]:
            self.boxes[device.name] = _Box(_Point(middle.x, y + _ROW / 2 - 1), _BOX - 16, _ROW - 2)
            self.elements += [
                svg.Rect(x=place(left + 8), y=place(y), width=_BOX - 16, height=_ROW - 3, rx=3, class_=["device"]),
                safe_text(_short(_device_words(device), _BOX - 24), middle.x, y + 12.5, "s"),
            ]
            y += _ROW
        for line in _node_notes(node):
            self.elements.append(safe_text(_short(line, _BOX - 10), middle.x, y + 12, "s"))
            y += 16

    def links(self, words: list[str]) -> list[svg.Element]:
        lines: list[svg.Element] = []
        with_labels = len(self.topology.links) <= _MOST_LABELS
        owner = {name: node.name for node in self.nodes for name in (node.name, *(device.name for device in node.devices))}
        for link in self.topology.links:
            source, target = self.boxes.get(link.source), self.boxes.get(link.target)
            is_drawn = self.in_ring and owner.get(link.source) != owner.get(link.target)
            if is_drawn and source and target:
                lines += self.line(link, source, target)
                if with_labels:
                    self.elements += self.label(link, source, target)
                    continue
            words.append(f"{link_ends(link)}: {link_words(link)}")
        return lines

    def line(self, link: Link, source: _Box, target: _Box) -> Iterator[svg.Element]:
        start, end = source.edge_towards(target.middle), target.edge_towards(source.middle)
        yield svg.Line(x1=place(start.x), y1=place(start.y), x2=place(end.x), y2=place(end.y), class_=["link"])
        if link.one_way:
            angle = math.atan2(end.y - start.y, end.x - start.x)
            for turn in (-0.4, 0.4):
                x, y = end.x - 10 * math.cos(angle + turn), end.y - 10 * math.sin(angle + turn)
                yield svg.Line(x1=place(x), y1=place(y), x2=place(end.x), y2=place(end.y), class_=["link"])

    def label(self, link: Link, source: _Box, target: _Box) -> Iterator[svg.Element]:
        start, end = source.edge_towards(target.middle), target.edge_towards(source.middle)
        # Each of two one-way links between the same ends has its label nearer to its own source.
        share = 0.36 if link.one_way else 0.5
        x, y = start.x + (end.x - start.x) * share, start.y + (end.y - start.y) * share
        parts = link_words(link).split(", ")
        width = max(map(len, parts)) * _LETTER + 8
        height = 14 * len(parts) + 3
        yield svg.Rect(x=place(x - width / 2), y=place(y - height / 2), width=place(width), height=height, class_=["label"])
        for line, part in enumerate(parts):
            yield safe_text(part, x, y - height / 2 + 12 + 14 * line, "s")

    def words(self) -> Iterator[str]:
        if left_out := len(self.topology.nodes) - len(self.nodes):
            yield f"{left_out} more nodes are left out"
        if self.topology.default_link:
            yield f"any other pair: {link_words(self.topology.default_link)}"
        for shared in self.topology.shared_links:
            yield f"{shared_words(shared)}: {link_words(shared)}"


def _height(node: Node) -> float:
    return 30 + min(len(node.devices), _MOST_DEVICES) * _ROW + 16 * len(_node_notes(node))


def _node_notes(node: Node) -> list[str]:
    notes = [f"and {len(node.devices) - _MOST_DEVICES} more devices"] if len(node.devices) > _MOST_DEVICES else []
    notes += [f"share {node.cores} cores"] if node.cores else []
    return notes + ([f"inside: {link_words(node.link)}"] if node.link and len(node.devices) > 1 else [])


def _device_words(device: Device) -> str:
    memory = "" if device.memory_bytes is None else f" {size(device.memory_bytes)}"
    speed = "" if device.speed == 1 else f" x{number(device.speed)}"
    return f"{device.name}  {device.kind}{memory}{speed}"


def _short(text: str, width: float) -> str:
    most = int(width / _LETTER)
    return text if len(text) <= most else text[: most - 2] + ".."
