"""Checks that the model functions share."""

from __future__ import annotations

import torch

from raypipe.errors import ConfigError, UnknownNameError

_FLOAT_TYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def float_type(name: str) -> torch.dtype:
    """Return the torch type of "float32", "float64" or "bfloat16"; raise `UnknownNameError` for another name."""
    if name not in _FLOAT_TYPES:
        raise UnknownNameError("dtype", name, _FLOAT_TYPES)
    return _FLOAT_TYPES[name]


def check_positive(**counts: int) -> None:
    """Raise `ConfigError` unless each count is at least 1."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")
