"""What a step of an optimizer makes of some rows of a weight, before the gradients of its other rows are there.

The optimizer itself does not change: it steps the whole weight later, and comes to the same numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.actors.stage.joined_optimizer import JoinedOptimizer
from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.errors import ConfigError

STEPS_NUMBERS = frozenset({
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
})
"""Optimizers that step each number by its own gradient and state; of weights in 16 bits some round otherwise at other places."""
_VECTOR_BYTES = 128  # the most that kernels of torch take at once, two vectors of AVX-512


def stepped_rows(optimizer: torch.optim.Optimizer, weight: nn.Parameter, rows: Tensor) -> Tensor:
    """Return what a step would make of some rows of a weight whose `.grad` is set in these rows; change nothing.

    Raises:
        ConfigError: The optimizer does not step each number by itself.
    """
    assert weight.grad is not None, "there is a gradient to step with"
    taken, places = _ending_alike(weight, rows)
    part = nn.Parameter(weight.detach().index_select(0, taken))
    part.grad = weight.grad.index_select(0, taken)
    of_rows = _of_rows(optimizer, weight, part, taken)
    type(of_rows).step(of_rows)
    return part.detach().index_select(0, places)


def _ending_alike(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows that have the given ones and end as the weight does, and the places of the given ones among them.

    Kernels take what is left at the end of a tensor one by one, and may round it otherwise.
    """
    num_rows, row_bytes = len(weight), max(weight[0].nbytes, 1)
    num_last = min(-(-_VECTOR_BYTES // row_bytes), num_rows)
    num_filling = (num_rows - num_last - len(rows)) % (_VECTOR_BYTES // math.gcd(_VECTOR_BYTES, row_bytes))
    last = torch.arange(num_rows - num_last, num_rows, device=rows.device)
    taken = torch.cat((rows, rows.new_zeros(num_filling), last))
    places = torch.where(rows < num_rows - num_last, torch.arange(len(rows), device=rows.device), rows + len(taken) - num_rows)
    return taken, places


def _of_rows(optimizer: torch.optim.Optimizer, weight: nn.Parameter, part: nn.Parameter, rows: Tensor) -> torch.optim.Optimizer:
    """Return an optimizer of `part`, which is `rows` of a weight, with the state of these rows."""
    if isinstance(optimizer, JoinedOptimizer):
        return _of_rows(next(each for each in optimizer.parts if _group(each, weight)), weight, part, rows)
    if isinstance(optimizer, LateGradients):
        inner = _of_rows(optimizer.inner, weight, part, rows)
        late = LateGradients(inner, lookahead=optimizer.lookahead, gradient_correction=optimizer.gradient_correction)
        late.delay = optimizer.delay
        return late
    if type(optimizer) not in STEPS_NUMBERS:
        raise ConfigError(f"{type(optimizer).__name__} is not known to step each number by itself, so that its rows are due together")
    # A copy made by torch would lose what classes keep beside groups and state.
    found = object.__new__(type(optimizer))
    found.__dict__.update(optimizer.__dict__)
    found.param_groups = [{**_group(optimizer, weight), "params": [part]}]
    found.state = defaultdict(dict)
    if weight in optimizer.state:
        found.state[part] = {key: _taken(value, weight, rows) for key, value in optimizer.state[weight].items()}
    return found


def _group(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Any]:
    groups = (group for group in optimizer.param_groups if any(each is weight for each in group["params"]))
    return next(groups, {})


def _taken(value: Any, weight: Tensor, rows: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.index_select(0, rows) if value.shape == weight.shape else value.clone()
