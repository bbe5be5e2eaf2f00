"""Corrections for late gradients, against their formulas, and what they do for a quadratic loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.config import OptimizerConfig

RATE, MOMENTUM = 0.1, 0.8


@pytest.mark.parametrize("delay", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("lookahead", "correction"), [(1.0, 0.0), (0.0, 1.0), (1.5, 0.5)])
def test_steps_are_those_of_the_formula(lookahead: float, correction: float, delay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    inner = torch.optim.SGD([weight], lr=RATE, momentum=MOMENTUM, weight_decay=0.01)
    optimizer = LateGradients(inner, lookahead=lookahead, gradient_correction=correction)
    optimizer.delay = delay
    expected = weight.detach().clone()
    momentum = torch.zeros_like(expected)
    last_gradient = None
    last_step = torch.zeros_like(expected)
    for _ in range(6):
        gradient = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        fed_back = gradient if last_gradient is None else gradient + correction * delay * (gradient - last_gradient)
        momentum = MOMENTUM * momentum + fed_back + 0.01 * expected
        step = -RATE * momentum
        expected = expected + step + lookahead * delay * (step - last_step)
        last_gradient, last_step = gradient, step
        assert torch.allclose(weight, expected, rtol=0, atol=1e-14)
    assert optimizer.state[weight].keys() == {"momentum_buffer"} | ({"late_step"} if lookahead else set()) | (
        {"late_gradient"} if correction else set()
    )


def test_weights_without_a_gradient_stay_as_they_are() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = LateGradients(torch.optim.AdamW(weights), lookahead=1.0, gradient_correction=1.0)
    for _ in range(3):
        weights[1].grad = torch.ones(2)
        optimizer.step()
    assert torch.equal(weights[0], torch.ones(2))
    assert weights[0] not in optimizer.state


def largest_of_last(lookahead: float, correction: float, rate: float) -> float:
    """The largest distance from the optimum in the last of many updates with gradients that are one update late."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    inner = torch.optim.SGD([weight], lr=rate, momentum=0.9, dampening=0.9)
    optimizer = LateGradients(inner, lookahead=lookahead, gradient_correction=correction)
    optimizer.delay = 1.0
    before = weight.detach().clone()
    distances = []
    for _ in range(300):
        weight.grad = before
        before = weight.detach().clone()
        optimizer.step()
        distances.append(float(weight.detach().abs()))
    return max(distances[-20:])


def test_a_quadratic_loss_is_stable_at_rates_at_which_late_gradients_alone_diverge() -> None:
    """The limit of the learning rate times the curvature is 1.0 without, 2.7 with a correction of 1 (benchmarks/staleness.py)."""
    assert largest_of_last(0.0, 0.0, 1.1) > 1
    assert largest_of_last(0.0, 1.0, 1.8) < 1e-3
    assert largest_of_last(1.0, 0.0, 1.8) < 1e-3
    assert largest_of_last(1.0, 0.0, 3.0) > 1


@pytest.mark.parametrize("config", [{"lookahead": 1.0}, {"gradient_correction": 1.0}])
def test_where_nothing_is_late_nothing_is_corrected(config: dict[str, float]) -> None:
    steps = []
    for options in ({}, config):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = build_optimizer(OptimizerConfig(learning_rate=RATE, **options), [("layer.weight", weight)])  # type: ignore[arg-type]
        for number in range(4):
            weight.grad = torch.full_like(weight, number - 1.5)
            optimizer.step()
        steps.append(weight.detach().clone())
    assert torch.equal(steps[0], steps[1])


@pytest.mark.parametrize("delays", [(0.0, 1.0, 0.25, 0.0), (1.0, 0.0), (0.5, 1.0, 0.0)])
def test_weights_step_back_from_ahead_when_nothing_is_late_any_more(delays: tuple[float, ...]) -> None:
    """The look-ahead telescopes: behind an update without delay the weights are those of the optimizer alone."""
    weights = []
    for lookahead in (0.0, 1.0):
        weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = LateGradients(torch.optim.SGD([weight], lr=RATE), lookahead=lookahead, gradient_correction=0.0)
        for delay in delays:
            optimizer.delay = delay
            weight.grad = torch.full_like(weight, 1 + delay)
            optimizer.step()
        weights.append(weight.detach().clone())
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-15)
