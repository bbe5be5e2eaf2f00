"""Models that take several times their own CPU seconds: few cores serve many stages, each as if it had a core of its own.

A layer computes, and then sleeps until its forward, or its backward, has taken `factor` times the fewest CPU seconds that it has needed
so far: those of an undisturbed core, once some microbatches have passed. So does the loss. What a stage waits for others is no CPU second
and is not stretched, nor are updates, nor sums that begin inside a backward. Outputs, gradients and names of weights are those of the model
itself. Layers return one tensor; backwards are whole, not divided into I and W.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from raypipe.model import Batch, Model
from raypipe.models.waiting import sleep


def stretched(model: Model, factor: float) -> Model:
    """Return the model, whose layers and loss take `factor` times their CPU seconds; each process makes its own."""
    layers = tuple(replace(layer, build=partial(_layer, layer.build, factor)) for layer in model.layers)
    return replace(model, layers=layers, loss=partial(_loss, model.loss, _Stretch(factor)))


@dataclass
class Span:
    """A piece of work, which `stretch` makes longer; `least_s` are the fewest CPU seconds so far until each call of `stretch`."""

    factor: float
    least_s: list[float]
    began_s: float = 0.0
    began_cpu_s: float = 0.0
    num_calls: int = 0

    def begin(self) -> None:
        """Count from now on."""
        self.began_s, self.began_cpu_s, self.num_calls = time.perf_counter(), time.thread_time(), 0

    def stretch(self) -> None:
        """Sleep until the work has taken `factor` times the fewest CPU seconds that any thread has used for it."""
        used_s = time.thread_time() - self.began_cpu_s
        if self.num_calls == len(self.least_s):
            self.least_s.append(used_s)
        least_s = self.least_s[self.num_calls] = min(used_s, self.least_s[self.num_calls])
        self.num_calls += 1
        left_s = self.factor * least_s - (time.perf_counter() - self.began_s)
        if left_s > 0:
            sleep(left_s)


class _At(Function):
    """Passes a tensor on, and acts where the backward comes to it."""

    @staticmethod
    def forward(ctx: FunctionCtx, act: Callable[[], None], tensor: Tensor) -> Tensor:
        ctx.act = act  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[None, Tensor]:
        ctx.act()  # type: ignore[attr-defined]
        return None, gradients[0]


def _marked(act: Callable[[], None], value: Any) -> Any:
    return _At.apply(act, value) if isinstance(value, Tensor) and value.requires_grad else value  # type: ignore[no-untyped-call]


class _Stretch:
    """Stretches one call after the other, each with its backward."""

    def __init__(self, factor: float) -> None:
        self._forward = Span(factor, [])
        self._backward_least_s: list[float] = []
        self._backward = Span(factor, self._backward_least_s)
        self._factor = factor
        self._has_inputs = False

    def inputs(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Begin a forward; return its inputs, where its backward ends."""
        self._backward = Span(self._factor, self._backward_least_s)
        marked = tuple(_marked(self._backward.stretch, value) for value in given)
        self._has_inputs = any(one is not other for one, other in zip(marked, given, strict=True))
        self._forward.begin()
        return marked

    def output(self, output: Tensor) -> Tensor:
        """End a forward; return its output, where its backward begins."""
        if not self._has_inputs:  # its backward ends with the gradients of weights
            for node in _above_weights(output.grad_fn):
                node.register_hook(lambda *_, stretch=self._backward.stretch: stretch())
        marked: Tensor = _marked(self._backward.begin, output)
        self._forward.stretch()
        return marked


def _above_weights(root: Node | None) -> Iterator[Node]:
    """Yield the nodes of a graph that compute gradients of leaves."""
    seen: set[Node] = set()
    left = [root]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [child for child, _ in node.next_functions if child is not None]
        if any(not child.next_functions for child in below):
            yield node
        left += below


def _layer(build: Callable[[], nn.Module], factor: float) -> nn.Module:
    module, stretch = build(), _Stretch(factor)
    module.register_forward_pre_hook(lambda _, given: stretch.inputs(given))
    module.register_forward_hook(lambda _, __, output: stretch.output(output))
    return module


def _loss(loss: Callable[[Tensor, Batch], Tensor], stretch: _Stretch, output: Tensor, batch: Batch) -> Tensor:
    (inside,) = stretch.inputs((output,))
    return stretch.output(loss(inside, batch))
