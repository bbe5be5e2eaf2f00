"""The optimizers that a configuration names, against their formulas, and trained with by pipelines."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig, OptimizerName
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.passes import shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomRows, largest_difference, layers_of, train_unsplit

RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-8


def config(name: OptimizerName, *, beta1: float = 0.95) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=RATE, beta1=beta1, beta2=0.99, epsilon=EPSILON, weight_decay=DECAY)


@pytest.mark.parametrize("name", OptimizerName)
def test_steps_are_those_of_the_formula(name: OptimizerName) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((3, 2), (2,))]
    optimizer = build_optimizer(config(name), weights)
    expected = [weight.detach().clone() for weight in weights]
    first = [torch.zeros_like(weight) for weight in expected]
    second = [torch.zeros_like(weight) for weight in expected]
    beta1, beta2 = 0.95, 0.99
    for step in range(1, 30):
        for position, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.grad = gradient
            m = first[position] = beta1 * first[position] + (1 - beta1) * gradient
            v = second[position] = beta2 * second[position] + (1 - beta2) * gradient**2
            mean = m / (1 - beta1**step)
            if name is OptimizerName.NADAMW:
                mean = beta1 * m / (1 - beta1 ** (step + 1)) + (1 - beta1) * gradient / (1 - beta1**step)
            decayed = expected[position] * (1 - RATE * (DECAY if position == 0 else 0.0))
            expected[position] = decayed - RATE * mean / ((v / (1 - beta2**step)).sqrt() + EPSILON)
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        assert torch.allclose(weight, value, rtol=0, atol=1e-7), "torch keeps the product of NAdam's momenta in float32"


@pytest.mark.parametrize("sharded", [False, True], ids=["all-update", "owner-publishes"])
@pytest.mark.parametrize("name", OptimizerName)
def test_copies_of_a_stage_equal_the_unsplit_model(name: OptimizerName, sharded: bool) -> None:
    model = mlp(num_layers=4, dtype="float64")
    schedule = build("chimera", ScheduleRequest(4, 4, 3))
    run = LocalPipeline(
        model,
        cut=Cut.equal(4, 4, model.edges()),
        schedule=shard_optimizer(schedule) if sharded else schedule,
        batches=RandomRows(),
        optimizer=partial(build_optimizer, config(name)),
        learning_rate=lambda _: RATE,
        max_grad_norm=0.5,
    )
    losses = [loss for _ in range(4) for loss in mean_losses(run.run_window(), num_microbatches=4)]
    expected = train_unsplit(
        model,
        RandomRows(),
        num_updates=12,
        num_microbatches=4,
        learning_rate=RATE,
        max_grad_norm=0.5,
        optimizer=partial(build_optimizer, config(name)),
    )
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    for index, copies in layers_of(run).items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-10 for copy in copies)
