"""What the losses of the microbatches of a window count for (`Model.loss_weight`).

The loss of an update is sum(w loss) / sum(w) over pieces of its microbatches. The second sum must be known before the first backward of
the update. It needs no other device: rows follow from the number of a microbatch, so that whoever takes a loss counts all of them.
"""

from __future__ import annotations

import math

from raypipe.actors.execution.batches import WHOLE, BatchSource
from raypipe.actors.execution.steps import BoundOp
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model


class LossWeights:
    """The weights of the losses of one window; `first_microbatch` is its first, counted over training."""

    def __init__(self, model: Model, batches: BatchSource | None, *, first_microbatch: int, num_microbatches: int) -> None:
        self._weigh = model.loss_weight
        self._batches = batches
        self._first_microbatch = first_microbatch
        self._num_microbatches = num_microbatches
        self._totals: dict[int, float] = {}

    def weight(self, bound: BoundOp, batch: Batch) -> float:
        """Return what the loss of a forward counts for; `batch` is on the host."""
        return float(bound.num_rows) if self._weigh is None else self._of(batch)

    def factor(self, bound: BoundOp, weight: float) -> float:
        """Return the factor of the loss of some rows, which counts for `weight`, in the loss of its update."""
        if self._weigh is None:
            return bound.loss_factor
        self.count(bound.update)
        return weight / self._totals[bound.update] if weight else 0.0

    def count(self, update: int) -> None:
        """Count what all losses of an update of the window count for, unless all rows count alike."""
        if self._weigh is None or update in self._totals:
            return
        assert self._batches is not None, "a device that takes the loss has a source of rows"
        first = self._first_microbatch + update * self._num_microbatches
        numbers = range(first, first + self._num_microbatches)
        self._totals[update] = math.fsum(self._of(self._batches.batch(number, WHOLE)) for number in numbers)

    def _of(self, batch: Batch) -> float:
        assert self._weigh is not None, "all rows count alike without it"
        value = self._weigh(batch)
        try:
            weight = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the model's loss_weight gives no number ({error}); expected a scalar tensor, the sum over the rows"
            ) from error
        if not 0.0 <= weight < math.inf:
            raise ConfigError(f"the model's loss_weight is {weight}; expected a finite number of 0 or more")
        return weight
