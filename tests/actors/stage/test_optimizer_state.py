"""The state of one weight as tensors by name, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raypipe.actors.stage.optimizer_state import flat_state, load_state
from raypipe.errors import ConfigError

STATE: dict[str, Any] = {
    "step": torch.tensor(3.0),
    "exp_avg": torch.arange(6.0).view(2, 3),
    "rows": torch.ones(2),
    "half": torch.ones(2, 3, dtype=torch.bfloat16),
    "count": 3,
    "product": 0.1,
    "is_warm": True,
    "recent": [torch.ones(2), (torch.zeros(1), 4), []],
    "nothing": None,
    "mode": "h\u00e9",
    "empty": {"text": "", "list": [], "tuple": (), "dict": {}},
    "many": list(range(12)),
}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_state_of_every_sort_comes_back_as_it_was() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([weight])
    flat = flat_state(STATE)
    load_state(optimizer, weight, flat)
    assert same(STATE, optimizer.state[weight])
    assert flat["product:float"].dtype == torch.float64, "a number of Python has 53 bits"
    optimizer.state[weight]["exp_avg"].zero_()
    assert flat["exp_avg"].any(), "they are copies"


def test_a_tensor_of_the_shape_of_the_weight_has_its_order_in_memory() -> None:
    weight = nn.Parameter(torch.zeros(3, 2).T)
    optimizer = torch.optim.SGD([weight])
    load_state(optimizer, weight, {"exp_avg": torch.ones(2, 3)})
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()


@pytest.mark.parametrize(
    ("state", "problem"), [({"x": object()}, "keeps a object under 'x'"), ({"a/b": 1}, "under 'a/b'"), ({3: 1}, "under 3")]
)
def test_what_no_file_can_hold_is_refused(state: dict[Any, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        flat_state(state)
