"""A small model of two branches that meet at its end, for tests of branch-aware planning."""

from __future__ import annotations

from functools import partial

from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type
from raypipe.models.mlp import Dense, mean_squared_error


def two_towers(*, num_left_layers: int = 3, num_right_layers: int = 3, width: int = 16, dtype: str = "float32") -> Model:
    """Return layers `left-0` ..., `right-0` ... (Linear and tanh) and `joint` (a Linear over both towers); mean squared error.

    Batch fields: `left`, `right` and `targets`, all [B, width].

    Raises:
        ConfigError: A size is less than 1.
        UnknownNameError: There is no such `dtype`.
    """
    check_positive(num_left_layers=num_left_layers, num_right_layers=num_right_layers, width=width)
    dense = partial(Dense, in_width=width, out_width=width, tanh=True, dtype=float_type(dtype))
    left = _tower("left", num_left_layers, dense)
    right = _tower("right", num_right_layers, dense)
    joint = Layer("joint", partial(dense, in_width=2 * width, tanh=False), inputs=(left[-1].name, right[-1].name))
    return Model(layers=(*left, *right, joint), loss=mean_squared_error)


def _tower(name: str, num_layers: int, build: partial[Dense]) -> tuple[Layer, ...]:
    return tuple(Layer(f"{name}-{index}", build, batch=() if index else (name,), branch=name) for index in range(num_layers))
