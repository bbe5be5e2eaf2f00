"""Autograd's graph of one stage: what leads to its inputs, and what computes each parameter's gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph below the outputs of a stage; `inputs` and `parameters` by leaf node.

    `height` of an inner node (one that leads to an input or pivot) is its longest path, in nodes, down to one.
    """

    children: dict[Node, tuple[tuple[Node | None, int], ...]]
    height: dict[Node, int]
    inputs: dict[Node, Tensor]
    parameters: dict[Node, Tensor]


def walk(roots: Iterable[GradientEdge], *, inputs: Iterable[Tensor], pivots: Collection[Node], parameters: Iterable[Tensor]) -> Graph:
    """Visit every node below `roots` once, children first."""
    graph = Graph(children={}, height={}, inputs={}, parameters={})
    children, height = graph.children, graph.height
    inputs, parameters = set(inputs), set(parameters)
    stack = [root.node for root in roots]  # no recursion: graphs can be deeper than Python's stack
    while stack:
        node = stack.pop()
        edges = children.get(node)
        if edges is None:
            edges = children[node] = node.next_functions
            if edges:
                stack.append(node)
                stack += [child for child, _ in edges if child is not None and child not in children]
                continue
            leaf = getattr(node, "variable", None)  # AccumulateGrad has its tensor
            if not isinstance(leaf, Tensor):
                continue
            if leaf in inputs:
                height[node] = 0
                graph.inputs[node] = leaf
            elif leaf in parameters:
                graph.parameters[node] = leaf
            continue
        heights = [height[child] for child, _ in edges if child in height]
        if heights:
            height[node] = 1 + max(heights)
        elif node in pivots:
            height[node] = 0
    return graph


class _Owner(Enum):
    OUTSIDE = "an output or a pivot leads to the node without passing a cut"
    SEVERAL = "several nodes lead to the node, or one that cannot be split"


@dataclass(frozen=True, slots=True)
class Owners:
    """Where the gradient of each parameter is computed.

    Attributes:
        cuts: By cut, the parameters that it alone leads to: in W, from the cut.
        late: Parameters that only pivots and input-less outputs lead to: in W, from these.
        early: Leaf nodes of all others: in I.
    """

    cuts: dict[Node, list[Tensor]]
    late: list[Tensor]
    early: list[Node]


def find_owners(graph: Graph, roots: Iterable[GradientEdge]) -> Owners:
    """Color the nodes that are not inner by what leads to them, in linear time."""
    height, children = graph.height, graph.children
    color: dict[Node, Node | _Owner] = {}
    stack: list[tuple[Node, Node | _Owner]] = [(root.node, _Owner.OUTSIDE) for root in roots if root.node not in height]
    for node, node_height in height.items():
        owner = _Owner.OUTSIDE if node_height == 0 else _Owner.SEVERAL if isinstance(node, FunctionCtx) else node
        stack += [(child, owner) for child, _ in children[node] if child is not None and child not in height]
    while stack:
        node, owner = stack.pop()
        before = color.get(node)
        if before is owner or before is _Owner.SEVERAL:
            continue
        color[node] = owner = owner if before is None else _Owner.SEVERAL
        stack += [(child, owner) for child, _ in children[node] if child is not None]

    owners = Owners(cuts={}, late=[], early=[])
    for node, parameter in graph.parameters.items():
        match color[node]:
            case _Owner.OUTSIDE:
                owners.late.append(parameter)
            case _Owner.SEVERAL:
                owners.early.append(node)
            case cut:
                owners.cuts.setdefault(cut, []).append(parameter)
    return owners


def edges_into(nodes: Collection[Node], *, graph: Graph, roots: Iterable[GradientEdge]) -> list[GradientEdge]:
    """Return the edges from outputs and inner nodes into `nodes`, each once."""
    if not nodes:
        return []
    edges = [(root.node, root.output_nr) for root in roots]
    edges += [(child, number) for node in graph.height for child, number in graph.children[node] if child is not None]
    return [GradientEdge(node, number) for node, number in dict.fromkeys(edges) if node in nodes]
