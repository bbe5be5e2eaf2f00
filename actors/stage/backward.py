"""Splits the backward pass of one stage into input gradients (I) and weight gradients (W), for any nn.Module.

Zero-bubble schedules send the input gradient on first and fill idle time with the weight gradients
(Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 2).

Autograd's graph of `y = fc2(gelu(fc1(x)))` runs from the outputs down to the leaves. The nodes from which an input is
reachable are `inner`; an inner node with a child that leads to parameters but to no input is a `cut`:

    gradient of y -> [addmm fc2] -> [gelu] -> [addmm fc1] -> x        I runs this row and notes what arrives at each cut
                          |                        |
                      [t] -> fc2.weight        [t] -> fc1.weight      W runs each cut again, but only this side of it

A node computes only those gradients that the running pass asked for, so no matrix product is done twice.
W asks a cut for its own parameters, which keeps the pass from descending the upper row. That holds while no second way
leads from the cut to the parameter. Gradients of parameters that several cuts reach (a weight used twice, the weights of a
recurrent layer) are therefore computed in I and held until W.

Limits, none of which affects the values:
* A Python `autograd.Function` computes all its gradients at once, and a module from `torch.compile` is one such function:
  its weight gradients are computed in I and held until W.
* Autograd frees a graph as a whole: between I and W the activations stay, also those that only I needed, as long as they lie
  below the topmost cut. Add to them one gradient for each cut.
* `torch.utils.checkpoint(use_reentrant=False)` recomputes its segment once in I and once for each pass of W that enters it:
  for each of its parametrized layers that lie one behind the other. The reentrant kind raises, as with any `torch.autograd.grad`.
* Autograd looks at all nodes below a cut before a pass (0.2 us a node), so W's overhead has a small part quadratic in the stage's length.
* A hook on a parameter runs once, in W; on a parameter whose gradient I computed, a tensor hook runs in I and again in W, where its
  result is dropped. A hook on the output of a cut or on a pivot does so too. Effects on values are never applied twice.
* No second derivatives: nothing here builds a graph of the backward pass.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)
"""What `torch.autograd.backward` calls behind checks in Python, which take 45 us where caches are cold; the engine has checks of its own.
It is not public: where a torch is without it, the public way is taken."""


def keep_what_compiled_forwards_save() -> None:
    """Lets layers that this thread compiles be walked twice, by I and by W.

    Their backwards would else take the memory that their forwards saved for results of their own. Torch has no public switch for that; the
    one that it has is the thread's.
    """
    config = sys.modules.get("torch._functorch.config")  # loaded with the compiler
    if config is not None:
        config.donated_buffer = False  # type: ignore[attr-defined]


def backward_full(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Accumulates the gradients of `parameters` into their `.grad` and returns those of `inputs`.

    Args:
        outputs: the stage's outputs; the graph behind them is freed.
        output_gradients: for each output a gradient of its shape, or None where none arrived (also for a scalar: the
            last stage passes the loss's own gradient, such as `torch.ones_like(loss)`).
        inputs: leaves without `.grad`, and without it afterwards.
        parameters: leaves; those that are frozen or unused keep the `.grad` they have.

    Returns:
        For each input a gradient of its shape, or None if it takes none (integers) or none reaches it.
    """
    roots: list[Tensor] = []
    given: list[Tensor] = []
    for output, gradient in zip(outputs, output_gradients, strict=True):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            given.append(gradient)
    leaves = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
    if not roots or not leaves:
        return (None,) * len(inputs)
    if _ENGINE is not None:
        _ENGINE.run_backward(tuple(roots), tuple(given), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(roots, given, inputs=leaves)
    gradients = tuple([tensor.grad for tensor in inputs])
    for tensor in inputs:
        tensor.grad = None
    return gradients


def backward_input(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    pivot: Sequence[Tensor] = (),
) -> tuple[tuple[Tensor | None, ...], PendingWeightGradient]:
    """Returns the gradients of `inputs` and what is left to do for the gradients of `parameters`.

    No `.grad` is touched. The caller drops `outputs` afterwards, or they keep the graph alive. The graph is walked once, in time
    linear in its nodes; the returned gradients may share memory with `output_gradients`, as in torch.

    Args:
        outputs: as in `backward_full`.
        output_gradients: as in `backward_full`.
        inputs: as in `backward_full`.
        parameters: as in `backward_full`.
        pivot: tensors inside the stage down to which gradients are computed, for a stage none of whose inputs takes a
            gradient: the outputs of its first layer. What lies below them is left to W. With neither, all is left to W.
    """
    assert all(tensor.grad_fn is None for tensor in inputs), "the inputs of a stage are leaves: detach what the stage before sent"
    roots = _roots(outputs, output_gradients)
    edges = [root.edge for root in roots]
    inside = [tensor for tensor in pivot if isinstance(tensor, Tensor) and tensor.requires_grad]
    pivots = {edge.node: edge for edge in map(get_gradient_edge, inside)}
    graph = _walk(edges, inputs=inputs, pivots=pivots, parameters=parameters)
    owners = _owners(graph, edges)

    cuts = {node: _Tap(GradientEdge(node, 0)) for node in owners.cuts}
    floor = {node: _Tap(edge) for node, edge in pivots.items() if graph.height.get(node) == 0}
    floor_edges = _edges_into(floor, graph=graph, roots=edges)
    wanted = [*(GradientEdge(node, 0) for node in graph.inputs), *floor_edges, *(GradientEdge(node, 0) for node in owners.early)]
    found: list[Tensor | None] = []
    if wanted:
        keep = bool(cuts or (owners.early and owners.late))
        found = list(torch.autograd.grad(edges, wanted, [root.gradient for root in roots], retain_graph=keep, allow_unused=True))
    early = found[len(graph.inputs) + len(floor_edges) :]
    for edge, gradient in zip(floor_edges, found[len(graph.inputs) :], strict=False):
        floor[edge.node].note(edge.output_nr, gradient)

    rows: defaultdict[int, _Pass] = defaultdict(_Pass)
    for node, tap in cuts.items():
        row = rows[graph.height[node]]
        row.taps.append(tap)
        row.parameters += owners.cuts[node]
    outside = [root for root in roots if root.edge.node not in graph.height]
    bottom = _Pass(roots=outside, taps=list(floor.values()), parameters=owners.late)
    pending = PendingWeightGradient(
        passes=[bottom, *(rows[height] for height in sorted(rows))],
        early=[(graph.parameters[node], gradient) for node, gradient in zip(owners.early, early, strict=True) if gradient is not None],
    )
    by_input = dict(zip(graph.inputs.values(), found, strict=False))
    return tuple(by_input.get(tensor) for tensor in inputs), pending


class PendingWeightGradient:
    """The weight gradients of one microbatch of one stage that `backward_input` left to do.

    Holds the graph below the topmost cut, the gradients that arrived at the cuts, and the gradients computed early.
    """

    def __init__(self, *, passes: list[_Pass], early: list[tuple[Tensor, Tensor]]) -> None:
        self._passes = passes
        self._early = early
        self._done = False

    def run(self) -> None:
        """Accumulates into `.grad` of the parameters as `torch.autograd.backward` does, and frees what was held.

        Callable once. Different microbatches may run in any order.
        """
        assert not self._done, "the weight gradients of this microbatch have been computed already"
        self._done = True
        # From the outputs down, so that each pass lets go of the graph above the next one.
        while self._passes:
            self._passes.pop().run()
        _accumulate_early(self._early)
        self._early.clear()

    def gradients(self) -> list[Tensor]:
        """The gradients that are held until `run`: those that arrived at the cuts, and those computed early."""
        roots = [root for each in self._passes for root in each.all_roots()]
        return [*(root.gradient for root in roots), *(gradient for _, gradient in self._early)]


def _accumulate_early(early: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Adds gradients that I computed to the `.grad` of their parameters, with torch's own rules and hooks for accumulation."""
    if not early:
        return
    # I ran the tensor hooks of these parameters. They run again here, before these, which put the gradient back.
    handles = [
        parameter.register_hook(lambda _, gradient=gradient: gradient)  # type: ignore[no-untyped-call]
        for parameter, gradient in early
    ]
    parameters = [parameter for parameter, _ in early]
    try:
        torch.autograd.backward(parameters, [gradient for _, gradient in early], inputs=parameters)
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Root:
    """Where a backward pass starts and the gradient it starts with."""

    edge: GradientEdge
    gradient: Tensor


class _Tap:
    """Notes the gradients that arrive at a node in I, and hands the same ones to the node in W.

    Both happen in a prehook, which runs after the tensor hooks that a user put on a layer's output. What I notes includes their
    effect, and handing it back in W undoes a second one.
    """

    __slots__ = ("_arrived", "_edge", "_handle")

    def __init__(self, edge: GradientEdge) -> None:
        self._edge = edge
        self._arrived: dict[int, Tensor] = {}
        # The hook holds the gradients only: if it held the tap, node and tap would keep each other alive unseen by the collector.
        self._handle = edge.node.register_prehook(_note_or_hand_back(self._arrived))

    def note(self, output_nr: int, gradient: Tensor | None) -> None:
        """Notes what arrived at a node that I did not run; a node that ran has noted it itself."""
        if gradient is not None:
            self._arrived.setdefault(output_nr, gradient)

    def roots(self) -> list[_Root]:
        """Returns one root for each of the node's outputs that got a gradient."""
        node, _, token = self._edge
        return [_Root(GradientEdge(node, number, token), gradient) for number, gradient in self._arrived.items()]

    def remove(self) -> None:
        """Takes the hook off the node."""
        self._handle.remove()


def _note_or_hand_back(arrived: dict[int, Tensor]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]:
    def prehook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if arrived:
            return tuple(arrived.get(number) for number in range(len(gradients)))
        arrived.update((number, gradient) for number, gradient in enumerate(gradients) if gradient is not None)
        return None

    return prehook


@dataclass(slots=True)
class _Pass:
    """One run of autograd's engine in W: from nodes of which none is below another, to parameters that only these reach."""

    roots: list[_Root] = field(default_factory=list)
    taps: list[_Tap] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    def all_roots(self) -> list[_Root]:
        """Where it starts: at outputs, and at nodes that I ran."""
        return [*self.roots, *(root for tap in self.taps for root in tap.roots())]

    def run(self) -> None:
        """Accumulates into `.grad` of the parameters and takes the hooks off."""
        roots = self.all_roots()
        if roots and self.parameters:
            torch.autograd.backward([root.edge for root in roots], [root.gradient for root in roots], inputs=self.parameters)
        for tap in self.taps:
            tap.remove()


def _roots(outputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None]) -> list[_Root]:
    return [
        _Root(get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, output_gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]


@dataclass(frozen=True, slots=True)
class _Graph:
    """What a walk from the outputs found.

    Attributes:
        children: the edges of each node.
        height: of each inner node (an input or pivot is reachable from it) the longest way down to one, in nodes.
        inputs: the inputs that were reached, by their leaf nodes.
        parameters: the parameters that were reached, by their leaf nodes.
    """

    children: dict[Node, tuple[tuple[Node | None, int], ...]]
    height: dict[Node, int]
    inputs: dict[Node, Tensor]
    parameters: dict[Node, Tensor]


def _walk(roots: Iterable[GradientEdge], *, inputs: Iterable[Tensor], pivots: Collection[Node], parameters: Iterable[Tensor]) -> _Graph:
    """Visits every node once, children before parents; no recursion, since graphs can be deeper than Python's stack."""
    graph = _Graph(children={}, height={}, inputs={}, parameters={})
    children, height = graph.children, graph.height
    inputs, parameters = set(inputs), set(parameters)
    stack = [root.node for root in roots]
    while stack:
        node = stack.pop()
        edges = children.get(node)
        if edges is None:
            edges = children[node] = node.next_functions
            if edges:
                stack.append(node)
                stack += [child for child, _ in edges if child is not None and child not in children]
                continue
            leaf = getattr(node, "variable", None)  # AccumulateGrad tells its tensor
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
    OUTSIDE = "an output or a pivot leads here past all cuts"
    SEVERAL = "more than one way leads here, or one that cannot be split"


@dataclass(frozen=True, slots=True)
class _Owners:
    """Who computes the gradient of which parameters.

    Attributes:
        cuts: for each cut the parameters that nothing else leads to.
        late: the parameters that only outputs without a way to the inputs, and pivots, lead to.
        early: the leaf nodes of all others, whose gradients are computed in I.
    """

    cuts: dict[Node, list[Tensor]]
    late: list[Tensor]
    early: list[Node]


def _owners(graph: _Graph, roots: Iterable[GradientEdge]) -> _Owners:
    """Colours the nodes that are not inner by who leads to them. Each changes colour at most twice: linear time."""
    height, children = graph.height, graph.children
    colour: dict[Node, Node | _Owner] = {}
    stack: list[tuple[Node, Node | _Owner]] = [(root.node, _Owner.OUTSIDE) for root in roots if root.node not in height]
    for node, own_height in height.items():
        owner = _Owner.OUTSIDE if own_height == 0 else _Owner.SEVERAL if isinstance(node, FunctionCtx) else node
        stack += [(child, owner) for child, _ in children[node] if child is not None and child not in height]
    while stack:
        node, owner = stack.pop()
        before = colour.get(node)
        if before is owner or before is _Owner.SEVERAL:
            continue
        colour[node] = owner = owner if before is None else _Owner.SEVERAL
        stack += [(child, owner) for child, _ in children[node] if child is not None]

    owners = _Owners(cuts={}, late=[], early=[])
    for node, parameter in graph.parameters.items():
        match colour[node]:
            case _Owner.OUTSIDE:
                owners.late.append(parameter)
            case _Owner.SEVERAL:
                owners.early.append(node)
            case cut:
                owners.cuts.setdefault(cut, []).append(parameter)
    return owners


def _edges_into(nodes: Collection[Node], *, graph: _Graph, roots: Iterable[GradientEdge]) -> list[GradientEdge]:
    """Returns the edges by which the outputs and the inner nodes lead into `nodes`, each once."""
    if not nodes:
        return []
    reached = [(root.node, root.output_nr) for root in roots]
    reached += [(child, number) for node in graph.height for child, number in graph.children[node] if child is not None]
    return [GradientEdge(node, number) for node, number in dict.fromkeys(reached) if node in nodes]
