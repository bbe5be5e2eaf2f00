"""raypipe trains models too large for one GPU as pipelines of Ray actors, on any network of machines.

The names below are loaded when they are first used: `import raypipe` alone loads neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.config import (
        AdaptationConfig,
        ClusterConfig,
        DataConfig,
        OptimizerConfig,
        Precision,
        RunConfig,
        ScalingConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from raypipe.model import Layer, Model
    from raypipe.training.result import Result
    from raypipe.training.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "AdaptationConfig": "config",
    "ClusterConfig": "config",
    "DataConfig": "config",
    "OptimizerConfig": "config",
    "Precision": "config",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "ScheduleConfig": "config",
    "TrainConfig": "config",
    "Layer": "model",
    "Model": "model",
    "Result": "training.result",
    "Trainer": "training.trainer",
}

__all__ = [
    "AdaptationConfig",
    "ClusterConfig",
    "DataConfig",
    "Layer",
    "Model",
    "OptimizerConfig",
    "Precision",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "TrainConfig",
    "Trainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"raypipe.{_HOME[name]}"), name)
