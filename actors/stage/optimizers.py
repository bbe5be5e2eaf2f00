"""The optimizers that a configuration names, as torch has them."""

from __future__ import annotations

import torch

from raypipe.config import OptimizerConfig, OptimizerName

_AT_ONCE = 1e9
"""Of torch's schedule of NAdam's momentum, which else takes hundreds of updates from half of `beta1` to all of it."""


def build_optimizer(config: OptimizerConfig, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of some weights; weight decay spares vectors, such as biases and gains."""
    matrices = [weight for weight in weights if weight.dim() >= 2]
    vectors = [weight for weight in weights if weight.dim() < 2]
    groups = [{"params": group, "weight_decay": decay} for group, decay in ((matrices, config.weight_decay), (vectors, 0.0)) if group]
    betas = (config.beta1, config.beta2)
    if config.name is OptimizerName.NADAMW:
        return torch.optim.NAdam(
            groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, momentum_decay=_AT_ONCE, decoupled_weight_decay=True
        )
    fused = all(weight.is_floating_point() for weight in weights)  # complex ones have no kernel of their own
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)
