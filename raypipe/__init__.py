"""Train models too large for one GPU as pipelines of Ray actors, on any network of machines.

Names load when they are first used: `import raypipe` alone loads neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.artifacts.plan import Plan
    from raypipe.artifacts.profile import ModelProfile
    from raypipe.artifacts.topology import ClusterTopology
    from raypipe.artifacts.trace import Trace
    from raypipe.callbacks.base import Callback
    from raypipe.config import (
        AdaptationConfig,
        CallbackConfig,
        ClusterConfig,
        CommunicationConfig,
        DataConfig,
        FailureConfig,
        OptimizerConfig,
        Precision,
        RunConfig,
        ScalingConfig,
        ScheduleConfig,
        TrainConfig,
        WeightGroup,
    )
    from raypipe.model import Layer, Model
    from raypipe.planning.plan import plan
    from raypipe.schedule_registry import build_schedule
    from raypipe.simulation.simulator import simulate
    from raypipe.training.result import Result
    from raypipe.training.trained import TrainedModel, load
    from raypipe.training.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "ClusterTopology": "artifacts.topology",
    "ModelProfile": "artifacts.profile",
    "Plan": "artifacts.plan",
    "Trace": "artifacts.trace",
    "build_schedule": "schedule_registry",
    "plan": "planning.plan",
    "simulate": "simulation.simulator",
    "AdaptationConfig": "config",
    "Callback": "callbacks.base",
    "CallbackConfig": "config",
    "ClusterConfig": "config",
    "CommunicationConfig": "config",
    "DataConfig": "config",
    "FailureConfig": "config",
    "OptimizerConfig": "config",
    "Precision": "config",
    "RunConfig": "config",
    "ScalingConfig": "config",
    "ScheduleConfig": "config",
    "TrainConfig": "config",
    "WeightGroup": "config",
    "Layer": "model",
    "Model": "model",
    "Result": "training.result",
    "TrainedModel": "training.trained",
    "load": "training.trained",
    "Trainer": "training.trainer",
}

__all__ = [
    "AdaptationConfig",
    "Callback",
    "CallbackConfig",
    "ClusterConfig",
    "ClusterTopology",
    "CommunicationConfig",
    "DataConfig",
    "FailureConfig",
    "Layer",
    "Model",
    "ModelProfile",
    "OptimizerConfig",
    "Plan",
    "Precision",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "Trace",
    "TrainConfig",
    "TrainedModel",
    "Trainer",
    "WeightGroup",
    "build_schedule",
    "load",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"raypipe.{_HOME[name]}"), name)
