"""Layers that wait instead of computing: they show the costs besides computation, and few cores serve many stages."""

from __future__ import annotations

import ctypes
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive

if TYPE_CHECKING:
    from raypipe.model import Batch


_PR_SET_TIMERSLACK = 29
_exact = threading.local()


def waiting(
    *,
    num_layers: int = 4,
    width: int = 64,
    forward_s: float = 0.005,
    input_grad_s: float = 0.005,
    weight_grad_s: float = 0.005,
    num_rows: int = 0,
) -> Model:
    """Return layers `entry`, `wait-0`, `wait-1`, ... that pass on [B, width] of float32; the loss is the mean output.

    Batch field: `inputs`, [B, width]. The seconds hold for `num_rows` rows, in proportion for others; with 0, for any number.

    Raises:
        ConfigError: A size is less than 1.
    """
    check_positive(num_layers=num_layers, width=width, num_rows=num_rows + 1)
    layers = [Layer("entry", partial(Entry, width), inputs=(), batch=("inputs",))]
    build = partial(Waiting, width, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s, num_rows=num_rows)
    layers += [Layer(f"wait-{number}", build) for number in range(num_layers)]
    return Model(tuple(layers), mean)


def mean(output: Tensor, _: Batch) -> Tensor:
    """Return the mean of the output."""
    return output.mean()


def sleep(seconds: float) -> None:
    """Sleep without the 50 us by which Linux delays most wake-ups."""
    if not getattr(_exact, "is_set", False):
        _exact.is_set = True
        if prctl := getattr(ctypes.CDLL(None), "prctl", None):
            prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    time.sleep(seconds)


class WaitInBackward(torch.autograd.Function):
    """Passes a tensor on, and waits so many seconds before it passes the gradient back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, wait_s: float) -> Tensor:
        """Return the tensor."""
        ctx.wait_s = wait_s  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        """Wait, and return the gradient."""
        sleep(ctx.wait_s)  # type: ignore[attr-defined]
        return gradients[0], None


class Entry(nn.Module):
    """Adds a weight to the rows, [B, width], so that the next layer has an input gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + weight."""
        return x + self.weight


class Waiting(nn.Module):
    """Adds a weight to the rows, [B, width], and waits in forward, input gradient (autograd) and weight gradient (a hook)."""

    def __init__(self, width: int, *, forward_s: float, input_grad_s: float, weight_grad_s: float, num_rows: int = 0) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.share = 1.0
        """Rows of the last forward over `num_rows`."""
        self.forward_s = forward_s
        self.input_grad_s = input_grad_s
        self.weight_grad_s = weight_grad_s
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + weight."""
        if self.num_rows:
            self.share = x.shape[0] / self.num_rows
        sleep(self.forward_s * self.share)
        passed: Tensor = WaitInBackward.apply(x, self.input_grad_s * self.share)  # type: ignore[no-untyped-call]
        weight = self.weight
        if not hasattr(weight, "waits"):  # once for each tensor that holds a version of the weight
            weight.waits = weight.register_hook(self._wait)  # type: ignore[no-untyped-call, attr-defined]
        return passed + weight

    def _wait(self, _: Tensor) -> None:
        sleep(self.weight_grad_s * self.share)
