"""A small GPT whose layers also wait, as a host waits for its GPU: its node's cores are idle meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from raypipe.model import Layer, Model
from raypipe.models.gpt import gpt
from raypipe.models.waiting import WaitInBackward, sleep

BACKWARD_OVER_FORWARD = 2.0


class OnDevice(nn.Module):
    """A layer that waits so many seconds for each row of its output in the forward, and twice as long in the backward."""

    def __init__(self, build: Callable[[], nn.Module], *, row_s: float) -> None:
        super().__init__()
        self.layer = build()
        self.row_s = row_s

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the layer's output."""
        output: Tensor = self.layer(*inputs)
        wait_s = self.row_s * len(output)
        sleep(wait_s)
        output = WaitInBackward.apply(output, BACKWARD_OVER_FORWARD * wait_s)  # type: ignore[no-untyped-call]
        return output


def gpt_on_device(*, row_s: float, **options: Any) -> Model:
    """Return `raypipe.models.gpt.gpt`, of which each layer waits so many seconds for a row; options as there, but no ties."""
    model = gpt(**options)
    assert not model.ties, "tied weights have other names in layers that wait"
    return replace(model, layers=tuple(_on_device(layer, row_s) for layer in model.layers))


def _on_device(layer: Layer, row_s: float) -> Layer:
    return replace(layer, build=partial(OnDevice, layer.build, row_s=row_s))
