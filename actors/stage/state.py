"""The state of a stage's layers by name, for checkpoints and other actors.

weight                        a weight or buffer of the layer
optimizer/exp_avg/weight      optimizer state of this weight; `optimizer_state` explains the name in the middle
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.optimizer_state import check_places, flat_state, load_state
from raypipe.actors.stage.weights import Weights
from raypipe.errors import ConfigError


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes, which processes of one node can read from the same memory; torch's own tensors would be copied by each."""

    data: np.ndarray[tuple[int], np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


PackedState = dict[str, PackedTensor]
"""The state of a layer on its way between processes."""
OPTIMIZER = "optimizer/"  # a module cannot have such a name


def packed(state: Mapping[str, Tensor]) -> PackedState:
    """Return the state of a layer in the memory of the host; on the CPU without a copy."""
    return {
        name: PackedTensor(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
        for name, tensor in state.items()
    }


def unpacked(state: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """Return the tensors of a packed state; nobody may write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(one.data).view(one.dtype).reshape(one.shape) for name, one in state.items()}


def export_layers(weights: Weights) -> dict[int, dict[str, Tensor]]:
    """Return the state of each layer of a stage, without borrowed weights, and without what only other copies have of the optimizer's."""
    module = weights.module
    if weights.optimizer is not None:
        check_places(weights.optimizer, weights.group_values)
    states: dict[int, dict[str, Tensor]] = {index: {} for index in module.indices}
    tensors = without_aliases(module) | {name: master.data for name, master in zip(weights.names, weights.masters, strict=True)}
    for name, tensor in tensors.items():
        _, index, rest = name.split(".", 2)
        if name not in module.borrowed:
            states[int(index)][rest] = tensor
    for at, name in enumerate(weights.names):
        if name not in module.borrowed:
            states[int(name.split(".", 2)[1])] |= _optimizer_state(weights, at)
    return states


def export_stepped(weights: Weights) -> dict[int, dict[str, Tensor]]:
    """Return the optimizer's state, by layer, of the weights that this copy of a stage steps and the others do not."""
    states: dict[int, dict[str, Tensor]] = {}
    if (shards := weights.shards) is None:
        return states
    for at in shards.passed:
        if at in shards.stepped and (state := _optimizer_state(weights, at)):
            states.setdefault(int(weights.names[at].split(".", 2)[1]), {}).update(state)
    return states


def _optimizer_state(weights: Weights, at: int) -> dict[str, Tensor]:
    rest = weights.names[at].split(".", 2)[2]
    state = weights.optimizer.state.get(weights.masters[at], {}) if weights.optimizer is not None else {}
    return {f"{OPTIMIZER}{key}/{rest}": tensor for key, tensor in flat_state(state).items()}


def import_layers(weights: Weights, states: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Load the states of `needed_layers`, as `export_layers` returned them. Between windows only.

    Raises:
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    assert weights.versions.num_versions == 1, "weights are loaded between windows only"
    tensors = without_aliases(weights.module)
    masters = dict(zip(weights.names, weights.masters, strict=True))
    optimizer_states: dict[str, dict[str, Tensor]] = {}
    for index, state in _with_borrowed(weights.module, states).items():
        expected = {name.split(".", 2)[2] for name in tensors if name.split(".", 2)[1] == str(index)}
        names = {name for name in state if not name.startswith(OPTIMIZER)}
        if expected != names:
            raise ConfigError(
                f"checkpoint of layer {index}: missing {sorted(expected - names)}, unknown {sorted(names - expected)}; "
                "was it made by another model?"
            )
        for key, tensor in state.items():
            prefix, rest = _split(key)
            name = f"layers.{index}.{rest}"
            if prefix:
                kind = prefix.split("/")[1]
                if name not in tensors:
                    raise ConfigError(f"checkpoint of {name}: has optimizer state {kind!r}, but the model has no such weight")
                if name in masters:  # otherwise the weight is frozen now
                    optimizer_states.setdefault(name, {})[kind] = tensor
                continue
            if tensors[name].shape != tensor.shape:
                raise ConfigError(f"checkpoint of {name}: has shape {tuple(tensor.shape)}, the model {tuple(tensors[name].shape)}")
            with torch.no_grad():
                (masters[name].data if name in masters else tensors[name]).copy_(tensor)
    for name, tensors_by_kind in optimizer_states.items():
        assert weights.optimizer is not None, "a stage with masters has an optimizer"
        load_state(weights.optimizer, masters[name], tensors_by_kind)
    weights.versions.set_newest(weights.versions.newest)


def _with_borrowed(module: StageModule, states: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    completed = {index: dict(states[index]) for index in module.indices}
    for parameter, stored in module.borrowed.items():
        _, index, name = parameter.split(".", 2)
        for key, tensor in states[stored.layer].items():
            prefix, weight = _split(key)
            if weight in stored.names:
                completed[int(index)][prefix + name] = tensor
    return completed


def _split(key: str) -> tuple[str, str]:
    # Such as "optimizer/exp_avg/" (nothing for a weight or buffer) and "weight".
    if not key.startswith(OPTIMIZER):
        return "", key
    _, kind, weight = key.split("/", 2)
    return f"{OPTIMIZER}{kind}/", weight


def without_aliases(module: nn.Module) -> dict[str, Tensor]:
    """Return layers' states with each weight under its first name, and each buffer under its first name in a layer.

    Names begin with a layer's index or `layers.` and it.
    """
    seen: set[tuple[str, int, tuple[int, ...]]] = set()
    state: dict[str, Tensor] = {}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for name, tensor in module.state_dict().items():
        # Models declare shared weights, but not shared buffers, which stay in each layer.
        layer = name.removeprefix("layers.").partition(".")[0] if name in buffers else ""
        key = (layer, tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or key not in seen:
            state[name] = tensor
            seen.add(key)
    return state
