"""The losses of one window: computed, checked and reported."""

from __future__ import annotations

import torch
from torch import Tensor

from raypipe.actors.execution.report import WindowReport
from raypipe.actors.execution.steps import BoundOp
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model


class WindowLosses:
    """The losses, and if asked for the model's outputs, of the microbatches of a window."""

    def __init__(self, model: Model, *, keep_outputs: bool) -> None:
        self._model = model
        self._keep_outputs = keep_outputs
        self._losses: dict[int, list[tuple[int, Tensor]]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[float, Tensor] = {}

    def loss(self, bound: BoundOp, outputs: Outputs, batch: Batch, rng_key: RngKey) -> Tensor:
        """Return the loss of a forward.

        Raises:
            ConfigError: The last layer has several outputs, or the loss is no scalar or has no gradient.
        """
        output = outputs[len(self._model.layers) - 1]
        if len(output) != 1:
            raise ConfigError(f"the model's last layer gives {len(output)} tensors; the loss takes one")
        if self._keep_outputs:
            self._outputs[bound.op.index] = output[0].detach()
        with bound.weights.module.seeded_loss(rng_key):
            loss = self._model.loss(output[0], batch)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is of type {type(loss).__name__}"
            raise ConfigError(f"the model's loss {what}; expected a scalar tensor, the mean over the rows")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                "the model's loss has no gradient, so nothing would be trained: no weight takes one, or the loss is detached or made of "
                "constants alone"
            )
        return loss

    def add(self, bound: BoundOp, loss: Tensor) -> None:
        """Add the loss of a forward to the report."""
        self._losses.setdefault(bound.op.index, []).append((bound.num_rows, loss.detach()))

    def gradient(self, loss: Tensor, weight: float) -> Tensor:
        """Return the gradient with which a loss's backward begins: its weight, one graph node less than a product."""
        gradient = self._gradients.get(weight)
        if gradient is None:
            gradient = self._gradients[weight] = torch.full_like(loss, weight)
        return gradient

    def write(self, report: WindowReport) -> None:
        """Write losses and outputs into a report."""
        report.outputs = {index: output.cpu() for index, output in self._outputs.items()}
        for index, parts in self._losses.items():
            report.num_rows[index] = sum(rows for rows, _ in parts)
            report.losses[index] = sum(rows * float(loss) for rows, loss in parts) / report.num_rows[index]
