"""Layers, each built from its own seed: the same weights and random numbers with any cut."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from raypipe.errors import ConfigError
from raypipe.model import Layer

GENERATOR_LOCK = threading.Lock()
"""Torch's random generator belongs to the process: threads that seed it and draw from it take turns."""
_LAYER_OF_WEIGHT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # names; a parameter is refused for a second layer


class RngKey(NamedTuple):
    """What random numbers depend on, besides the run's seed and the layer.

    Attributes:
        microbatch: Number since the beginning of training.
        first_row: First row on this device; replicas that share a microbatch draw different masks.
    """

    microbatch: int
    first_row: int = 0


def layer_seed(seed: int, layer: int, rng_key: RngKey | None = None) -> int:
    """Return the seed of a layer's weights, or of its random numbers."""
    # 64-bit products make neighbors' seeds unrelated.
    mixed = (seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    if rng_key is not None:
        mixed ^= ((rng_key.microbatch + 1) * 0xD6E8FEB86659FD93 + rng_key.first_row * 0xA0761D6478BD642F) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return mixed >> 1


def build_layer(layer: Layer, *, index: int, seed: int) -> nn.Module:
    """Build a layer's module on the CPU from its own seed.

    Raises:
        ConfigError: `build` raised, returned no module, or a parameter of another module.
    """
    with GENERATOR_LOCK:
        torch.manual_seed(layer_seed(seed, index))
        try:
            module = layer.build()
        except Exception as error:
            raise ConfigError(f"layer {layer.name!r} could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"layer {layer.name!r}: its build function returned {type(module).__name__}, expected a torch.nn.Module")
    for name, weight in module.named_parameters():
        if weight in _LAYER_OF_WEIGHT:
            raise ConfigError(
                f"layer {layer.name!r}: its build function returned the weight {name!r}, which it had returned for layer "
                f"{_LAYER_OF_WEIGHT[weight]!r} before; return a new module on every call, for example by copy.deepcopy, and declare "
                "weights that layers share in the model's ties"
            )
        _LAYER_OF_WEIGHT[weight] = layer.name
    return module
