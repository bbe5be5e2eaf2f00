"""Optimizers that step each number by itself: some rows alone come to what the whole weight does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raypipe.actors.stage.joined_optimizer import JoinedOptimizer
from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.actors.stage.optimizers import late_rows_refusal
from raypipe.actors.stage.row_steps import STEPS_NUMBERS, stepped_rows
from raypipe.config import OptimizerConfig, WeightGroup
from raypipe.errors import ConfigError

NUM_ROWS = 301
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}],
    "Adagrad": [{"lr_decay": 0.01}, {"fused": True}],
    "Adam": [{"weight_decay": 0.01}, {"amsgrad": True, "fused": True}],
    "AdamW": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "fused": True}, {"foreach": True}],
    "Adamax": [{}],
    "ASGD": [{"lambd": 0.01}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "fused": True}, {}],
}
CASES = [(name, options) for name, choices in OPTIONS.items() for options in choices]


def weights(width: int, dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(width)
    return [nn.Parameter(torch.randn(NUM_ROWS, width, dtype=dtype)) for _ in range(2)]


def check_rows(optimizer: torch.optim.Optimizer, of_optimizer: list[nn.Parameter]) -> None:
    table = of_optimizer[0]
    for _ in range(5):
        for weight in of_optimizer:
            weight.grad = torch.randn_like(weight) * (torch.rand(NUM_ROWS, 1) < 0.5)
        rows = torch.nonzero(torch.rand(NUM_ROWS) < 0.3).flatten()
        before = table.detach().clone()
        found = stepped_rows(optimizer, table, rows)
        assert torch.equal(table, before)
        again = stepped_rows(optimizer, table, rows)
        assert torch.equal(found, again), "the optimizer has changed"
        optimizer.step()
        assert torch.equal(found, table.detach()[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rows_are_stepped_as_in_the_whole_weight(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for width in (1, 3, 12, 33):
        of_optimizer = weights(width, dtype)
        check_rows(getattr(torch.optim, name)(of_optimizer, lr=0.01, **options), of_optimizer)


def test_every_class_that_is_known_is_tried() -> None:
    assert {kind.__name__ for kind in STEPS_NUMBERS} == OPTIONS.keys()


def test_optimizers_around_others_are_seen_through() -> None:
    of_optimizer = weights(7, torch.float32)
    inner = JoinedOptimizer([torch.optim.SGD(of_optimizer[1:], lr=0.1), torch.optim.NAdam(of_optimizer[:1], lr=0.01)])
    late = LateGradients(inner, lookahead=1.0, gradient_correction=0.5)
    late.delay = 1.0
    check_rows(late, of_optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_that_is_not_known_to_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    table, _ = weights(3, torch.float32)
    table.grad = torch.ones_like(table)
    optimizer: Any = kind
    with pytest.raises(ConfigError, match=kind.__name__):
        stepped_rows(optimizer([table], lr=0.1), table, torch.tensor([1]))


def test_a_class_derived_from_a_known_one_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    table, _ = weights(3, torch.float32)
    table.grad = torch.ones_like(table)
    with pytest.raises(ConfigError, match="Own"):
        stepped_rows(Own([table], lr=0.1), table, torch.tensor([1]))


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(max_grad_norm=None),
        OptimizerConfig(max_grad_norm=None, name="sgd"),
        OptimizerConfig(max_grad_norm=None, name="muon"),
        OptimizerConfig(max_grad_norm=None, name="nadamw", lookahead=1.0, groups=(WeightGroup(weights=("*norm*",), optimizer="adam"),)),
    ],
)
def test_configured_optimizers_that_step_numbers_let_rows_be_late(config: OptimizerConfig) -> None:
    assert not late_rows_refusal(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (OptimizerConfig(), "max_grad_norm"),
        (OptimizerConfig(max_grad_norm=None, name="adafactor"), "adafactor"),
        (OptimizerConfig(max_grad_norm=None, groups=(WeightGroup(weights=("*table*",), optimizer="muon"),)), "muon"),
    ],
)
def test_others_do_not(config: OptimizerConfig, named: str) -> None:
    assert named in late_rows_refusal(config)


def test_an_optimizer_of_the_user_s_own_does_not() -> None:
    assert "SGD" in late_rows_refusal(OptimizerConfig(max_grad_norm=None), function=torch.optim.SGD)
