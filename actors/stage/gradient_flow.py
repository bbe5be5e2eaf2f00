"""What crosses the borders of stages, found before training by trial forwards and the graphs that these leave.

A gradient returns only for tensors that take one and that the loss depends on, in any trial or as `Layer.gradients_vary` declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from raypipe.actors import devices
from raypipe.actors.stage.backward import disable_buffer_donation
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs, StageModule
from raypipe.actors.transport.protocol import TensorSpec
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError
from raypipe.model import Batch

OutputId = tuple[int, int]
"""An output tensor of a layer: the layer, and the tensor's position among the layer's outputs."""


@dataclass(frozen=True)
class LayerOutput:
    """A tensor that a layer passes on, with its shape for a whole microbatch.

    Attributes:
        takes_gradient: Whether its stage can use a gradient.
        reaches: Outputs of other stages that its gradient flows on to.
        always: Whether a gradient returns in any case.
    """

    spec: TensorSpec
    takes_gradient: bool
    reaches: frozenset[OutputId] = field(default=frozenset(), repr=False)
    always: bool = False


StageOutputs = Mapping[int, tuple[LayerOutput, ...]]
"""The tensors that layers pass to other stages or to the loss, by layer."""


@dataclass(frozen=True)
class EdgeTensor:
    """A tensor between two stages, with its shape for a whole microbatch.

    Attributes:
        takes_gradient: Whether the producing stage can use a gradient.
        returns: Whether the consuming stage sends one back.
    """

    spec: TensorSpec
    takes_gradient: bool
    returns: bool


EdgeSpecs = Mapping[tuple[int, int], tuple[tuple[EdgeTensor, ...], ...]]
"""For each edge (source, target) of the stage graph and each layer that crosses it, the layer's output tensors."""


def output_specs(
    module: StageModule,
    inputs: StageOutputs,
    batch: Batch,
    *,
    num_rows: int,
    known: Callable[[], dict[int, tuple[LayerOutput, ...]] | None] = lambda: None,
) -> dict[int, tuple[LayerOutput, ...]]:
    """Return the tensors that a stage passes on, from trials over zeros and noise in place of `inputs`.

    `known` is called behind the first trial, one in training. Where it returns the tensors, no other trial follows.

    Raises:
        ConfigError: The trial over zeros failed or wrote into its inputs, or a tensor's first dimension is not `num_rows`.
    """
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"the batch field {name!r} is of type {type(tensor).__name__}; expected a tensor")
        if not tensor.dim() or tensor.shape[0] != num_rows:
            raise ConfigError(
                f"the batch field {name!r} has the shape {tuple(tensor.shape)}; expected {num_rows} rows, schedule.microbatch_size"
            )
    disable_buffer_donation()
    batch = devices.upload(batch, module.on)
    over_noise: list[_Trial] = []

    def try_noise(number: int) -> None:
        module.train()
        noise = {layer: tuple(_noise(output, number, on=module.on) for output in outputs) for layer, outputs in inputs.items()}
        with suppress(ConfigError):  # noise may be out of a layer's range
            over_noise.append(_try_forward(module, noise, batch, RngKey(number), num_rows))

    try_noise(1)
    if over_noise and (found := known()) is not None:
        return found
    module.eval()
    first = _try_forward(module, zero_inputs(inputs, on=module.on), batch, RngKey(0), num_rows)
    try_noise(2)
    return _combined(module, first, [first, *(trial for trial in over_noise if trial.specs == first.specs)])


@dataclass(frozen=True)
class _Trial:
    specs: dict[int, tuple[TensorSpec, ...]]
    paths: dict[OutputId, frozenset[OutputId]]
    leaves: frozenset[OutputId]


def _combined(module: StageModule, first: _Trial, trials: Sequence[_Trial]) -> dict[int, tuple[LayerOutput, ...]]:
    in_training = len(trials) > 1
    # If no trial in training succeeded, any path may exist.
    anywhere = frozenset().union(*(path for trial in trials for path in trial.paths.values())) if in_training else first.leaves
    combined: dict[int, tuple[LayerOutput, ...]] = {}
    for layer, specs in first.specs.items():
        vary = module.specs[layer].gradients_vary or not in_training
        outputs: list[LayerOutput] = []
        for number, spec in enumerate(specs):
            if vary and (spec.dtype.is_floating_point or spec.dtype.is_complex):
                outputs.append(LayerOutput(spec, takes_gradient=True, reaches=anywhere, always=True))
            else:
                paths = [trial.paths[layer, number] for trial in trials if (layer, number) in trial.paths]
                outputs.append(LayerOutput(spec, takes_gradient=bool(paths), reaches=frozenset().union(*paths)))
        combined[layer] = tuple(outputs)
    return combined


def _try_forward(module: StageModule, inputs: Outputs, batch: Batch, rng_key: RngKey, num_rows: int) -> _Trial:
    where = f"stage {module.stage} (layers {', '.join(spec.name for spec in module.specs.values())})"
    ids = {tensor: (layer, number) for layer, tensors in inputs.items() for number, tensor in enumerate(tensors)}
    versions = {tensor: tensor._version for tensor in ids if not tensor.requires_grad and tensor.is_floating_point()}
    try:
        with torch.enable_grad():
            outputs: Outputs = module(inputs, batch, rng_key)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        over = " (a trial over zeros in place of other stages' outputs)" if inputs else ""
        raise ConfigError(f"a forward of {where} failed: {type(error).__name__}: {error}{over}") from error
    finally:
        module.first[0] = ()
    for tensor, version in versions.items():
        if tensor._version != version:
            layer, number = ids[tensor]
            raise ConfigError(
                f"a forward of {where} writes in place into output {number} of layer {module.names[layer]!r}, which other stages may read, "
                "too; let it work on a clone"
            )
    _check_rows(module, outputs, where, num_rows)
    leaves = {tensor: output for tensor, output in ids.items() if tensor.requires_grad}
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


def _check_rows(module: StageModule, outputs: Outputs, where: str, num_rows: int) -> None:
    for layer, tensors in outputs.items():
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.shape[0] != num_rows:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                consumer = "the loss" if layer == module.num_layers - 1 else "other stages"
                raise ConfigError(
                    f"layer {module.specs[layer].name!r} of {where} gives {shape} to {consumer}; "
                    f"expected tensors whose first dimension is the batch ({num_rows} rows)"
                )


def _reached(tensor: Tensor, leaves: Mapping[Tensor, OutputId]) -> Iterator[OutputId]:
    stack: list[Node] = [get_gradient_edge(tensor).node]
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # AccumulateGrad has its tensor
        if isinstance(leaf, Tensor) and leaf in leaves:
            yield leaves[leaf]
        fresh = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= fresh
        stack += fresh


def edge_specs(cut: Cut, outputs: Mapping[int, Sequence[LayerOutput]]) -> EdgeSpecs:
    """Return the tensors that travel along each edge of the stage graph."""
    last = max(layer for stage in cut.stages for layer in stage)
    # A stage without gradients for its outputs returns none for its inputs: from the loss back to the first stage.
    with_gradient: set[OutputId] = {(last, number) for number in range(len(outputs[last]))}
    specs: dict[tuple[int, int], tuple[tuple[EdgeTensor, ...], ...]] = {}
    for stage in reversed(range(len(cut.stages))):
        crossing = {edge: layers for edge, layers in cut.crossing.items() if edge[1] == stage}
        returned = {
            reached
            for layer in cut.stages[stage]
            for number, output in enumerate(outputs.get(layer, ()))
            if (layer, number) in with_gradient
            for reached in output.reaches
        }
        returned |= {
            (layer, number)
            for layers in crossing.values()
            for layer in layers
            for number, output in enumerate(outputs[layer])
            if output.always
        }
        with_gradient |= returned
        for edge, layers in crossing.items():
            specs[edge] = tuple(
                tuple(EdgeTensor(out.spec, out.takes_gradient, (layer, number) in returned) for number, out in enumerate(outputs[layer]))
                for layer in layers
            )
    return specs


def zero_inputs(outputs: Mapping[int, Sequence[LayerOutput | EdgeTensor]], *, on: torch.device) -> Outputs:
    """Return zeros in place of other stages' outputs, requiring a gradient where these take one."""
    return {layer: tuple(_zeros(output, on=on) for output in of_layer) for layer, of_layer in outputs.items()}


def _zeros(output: LayerOutput | EdgeTensor, *, on: torch.device) -> Tensor:
    return torch.zeros(output.spec.shape, dtype=output.spec.dtype, device=on).requires_grad_(output.takes_gradient)


def _noise(output: LayerOutput, number: int, *, on: torch.device) -> Tensor:
    # Integers stay 0 and other values in [0, 1]: a GPU ends the process if an index is out of range or a probability negative.
    spec = output.spec
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool):
        return _zeros(output, on=on)
    values = torch.rand(spec.shape, generator=torch.Generator().manual_seed(number))
    noise = values < 0.5 if spec.dtype == torch.bool else values.to(spec.dtype)
    return noise.to(on).requires_grad_(output.takes_gradient)
