"""Splits the backward pass of one stage into input gradients (I) and weight gradients (W), for any nn.Module.

Zero-bubble schedules send the input gradient on first and fill idle time with the weight gradients
(Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 2).

Autograd's graph of `y = fc2(gelu(fc1(x)))` runs from the outputs down to the leaves. A node that leads to an input is `inner`; an inner
node with a child that leads to parameters but to no input is a `cut`:

    gradient of y -> [addmm fc2] -> [gelu] -> [addmm fc1] -> x        I runs this row and notes what arrives at each cut
                          |                        |
                      [t] -> fc2.weight        [t] -> fc1.weight      W runs each cut again, but only this side of it

Each node computes only what a pass asks for: no matrix product is done twice. Gradients of parameters below several cuts (a weight used
twice, a recurrent layer) are computed in I and held until W.

Limits, none of which affects the values:
* A Python `autograd.Function` and a module from `torch.compile` compute all their gradients in I.
* Between I and W all activations below the topmost cut stay, with one gradient per cut.
* `torch.utils.checkpoint(use_reentrant=False)` recomputes in I and in each pass of W that enters its segment; the reentrant kind raises.
* Autograd visits all nodes below a cut before a pass (0.2 us each): a small part of W is quadratic in the stage's length.
* Tensor hooks on parameters of I, outputs of cuts and pivots run in I and again in W, which drops their result.
* No second derivatives.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raypipe.actors.stage.autograd_graph import edges_into, find_owners, walk

_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)
"""What `torch.autograd.backward` calls after checks in Python, which take 45 us with cold caches. It is not public: a torch without it
takes the public way."""


def disable_buffer_donation() -> None:
    """Keep compiled backwards of this thread from overwriting saved tensors, which I and W both need."""
    config = sys.modules.get("torch._functorch.config")  # loaded with the compiler
    if config is not None:
        config.donated_buffer = False  # type: ignore[attr-defined]


def backward_full(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Accumulate the gradients of `parameters` into `.grad` and return those of `inputs`; free the graph behind `outputs`.

    `output_gradients` may hold `None`; the gradient of the loss is `torch.ones_like(loss)`. `inputs` are leaves without `.grad`. An input
    that takes no gradient, or that none reaches, gets `None`. Frozen and unused parameters keep their `.grad`.
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

    The caller must drop `outputs` afterwards, or they keep the graph alive. I ends at `pivot`, the outputs of the first layer, if no input
    takes a gradient; with neither, W computes everything. Time is linear in nodes.
    """
    assert all(tensor.grad_fn is None for tensor in inputs), "the inputs of a stage must be leaves: detach the tensors that it received"
    roots = _roots(outputs, output_gradients)
    edges = [root.edge for root in roots]
    inside = [tensor for tensor in pivot if isinstance(tensor, Tensor) and tensor.requires_grad]
    pivots = {edge.node: edge for edge in map(get_gradient_edge, inside)}
    graph = walk(edges, inputs=inputs, pivots=pivots, parameters=parameters)
    owners = find_owners(graph, edges)

    cuts = {node: _Tap(GradientEdge(node, 0)) for node in owners.cuts}
    floor = {node: _Tap(edge) for node, edge in pivots.items() if graph.height.get(node) == 0}
    floor_edges = edges_into(floor, graph=graph, roots=edges)
    wanted = [*(GradientEdge(node, 0) for node in graph.inputs), *floor_edges, *(GradientEdge(node, 0) for node in owners.early)]
    gradients: list[Tensor | None] = []
    if wanted:
        keep = bool(cuts or (owners.early and owners.late))
        gradients = list(torch.autograd.grad(edges, wanted, [root.gradient for root in roots], retain_graph=keep, allow_unused=True))
    early = gradients[len(graph.inputs) + len(floor_edges) :]
    for edge, gradient in zip(floor_edges, gradients[len(graph.inputs) :], strict=False):
        floor[edge.node].record(edge.output_nr, gradient)

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
    by_input = dict(zip(graph.inputs.values(), gradients, strict=False))
    return tuple(by_input.get(tensor) for tensor in inputs), pending


class PendingWeightGradient:
    """The weight gradients of one microbatch of one stage that `backward_input` has left to W."""

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
        _accumulate_early(self._early)
        self._early.clear()

    def gradients(self) -> list[Tensor]:
        """Return the gradients held until `run`."""
        roots = [root for each in self._passes for root in each.all_roots()]
        return [*(root.gradient for root in roots), *(gradient for _, gradient in self._early)]


def _accumulate_early(early: Sequence[tuple[Tensor, Tensor]]) -> None:
    # As autograd accumulates, with its hooks.
    if not early:
        return
    # I ran the parameters' tensor hooks. They run again here; the hooks added last drop their effect.
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
    edge: GradientEdge
    gradient: Tensor


class _Tap:
    """Records in a prehook the gradients that arrive at a node in I, after tensor hooks, and hands them to the node in W."""

    __slots__ = ("_arrived", "_edge", "_handle")

    def __init__(self, edge: GradientEdge) -> None:
        self._edge = edge
        self._arrived: dict[int, Tensor] = {}
        # The hook refers to the gradients alone: if it referred to the tap, node and tap would keep each other alive.
        self._handle = edge.node.register_prehook(_record_or_hand_back(self._arrived))

    def record(self, output_nr: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._arrived.setdefault(output_nr, gradient)

    def roots(self) -> list[_Root]:
        node, _, token = self._edge
        return [_Root(GradientEdge(node, number, token), gradient) for number, gradient in self._arrived.items()]

    def remove(self) -> None:
        self._handle.remove()


def _record_or_hand_back(arrived: dict[int, Tensor]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]:
    def prehook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if arrived:
            return tuple(arrived.get(number) for number in range(len(gradients)))
        arrived.update((number, gradient) for number, gradient in enumerate(gradients) if gradient is not None)
        return None

    return prehook


@dataclass(slots=True)
class _Pass:
    """One run of autograd in W: from nodes none of which is below another, to parameters that only these reach."""

    roots: list[_Root] = field(default_factory=list)
    taps: list[_Tap] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    def all_roots(self) -> list[_Root]:
        return [*self.roots, *(root for tap in self.taps for root in tap.roots())]

    def run(self) -> None:
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
