"""Measures what the layers of a model cost on this device, one layer at a time: never the whole model at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from raypipe.actors.backward import backward_full, backward_input
from raypipe.actors.held import Draw, Optimizer, StageModule, output_specs
from raypipe.actors.transport import TensorSpec
from raypipe.cut import Cut
from raypipe.model import Batch, Model

T = TypeVar("T")


@dataclass(frozen=True)
class LayerMeasurement:
    """What one layer costs for one microbatch.

    Attributes:
        name: of the layer.
        forward_s: seconds of the forward; all times are lower quartiles.
        backward_s: of the full backward.
        weight_grad_s: of the weight gradient, where the backward is split.
        output_bytes: of what it passes on.
        saved_bytes: of what autograd keeps for the backward, weights left out.
        parameter_bytes: of its weights.
        update_s: seconds of the optimizer's step over its weights.
        spread: half the distance between the quartiles of the forward's and backward's sum, over its median.
    """

    name: str
    forward_s: float
    backward_s: float
    weight_grad_s: float
    output_bytes: int
    saved_bytes: int
    parameter_bytes: int
    update_s: float
    spread: float


def measure_layers(
    model: Model, batch: Batch, *, optimizer: Optimizer, seed: int, repeats: int = 7, warm_up: int = 2
) -> list[LayerMeasurement]:
    """Measures every layer in order.

    Args:
        model: the model's description.
        batch: one microbatch.
        optimizer: makes the optimizer of a layer.
        seed: of the weights.
        repeats: timed runs of each layer.
        warm_up: runs before them.
    """
    cut = Cut(tuple((layer,) for layer in range(len(model.layers))), model.edges())
    num_rows = len(next(iter(batch.values())))
    made: dict[int, tuple[TensorSpec, ...]] = {}
    found: list[LayerMeasurement] = []
    for index in range(len(model.layers)):
        module = StageModule(model, cut, index, seed=seed)
        made |= output_specs(module, {source: made[source] for source in module.inputs[index]}, batch, num_rows=num_rows)
        found.append(_Layer(model, module, made, batch, optimizer).measure(repeats=repeats, warm_up=warm_up))
    return found


class _Layer:
    def __init__(
        self, model: Model, module: StageModule, made: dict[int, tuple[TensorSpec, ...]], batch: Batch, optimizer: Optimizer
    ) -> None:
        self.model = model
        self.module = module.train()
        self.index = module.stage
        self.specs = {source: made[source] for source in module.inputs[self.index]}
        self.output_specs = made[self.index]
        self.batch = batch
        self.parameters = [weight for weight in module.parameters() if weight.requires_grad]
        self.optimizer = optimizer(self.parameters) if self.parameters else None

    def measure(self, *, repeats: int, warm_up: int) -> LayerMeasurement:
        forwards, backwards, weight_grads, updates, saved = [], [], [], [], 0
        for repeat in range(warm_up + repeats):
            forward_s, backward_s, weight_grad_s, saved = self._once()
            update_s = self._update()
            if repeat >= warm_up:
                forwards.append(forward_s)
                backwards.append(backward_s)
                weight_grads.append(weight_grad_s)
                updates.append(update_s)
        sums = sorted(forward + backward for forward, backward in zip(forwards, backwards, strict=True))
        quartiles = statistics.quantiles(sums, n=4) if len(sums) > 1 else [sums[0]] * 3
        backward_s = _undisturbed(backwards)
        return LayerMeasurement(
            name=self.model.layers[self.index].name,
            forward_s=_undisturbed(forwards),
            backward_s=backward_s,
            weight_grad_s=min(_undisturbed(weight_grads), backward_s),
            output_bytes=sum(_spec_bytes(spec) for spec in self.output_specs),
            saved_bytes=saved,
            parameter_bytes=sum(weight.nbytes for weight in self.module.parameters()),
            update_s=_undisturbed(updates),
            spread=(quartiles[2] - quartiles[0]) / 2 / quartiles[1],
        )

    def _once(self) -> tuple[float, float, float, int]:
        roots, leaves, forward_s, saved = self._forward()
        gradients = [torch.ones_like(root) for root in roots]
        _, backward_s = _timed(lambda: backward_full(roots, gradients, leaves, self.parameters))
        self._clear()
        roots, leaves, _, _ = self._forward()
        pivot = () if any(leaf.requires_grad for leaf in leaves) else self.module.first[0]
        _, deferred = backward_input(roots, gradients, leaves, self.parameters, pivot=pivot)
        _, weight_grad_s = _timed(deferred.run)
        return forward_s, backward_s, weight_grad_s, saved

    def _forward(self) -> tuple[list[Tensor], list[Tensor], float, int]:
        """The roots of the backward, the input leaves, the seconds of the forward and the bytes saved for the backward."""
        inputs = {
            source: tuple(torch.zeros(spec.shape, dtype=spec.dtype).requires_grad_(spec.dtype.is_floating_point) for spec in specs)
            for source, specs in self.specs.items()
        }
        own = {weight.data_ptr() for weight in self.module.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        def forward() -> list[Tensor]:
            outputs = self.module(inputs, self.batch, Draw(0))[self.index]
            if self.index == len(self.model.layers) - 1:
                return [self.model.loss(outputs[0], self.batch)]
            return [tensor for tensor in outputs if tensor.requires_grad]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            roots = forward()
        size = sum(saved.values())
        roots, forward_s = _timed(forward)
        return roots, [leaf for tensors in inputs.values() for leaf in tensors], forward_s, size

    def _update(self) -> float:
        """Steps the optimizer with the gradients that are there, and clears them."""
        seconds = _timed(self.optimizer.step)[1] if self.optimizer is not None else 0.0
        self._clear()
        return seconds

    def _clear(self) -> None:
        for weight in self.parameters:
            weight.grad = None


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what disturbs a measurement only ever adds to it, and often to more than half of a few repeats."""
    return statistics.quantiles(seconds, n=4)[0] if len(seconds) > 1 else seconds[0]


def _timed(what: Callable[[], T]) -> tuple[T, float]:
    since = time.perf_counter()
    result = what()
    return result, time.perf_counter() - since


def _spec_bytes(spec: TensorSpec) -> int:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta").nbytes
