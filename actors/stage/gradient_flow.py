"""What crosses the borders of stages: found once, by a few forwards of each stage and the graphs that these leave.

    layer       gives            its gradient comes back from the next stage, if
    embed       x, mask          x leads to the loss there, and takes one; the mask takes none
    block       x, mask, aux     aux is used by no later layer: nothing comes back, and its weights stay as they are

Gradients that are not there cost nothing: a mask that goes from layer to layer, a frozen stage, what nobody uses. What layers do may
depend on values, so a way of gradients counts if any of the forwards has it: one over zeros, as in evaluation, and some over noise, as in
training. A way that none of them has and training finds is an error; `Layer.gradients_vary` says that it may come.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from raypipe.actors import devices
from raypipe.actors.stage.backward import keep_what_compiled_forwards_save
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs, StageModule
from raypipe.actors.transport.protocol import TensorSpec
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError
from raypipe.model import Batch

Place = tuple[int, int]
"""A tensor that a layer gives: the layer, and which of its outputs."""


@dataclass(frozen=True)
class LayerOutput:
    """A tensor that a layer gives to other stages, or to the loss.

    Attributes:
        spec: its shape for a whole microbatch, and its dtype.
        takes_gradient: whether its stage has a use for a gradient of it.
        reaches: the tensors of other stages that a gradient of it leads to one of.
        always: whether a gradient comes back in any case.
    """

    spec: TensorSpec
    takes_gradient: bool
    reaches: frozenset[Place] = field(default=frozenset(), repr=False)
    always: bool = False


@dataclass(frozen=True)
class EdgeTensor:
    """A tensor that goes along an edge of the stage graph.

    Attributes:
        spec: its shape for a whole microbatch, and its dtype.
        takes_gradient: whether the stage that gives it has a use for a gradient.
        returns: whether a gradient comes back: it takes one, and the stage that it goes to has one.
    """

    spec: TensorSpec
    takes_gradient: bool
    returns: bool


_OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes of all modules, which are put back by themselves or have no numbers."""
_NUM_TRIALS = 2
"""Forwards over noise."""

EdgeSpecs = Mapping[tuple[int, int], tuple[tuple[EdgeTensor, ...], ...]]
"""For each edge (source, target) of the stage graph and each layer that crosses it, its tensors."""


def output_specs(
    module: StageModule, inputs: Mapping[int, tuple[LayerOutput, ...]], batch: Batch, *, num_rows: int
) -> dict[int, tuple[LayerOutput, ...]]:
    """What a stage gives, found by forwards over zeros and over noise.

    Args:
        module: the stage.
        inputs: the tensors of layers in other stages.
        batch: the fields of one microbatch.
        num_rows: of the microbatch.

    Raises:
        ConfigError: the forward over zeros failed or wrote into what it was given, or the first dimension of a tensor is not the row.
    """
    names = ", ".join(spec.name for spec in module.specs.values())
    where = f"stage {module.stage} (layers {names})"
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"the batch field {name!r} is of type {type(tensor).__name__}; expected a tensor")
        if not tensor.dim() or tensor.shape[0] != num_rows:
            raise ConfigError(
                f"the batch field {name!r} has the shape {tuple(tensor.shape)}; expected {num_rows} rows, schedule.microbatch_size"
            )
    keep_what_compiled_forwards_save()
    batch = devices.upload(batch, module.on)
    module.eval()
    zeros = {layer: tuple(stand_in(given, on=module.on) for given in of_layer) for layer, of_layer in inputs.items()}
    trials = [_trial(module, zeros, batch, RngKey(0), where, num_rows)]
    module.train()
    for number in range(1, 1 + _NUM_TRIALS):
        noise = {layer: tuple(_noise(given, number, on=module.on) for given in of_layer) for layer, of_layer in inputs.items()}
        with suppress(ConfigError):  # noise may be out of a layer's range
            trials.append(_trial(module, noise, batch, RngKey(number), where, num_rows))
    first = trials[0]
    alike = [trial for trial in trials if trial.specs == first.specs]
    tried = len(alike) > 1
    # Of what could not be tried in training nothing is known.
    anywhere = frozenset().union(*(way for trial in alike for way in trial.ways.values())) if tried else first.leaves
    found: dict[int, tuple[LayerOutput, ...]] = {}
    for layer, specs in first.specs.items():
        vary = module.specs[layer].gradients_vary or not tried
        of_layer: list[LayerOutput] = []
        for number, spec in enumerate(specs):
            if vary and (spec.dtype.is_floating_point or spec.dtype.is_complex):
                of_layer.append(LayerOutput(spec, takes_gradient=True, reaches=anywhere, always=True))
            else:
                ways = [trial.ways[layer, number] for trial in alike if (layer, number) in trial.ways]
                of_layer.append(LayerOutput(spec, takes_gradient=bool(ways), reaches=frozenset().union(*ways)))
        found[layer] = tuple(of_layer)
    return found


@dataclass(frozen=True)
class _Trial:
    """What one forward of a stage showed.

    Attributes:
        specs: of the tensors that each layer gives.
        ways: for each of them that has a gradient, the tensors of other stages that it leads to.
        leaves: the tensors of other stages that take a gradient.
    """

    specs: dict[int, tuple[TensorSpec, ...]]
    ways: dict[Place, frozenset[Place]]
    leaves: frozenset[Place]


def _trial(module: StageModule, inputs: Outputs, batch: Batch, draw: RngKey, where: str, num_rows: int) -> _Trial:
    places = {tensor: (layer, number) for layer, tensors in inputs.items() for number, tensor in enumerate(tensors)}
    versions = {tensor: tensor._version for tensor in places if not tensor.requires_grad and tensor.is_floating_point()}
    try:
        with torch.enable_grad():
            outputs: Outputs = module(inputs, batch, draw)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        over = " (it ran over zeros, in place of what other stages send)" if inputs else ""
        raise ConfigError(f"a forward of {where} failed: {type(error).__name__}: {error}{over}") from error
    finally:
        module.first[0] = ()
    for tensor, version in versions.items():
        if tensor._version != version:
            raise ConfigError(
                f"a forward of {where} writes in place into output {places[tensor][1]} of layer {module.names[places[tensor][0]]!r}, "
                "which others may read, too; let it work on a clone"
            )
    for layer, tensors in outputs.items():
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.shape[0] != num_rows:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                taker = "the loss" if layer == module.num_layers - 1 else "other stages"
                raise ConfigError(
                    f"layer {module.specs[layer].name!r} of {where} gives {shape} to {taker}; "
                    f"expected tensors whose first dimension is the row ({num_rows} of them)"
                )
    leaves = {tensor: place for tensor, place in places.items() if tensor.requires_grad}
    return _Trial(
        {layer: tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors) for layer, tensors in outputs.items()},
        {
            (layer, number): frozenset(_reached(tensor, leaves))
            for layer, tensors in outputs.items()
            for number, tensor in enumerate(tensors)
            if tensor.requires_grad
        },
        frozenset(leaves.values()),
    )


def _reached(tensor: Tensor, leaves: Mapping[Tensor, Place]) -> Iterator[Place]:
    """The leaves that a backward from a tensor leads to."""
    stack: list[Node] = [get_gradient_edge(tensor).node]
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # AccumulateGrad tells its tensor
        if isinstance(leaf, Tensor) and leaf in leaves:
            yield leaves[leaf]
        fresh = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= fresh
        stack += fresh


def edge_specs(cut: Cut, made: Mapping[int, Sequence[LayerOutput]]) -> EdgeSpecs:
    """What travels along each edge of the stage graph.

    Args:
        cut: the layers of all stages, which are numbered in topological order.
        made: what each layer gives.
    """
    last = max(layer for stage in cut.stages for layer in stage)
    # Of a consumer that has a gradient for nothing that it gives, none comes either: from the loss to the first stage.
    wanted: set[Place] = {(last, number) for number in range(len(made[last]))}
    found: dict[tuple[int, int], tuple[tuple[EdgeTensor, ...], ...]] = {}
    for stage in reversed(range(len(cut.stages))):
        returned = {
            place
            for layer in cut.stages[stage]
            for number, given in enumerate(made.get(layer, ()))
            if (layer, number) in wanted
            for place in given.reaches
        }
        returned |= {
            (layer, number)
            for edge, layers in cut.crossing.items()
            if edge[1] == stage
            for layer in layers
            for number, given in enumerate(made[layer])
            if given.always
        }
        wanted |= returned
        for edge, layers in cut.crossing.items():
            if edge[1] == stage:
                found[edge] = tuple(
                    tuple(EdgeTensor(given.spec, given.takes_gradient, (layer, at) in returned) for at, given in enumerate(made[layer]))
                    for layer in layers
                )
    return found


def stand_in(given: LayerOutput | EdgeTensor, *, on: torch.device) -> Tensor:
    """Zeros in place of what comes from another stage, which take a gradient as that does."""
    return torch.zeros(given.spec.shape, dtype=given.spec.dtype, device=on).requires_grad_(given.takes_gradient)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _noise(given: LayerOutput, number: int, *, on: torch.device) -> Tensor:
    """Values from 0 to 1, which lead layers elsewhere than zeros do; those of indices do not change, of which some may be too large.

    Others may be no probabilities, and what refuses these on a GPU ends the process.
    """
    spec = given.spec
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool):
        return stand_in(given, on=on)
    values = torch.rand(spec.shape, generator=torch.Generator().manual_seed(number))
    noise = values < 0.5 if spec.dtype == torch.bool else values.to(spec.dtype)
    return noise.to(on).requires_grad_(given.takes_gradient)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """A context after which weights, buffers and what layers note of themselves are as before: layers may begin by what they see first.

    Copies wait in the host's memory.
    """
    # Some of torch's own layers write into their buffers unseen.
    tensors: list[tuple[Tensor, int, Tensor]] = [(weight, weight._version, _on_host(weight)) for weight in module.parameters()]
    tensors += [(buffer, -1, _on_host(buffer)) for buffer in module.buffers() if buffer.layout is torch.strided]
    noted = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    held = [
        (value, copy.copy(value))
        for _, attributes, _ in noted
        for name, value in attributes.items()
        if type(value) in {list, dict, set} and name not in _OF_TORCH
    ]
    try:
        yield
    finally:
        for value, before in held:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for part, attributes, buffers in noted:
            for name in part.__dict__.keys() - attributes.keys():
                del part.__dict__[name]
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for tensor, version, before in tensors:
                if tensor._version != version:
                    tensor.copy_(before)
