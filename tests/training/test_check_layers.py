"""Layers are made without memory on the driver, without a trace in the user's program."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raypipe.model import Batch, Layer, Model
from raypipe.training.check_layers import DraftLayers


def drawing_layer() -> nn.Module:
    """Return a layer whose making draws from all generators."""
    return nn.Linear(4, 4 + int(random.random()) + int(np.random.rand()) + int(torch.rand(1, device="cpu").item()))


def mean(output: Tensor, _: Batch) -> Tensor:
    return output.mean()


MODEL = Model((Layer("first", drawing_layer, batch=("inputs",)), Layer("second", partial(nn.Linear, 4, 4))), loss=mean)


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_layers_that_draw_when_they_are_made_leave_the_generators_as_they_were() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = drawn()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert DraftLayers.of(MODEL) is not None
    assert drawn() == expected


@pytest.mark.parametrize("seconds_a_layer", [9.0, 11.0])
def test_layers_that_take_long_to_make_are_left_to_the_actors(seconds_a_layer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("raypipe.training.check_layers.time.monotonic", lambda: clock[0])

    def slow() -> nn.Module:
        clock[0] += seconds_a_layer
        return nn.Linear(4, 4)

    draft = DraftLayers.of(Model((Layer("first", slow, batch=("inputs",)), Layer("second", slow)), loss=mean))
    assert (draft is not None) == (2 * seconds_a_layer < 20)
