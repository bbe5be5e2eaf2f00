"""Optimizers as users write them, with state of all sorts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Remembering(torch.optim.Optimizer):
    """Steps along the mean of the last gradients, which it keeps in a list beside plain numbers, a tuple, a dict and the sums of rows."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, length: int = 3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "length": length, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all weights with a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, weight.grad, group)
        return None

    def _step(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state |= {"count": 0, "decayed": 1.0, "recent": [], "is_new": True, "last": (None, "none"), "sums": {"rows": None, "whole": {}}}
        state["count"] += 1
        state["decayed"] *= 0.9
        state["is_new"] = False
        state["recent"] = [*state["recent"], gradient.clone()][-group["length"] :]
        state["last"] = (gradient.mean(), "some")
        before = state["sums"]["rows"]
        rows = gradient.reshape(len(gradient), -1).square().sum(dim=1)
        state["sums"]["rows"] = rows if before is None else before + rows
        mean = torch.stack(state["recent"]).mean(dim=0)
        scale = (state["sums"]["rows"] / state["count"]).sqrt().view(-1, *[1] * (weight.dim() - 1)) + 0.1
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] / (2 - state["decayed"]) * mean / scale)


def halved(params: Iterable[Any], lr: float, *, momentum: float = 0.0) -> torch.optim.Optimizer:
    """Return SGD with half of the momentum."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum / 2)


class Counting(torch.optim.SGD):
    """Counts its steps where no checkpoint by layers finds it."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step and count."""
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        super().step()
        return None


def no_optimizer(params: Iterable[Any], lr: float) -> list[Any]:
    """Return something else."""
    return [*params, lr]


def forgetful(params: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of the first weight only."""
    return torch.optim.SGD([params[0]["params"][0]], lr=lr)
