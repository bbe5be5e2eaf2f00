"""Layers that torch compiles: the numbers are those of the layers as they were written, under schedules that split the backward, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.state import export_layers
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Batch, Layer, Model, compiled
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.user_code import make_model
from tests.actors.oracles import RandomTokens

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

SIZES = {"num_layers": 3, "d_model": 16, "num_heads": 2, "sequence_length": 16}


def run(*, compile_layers: bool, schedule: str, precision: Precision) -> tuple[list[float], list[str]]:
    model = make_model("raypipe.models.gpt:gpt", SIZES, compile_layers=compile_layers)
    order = build(schedule, ScheduleRequest(2, 4, 2))
    pipeline = LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), order.num_stages, model.edges()),
        schedule=order,
        batches=RandomTokens(),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
        learning_rate=lambda _: 1e-3,
        max_grad_norm=1.0,
        precision=precision,
    )
    losses = [loss for _ in range(2) for loss in mean_losses(pipeline.run_window(), num_microbatches=4)]
    states = [export_layers(weights) for on_device in pipeline.weights for weights in on_device.values()]
    return losses, [f"{index}/{name}" for state in states for index, tensors in state.items() for name in tensors]


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BF16_MIXED])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream-2bw", "async-1f1b"])
def test_compiled_layers_learn_the_same(counter: CompileCounterWithBackend, schedule: str, precision: Precision) -> None:
    expected, names = run(compile_layers=False, schedule=schedule, precision=precision)
    assert not counter.frame_count
    losses, found = run(compile_layers=True, schedule=schedule, precision=precision)
    assert counter.frame_count, "nothing was compiled"
    assert losses == pytest.approx(expected, rel=1e-6 if precision is Precision.FLOAT32 else 1e-3)
    assert found == names


def test_layers_that_are_torchs_own_modules_are_compiled(counter: CompileCounterWithBackend) -> None:
    makes: list[Callable[[], nn.Module]] = [
        partial(nn.Linear, 4, 4),
        partial(nn.Sequential, nn.Linear(4, 4), nn.Tanh()),
        Inherits,
    ] * 2
    x = torch.randn(2, 4, requires_grad=True)
    for make in makes:
        module, plain = compiled(Model((Layer("layer", make),), squared)).layers[0].build(), make()
        plain.load_state_dict(module.state_dict())  # under the same names
        assert torch.equal(module(x), plain(x))
    assert counter.frame_count == 3, "each class is compiled, once for all of one shape"


class Inherits(nn.GELU):
    """Has torch's own forward."""


def squared(output: Tensor, _: Batch) -> Tensor:
    return output.square().mean()
