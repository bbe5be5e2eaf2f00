"""The losses of models over the labels that count, as transformers takes them, but in float64 where logits are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from raypipe.errors import ConfigError
from raypipe.model import Batch

IGNORED = -100
"""Label of a position that the loss leaves out."""
AHEAD = {"causal-lm": 1, "masked-lm": 0, "token-classification": 0, "sequence-classification": 0, "image-classification": 0}
"""By the head of a model with labels, how many positions labels are ahead of the logits that predict them."""


def mean_over_targets(logits: Tensor, batch: Batch, *, ahead: int) -> Tensor:
    """Return the mean cross entropy over the targets that count, in float32 at least.

    Args:
        logits: [rows, positions, vocabulary], or [rows, classes].
        batch: `labels` [rows, positions] or [rows], or `targets`, which stand where they are predicted.
        ahead: How many positions labels are ahead of the logits that predict them.

    Raises:
        ConfigError: The batch has neither, or as many as the head does not predict.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets_of(batch, ahead=ahead)
    if targets.numel() != logits.shape[:-1].numel():
        raise ConfigError(
            f"labels have the shape {list(targets.shape)}, but the head of the model predicts {list(logits.shape[:-1])}; give labels of "
            "that shape, or choose a head: model.options.head is causal-lm for a language model"
        )
    return functional.cross_entropy(exact.flatten(0, -2), targets.flatten().long(), ignore_index=IGNORED)


def num_targets(batch: Batch, *, ahead: int) -> Tensor:
    """Return how many targets of some rows count."""
    return (targets_of(batch, ahead=ahead) != IGNORED).sum()


def targets_of(batch: Batch, *, ahead: int) -> Tensor:
    """Return the token that each position is to predict, -100 for those that count for nothing; raises `ConfigError`."""
    if "labels" in batch:
        labels = batch["labels"]
        return functional.pad(labels, (0, ahead), value=IGNORED)[..., ahead:]
    if "targets" not in batch:
        raise ConfigError(
            f"the batch has neither the field 'labels' nor 'targets', so there is no loss; it has {', '.join(sorted(batch))}. "
            "For a causal model, labels are a copy of input_ids, with -100 where nothing is to be learned"
        )
    return batch["targets"]


def contrastive(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross entropy of finding each text's image and each image's text among those of the microbatch.

    Args:
        logits: [texts, images], the pairs on the diagonal (Radford et al., 2021, arXiv:2103.00020, figure 3).
        batch: Not read.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    pairs = torch.arange(len(exact), device=exact.device)
    return (functional.cross_entropy(exact, pairs) + functional.cross_entropy(exact.t(), pairs)) / 2
