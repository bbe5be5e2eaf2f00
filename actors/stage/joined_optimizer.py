"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of some weights, that step as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([weight for part in parts for group in part.param_groups for weight in group["params"]], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all of them; `closure` is not called."""
        for part in self.parts:
            part.step()
        return None
