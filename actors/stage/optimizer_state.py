"""What an optimizer keeps of one weight, as tensors by name, for checkpoints and other actors.

exp_avg          a tensor
count:int        a number of Python, as a tensor; `:float` and `:bool` are others
mode:text        text, as its bytes
previous:none    None
history[0]       the first member of a list; history(0) of a tuple, moments{slow} a member of a dict
history[]        an empty list; history() and history{} an empty tuple and dict
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.actors.stage.gradients import match_layout
from raypipe.errors import ConfigError

_KEY = re.compile(r"[\w.-]+", re.ASCII)
_STEP = re.compile(r"\[(\d*)\]|\((\d*)\)|\{([\w.-]*)\}", re.ASCII)
_NUMBERS: dict[str, type[Any]] = {"bool": bool, "int": int, "float": float}
_ON_HOST = frozenset({"step", "mu_product"})
"""What torch's optimizers keep on the host unless one kernel does everything: the host reads it."""


def flat_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state of a weight as tensors by name.

    Raises:
        ConfigError: A value is neither a tensor nor made of Python's own numbers, texts, lists, tuples and dicts.
    """
    return {name: tensor for key, value in state.items() for name, tensor in _flat(_checked(key), value)}


def _checked(key: object) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(f"the optimizer keeps state under {key!r}, which a checkpoint cannot; use letters, digits, `_`, `-` and `.`")
    return key


def _flat(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    match value:
        case Tensor():
            yield name, value
        case bool() | int() | float():
            # In float64 a float is itself.
            yield f"{name}:{type(value).__name__}", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        case None:
            yield f"{name}:none", torch.zeros(0, dtype=torch.uint8)
        case str():
            yield f"{name}:text", torch.frombuffer(bytearray(value.encode() + b"."), dtype=torch.uint8)[:-1]
        case list() | tuple():
            first, last = "[]" if isinstance(value, list) else "()"
            if not value:
                yield name + first + last, torch.zeros(0, dtype=torch.uint8)
            for number, member in enumerate(value):
                yield from _flat(f"{name}{first}{number}{last}", member)
        case dict():
            if not value:
                yield name + "{}", torch.zeros(0, dtype=torch.uint8)
            for member_key, member in value.items():
                yield from _flat(f"{name}{{{_checked(member_key)}}}", member)
        case _:
            raise ConfigError(
                f"the optimizer keeps a {type(value).__name__} under {name!r}, which a checkpoint cannot; keep tensors, numbers and lists"
            )


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the entries of an optimizer's groups, but for weights and learning rate: no optimizer may change them."""
    plain = (bool, int, float, str, Tensor, type(None))
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if isinstance(value, plain) and key != "lr"
        }
        for group in optimizer.param_groups
    ]


def check_places(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an optimizer that keeps state elsewhere than by weight; `before` are its `group_values` when it was made.

    Raises:
        ConfigError: Names what a checkpoint, or a stage with other layers, would lose.
    """
    remedy = "which no checkpoint by layers can hold; let it keep `self.state[weight]` alone"
    weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for owner in optimizer.state:
        if id(owner) not in weights:
            raise ConfigError(f"the optimizer keeps state under {owner!r}, {remedy}")
    for old, new in zip(before, group_values(optimizer), strict=True):
        for key, value in new.items():
            if key not in old or not bool(torch.as_tensor(old[key] == value).all()):
                raise ConfigError(f"the optimizer changes {key!r} of its groups of weights while it steps, {remedy}")


def load_state(optimizer: torch.optim.Optimizer, weight: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state of a weight that `flat_state` returned, from copies of the tensors where they are needed."""
    group = next(group for group in optimizer.param_groups if any(member is weight for member in group["params"]))
    has_one_kernel = bool(group.get("fused") or group.get("capturable"))

    def placed(key: str, tensor: Tensor) -> Tensor:
        if not tensor.dim() and key in _ON_HOST and not has_one_kernel:
            return tensor.to("cpu", copy=True)
        loaded = tensor.to(weight.device, copy=True)
        return match_layout(loaded, weight, dtype=tensor.dtype) if tensor.shape == weight.shape else loaded

    root: dict[str, Any] = {}
    for name, tensor in tensors.items():
        path, _, kind = name.partition(":")
        key = re.split(r"[\[({]", path, maxsplit=1)[0]
        steps = [key, *(step.group() for step in _STEP.finditer(path))]
        _put(root, steps, _value(kind, tensor) if kind else placed(key, tensor))
    optimizer.state[weight] = {key: _with_tuples(value) for key, value in root.items()}


def _value(kind: str, tensor: Tensor) -> object:
    if kind in _NUMBERS:
        return _NUMBERS[kind](tensor.item())
    return bytes(tensor.tolist()).decode() if kind == "text" else None


class _Members(dict[str, Any]):
    """A list, tuple or dict while its members arrive, by the brackets that they are in."""


def _put(parent: dict[str, Any], steps: list[str], value: object) -> None:
    first, *rest = steps
    if not rest:
        parent[first] = value
    elif rest[0] in {"[]", "()", "{}"}:
        parent[first] = _Members({rest[0]: None})
    else:
        _put(parent.setdefault(first, _Members()), rest, value)


def _with_tuples(value: object) -> object:
    if not isinstance(value, _Members):
        return value
    members = {step: _with_tuples(member) for step, member in value.items() if step not in {"[]", "()", "{}"}}
    bracket = next(iter(value))[0]
    if bracket == "{":
        return {step[1:-1]: member for step, member in members.items()}
    ordered = [members[step] for step in sorted(members, key=lambda step: int(step[1:-1]))]
    return ordered if bracket == "[" else tuple(ordered)
