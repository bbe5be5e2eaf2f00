"""Tells which layers cost the same, so that one of them is measured for all.

Two layers are alike if nothing that could make a difference differs: the classes of their modules with the code of their methods, the
shapes of weights and buffers, every other attribute, what they are given, and the operators, with the shapes of their arguments, that trial
forwards execute. Whatever cannot be compared makes a layer like no other.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from raypipe.actors.stage.gradient_flow import StageOutputs
from raypipe.actors.stage.module import StageModule
from raypipe.model import Batch, Model

POSITIONS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
"""Attributes with which models number their layers. They may differ, since the operators show what a layer makes of its number."""

_OF_TORCH = frozenset(nn.Module().__dict__)
_STATE = ("_parameters", "_buffers", "_modules")
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class LayerKey:
    """What layers of one cost have in common.

    Attributes:
        structure: As `structure` returns it; empty for a layer that is like no other.
        operators: Digest of its trial forwards, and what steps its weights.
    """

    structure: str
    operators: str

    @property
    def is_known(self) -> bool:
        """Whether another layer, or one of another run, can have the same key."""
        return bool(self.structure)


class _IncomparableError(Exception):
    pass


def structure(model: Model, module: StageModule, inputs: StageOutputs, batch: Batch) -> str | None:
    """Return text that layers have in common which are built and called alike; `None` for a layer that is like no other.

    `module` holds this layer only.
    """
    (index,) = module.indices
    layer = model.layers[index]
    if layer.looked_up:  # rows depend on the values of the batch
        return None
    walk, built = _Walk(), module.layers[str(index)]
    # A module that holds more than it computes with says what its cost depends on. Compiled, it shows no operators that would confirm it.
    says = None if _is_compiled(built) else getattr(built, "cost_structure", None)
    try:
        walk.add(says() if says is not None else built)
        walk.add([[(output.spec.shape, output.spec.dtype, output.takes_gradient) for output in inputs[at]] for at in module.inputs[index]])
        walk.add([(name, tuple(batch[name].shape), batch[name].dtype) for name in (*layer.batch, *layer.batch_if_present) if name in batch])
        walk.add((layer.gradients_vary, [name for tie in model.ties for member, name in tie if member == layer.name]))
        is_last = index == len(model.layers) - 1
        walk.add((is_last, [(name, tuple(field.shape), field.dtype) for name, field in batch.items()] if is_last else []))
        walk.add(model.loss if is_last else None)
    except (_IncomparableError, RecursionError):
        return None
    return walk.digest()


class _Walk:
    """Writes what a value is made of, in a form that is equal for equal values in every process."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no number of an object is given to another

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _write(self, *parts: object) -> None:
        self._hash.update(("\x1f".join(map(str, parts)) + "\x1e").encode())

    def add(self, value: Any) -> None:
        if isinstance(value, Enum):
            self._write(_name(type(value)), value.name)
        elif isinstance(value, _VALUES):
            self._write(type(value).__name__, repr(value))
        elif self._is_new(value):
            self._add_object(value)

    def _is_new(self, value: object) -> bool:
        # What comes again, or contains itself, is its number.
        if (number := self._seen.get(id(value))) is not None:
            self._write("again", number)
            return False
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return True

    def _add_object(self, value: Any) -> None:
        match value:
            case nn.Module():
                self._add_module(value)
            case Tensor():
                self._write(_name(type(value)), tuple(value.shape), value.dtype, value.stride(), value.requires_grad, value.layout)
            case list() | tuple() | set() | frozenset() | Mapping():
                self._add_container(value)
            case type() | types.FunctionType() | types.MethodType() | functools.partial():
                self._add_callable(value)
            case types.BuiltinFunctionType() | types.ModuleType():
                self._write(type(value).__name__, getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
            case _ if type(value) is object:  # a sentinel
                self._write("object")
            case _ if _is_plain(value):
                self.add((type(value), vars(value)))
            case _:
                raise _IncomparableError

    def _add_container(self, value: Any) -> None:
        self._write(_name(type(value)), len(value))
        match value:
            case Mapping():
                for key, item in value.items():
                    self.add(key)
                    self.add(item)
            case set() | frozenset():
                if not all(isinstance(item, _VALUES) for item in value):
                    raise _IncomparableError
                self._write(*sorted(map(repr, value)))
            case _:
                for item in value:
                    self.add(item)

    def _add_callable(self, value: Any) -> None:
        match value:
            case type():
                self._add_class(value)
            case types.FunctionType():
                self._add_function(value)
            case functools.partial():
                self.add(("partial", value.func, value.args, value.keywords))
            case _:
                self.add(("method", value.__func__, value.__self__))

    def _add_module(self, module: nn.Module) -> None:
        self._add_class(type(module))
        for name in _STATE:
            self._write(name)
            self.add(dict(getattr(module, name)))
        is_compiled = _is_compiled(module)
        self._write("compiled", is_compiled)
        for name, value in vars(module).items():
            if name in _STATE or name == "_compiled_call_impl" or (name in POSITIONS and not is_compiled):
                continue
            self._write(name)
            # Hooks are numbered over all modules.
            self.add(list(value.values()) if name in _OF_TORCH and isinstance(value, dict) else value)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            self._write("class", _name(base))
            if base.__module__.partition(".")[0] in {"builtins", "torch"} or not self._is_new(base):
                continue
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType | staticmethod | classmethod | property) or (
                    not name.startswith("__") and isinstance(value, (*_VALUES, tuple, list))
                ):
                    self._write(name)
                    self._add_member(value)

    def _add_member(self, value: Any) -> None:
        match value:
            case staticmethod() | classmethod():
                self.add(value.__func__)
            case property():
                self.add((value.fget, value.fset))
            case _:
                self.add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        self._write("function", function.__module__, function.__qualname__)
        self._add_code(function.__code__)
        self.add((function.__defaults__, function.__kwdefaults__))
        if function.__module__.partition(".")[0] == "torch":
            return
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # still empty
                self._write("empty")
                continue
            self.add(content)

    def _add_code(self, code: types.CodeType) -> None:
        self._write(code.co_code.hex(), code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            else:
                self._write(repr(_ordered(constant)))


def _ordered(constant: object) -> object:
    # The order of a set differs from process to process.
    match constant:
        case frozenset():
            return ("frozenset", sorted(map(repr, constant)))
        case tuple():
            return tuple(map(_ordered, constant))
    return constant


def code_of(kinds: Iterable[type]) -> str | None:
    """Return text that is equal for classes of equal code, those of torch by name; `None` if they cannot be compared."""
    walk = _Walk()
    try:
        for kind in kinds:
            walk.add(kind)
    except (_IncomparableError, RecursionError):
        return None
    return walk.digest()


def _is_compiled(module: nn.Module) -> bool:
    return vars(module).get("_compiled_call_impl") is not None


def _is_plain(value: object) -> bool:
    # All that it is made of are its attributes.
    keeps_default = getattr(type(value), "__reduce_ex__", None) is object.__reduce_ex__
    return keeps_default and hasattr(value, "__dict__") and not hasattr(value, "__slots__")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class OperatorTrace:
    """The operators of forwards with the shapes of their arguments, and the tensors kept for backwards."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def digest(self) -> str:
        """Return text that is equal for equal traces."""
        return self._hash.hexdigest()

    @contextmanager
    def recorded(self, module: StageModule) -> Iterator[None]:
        """Record what runs inside the block; nothing of a compiled layer, which runs operators of its own."""
        if any(map(_is_compiled, module.modules())):
            yield
            return
        # Only selective checkpointing reports operators together with their arguments.
        context, _ = create_selective_checkpoint_contexts(self._note)  # type: ignore[no-untyped-call]
        with torch.autograd.graph.saved_tensors_hooks(self._kept, lambda tensor: tensor), context:
            yield

    def _note(self, _: object, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        self._write(str(operator), [_argument(one) for one in arguments], {name: _argument(one) for name, one in options.items()})
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _kept(self, tensor: Tensor) -> Tensor:
        self._write("kept", _argument(tensor))
        return tensor.detach()

    def _write(self, *parts: object) -> None:
        self._hash.update(repr(parts).encode())


def _argument(value: Any) -> object:
    match value:
        case Tensor():
            return (tuple(value.shape), str(value.dtype), value.requires_grad, value.device.type)
        case list() | tuple():
            return [_argument(one) for one in value]
        case torch.Generator():
            return "generator"
        case _:
            return repr(value)
