"""The layers of one stage as one module."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raypipe.actors import devices
from raypipe.actors.stage.layers import GENERATOR_LOCK, RngKey, build_layer, layer_seed
from raypipe.actors.stage.ties import borrowed_weights, shared_weights, tie_layers, tied_names
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError, PlanError
from raypipe.model import Batch, Layer, Model

Outputs = dict[int, tuple[Tensor, ...]]
"""The output tensors of layers, by layer index."""
_ATTRIBUTES_OF_TORCH = frozenset(nn.Module().__dict__)


class StageModule(nn.Module):
    """The layers of one stage, built on the CPU so that they start equal on every kind of device.

    Attributes:
        names: Names of all layers of the model.
        inputs: Layers whose outputs each layer takes.
        shared: Weights shared with other stages, in the same order on all.
        borrowed: By name, weights stored with other stages' layers.
        tied: By name, weights that several layers share, each with its full name in the first of them.
    """

    def __init__(self, model: Model, cut: Cut, stage: int, *, seed: int, on: torch.device = devices.CPU) -> None:
        super().__init__()
        if cut.ties != model.tied_layers():
            raise PlanError(f"the cut ties the layers {cut.ties}, the model {model.tied_layers()}; make it with ties=model.tied_layers()")
        self.stage = stage
        self.seed = seed
        self.on = on
        self.indices = cut.stages[stage]
        self.names = tuple(layer.name for layer in model.layers)
        self.num_layers = len(model.layers)
        self.specs: dict[int, Layer] = {index: model.layers[index] for index in self.indices}
        self.inputs: dict[int, list[int]] = {index: [source for source, target in cut.edges if target == index] for index in self.indices}
        leaving = {layer for (source, _), layers in cut.crossing.items() if source == stage for layer in layers}
        self._leaving = tuple(sorted(leaving | {self.num_layers - 1}.intersection(self.indices)))
        self.layers = nn.ModuleDict({str(index): build_layer(model.layers[index], index=index, seed=seed).to(on) for index in self.indices})
        tie_layers(model, {index: self.layers[str(index)] for index in self.indices}, seed=seed, on=on)
        self.shared = shared_weights(model, cut, self, self.indices, seed=seed) if stage in cut.graph.tie_of else ()
        self.borrowed = borrowed_weights(model, self, self.indices)
        self.tied = tied_names(model, self, self.indices)
        self._steps = [(index, self.layers[str(index)], self.inputs[index], self.specs[index]) for index in self.indices]
        self.takes_batch = any(spec.takes_batch for spec in self.specs.values())
        _check_state(self)
        # The first layer's outputs in the last forward, in a list: setting a module's attribute takes microseconds.
        self.first: list[tuple[Tensor, ...]] = [()]

    @property
    def needed_layers(self) -> tuple[int, ...]:
        """The layers whose states this stage loads: its own, and those it borrows from."""
        return tuple(dict.fromkeys([*self.indices, *(stored.layer for stored in self.borrowed.values())]))

    def forward(self, inputs: Outputs, batch: Batch, rng_key: RngKey) -> Outputs:
        """Return the outputs that other stages or the loss take."""
        values = dict(inputs)
        with GENERATOR_LOCK:
            for index, module, sources, spec in self._steps:
                arguments = [tensor for source in sources for tensor in values[source]]
                for field in spec.batch:
                    arguments.append(batch[field])
                optional = {field: batch[field] for field in spec.batch_if_present if field in batch}
                self._seed(index, rng_key)
                result = module(*arguments, **optional)
                values[index] = result if isinstance(result, tuple) else (result,)
        self.first[0] = values[self.indices[0]]
        return {index: values[index] for index in self._leaving}

    def pivot(self, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return the pivot of `backward_input` after a forward."""
        return () if any(tensor.requires_grad for tensor in inputs) else self.first[0]

    @contextmanager
    def seeded_loss(self, rng_key: RngKey) -> Iterator[None]:
        """Seed the loss as a layer after the last."""
        with GENERATOR_LOCK:
            self._seed(self.num_layers, rng_key)
            yield

    def _seed(self, layer: int, rng_key: RngKey) -> None:
        devices.seed(self.on, layer_seed(self.seed, layer, rng_key))


def _check_state(module: StageModule) -> None:
    # Now, and not at the first checkpoint after days of training.
    for name, value in module.state_dict().items():
        _, index, rest = name.split(".", 2)
        where = f"{rest!r} of layer {module.specs[int(index)].name!r}"
        if rest.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = f"a tensor of {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{where} is {what}, and checkpoints hold parameters and dense buffers; register a buffer in its place")
        if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
            raise ConfigError(f"{where} has elements that share memory, and could not be loaded again; register its `.clone()`")


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore a module on exit, from the host: some layers initialize themselves from the first values."""
    # Torch's own layers write into some buffers without changing their version counter.
    tensors: list[tuple[Tensor, int, Tensor]] = [(weight, weight._version, _on_host(weight)) for weight in module.parameters()]
    tensors += [(buffer, -1, _on_host(buffer)) for buffer in module.buffers() if buffer.layout is torch.strided]
    parts = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    containers = [
        (value, copy.copy(value))
        for _, attributes, _ in parts
        for name, value in attributes.items()
        if type(value) in {list, dict, set} and name not in _ATTRIBUTES_OF_TORCH
    ]
    try:
        yield
    finally:
        for value, before in containers:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for part, attributes, buffers in parts:
            for name in part.__dict__.keys() - attributes.keys():
                del part.__dict__[name]
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for tensor, version, before in tensors:
                if tensor._version != version:
                    tensor.copy_(before)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
