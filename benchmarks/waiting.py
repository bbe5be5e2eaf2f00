"""Rows and cut for stages that wait instead of computing (`raypipe.models.waiting`), so that a few cores serve many stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from raypipe import Model
from raypipe.model import Batch
from raypipe.models.waiting import waiting

WIDTH = 64


def equal_waits(wait_s: float, num_stages: int) -> partial[Model]:
    """Makes the model: a waiting layer a stage, as long in F, I and W."""
    return partial(waiting, num_layers=num_stages, width=WIDTH, forward_s=wait_s, input_grad_s=wait_s, weight_grad_s=wait_s)


def layers_per_stage(num_stages: int) -> tuple[int, ...]:
    """The cut: the first stage has the entry, too."""
    return (2, *[1] * (num_stages - 1))


@dataclass(frozen=True)
class NumberedRows:
    """Rows of WIDTH numbers, each the microbatch's number in its update; the same for both splits.

    Attributes:
        num_rows: of a microbatch.
        num_microbatches: of an update.
    """

    num_rows: int
    num_microbatches: int

    def __call__(self, split: str) -> _OpenRows:
        """The rows of a split."""
        return _OpenRows(self, split)


class _OpenRows:
    def __init__(self, rows: NumberedRows, split: str) -> None:
        self.split = split
        numbers = torch.arange(rows.num_microbatches, dtype=torch.float32)
        # Made once: what is measured is not how fast rows are made.
        self.inputs = [torch.full((rows.num_rows, WIDTH), float(number)) for number in numbers]
        self.targets = torch.zeros(rows.num_rows)

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """The rows of a microbatch."""
        assert rows == (0.0, 1.0), "these stages have one device each"
        return {"inputs": self.inputs[microbatch % len(self.inputs)], "targets": self.targets}
