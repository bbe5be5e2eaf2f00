"""Stages that wait as long as a model's would compute, and pass on as many bytes: what `raypipe rehearse` runs.

    entry-0 -> stage-0 -> port-0-1 -> stage-1 -> port-1-2 -> stage-2 -> loss

A stage returns one number per row; a port turns these into [rows, width] of float32 zeros, always the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from raypipe.artifacts.profile import factor_of_rows
from raypipe.communication.patterns import slice_starts
from raypipe.model import Layer, Model
from raypipe.models.waiting import Entry, mean, sleep

NUMBER_BYTES = 4
"""All tensors are float32."""
_MOST_LATE_ROWS = 1024


@dataclass(frozen=True)
class LayerWaits:
    """Seconds that one layer of a stage on one device waits for a whole microbatch, and its numbers of parameters.

    Attributes:
        input_grad_s: Seconds of I; B takes `input_grad_s + weight_grad_s`.
        num_parameters: Number of parameters whose gradients are summed over replicas.
        num_tied: Part of `num_parameters` that other stages share; equal on all stages of a tie.
        num_weights: Number of weights, alike, that have most of the parameters.
        num_late: Part of `num_parameters` that is rows of a table which the next reader does not look up.
        fixed_share: Part of the seconds that does not depend on the number of rows.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    num_parameters: int
    num_tied: int = 0
    num_weights: int = 1
    num_late: int = 0
    fixed_share: float = 0.0

    @property
    def late_shape(self) -> tuple[int, int]:
        """Rows and width of what an update touches of the table; the width divides what a sum has to gather into few pieces."""
        width = -(-self.num_late // _MOST_LATE_ROWS)
        return (self.num_late // width, width) if width else (0, 0)


def rehearsing(
    *,
    stages: Sequence[Sequence[LayerWaits]],
    widths: Mapping[tuple[int, int], int],
    num_rows: int,
    ties: Sequence[Sequence[int]] = (),
    num_microbatches: int = 1,
) -> Model:
    """Return the layers of all stages: `layers_per_stage` gives their numbers; the loss is the mean output.

    Batch fields: `inputs`, [rows, 1] of float32, and for layers with late rows `microbatch`, [rows] of its number, of which an update has
    `num_microbatches`. With fewer rows than `num_rows`, stages wait for less. `widths` are numbers per row on
    each edge (source, target); `ties` are groups of stages, whose last layers share `num_tied` parameters. Raises `ConfigError` if several
    stages feed no other.
    """
    layers: list[Layer] = []
    for stage, of_stage in enumerate(stages):
        first, *others = of_stage
        inputs = tuple(f"port-{source}-{target}" for source, target in widths if target == stage)
        if not inputs:
            layers.append(Layer(f"entry-{stage}", partial(Entry, 1), inputs=(), batch=("inputs",)))
            inputs = (f"entry-{stage}",)
            first = replace(first, num_parameters=first.num_parameters - 1)  # the entry has one of them
        for number, waits in enumerate((first, *others), 1):
            name = f"stage-{stage}" if number == len(of_stage) else f"stage-{stage}-{number}"
            looked_up = {"table": partial(_rows_read, num_rows=waits.late_shape[0], num_microbatches=num_microbatches)}
            layers.append(
                Layer(
                    name,
                    partial(WaitingLayer, waits, num_rows=num_rows),
                    inputs=inputs,
                    batch=("microbatch",) if waits.num_late else (),
                    looked_up=looked_up if waits.num_late else {},
                )
            )
            inputs = (name,)
        layers += [
            Layer(f"port-{source}-{target}", partial(Port, width, num_rows=num_rows), inputs=(f"stage-{stage}",))
            for (source, target), width in widths.items()
            if source == stage
        ]
    return Model(tuple(layers), mean, ties=tuple(tuple((f"stage-{stage}", "tied") for stage in tie) for tie in ties))


def _rows_read(microbatch: Tensor, *, num_rows: int, num_microbatches: int) -> Tensor:
    """Return the rows of an update: one half of the table, and two updates later the other."""
    half = int(microbatch[0]) // num_microbatches // 2 % 2
    return torch.arange(half * num_rows, (half + 1) * num_rows)


def layers_per_stage(num_waiting: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of layers of each stage: those that wait, an entry where nothing feeds it, one port per edge."""
    return [
        count + (not any(target == stage for _, target in edges)) + sum(source == stage for source, _ in edges)
        for stage, count in enumerate(num_waiting)
    ]


class _Wait(torch.autograd.Function):
    """Waits in its backward, then returns zeros in existing memory."""

    @staticmethod
    def forward(ctx: FunctionCtx, wait_s: float, output: Tensor, zeros: Callable[[int], Tensor], *inputs: Tensor) -> Tensor:
        ctx.wait_s, ctx.zeros = wait_s, zeros  # type: ignore[attr-defined]
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Tensor) -> Any:
        if ctx.wait_s:  # type: ignore[attr-defined]
            sleep(ctx.wait_s)  # type: ignore[attr-defined]
        gradients = [
            ctx.zeros(number) if needed else None  # type: ignore[attr-defined]
            for number, needed in enumerate(ctx.needs_input_grad[3:])  # type: ignore[attr-defined]
        ]
        return (None, None, None, *gradients)


class _Widen(torch.autograd.Function):
    """[rows, 1] to [rows, width] without a copy; the gradient of the first column goes back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, wide: Tensor) -> Tensor:
        return wide

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][:, :1], None


class Port(nn.Module):
    """Turns [rows, 1] into [rows, width], always in the same memory."""

    def __init__(self, width: int, *, num_rows: int) -> None:
        super().__init__()
        self.wide = torch.zeros(num_rows, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros that depend on x."""
        wide: Tensor = _Widen.apply(x, self.wide[: x.shape[0]])  # type: ignore[no-untyped-call]
        return wide


class WaitingLayer(nn.Module):
    """Waits in forward, input gradient and weight gradient, for less on fewer rows; returns [rows, 1].

    Each wait is in its own autograd branch, so that I and W run one each. Only gradient sums read `ballast`, `tied` and `table`: they have
    no gradients, which would take the memory's time, but their hooks run as if they had.
    """

    def __init__(self, waits: LayerWaits, *, num_rows: int) -> None:
        super().__init__()
        self.waits = waits
        self.num_rows = num_rows
        self.weight = nn.Parameter(torch.zeros(1))
        late_rows, width = waits.late_shape
        num_others = waits.num_parameters - 1 - waits.num_tied - late_rows * width
        starts = slice_starts(max(num_others, 0), waits.num_weights)
        self.ballast = nn.ParameterList(torch.zeros(end - start) for start, end in pairwise(starts) if end > start)
        self.tied = nn.Parameter(torch.zeros(waits.num_tied)) if waits.num_tied else None
        self.table = nn.Parameter(torch.zeros(2 * late_rows, width)) if late_rows else None
        self._zeros: dict[tuple[int, ...], Tensor] = {}

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return zeros, [rows, 1], that depend on the weight and all inputs."""
        waits, rows = self.waits, inputs[0].shape[0]
        part = factor_of_rows(waits.fixed_share, rows / self.num_rows)
        if waits.forward_s:
            sleep(waits.forward_s * part)
        shapes = [tuple(x.shape) for x in inputs]
        # `detach` makes another tensor of the same memory: autograd notes its place in the graph in the one that it is given.
        passed: Tensor = _Wait.apply(  # type: ignore[no-untyped-call]
            waits.input_grad_s * part, self._of(rows, 1).detach(), lambda number: self._of(*shapes[number]).detach(), *inputs
        )
        others = (*self.ballast, self.tied, self.table)
        weight: Tensor = _Wait.apply(  # type: ignore[no-untyped-call]
            waits.weight_grad_s * part,
            self._of(1).detach(),
            partial(self._weight_gradient, others),
            self.weight,
        )
        return passed + weight

    @staticmethod
    def _weight_gradient(weights: Sequence[Tensor | None], _: int) -> Tensor:
        for weight in weights:
            for hook in ((weight is not None and weight._post_accumulate_grad_hooks) or {}).values():
                hook(weight)
        return torch.zeros(1)

    def _of(self, *shape: int) -> Tensor:
        zeros = self._zeros.get(shape)
        if zeros is None:
            zeros = self._zeros[shape] = torch.zeros(shape)
        return zeros


class WaitingOptimizer(torch.optim.Optimizer):
    """Waits instead of stepping, by the seconds of its stage."""

    def __init__(self, wait_s: Mapping[int, float], stage: int, weights: Iterable[Any]) -> None:
        super().__init__(weights, {"lr": 0.0})
        self.wait_s = wait_s[stage]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Wait."""
        if self.wait_s:
            sleep(self.wait_s)
        return None
