"""Checks that the model functions share."""

from __future__ import annotations

import torch

from raypipe.errors import ConfigError, UnknownNameError

_FLOAT_TYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_MOST_LAYERS = 100_000


def float_type(name: str) -> torch.dtype:
    """Return the torch type of "float32", "float64" or "bfloat16"; raise `UnknownNameError` for another name."""
    if name not in _FLOAT_TYPES:
        raise UnknownNameError("dtype", name, _FLOAT_TYPES)
    return _FLOAT_TYPES[name]


def check_positive(**counts: int) -> None:
    """Raise `ConfigError` unless each count is from 1 to 2^31 - 1; `num_layers`, of which each is an object, to 100,000."""
    for name, count in counts.items():
        most = _MOST_LAYERS if name == "num_layers" else 2**31 - 1
        if not 1 <= count <= most:
            raise ConfigError(f"{name} must be at least 1 and at most {most}, not {count}")
