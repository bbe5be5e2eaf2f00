"""Callbacks by name, for configurations."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable

from raypipe.callbacks.base import Callback
from raypipe.config import CallbackConfig
from raypipe.errors import ConfigError, suggestion
from raypipe.user_code import named

BUNDLED = {
    "progress": "raypipe.callbacks.progress:Progress",
    "tensorboard": "raypipe.callbacks.tensorboard:TensorBoard",
    "wandb": "raypipe.callbacks.wandb:WandB",
    "mlflow": "raypipe.callbacks.mlflow:MLflow",
    "csv": "raypipe.callbacks.tables:Csv",
    "parquet": "raypipe.callbacks.tables:Parquet",
    "early-stopping": "raypipe.callbacks.early_stopping:EarlyStopping",
}


def make_callback(given: Callback | CallbackConfig | str) -> Callback:
    """Return a callback, made by its name and options if it is none yet.

    Raises:
        ConfigError: No callback has this name, its options do not fit, or a package that it needs is not installed.
    """
    if isinstance(given, Callback):
        return given
    config = CallbackConfig(name=given) if isinstance(given, str) else given
    if config.name not in BUNDLED and ":" not in config.name:
        raise ConfigError(
            f"no callback is called {config.name!r}{suggestion(config.name, BUNDLED)}; choose from {', '.join(BUNDLED)}, or name your own "
            "class: module:Class"
        )
    make = named(BUNDLED.get(config.name, config.name), what="callbacks", such_as="my_module:MyCallback")
    if not (isinstance(make, type) and issubclass(make, Callback)):
        raise ConfigError(f"callbacks {config.name!r}: expected a class that extends raypipe.Callback, got {make!r}")
    try:
        inspect.signature(make).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"callbacks {config.name!r}: its options do not fit: {error}") from error
    return make(**config.options)


def require(package: str, extra: str, *, callback: str) -> None:
    """Refuse a callback whose package is not installed, in the words of what installs it."""
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise ConfigError(f"the callback {callback!r} needs the package {package}: pip install 'raypipe[{extra}]'")


def callback_configs(callbacks: Iterable[Callback | CallbackConfig | str]) -> tuple[CallbackConfig, ...]:
    """Return those of the callbacks that a configuration can name."""
    configs = (CallbackConfig(name=one) if isinstance(one, str) else one for one in callbacks)
    return tuple(config for config in configs if isinstance(config, CallbackConfig))
