"""Reads PipeDream's profiles (github.com/msr-fiddle/pipedream, `profiler/*/profiles/graph.txt`; Harlap et al. 2018, arXiv 1806.03377).

    node4 -- Conv2d(64, 64, ...) -- forward_compute_time=46.201, backward_compute_time=113.330, activation_size=1644167168.000, ...
    <tab>node3 -- node4

Times are milliseconds, sizes bytes. An operator with several outputs lists their sizes, `[6291456.0; 131072.0]`; each `__getitem__` takes
one. The files do not say what is saved for the backward: see `_saved_bytes`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from raypipe.artifacts.files import read_text
from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.errors import FormatError, InputError

WEIGHT_GRAD_SHARE = 0.5
"""Default share of a backward with weights: both gradients of a matrix product take as many operations."""

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SEPARATOR = " -- "
_GETITEM = "__getitem__"
_VIEWS = (_GETITEM, "Size", "View")
_SUMS = ("Add", "Concat")
_IN_PLACE = "inplace"


@dataclass(frozen=True)
class _Node:
    name: str
    line: int
    description: str
    forward_s: float
    backward_s: float
    tensor_bytes: tuple[int, ...]
    parameter_bytes: int

    @property
    def kind(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.description.partition("(")[0].strip(), flags=re.ASCII).strip("-")

    @property
    def layer_name(self) -> str:
        return "-".join(filter(None, (self.name, self.kind)))

    @property
    def output_bytes(self) -> int:
        return sum(self.tensor_bytes)

    @property
    def works_in_place(self) -> bool:
        # Its outputs lie in the memory of its inputs.
        return self.kind in _VIEWS or _IN_PLACE in self.description


@dataclass(frozen=True)
class _Graph:
    # Both in topological order; edges are pairs (producer, consumer) with their lines.
    nodes: Mapping[str, _Node]
    edges: Mapping[tuple[str, str], int]

    def sources_of(self, name: str) -> list[_Node]:
        return [self.nodes[producer] for producer, consumer in self.edges if consumer == name]

    def loads_rows(self, node: _Node) -> bool:
        # Every stage that needs rows loads them by itself. PipeDream's own planner leaves these operators out, too.
        return node.description.startswith("Input") and not self.sources_of(node.name)


def read_pipedream(
    path: str | os.PathLike[str], *, microbatch_size: int, weight_grad_share: float = WEIGHT_GRAD_SHARE, name: str | None = None
) -> ModelProfile:
    """Read a profile with its edges from a `graph.txt`; `name` is by default the file's name up to its first dot.

    The file says neither the rows of its microbatch nor what share of a backward's seconds the weight gradient takes.

    Raises:
        FormatError: The file is no such graph; names the line.
        InputError: The share is not from 0 to 1.
    """
    if not 0 <= weight_grad_share <= 1:
        raise InputError(f"weight_grad_share: expected a share from 0 to 1, got {weight_grad_share}")
    file = os.fspath(path)
    graph = _read(read_text(path), file)
    layers = [node for node in graph.nodes.values() if not graph.loads_rows(node)]
    if not layers:
        raise FormatError(
            file, "", "holds no operator that computes; expected lines like `node1 -- Linear(...) -- forward_compute_time=...`"
        )
    saved_bytes = _saved_bytes(graph)
    return ModelProfile(
        name=name or Path(file).name.partition(".")[0] or file,
        microbatch_size=microbatch_size,
        layers=tuple(
            LayerProfile(
                name=node.layer_name,
                forward_s=node.forward_s,
                backward_s=node.backward_s,
                weight_grad_s=node.backward_s * weight_grad_share if node.parameter_bytes else 0.0,
                output_bytes=node.output_bytes,
                saved_bytes=saved_bytes[node.name],
                parameter_bytes=node.parameter_bytes,
            )
            for node in layers
        ),
        named_edges=tuple(
            NamedEdge(
                producer=graph.nodes[producer].layer_name,
                consumer=graph.nodes[consumer].layer_name,
                bytes=_edge_bytes(graph.nodes[producer], graph.nodes[consumer]),
            )
            for producer, consumer in graph.edges
            if not graph.loads_rows(graph.nodes[producer])
        ),
    )


def _edge_bytes(producer: _Node, consumer: _Node) -> int | None:
    # Without a number, an edge carries all that its producer returns.
    takes_one = consumer.kind == _GETITEM and len(producer.tensor_bytes) > 1
    return min(consumer.output_bytes, producer.output_bytes) if takes_one else None


def _saved_bytes(graph: _Graph) -> dict[str, int]:
    # Each tensor is saved once, by the first operator that computes with it. Views, sums and in-place operators save nothing.
    owner: dict[str, _Node] = {}
    saved: set[str] = set()
    saved_bytes: dict[str, int] = {}
    for node in graph.nodes.values():
        sources = graph.sources_of(node.name)
        owner[node.name] = owner[sources[0].name] if node.works_in_place and sources else node
        saves_nothing = node.works_in_place or node.kind in _SUMS
        inputs = set() if saves_nothing else {owner[source.name].name for source in sources}
        saved_bytes[node.name] = sum(graph.nodes[name].output_bytes for name in inputs - saved)
        saved |= inputs
    return saved_bytes


def _read(text: str, path: str) -> _Graph:
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        if line[0].isspace():
            ends = _edge(line, where, path)
            if ends in edges:
                raise FormatError(path, where, f"the edge {_SEPARATOR.join(ends)} stands in line {edges[ends]} already; drop one")
            edges[ends] = number
        else:
            node = _node(line, number, path)
            if node.name in nodes:
                problem = f"{node.name!r} stands in line {nodes[node.name].line} already; give each operator its own name"
                raise FormatError(path, where, problem)
            nodes[node.name] = node
    for ends, number in edges.items():
        for name in ends:
            if name not in nodes:
                raise FormatError(path, f"line {number}", f"no line describes {name!r}; add `{name} -- ... -- forward_compute_time=...`")
    return _sorted(nodes, edges, path)


def _sorted(nodes: Mapping[str, _Node], edges: Mapping[tuple[str, str], int], path: str) -> _Graph:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)

    def place(name: str) -> tuple[int, int]:  # lower numbers first where several may come next
        digits = re.search(r"\d+", name)
        return (int(digits[0]) if digits else 0, nodes[name].line)

    try:
        order = list(nx.lexicographical_topological_sort(graph, key=place))
    except nx.NetworkXUnfeasible:
        cycle = [(source, target) for source, target, *_ in nx.find_cycle(graph)]
        edge_text = ", ".join(f"{source} -- {target} (line {edges[source, target]})" for source, target in cycle)
        raise FormatError(path, f"line {edges[cycle[-1]]}", f"the edges form a cycle: {edge_text}; drop one of them") from None
    position = {name: index for index, name in enumerate(order)}
    in_order = sorted(edges, key=lambda ends: (position[ends[1]], position[ends[0]]))
    return _Graph({name: nodes[name] for name in order}, {ends: edges[ends] for ends in in_order})


def _edge(line: str, where: str, path: str) -> tuple[str, str]:
    ends = line.split(_SEPARATOR)
    if len(ends) != 2 or not all(map(str.strip, ends)):
        raise FormatError(path, where, f"expected an edge, a tab and `node1 -- node2`, got {line.strip()[:80]!r}")
    return ends[0].strip(), ends[1].strip()


def _node(line: str, number: int, path: str) -> _Node:
    where, parts = f"line {number}", line.strip().split(_SEPARATOR)
    # A fourth part, `stage_id=0`, is PipeDream's plan, not a property of the model.
    if len(parts) not in {3, 4} or not parts[0]:
        problem = f"expected `node1 -- description -- forward_compute_time=..., ...` or, behind a tab, an edge; got {line.strip()[:80]!r}"
        raise FormatError(path, where, problem)
    values: dict[str, str] = {}
    for item in parts[2].split(", "):
        key, equals, value = item.partition("=")
        if not equals or key not in _KEYS or key in values:
            raise FormatError(path, where, f"expected {'=..., '.join(_KEYS)}=..., each once, got {item[:80]!r}")
        values[key] = value
    if missing := [key for key in _KEYS if key not in values]:
        raise FormatError(path, where, f"{', '.join(missing)} is missing; add it")
    text = values[_KEYS[2]].strip()  # one size, or several in brackets
    sizes = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
    return _Node(
        name=parts[0],
        line=number,
        description=parts[1],
        forward_s=_amount(values, _KEYS[0], where, path) / 1e3,
        backward_s=_amount(values, _KEYS[1], where, path) / 1e3,
        tensor_bytes=tuple(round(_amount({_KEYS[2]: size}, _KEYS[2], where, path)) for size in sizes),
        parameter_bytes=round(_amount(values, _KEYS[3], where, path)),
    )


def _amount(values: Mapping[str, str], key: str, where: str, path: str) -> float:
    try:
        amount = float(values[key])
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount >= 0):
        raise FormatError(path, where, f"{key}: expected a number that is not negative, got {values[key].strip()!r}")
    return amount
