"""A small chain of dense layers, for tests and first steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type

if TYPE_CHECKING:
    from raypipe.model import Batch


def mlp(*, num_layers: int = 4, width: int = 16, dtype: str = "float32") -> Model:
    """Return layers `layer-0`, `layer-1`, ..., each a Linear and, but for the last, tanh; mean squared error.

    Batch fields: `inputs` and `targets`, [B, width]. Smooth tanh gradients, none zero by chance, compare closely.

    Raises:
        ConfigError: A size is less than 1.
        UnknownNameError: There is no such `dtype`.
    """
    check_positive(num_layers=num_layers, width=width)
    dense = partial(Dense, in_width=width, out_width=width, dtype=float_type(dtype))
    names = [f"layer-{index}" for index in range(num_layers)]
    return Model(
        layers=tuple(
            Layer(
                name,
                partial(dense, tanh=name != names[-1]),
                inputs=() if name == names[0] else None,
                batch=("inputs",) if name == names[0] else (),
            )
            for name in names
        ),
        loss=mean_squared_error,
    )


def mean_squared_error(output: Tensor, batch: Batch) -> Tensor:
    """Return the mean squared difference of the output and `targets`, both [B, width]."""
    return functional.mse_loss(output, batch["targets"])


class Dense(nn.Module):
    """A Linear layer, then tanh if asked for: [B, in_width] to [B, out_width]; several inputs are concatenated."""

    def __init__(self, *, in_width: int, out_width: int, tanh: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(in_width, out_width, dtype=dtype)
        self.tanh = tanh

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output of the layer."""
        output: Tensor = self.linear(torch.cat(inputs, dim=-1) if len(inputs) > 1 else inputs[0])
        return output.tanh() if self.tanh else output
