"""Splits the backward pass of one stage into input gradients (I) and weight gradients (W), for any nn.Module.

Zero-bubble schedules send input gradients on first and fill idle time with W (Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism,
ICLR 2024, arXiv 2401.10241, section 2). In autograd's graph of `y = fc2(gelu(fc1(x)))` a node that leads to an input is `inner`; an inner
node with a child that leads to parameters but to no input is a `cut`:

    gradient of y -> [addmm fc2] -> [gelu] -> [addmm fc1] -> x        I runs this row and notes what arrives at each cut
                          |                        |
                      [t] -> fc2.weight        [t] -> fc1.weight      W runs each cut again, but only this side of it

No matrix product is done twice. Gradients below several cuts (a weight used twice, a recurrent layer) are computed in I and held until W.

Limits, none of which affects the values:
* A Python `autograd.Function` and a module from `torch.compile` compute all their gradients in I.
* Between I and W all activations below the topmost cut stay, with one gradient per cut.
* Checkpointed segments are recomputed in I and in each pass of W that enters them; reentrant ones raise.
* Tensor hooks on parameters of I, outputs of cuts and pivots run again in W, which drops their result.
* No second derivatives.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raypipe.actors.stage.autograd_graph import edges_into, find_owners, walk

# What `torch.autograd.backward` calls after checks in Python, which take 45 us with cold caches. Not public, so it may be missing.
_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)
_Root = tuple[GradientEdge, Tensor]


def disable_buffer_donation() -> None:
    """Keep compiled backwards from overwriting saved tensors, which I and W both need."""
    config = sys.modules.get("torch._functorch.config")  # loaded with the compiler
    if config is not None:
        config.donated_buffer = False  # type: ignore[attr-defined]


def backward_full(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Accumulate the gradients of `parameters` into `.grad` and return those of `inputs`; free the graph behind `outputs`.

    `inputs` are leaves without `.grad`; one that no gradient reaches gets `None`. Frozen and unused parameters keep their `.grad`.
    """
    roots: list[Tensor] = []
    root_gradients: list[Tensor] = []
    for output, gradient in zip(outputs, output_gradients, strict=True):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            root_gradients.append(gradient)
    leaves = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
    if not roots or not leaves:
        return (None,) * len(inputs)
    if _ENGINE is not None:
        _ENGINE.run_backward(tuple(roots), tuple(root_gradients), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(roots, root_gradients, inputs=leaves)
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
    """Return the gradients of `inputs` and the pending computation of those of `parameters`; leave every `.grad`.

    The caller must drop `outputs`, or they keep the graph alive. Without an input that takes a gradient, I ends at `pivot`, the first
    layer's outputs; without that, W computes everything. Time is linear in nodes.
    """
    assert all(tensor.grad_fn is None for tensor in inputs), "the inputs of a stage must be leaves: detach the tensors that it received"
    roots: list[_Root] = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, output_gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    edges = [edge for edge, _ in roots]
    inside = [get_gradient_edge(tensor) for tensor in pivot if isinstance(tensor, Tensor) and tensor.requires_grad]
    pivots = {edge.node: edge for edge in inside}
    graph = walk(edges, inputs=inputs, pivots=pivots, parameters=parameters)
    owners = find_owners(graph, edges)

    cuts = {node: _Tap(GradientEdge(node, 0)) for node in owners.cuts}
    floor = {node: _Tap(edge) for node, edge in pivots.items() if graph.height.get(node) == 0}
    floor_edges = edges_into(floor, graph=graph, roots=edges)
    wanted = [*(GradientEdge(node, 0) for node in graph.inputs), *floor_edges, *(GradientEdge(node, 0) for node in owners.early)]
    gradients: list[Tensor | None] = []
    if wanted:
        keep = bool(cuts or (owners.early and owners.late))
        gradients = list(torch.autograd.grad(edges, wanted, [gradient for _, gradient in roots], retain_graph=keep, allow_unused=True))
    early = gradients[len(graph.inputs) + len(floor_edges) :]
    for edge, gradient in zip(floor_edges, gradients[len(graph.inputs) :], strict=False):
        if gradient is not None:
            floor[edge.node].arrived.setdefault(edge.output_nr, gradient)

    rows: defaultdict[int, _Pass] = defaultdict(_Pass)
    for node, tap in cuts.items():
        row = rows[graph.height[node]]
        row.taps.append(tap)
        row.parameters += owners.cuts[node]
    outside = [(edge, gradient) for edge, gradient in roots if edge.node not in graph.height]
    bottom = _Pass(roots=outside, taps=list(floor.values()), parameters=owners.late)
    pending = PendingWeightGradient(
        passes=[bottom, *(rows[height] for height in sorted(rows))],
        early=[(graph.parameters[node], gradient) for node, gradient in zip(owners.early, early, strict=True) if gradient is not None],
    )
    by_input = dict(zip(graph.inputs.values(), gradients, strict=False))
    return tuple(by_input.get(tensor) for tensor in inputs), pending


class PendingWeightGradient:
    """The weight gradients that `backward_input` has left to W."""

    def __init__(self, *, passes: list[_Pass], early: list[tuple[Tensor, Tensor]]) -> None:
        self._passes = passes
        self._early = early
        self._done = False

    def run(self) -> None:
        """Accumulate into the parameters' `.grad`, once; microbatches may run in any order."""
        assert not self._done, "the weight gradients of this microbatch have been computed already"
        self._done = True
        # From the outputs down, so that each pass frees the graph above the next one.
        while self._passes:
            self._passes.pop().run()
        if not self._early:
            return
        # As autograd accumulates, with its hooks. I ran the parameters' tensor hooks; the hooks added last drop the effect of a second run.
        handles = [
            parameter.register_hook(lambda _, gradient=gradient: gradient)  # type: ignore[no-untyped-call]
            for parameter, gradient in self._early
        ]
        parameters = [parameter for parameter, _ in self._early]
        try:
            torch.autograd.backward(parameters, [gradient for _, gradient in self._early], inputs=parameters)
        finally:
            for handle in handles:
                handle.remove()
        self._early.clear()

    def gradients(self) -> list[Tensor]:
        """Return the gradients held until `run`."""
        roots = [root for each in self._passes for root in each.all_roots()]
        return [gradient for _, gradient in (*roots, *self._early)]


class _Tap:
    # Records in a prehook, after tensor hooks, the gradients that arrive at a node in I, and hands them to the node in W.
    __slots__ = ("_edge", "arrived", "handle")

    def __init__(self, edge: GradientEdge) -> None:
        self._edge = edge
        # The hook refers to the gradients alone: if it referred to the tap, node and tap would keep each other alive.
        arrived = self.arrived = dict[int, Tensor]()

        def prehook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if arrived:
                return tuple(arrived.get(number) for number in range(len(gradients)))
            arrived.update((number, gradient) for number, gradient in enumerate(gradients) if gradient is not None)
            return None

        self.handle = edge.node.register_prehook(prehook)

    def roots(self) -> list[_Root]:
        node, _, token = self._edge
        return [(GradientEdge(node, number, token), gradient) for number, gradient in self.arrived.items()]


@dataclass(slots=True)
class _Pass:
    # One run of autograd in W: from nodes none of which is below another, to parameters that only these reach. Autograd visits all nodes
    # below them before (0.2 us each): a small part of W is quadratic in the stage's length.
    roots: list[_Root] = field(default_factory=list)
    taps: list[_Tap] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    def all_roots(self) -> list[_Root]:
        return [*self.roots, *(root for tap in self.taps for root in tap.roots())]

    def run(self) -> None:
        roots = self.all_roots()
        if roots and self.parameters:
            torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots], inputs=self.parameters)
        for tap in self.taps:
            tap.handle.remove()
