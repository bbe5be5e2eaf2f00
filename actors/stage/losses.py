"""What a model's loss may return."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypipe.errors import ConfigError
from raypipe.model import Batch, Model


def checked_loss(loss: object) -> Tensor:
    """Return a loss, or raise `ConfigError` if it is no scalar with a gradient."""
    if isinstance(loss, tuple | list | Mapping):
        raise ConfigError(
            f"the model's loss is of type {type(loss).__name__}; return the loss alone, a scalar tensor, and log other figures in a "
            "callback with run.forward and run.log"
        )
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is of type {type(loss).__name__}"
        raise ConfigError(f"the model's loss {what}; expected a scalar tensor, the mean over the rows")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "the model's loss has no gradient, so nothing would be trained: no weight takes one, or the loss is detached or made of "
            "constants alone"
        )
    return loss


def tried_loss(model: Model, outputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Return the loss of a trial forward.

    Raises:
        ConfigError: The loss failed, or is no scalar with a gradient; the last layer gives several tensors.
    """
    if len(outputs) != 1:
        raise ConfigError(f"the model's last layer gives {len(outputs)} tensors; the loss takes one")
    try:
        loss: object = model.loss(outputs[0], batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        given = f"an output of shape {tuple(outputs[0].shape)} and the batch fields {', '.join(batch)}"
        raise ConfigError(f"the model's loss failed: {type(error).__name__}: {error}; it got {given}") from error
    return checked_loss(loss)
