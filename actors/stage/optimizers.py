"""Torch's optimizers, as a configuration names them."""

from __future__ import annotations

import torch

from raypipe.config import OptimizerConfig, OptimizerName

_MOMENTUM_DECAY = 1e9
"""Momentum decay with which NAdam uses `beta1` from the first update on; with torch's default it starts at half of `beta1`."""


def build_optimizer(config: OptimizerConfig, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of some weights. Weight decay applies to matrices only, not to vectors such as biases and gains."""
    matrices = [weight for weight in weights if weight.dim() >= 2]
    vectors = [weight for weight in weights if weight.dim() < 2]
    groups = [{"params": group, "weight_decay": decay} for group, decay in ((matrices, config.weight_decay), (vectors, 0.0)) if group]
    betas = (config.beta1, config.beta2)
    if config.name is OptimizerName.NADAMW:
        return torch.optim.NAdam(
            groups,
            lr=config.learning_rate,
            betas=betas,
            eps=config.epsilon,
            momentum_decay=_MOMENTUM_DECAY,
            decoupled_weight_decay=True,
        )
    fused = all(weight.is_floating_point() for weight in weights)  # there is no fused kernel for complex weights
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)
