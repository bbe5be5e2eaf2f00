"""Forwards of the stages between windows, for callbacks: text, figures of one's own, whatever is made of the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raypipe.actors.execution.batches import FixedBatch
from raypipe.cluster.coordinator import Coordinator
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Batch, Model
from raypipe.schedules.lower import Placement
from raypipe.training.strategy import Strategy


@dataclass(frozen=True)
class Forwards:
    """Runs the model of a run, which its stages hold, in eval mode over rows of one's own.

    Attributes:
        model: What the stages are made of.
        example: Rows of the training data, which say which shapes the stages take.
        now: Coordinator and strategy of this moment; `None` while stages are not there, or may move.
    """

    model: Model
    example: Batch
    now: Callable[[], tuple[Coordinator, Strategy] | None]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a row of each field of the training data; empty where the first rows could not be read by the driver."""
        return {name: tuple(tensor.shape[1:]) for name, tensor in self.example.items()}

    def __call__(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the last layer for some rows.

        Fields that no layer takes, such as labels, may be left out: the stages then take those of other rows, which changes no output.

        Args:
            fields: Rows of a batch, each [rows, ...] in shape and dtype of the training data; as many rows as memory allows for.

        Raises:
            ConfigError: No stage holds the model now, or fields are missing or of another shape or dtype.
            RunError: A device failed.
        """
        found = self.now()
        if found is None:
            raise ConfigError(
                "run.forward works between the first window and the last, while the stages hold the model: in on_window, on_evaluation and "
                "on_checkpoint, and not in on_phase, whose stages may be on their way to other devices"
            )
        coordinator, strategy = found
        whole = self._completed(fields)
        num_rows = len(next(iter(whole.values())))
        pieces: list[Tensor] = []
        for first in range(0, num_rows, strategy.microbatch_size):
            piece = {name: tensor[first : first + strategy.microbatch_size] for name, tensor in whole.items()}
            pieces.append(_forward(coordinator, strategy, piece))
        return torch.cat(pieces)

    def _completed(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not fields or any(not tensor.dim() or not len(tensor) for tensor in fields.values()):
            raise ConfigError("run.forward takes the fields of one row at least")
        num_rows = len(next(iter(fields.values())))
        taken = {name for layer in self.model.layers for name in layer.batch}
        optional = {name for layer in self.model.layers for name in layer.batch_if_present}
        for name, tensor in fields.items():
            expected = self.shapes.get(name)
            if len(tensor) != num_rows or expected not in {None, tuple(tensor.shape[1:])}:
                has = "any" if expected is None else list(expected)
                raise ConfigError(
                    f"run.forward: the field {name!r} has the shape {list(tensor.shape)}; expected {num_rows} rows of the shape {has}, as "
                    "in the training data"
                )
            example = self.example.get(name)
            if example is not None and tensor.dtype != example.dtype and not (_is_integer(tensor) and _is_integer(example)):
                raise ConfigError(
                    f"run.forward: the field {name!r} has {tensor.dtype}; expected {example.dtype}, as in the training data: "
                    f"convert it by .to({example.dtype})"
                )
        missing = sorted(taken - fields.keys())
        if missing:
            raise ConfigError(f"run.forward: the field {missing[0]!r} is missing{suggestion(missing[0], fields)}")
        others = {name: tensor for name, tensor in self.example.items() if name not in {*fields, *taken, *optional}}
        return {**fields, **{name: tensor[:1].expand(num_rows, *tensor.shape[1:]) for name, tensor in others.items()}}


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _forward(coordinator: Coordinator, strategy: Strategy, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs for one microbatch, in which the last row is repeated until all devices have their share."""
    num_rows, unit = len(next(iter(rows.values()))), strategy.num_sample_rows
    spare = -num_rows % unit
    filled = {name: torch.cat([tensor, tensor[-1:].expand(spare, *tensor.shape[1:])]) for name, tensor in rows.items()}
    result = coordinator.run_on("predict", FixedBatch(filled), num_rows=num_rows + spare)
    by_device = {report.device: report.outputs[0] for report in result.reports if report.outputs}
    return torch.cat([by_device[device] for device in _in_order(strategy.placement) if device in by_device])[:num_rows]


def _in_order(placement: Placement) -> list[int]:
    """Return all devices; those of a worker in the order of their rows."""
    return [device for members in placement.workers for device, _ in members]
