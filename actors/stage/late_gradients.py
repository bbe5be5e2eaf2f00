"""Corrections of an optimizer's steps where gradients are late.

With a delay of one update, the gradient that steps the weights `x(t)` was taken at `x(t - 1)`. Both corrections go around any optimizer,
whose step from its gradient `g` is `d(g)`; they are reconstructions from abstracts, and not the papers' own code.

    look-ahead            x(t + 1) = x(t) + d(t) + L (s(t) d(t) - s(t - 1) d(t - 1))
                          The weights stand L s updates ahead of where the optimizer has come to, so that a late gradient is of about the
                          weights that it changes. With a momentum as `d`, Nesterov's look-ahead (Ajanthan et al. 2025, arXiv 2505.01099).
    gradient correction   d(t) = d(g(t) + C s(t) (g(t) - g(t - 1)))
                          What the last gradient changed by is fed back, as the error of the late one (Zmushko et al. 2026,
                          arXiv 2606.30634).

s is the mean delay of the gradients of the stage in an update: of K rounds of which one is late, s = 1 / K; and where nothing is late,
nothing is corrected. Before the first step d counts as zero. Each keeps one tensor of the size of a weight, `late_step` and
`late_gradient`, beside the optimizer's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_STEP, _GRADIENT = "late_step", "late_gradient"


class LateGradients(torch.optim.Optimizer):
    """Another optimizer with corrections for late gradients.

    Args:
        inner: The optimizer; its groups and state are shared.
        lookahead: L above.
        gradient_correction: C above.

    Attributes:
        delay: s above, which is set before each step.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, lookahead: float, gradient_correction: float) -> None:
        super().__init__([weight for group in inner.param_groups for weight in group["params"]], {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.lookahead = lookahead
        self.gradient_correction = gradient_correction
        self.delay = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all weights with a gradient; `closure` is not called."""
        stepped = list(self._with_gradients())
        # Kept only behind the step: torch's optimizers take a weight with any state for one that they know.
        gradients = [gradient.clone() for _, gradient in stepped] if self.gradient_correction else []
        for (weight, _), gradient in zip(stepped, gradients, strict=False):
            if (before := self.state[weight].get(_GRADIENT)) is not None:
                weight.grad = gradient.add(gradient - before, alpha=self.gradient_correction * self.delay)
        old = [weight.detach().clone() for weight, _ in stepped] if self.lookahead else []
        self.inner.step()
        for (weight, _), gradient in zip(stepped, gradients, strict=False):
            self.state[weight][_GRADIENT] = gradient
        for (weight, _), value in zip(stepped, old, strict=False):
            self._look_ahead(weight, weight - value)
        return None

    def _look_ahead(self, weight: Tensor, step: Tensor) -> None:
        late = step * self.delay
        # Where no step is kept the weights stand nowhere ahead, as if the last step were zero.
        weight.add_(late - self.state[weight].get(_STEP, 0.0), alpha=self.lookahead)
        self.state[weight][_STEP] = late

    def _with_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    yield weight, weight.grad
