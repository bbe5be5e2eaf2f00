"""Layers of `benchmarks/stretched.py` take several times their own CPU seconds and compute what they compute."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from stretched import stretched
from torch import Tensor, nn

from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig
from raypipe.model import Batch, Layer, Model
from raypipe.models.gpt import gpt
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomTokens, layers_of

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=None)
FACTOR = 6.0
BUSY_S = 0.01


def busy() -> None:
    end_s = time.thread_time() + BUSY_S
    while time.thread_time() < end_s:
        pass


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        busy()
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        busy()
        return gradients[0]


class BusyLayer(nn.Module):
    """A layer that computes so long in its forward, and where it has inputs as long in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor) -> Tensor:
        scaled: Tensor = self.weight * given
        if not given.requires_grad:
            scaled = self.weight * 1.0
        output: Tensor = _Busy.apply(scaled)  # type: ignore[no-untyped-call]
        return output


def test_forwards_and_backwards_take_several_times_their_cpu_seconds() -> None:
    layers = (Layer("first", BusyLayer, inputs=(), batch=("inputs",)), Layer("second", BusyLayer))
    model = stretched(Model(layers, lambda output, _: output.sum()), FACTOR)
    modules = [build_layer(layer, index=index, seed=0) for index, layer in enumerate(model.layers)]
    began_s = time.perf_counter()
    output = modules[1](modules[0](torch.ones(1)))
    forward_s = time.perf_counter() - began_s
    assert forward_s >= 2 * FACTOR * BUSY_S
    began_s = time.perf_counter()
    torch.autograd.backward(model.loss(output, {}))
    assert time.perf_counter() - began_s >= 2 * FACTOR * BUSY_S


def test_waits_are_not_stretched() -> None:
    def slow(output: Tensor, _: Batch) -> Tensor:
        time.sleep(FACTOR * BUSY_S)
        busy()
        return output.sum()

    model = stretched(Model((Layer("only", BusyLayer, inputs=(), batch=("inputs",)),), slow), FACTOR)
    began_s = time.perf_counter()
    model.loss(torch.ones(1), {})
    assert FACTOR * BUSY_S <= time.perf_counter() - began_s < 5 * FACTOR * BUSY_S


@pytest.mark.parametrize("name", ["1f1b", "pipedream-2bw"])
def test_stretched_models_train_to_the_same_bits(name: str) -> None:
    model = gpt(num_layers=2, d_model=8, num_heads=2, sequence_length=16, vocabulary_size=256, dtype="float64")
    schedule = build(name, ScheduleRequest(2, 2, 2))

    def trained(model: Model) -> list[list[Tensor]]:
        run = LocalPipeline(
            model,
            cut=Cut.equal(len(model.layers), 2, model.edges()),
            schedule=schedule,
            batches=RandomTokens(),
            optimizer=partial(build_optimizer, OPTIMIZER),
            learning_rate=partial(OPTIMIZER.rate, num_updates=2),
        )
        run.run_window()
        return [copies[0] for copies in layers_of(run).values()]

    plain, found = trained(model), trained(stretched(model, 1.5))
    for mine, theirs in zip(found, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_names_of_weights_stay() -> None:
    model = gpt(num_layers=1, d_model=8, num_heads=2)
    for layer in model.layers:
        assert list(layer.build().state_dict()) == list(stretched(replace(model, layers=(layer,)), 2.0).layers[0].build().state_dict())
