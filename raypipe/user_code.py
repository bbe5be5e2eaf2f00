"""The user's functions by name: `module:function` or `path/to/file.py:function`; models of Hugging Face as `hf:PATH`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from raypipe.errors import ConfigError, RaypipeError, suggestion
from raypipe.model import Model, compiled

HUGGING_FACE = "hf:"
"""Begins the name of a model of Hugging Face: the folder or the name on the Hub follows."""
IN_PYTHON = "(given in Python) "
"""Begins, in a configuration, the name of what a program gave and no other process can find by that name."""
_HUGGING_FACE_MODEL = "raypipe.models.huggingface.model:huggingface"
_START = "RAYPIPE_FILES_START_AT"


def files_start_at(directory: str) -> None:
    """Let relative paths of files start at the working directory of the process that named them, in one that works elsewhere."""
    os.environ[_START] = directory


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that `model.function` names; raises as `named`."""
    if name.startswith(HUGGING_FACE):
        return partial(resolve(_HUGGING_FACE_MODEL), name.removeprefix(HUGGING_FACE))
    return model_function(named(name, what="model.function", such_as="raypipe.models.gpt:gpt"), what=f"model.function {name!r}")


def model_function(function: object, *, what: str) -> Callable[..., Any]:
    """Return a function that may return a model, or raise `ConfigError` for what cannot; `what` begins its text."""
    if isinstance(function, Model):
        raise ConfigError(f"{what} is a Model; give the function that returns it, which every device calls")
    if _is_module(function):
        raise ConfigError(f"{what} is a torch module of type {type(function).__name__}; {_FROM_MODULES}")
    if not callable(function):
        raise ConfigError(f"{what} is of type {type(function).__name__}; give a function that returns a raypipe.Model, or its name")
    checked: Callable[..., Any] = function
    return checked


_FROM_MODULES = (
    "give a function that returns raypipe.Model(layers=(raypipe.Layer(name, build), ...), loss=loss), in which each build makes one part "
    "of the module anew"
)


def _is_module(value: object) -> bool:
    # Whoever has a module has loaded torch, which is not loaded here to know.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def located(function: str) -> str:
    """Return a function's name with the absolute path of a folder `hf:FOLDER`, for processes that work elsewhere."""
    if not function.startswith(HUGGING_FACE):
        return function
    path = os.path.expanduser(function.removeprefix(HUGGING_FACE))
    return HUGGING_FACE + os.path.abspath(path) if os.path.isdir(path) else function


def named(name: str, *, what: str, such_as: str) -> object:
    """Return the object that `module:name` or `file.py:name` names, or raise `ConfigError`; `what` begins its text."""
    if name.startswith(IN_PYTHON):
        remedy = f"start the run from there, or put a name in its place, such as {such_as}"
        raise ConfigError(f"{what} {name!r}: only the program that gave it has it; {remedy}")
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{what} {name!r}: expected module:function, such as {such_as}, or file.py:function")
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except FileNotFoundError:
        raise ConfigError(
            f"{what} {name!r}: there is no file {module_name!r} in {os.environ.get(_START) or os.getcwd()}; check the path"
        ) from None
    except ModuleNotFoundError as error:
        remedy = "check the name, that it is installed, or name its file: path/to/file.py:function"
        raise ConfigError(f"{what} {name!r}: no module {error.name!r}; {remedy}") from None
    except (Exception, SystemExit) as error:  # a script that ends with sys.exit() shall not end the command in silence
        raise ConfigError(f"{what} {name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{what} {name!r}: {module_name} has no function {attribute!r}{suggestion(attribute, known)}")
    return getattr(module, attribute)


def _load_file(path: str) -> ModuleType:
    path = os.path.abspath(os.path.join(os.environ.get(_START, ""), path))
    name = "raypipe_model_file_" + re.sub(r"\W", "_", path.removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def make_model(function: str | Callable[..., Any], options: Mapping[str, Any], *, compile_layers: bool = False) -> Model:
    """Return the model that a function, or its name, describes; raise `ConfigError` if it fails or returns no `Model`."""
    call = resolve(function) if isinstance(function, str) else function
    _check_options(function, call, options)
    try:
        model = call(**options)
    except RaypipeError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends with sys.exit() shall not end the command in silence
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"model.function {name_of(function)}({given}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, Model):
        remedy = f"; {_FROM_MODULES}" if _is_module(model) else ""
        raise ConfigError(f"model.function {name_of(function)} returned {type(model).__name__}, expected a raypipe.Model{remedy}")
    return compiled(model) if compile_layers else model


def _check_options(function: str | Callable[..., Model], call: Callable[..., Model], options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # some callables tell nothing of their arguments
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind in {parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD}]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"model.options: {name_of(function)} got an unexpected keyword argument {name!r}{suggestion(name, known)}; it takes "
                f"{', '.join(known) or 'none'}"
            )


def keyword(function: str | Callable[..., Any], options: Mapping[str, Any], name: str) -> object:
    """Return a function's value for an argument, or its default; `None` without such an argument."""
    if name in options:
        return options[name]
    parameter = inspect.signature(resolve(function) if isinstance(function, str) else function).parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def name_of(function: str | Callable[..., Any]) -> str:
    """Return a function's name as text; of a `partial` that of its function, of another object that of its class."""
    if isinstance(function, str):
        return function
    if isinstance(function, partial):
        return name_of(function.func)
    named_object = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named_object, '__module__', '?')}:{named_object.__qualname__}"


def recorded_name(given: str | Callable[..., Any]) -> str:
    """Return the name by which a configuration records what a program gave; it begins with `IN_PYTHON` if it cannot be found by it."""
    if isinstance(given, str):
        return given
    name = name_of(given)
    module, _, attribute = name.rpartition(":")
    # Another program has another `__main__`.
    is_found = module != "__main__" and getattr(sys.modules.get(module), attribute, None) is given
    return name if is_found else IN_PYTHON + name
