"""Weights that several layers share: one parameter on one stage, one copy per stage on several.

The sum of the gradients updates all copies, which stay equal. Checkpoints have them in the first layer's file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypipe.actors import devices
from raypipe.actors.stage.gradients import FlatLayout, match_layout, squared_norm
from raypipe.actors.stage.layers import build_layer
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Model, Tie


def tie_layers(model: Model, layers: Mapping[int, nn.Module], *, seed: int, on: torch.device = devices.CPU) -> None:
    """Replace the weights of each tie by one parameter, with the initial values of the tie's first layer.

    Raises:
        ConfigError: A layer has no such weight, or tied weights differ in shape or dtype.
    """
    for tie, indices in zip(model.ties, model.tied_layers(), strict=True):
        if not any(index in layers for index in indices):
            continue
        index_of = {model.layers[index].name: index for index in indices}
        first = indices[0]
        if first in layers:
            shared = tied_weight(layers[first], *tie[0])
        else:
            shared = tied_weight(build_layer(model.layers[first], index=first, seed=seed).to(on), *tie[0])
            shared.data = shared.data.clone()  # drops memory that the weight shares with the rest of the layer
        for layer, name in tie:
            module = layers.get(index_of[layer])
            if module is None:
                continue
            weight = tied_weight(module, layer, name)
            _check_alike(tie, shared, (layer, name), weight)
            for alias, parameter in list(module.named_parameters(remove_duplicate=False)):
                if parameter is weight:
                    owner, _, attribute = alias.rpartition(".")
                    setattr(module.get_submodule(owner), attribute, shared)


def check_ties(model: Model, modules: Sequence[nn.Module]) -> None:
    """Refuse ties that the modules of all layers do not have, or whose weights cannot be one.

    Raises:
        ConfigError: As of `tie_layers`.
    """
    module_of = {layer.name: module for layer, module in zip(model.layers, modules, strict=True)}
    for tie in model.ties:
        shared, *others = (tied_weight(module_of[layer], layer, name) for layer, name in tie)
        for place, weight in zip(tie[1:], others, strict=True):
            _check_alike(tie, shared, place, weight)


def tied_weight(module: nn.Module, layer: str, name: str) -> nn.Parameter:
    """Return the weight by which the module of a layer is tied, or raise `ConfigError` if it has no such weight."""
    weights = dict(module.named_parameters(remove_duplicate=False))
    if name not in weights:
        near = suggestion(name, weights) or f"; choose from {', '.join(weights) or 'none'}"
        raise ConfigError(f"ties of the model: layer {layer!r} is tied by its weight {name!r}, but has no such weight{near}")
    return weights[name]


def _check_alike(tie: Tie, shared: Tensor, place: tuple[str, str], weight: Tensor) -> None:
    if (weight.shape, weight.dtype) == (shared.shape, shared.dtype):
        return
    (first_layer, first_name), (layer, name) = tie[0], place
    raise ConfigError(
        f"ties of the model: the weight {name!r} of layer {layer!r} is {_shape(weight)}, but it is tied to {first_name!r} of layer "
        f"{first_layer!r}, which is {_shape(shared)}; tied weights must have one shape and dtype"
    )


def _shape(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"


class SharedWeight(NamedTuple):
    """A weight that stages share; `name` is `None` where it is absent or not trained."""

    name: str | None
    numel: int
    dtype: torch.dtype


class StoredWeight(NamedTuple):
    """Where a checkpoint has a tied weight; the file uses one of `names`."""

    layer: int
    names: tuple[str, ...]


def shared_weights(model: Model, cut: Cut, stage: nn.Module, indices: Collection[int], *, seed: int) -> tuple[SharedWeight, ...]:
    """Return the weights that a stage shares with others, in the same order on all stages of the tie."""
    shared: list[SharedWeight] = []
    for tie in cut.parted_ties:
        name = _parameter_of(model, tie, stage, indices)
        if name is not None:
            weight = stage.get_parameter(name)
            shared.append(SharedWeight(name if weight.requires_grad else None, weight.numel(), weight.dtype))
        else:
            first = cut.ties[tie][0]
            weight = tied_weight(build_layer(model.layers[first], index=first, seed=seed), *model.ties[tie][0])
            shared.append(SharedWeight(None, weight.numel(), weight.dtype))
    return tuple(shared)


def borrowed_weights(model: Model, stage: nn.Module, indices: Collection[int]) -> dict[str, StoredWeight]:
    """Return, by name, the parameters that a checkpoint has in the file of another stage's layer."""
    borrowed: dict[str, StoredWeight] = {}
    for number, (tie, layers) in enumerate(zip(model.ties, model.tied_layers(), strict=True)):
        owner = min(layers)
        name = _parameter_of(model, number, stage, indices)
        if owner not in indices and name is not None:
            borrowed[name] = StoredWeight(owner, tuple(weight for layer, weight in tie if layer == model.layers[owner].name))
    return borrowed


def tied_names(model: Model, stage: nn.Module, indices: Collection[int]) -> dict[str, str]:
    """Return, by name, the parameters that belong to a tie, with the full name of the weight in the tie's first layer."""
    names: dict[str, str] = {}
    for number, (tie, layers) in enumerate(zip(model.ties, model.tied_layers(), strict=True)):
        owner = model.layers[min(layers)].name
        if (name := _parameter_of(model, number, stage, indices)) is not None:
            names[name] = next(f"{owner}.{weight}" for layer, weight in tie if layer == owner)
    return names


def _parameter_of(model: Model, tie: int, stage: nn.Module, indices: Collection[int]) -> str | None:
    index_of = {model.layers[index].name: index for index in indices}
    for layer, name in model.ties[tie]:
        if layer in index_of:
            weight = stage.get_parameter(f"layers.{index_of[layer]}.{name}")
            return next(first for first, parameter in stage.named_parameters() if parameter is weight)
    return None


class SharedGradients:
    """The gradients of shared weights; `unshared` are the other parameters' positions."""

    def __init__(self, shared: Sequence[SharedWeight], names: Sequence[str], masters: Sequence[Tensor], *, on: torch.device) -> None:
        self._positions = [names.index(weight.name) if weight.name else None for weight in shared]
        self._masters = masters
        self._layout = FlatLayout([(weight.numel, weight.dtype) for weight in shared], on=on)
        self.unshared = [position for position in range(len(names)) if position not in self._positions]

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return this stage's part of the sum over its tie, as a vector."""
        return self._layout.pack([None if position is None else gradients[position] for position in self._positions])

    def squared_norm(self, vector: Tensor) -> Tensor:
        """Return the sum of squares of a summed vector, in float64."""
        return squared_norm([self._layout.values(vector)])

    def unpack(self, vector: Tensor, gradients: list[Tensor | None]) -> None:
        """Replace the gradients of shared weights by those of a summed vector."""
        known = [position is None or gradients[position] is not None for position in self._positions]
        for position, part, has in zip(self._positions, self._layout.unpack(vector), self._layout.present(vector, known), strict=True):
            if position is not None and has:
                gradients[position] = match_layout(part, self._masters[position])
