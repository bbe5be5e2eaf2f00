"""Layers are made without memory on the driver, without a trace in the user's program."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
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
