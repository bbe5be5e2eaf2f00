"""Layers that cost the same are measured once; what differs in anything that could cost time is not taken for the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypipe.actors.devices import CPU
from raypipe.actors.measure.alike import _Walk
from raypipe.actors.measure.layer_costs import Effort
from raypipe.actors.measure.layers import _Comparison, _Maker, measure_layers
from raypipe.actors.stage.gradient_flow import LayerOutput
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.precision import prepare
from raypipe.config import OptimizerConfig, Precision
from raypipe.model import Batch, Layer, Model
from raypipe.models.gpt import gpt

ROWS, WIDTH = 2, 16
ONCE = Effort(repeats=1, warm_up=0)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.tanh(self.linear(x))
        return output


class Deeper(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Recomputing(Block):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False) if self.recomputes else super().forward(x)
        return output


class ByPosition(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.layer_idx == 1 else super().forward(x)


class ByPositionInTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.training and self.layer_idx == 1 else super().forward(x)


class Joined(Block):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x) + others[0].detach()


class Sleeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(float(str(self.seconds)))
        return super().forward(x)


def made_with(power: int) -> type[nn.Module]:
    """Two calls make classes of one name."""

    class Made(Block):
        def forward(self, x: Tensor) -> Tensor:
            if power == 2:
                time.sleep(0)
            return super().forward(x)

    return Made


def model(*builds: Callable[[], nn.Module]) -> Model:
    first = Layer("first", Block, batch=("inputs",))
    return Model((first, *(Layer(f"layer-{at}", build) for at, build in enumerate(builds)), Layer("last", Block)), mean)


def mean(output: Tensor, _: Batch) -> Tensor:
    return output.mean()


def num_measured(made: Model, *, precision: Precision = Precision.FLOAT32, rows: Batch | None = None) -> int:
    """How many layers are measured."""
    told: list[str] = []
    measured = measure_layers(
        made,
        rows or {"inputs": torch.zeros(ROWS, WIDTH)},
        optimizer=partial(build_optimizer, OptimizerConfig()),
        seed=0,
        effort=ONCE,
        precision=precision,
        on_layer=told.append,
    )
    assert [layer.name for layer in measured] == [layer.name for layer in made.layers]
    return sum(text.startswith("measuring layer") for text in told)


OTHERS = 2  # the first layer, which gives no gradient back, and the last with the loss


@pytest.mark.parametrize("precision", list(Precision))
def test_equal_layers_are_measured_once(precision: Precision) -> None:
    assert num_measured(model(Block, Block, Block), precision=precision) == OTHERS + 1


def test_the_blocks_of_a_gpt_are_measured_once_and_keep_their_names() -> None:
    made = gpt(num_layers=5, d_model=16, num_heads=2, sequence_length=8)
    rows = torch.zeros(2, 8, dtype=torch.long)
    assert num_measured(made, rows={"tokens": rows, "targets": rows}) == 3


def test_numbers_of_layers_may_differ_where_the_layer_makes_nothing_of_them() -> None:
    assert num_measured(model(*(partial(Block, layer_idx=at) for at in range(3)))) == OTHERS + 1
    assert num_measured(model(*(partial(ByPosition, layer_idx=at) for at in range(3)))) == OTHERS + 2
    assert num_measured(model(*(partial(ByPositionInTraining, layer_idx=at) for at in range(3)))) == OTHERS + 2


def test_a_layer_that_is_alike_is_tried_once_and_passes_on_what_full_trials_find() -> None:
    inputs = {"a": ("first",), "b": ("a", "first"), "c": ("b",), "d": ("c", "b")}
    layers = [Layer(name, Joined if len(given) > 1 else Block, inputs=given) for name, given in inputs.items()]
    made = Model((Layer("first", Block, batch=("inputs",)), *layers, Layer("last", Block)), mean)
    rows = {"inputs": torch.zeros(ROWS, WIDTH)}
    runs: list[int] = []

    def count(module: nn.Module, _: object) -> None:
        if isinstance(module, Block):
            runs.append(1)

    counting = nn.modules.module.register_module_forward_pre_hook(count)
    maker = _Maker(made, partial(build_optimizer, OptimizerConfig()), seed=0, precision=Precision.FLOAT32, on=CPU)
    compared, found = _Comparison(maker, rows), []
    for _ in made.layers:
        runs.clear()
        compared.add_next()
        found.append(len(runs))
    counting.remove()
    assert found == [3, 3, 3, 1, 1, 3]
    whole: dict[int, tuple[LayerOutput, ...]] = {}
    for index in range(len(made.layers)):
        whole |= prepare(maker.weights(index), whole, rows, num_rows=ROWS)
    assert compared.outputs == whole
    assert {index: [output.reaches for output in outputs] for index, outputs in whole.items()}[4] == [{(3, 0)}]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Block, Deeper),
        (partial(Block, scale=1.0), partial(Block, scale=2.0)),
        (partial(Block, depth=1), partial(Block, depth=2)),
        (partial(Block, mode="fast"), partial(Block, mode="slow")),
        (partial(Block, steps=[1, 2]), partial(Block, steps=[1, 3])),
        (partial(Block, table={"a": 1}), partial(Block, table={"a": 2})),
        (partial(Block, function=math.sin), partial(Block, function=math.cos)),
        (partial(Block, function=lambda x: x + 1), partial(Block, function=lambda x: x + 2)),
        (partial(Block, part=nn.Dropout(0.1)), partial(Block, part=nn.Dropout(0.2))),
        (partial(Block, kept=torch.zeros(2)), partial(Block, kept=torch.zeros(3))),
        (partial(Recomputing, recomputes=False), partial(Recomputing, recomputes=True)),
        (partial(Sleeping, seconds=0.0), partial(Sleeping, seconds=0.001)),
        (made_with(1), made_with(2)),
    ],
)
def test_layers_that_differ_are_both_measured(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    assert num_measured(model(one, one)) == OTHERS + 1
    assert num_measured(model(one, other)) == OTHERS + 2


def test_frozen_weights_other_inputs_and_what_cannot_be_compared_are_measured_apart() -> None:
    def frozen() -> nn.Module:
        return Block().requires_grad_(requires_grad=False)

    assert num_measured(model(Block, frozen)) == OTHERS + 2
    assert num_measured(model(partial(nn.Flatten, 1), partial(nn.Unflatten, 1, (4, 4)), partial(nn.Flatten, 1))) == OTHERS + 3
    assert num_measured(model(partial(Block, opaque=iter(())), partial(Block, opaque=iter(())))) == OTHERS + 2


def test_hooks_are_compared() -> None:
    def hooked() -> nn.Module:
        block = Block()
        block.register_forward_hook(lambda module, arguments, output: output * 2)
        return block

    assert num_measured(model(hooked, hooked)) == OTHERS + 1
    assert num_measured(model(Block, hooked)) == OTHERS + 2


def test_compiled_layers_are_told_apart_by_their_modules_alone() -> None:
    def digest(index: int) -> str:
        block = Block(layer_idx=index)
        block._compiled_call_impl = print  # as `Module.compile` sets it, which takes seconds
        walk = _Walk()
        walk.add(block)
        return walk.digest()

    assert digest(0) == digest(0) != digest(1)


def test_measuring_stops_when_it_is_exact_or_has_taken_long_enough() -> None:
    runs: list[int] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(len(x))
            time.sleep(0.02)
            return super().forward(x)

    def count(effort: Effort) -> tuple[int, int]:
        """The forwards on all rows, and on half of them."""
        runs.clear()
        measure_layers(
            model(Counting),
            {"inputs": torch.zeros(ROWS, WIDTH)},
            optimizer=partial(build_optimizer, OptimizerConfig()),
            seed=0,
            effort=effort,
        )
        return runs.count(ROWS), runs.count(ROWS // 2)

    full, half = count(Effort(repeats=8, warm_up=0))
    assert half == (8 + 1) * 2, "one of them warms up"
    assert count(Effort(repeats=8, warm_up=0, spread=10.0)) == (full - 5 * 2, (3 + 1) * 2)
    assert count(Effort(repeats=8, warm_up=0, most_s=0.001)) == (full - 7 * 2, 0)
    assert count(Effort(estimates=True))[0] < full - 8 * 2
