"""Measures what the layers of a model cost on this device, one layer at a time: never the whole model at once."""

from __future__ import annotations

import dataclasses
import os
import statistics
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from raypipe.actors import devices
from raypipe.actors.stage.backward import backward_full, backward_input
from raypipe.actors.stage.gradient_flow import LayerOutput, stand_in
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.precision import build_stage, loss_in_float32, prepare
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.actors.transport.protocol import TensorSpec
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Batch, Model
from raypipe.schedules.ir import WeightRule

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
        weight_grad_saved_bytes: of what is kept from the input gradient to the weight gradient, where the backward is split:
            what autograd still holds, and the gradients that the weight gradient starts from.
        parameter_bytes: of its weights, as the optimizer steps them.
        tied_bytes: of those of them that other layers have, too.
        update_s: seconds of the optimizer's step over its weights, and of making the copies anew.
        spread: half the distance between the quartiles of the forward's and backward's sum, over its median.
        low_precision_bytes: of the copies of its weights in lower precision that it computes with.
        working_bytes: the most that forward and backward take at any time, beyond what autograd keeps; what it passes on, the gradient
            of that and the gradients of its inputs are part of it, and a gradient of a weight before it is added to the others.
        input_grad_working_bytes: the same of the forward and the input gradient, where the backward is split.
        frozen_bytes: of those of its weights that are not trained.
    """

    name: str
    forward_s: float
    backward_s: float
    weight_grad_s: float
    output_bytes: int
    saved_bytes: int
    weight_grad_saved_bytes: int
    parameter_bytes: int
    tied_bytes: int
    update_s: float
    spread: float
    working_bytes: int
    input_grad_working_bytes: int
    low_precision_bytes: int = 0
    frozen_bytes: int = 0


@dataclass(frozen=True)
class Effort:
    """How often layers are measured.

    Attributes:
        repeats: timed runs of each layer in a pass.
        warm_up: runs before them.
        passes: over all layers. What disturbs a machine often lasts longer than all repeats of a layer, but hardly meets it again
            in the next pass.
    """

    repeats: int = 7
    warm_up: int = 2
    passes: int = 1


USUAL_EFFORT = Effort()
"""A second or so for a small model: as much as may go before every run."""


def measure_layers(
    model: Model,
    batch: Batch,
    *,
    optimizer: Optimizer,
    seed: int,
    effort: Effort = USUAL_EFFORT,
    precision: Precision = Precision.FLOAT32,
    on: torch.device = devices.CPU,
) -> list[LayerMeasurement]:
    """Measures every layer in order.

    Args:
        model: the model's description.
        batch: one microbatch.
        optimizer: makes the optimizer of a layer.
        seed: of the weights.
        effort: how often.
        precision: in which the layers compute.
        on: the device.
    """
    batch = devices.upload(batch, on)
    model = loss_in_float32(model, precision)
    alone = dataclasses.replace(model, ties=())  # what a layer begins with costs nothing
    cut = Cut(tuple((layer,) for layer in range(len(model.layers))), model.edges())
    num_rows = len(next(iter(batch.values())))
    samples = [_Samples() for _ in model.layers]
    found: list[LayerMeasurement] = []
    for _ in range(effort.passes):
        made: dict[int, tuple[LayerOutput, ...]] = {}
        found.clear()
        for index in range(len(model.layers)):
            weights = build_stage(alone, cut, index, optimizer=optimizer, rule=WeightRule.FLUSH, seed=seed, precision=precision, on=on)
            sizes = _sizes_of(weights.module)
            made |= prepare(weights, made, batch, num_rows=num_rows)
            found.append(_Layer(model, weights, made, batch, sizes).measure(samples[index], effort))
    devices.drop_fillers()
    return found


@dataclass(frozen=True)
class _Samples:
    """The seconds that one layer took, by run."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    weight_grad_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of forward and backward together, over their median."""
        sums = [forward_s + backward_s for forward_s, backward_s in zip(self.forward_s, self.backward_s, strict=True)]
        quartiles = statistics.quantiles(sums, n=4, method="inclusive") if len(sums) > 1 else sums * 3
        return (quartiles[2] - quartiles[0]) / 2 / quartiles[1] if quartiles[1] else 0.0


class _Saved:
    """A tensor that autograd keeps. It is the only one to keep this object, which so ends when autograd lets go of the tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Layer:
    def __init__(
        self, model: Model, weights: Weights, made: dict[int, tuple[LayerOutput, ...]], batch: Batch, sizes: tuple[int, int]
    ) -> None:
        self.model = model
        self.weights = weights
        self.module = weights.module.train()
        self.index = self.module.stage
        self.inputs = {source: made[source] for source in self.module.inputs[self.index]}
        self.outputs = made[self.index]
        self.batch = batch
        self.on = weights.on
        self.sizes = sizes
        self.parameters = weights.parameters(0)

    def measure(self, samples: _Samples, effort: Effort) -> LayerMeasurement:
        """What the layer costs by all samples, to which it adds those of a pass."""
        saved_bytes, weight_grad_saved_bytes = self._sizes()
        working_bytes, input_grad_working_bytes = (max(peak_bytes - saved_bytes, 0) for peak_bytes in self._peaks())
        for repeat in range(effort.warm_up + effort.repeats):
            self._once(samples if repeat >= effort.warm_up else _Samples())
        backward_s = _undisturbed(samples.backward_s)
        return LayerMeasurement(
            name=self.model.layers[self.index].name,
            forward_s=_undisturbed(samples.forward_s),
            backward_s=backward_s,
            weight_grad_s=min(_undisturbed(samples.weight_grad_s), backward_s),
            output_bytes=sum(_spec_bytes(given.spec) for given in self.outputs),
            saved_bytes=saved_bytes,
            weight_grad_saved_bytes=weight_grad_saved_bytes,
            parameter_bytes=self.sizes[0],
            tied_bytes=self._tied_bytes(),
            low_precision_bytes=self.weights.low_precision_bytes,
            frozen_bytes=self.sizes[1],
            update_s=_undisturbed(samples.update_s),
            spread=samples.spread,
            working_bytes=working_bytes,
            input_grad_working_bytes=input_grad_working_bytes,
        )

    def _tied_bytes(self) -> int:
        layer = self.model.layers[self.index].name
        names = [name for tie in self.model.ties for member, name in tie if member == layer]
        tied = {self.module.layers[str(self.index)].get_parameter(name) for name in names}
        # What the optimizer steps, whatever the precision of the copy that the layer computes with.
        stepped = {id(own): master for own, master in zip(self.weights.parameters(0), self.weights.masters, strict=True)}
        return sum(stepped.get(id(weight), weight).nbytes for weight in tied)

    def _once(self, samples: _Samples) -> None:
        """Runs the layer with the whole backward, then with the backward split, and its update; notes the seconds."""
        self._forward()  # as in a stage at work, where the caches know the layer
        (roots, leaves), forward_s = self._forward()
        gradients = [torch.ones_like(root) for root in roots]
        self._bind()
        _, backward_s = self._timed(lambda: backward_full(roots, gradients, leaves, self.parameters))
        self._clear()
        (roots, leaves), _ = self._forward()
        self._bind()
        _, deferred = backward_input(roots, gradients, leaves, self.parameters, pivot=self._pivot(leaves))
        _, weight_grad_s = self._timed(deferred.run)
        samples.forward_s.append(forward_s)
        samples.backward_s.append(backward_s)
        samples.weight_grad_s.append(weight_grad_s)
        samples.update_s.append(self._update())

    def _sizes(self) -> tuple[int, int]:
        """The bytes kept from forward to backward, and from the input gradient to the weight gradient."""
        alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

        def pack(tensor: Tensor) -> _Saved:
            # With its way back to the graph, what an operator gives and keeps would keep the operator, and that it.
            saved = _Saved(tensor.detach())
            alive.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            (roots, leaves), _ = self._forward()
        saved_bytes = self._storage_bytes(saved.tensor for saved in alive)
        gradients = [torch.ones_like(root) for root in roots]
        _, deferred = backward_input(roots, gradients, leaves, self.parameters, pivot=self._pivot(leaves))
        # What the graph above the weights' gradients holds ends with the last reference to the outputs.
        del roots
        self.module.first[0] = ()
        weight_grad_saved_bytes = self._storage_bytes([*(saved.tensor for saved in alive), *deferred.gradients()])
        self._bind()
        deferred.run()
        self._clear()
        return saved_bytes, weight_grad_saved_bytes

    def _peaks(self) -> tuple[int, int]:
        """The most bytes that a forward takes at any time together with its backward, and together with its input gradient."""

        def forward() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
            (roots, leaves), _ = self._forward()
            return roots, [torch.ones_like(root) for root in roots], leaves

        def whole() -> None:
            roots, gradients, leaves = forward()
            backward_full(roots, gradients, leaves, self.parameters)

        def split() -> None:
            roots, gradients, leaves = forward()
            backward_input(roots, gradients, leaves, self.parameters, pivot=self._pivot(leaves))

        whole()  # from now on gradients of weights are there, to which others are added
        peaks = []
        for work in (whole, split):
            self.module.first[0] = ()  # what was made before may not end now
            peaks.append(_peak_bytes(work) if self.on.type == "cpu" else devices.peak_bytes(work, self.on))
        self.module.first[0] = ()
        self._clear()
        return peaks[0], peaks[1]

    def _storage_bytes(self, tensors: Iterable[Tensor]) -> int:
        """The memory that tensors lie in, that of the weights left out."""
        own = {weight.untyped_storage().data_ptr() for weight in self.module.parameters()}
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}.values())

    def _pivot(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Where the input gradient ends, if no input takes one."""
        return () if any(leaf.requires_grad for leaf in leaves) else self.module.first[0]

    def _forward(self) -> tuple[tuple[list[Tensor], list[Tensor]], float]:
        """The roots of the backward and the input leaves, and the seconds of the forward."""
        inputs = {source: tuple(stand_in(given, on=self.on) for given in of_layer) for source, of_layer in self.inputs.items()}

        def forward() -> list[Tensor]:
            outputs = self.module(inputs, self.batch, RngKey(0))[self.index]
            if self.index == len(self.model.layers) - 1:
                return [self.model.loss(outputs[0], self.batch)]
            return [tensor for tensor in outputs if tensor.requires_grad]

        roots, forward_s = self._timed(forward)
        return (roots, [leaf for tensors in inputs.values() for leaf in tensors]), forward_s

    def _update(self) -> float:
        """Updates with the gradients that are there."""
        if self.weights.optimizer is None:
            self._clear()
            return 0.0
        number = self.weights.newest
        return self._timed(lambda: self.weights.update(number, scale=1.0, learning_rate=0.0, keep_old=False))[1]

    def _timed(self, what: Callable[[], T]) -> tuple[T, float]:
        """What a function returns, and the seconds that the device takes for what it does."""
        clock = devices.stop_watch(self.on)
        result = what()
        return result, clock()

    def _bind(self) -> None:
        self.weights.bind(0, self.weights.newest)

    def _clear(self) -> None:
        self.weights.drop_gradients(self.weights.newest)


def _sizes_of(module: nn.Module) -> tuple[int, int]:
    """Bytes of all weights, and of those that are not trained."""
    frozen = [weight.nbytes for weight in module.parameters() if not weight.requires_grad]
    return sum(weight.nbytes for weight in module.parameters()), sum(frozen)


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what disturbs a measurement only ever adds to it, and often to more than half of a few repeats.

    Never less than the least: of few repeats, quartiles of what they were drawn from would be guessed beyond them.
    """
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def start_profiler() -> None:
    """Starts torch's profiler for the first time; torch complains on stderr if another thread does than the one that loaded it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes a line whenever a profiler starts
    with torch.autograd.profiler.profile(use_kineto=False):
        pass


def _peak_bytes(what: Callable[[], None]) -> int:
    """The most bytes of tensors that there are at any time of what is done, beyond those before it."""
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profiler:
        what()
    events = sorted(profiler.function_events or (), key=lambda event: event.time_range.end)
    return max(accumulate(event.self_cpu_memory_usage for event in events), default=0)


def _spec_bytes(spec: TensorSpec) -> int:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta").nbytes
