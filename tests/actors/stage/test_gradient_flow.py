"""What crosses the borders of stages: gradients go back where somebody has one and somebody wants one, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.gradient_flow import EdgeTensor
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig
from raypipe.errors import ConfigError
from raypipe.model import Batch, Layer, Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.passes import over_graph, recompute
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import NUM_ROWS, RandomRows, layers_of, off_unsplit

WIDTH, RATE, NUM_MICROBATCHES = 8, 0.05, 4
adamw = partial(build_optimizer, OptimizerConfig(learning_rate=RATE, weight_decay=0.1))


class First(nn.Module):
    """Gives x, a mask that no weight is behind, and what the next layer alone may use."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.side = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.main(x).tanh(), (x > 0).to(x), self.side(x)


class Block(First):
    """Uses x and mask alone."""

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.main(x) * mask).tanh(), mask, self.side(x.detach())


class User(First):
    """Uses what the layer before gives aside, too; passes it on as it is."""

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.main(x) + self.side(side)).tanh(), mask, side


class Last(First):
    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> Tensor:  # type: ignore[override]
        return self.main(x) * mask  # type: ignore[no-any-return]


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["targets"])


def model_of(*builds: Callable[[], nn.Module]) -> Model:
    first, *rest = builds
    layers = (Layer("layer-0", first, inputs=(), batch=("inputs",)), *(Layer(f"layer-{n}", build) for n, build in enumerate(rest, start=1)))
    return Model(layers, loss)


def pipeline(model: Model, name: str, *, num_devices: int, again: Sequence[int] = ()) -> LocalPipeline:
    schedule = build(
        name,
        ScheduleRequest(
            num_devices, NUM_MICROBATCHES, 1, num_chunks=len(model.layers) // num_devices if name in {"zb-v", "interleaved"} else 1
        ),
    )
    cut = Cut.equal(len(model.layers), schedule.num_stages, model.edges(), model.tied_layers())
    return LocalPipeline(
        model,
        cut=cut,
        schedule=over_graph(recompute(schedule, again) if again else schedule, cut.graph),
        batches=RandomRows(width=WIDTH),
        optimizer=adamw,
        learning_rate=lambda _: RATE,
    )


def border(run: LocalPipeline, source: int) -> list[EdgeTensor]:
    return [tensor for tensors in run.executors[0].edges.specs[source, source + 1] for tensor in tensors]


@pytest.mark.parametrize(
    ("name", "num_devices", "again"),
    [
        ("gpipe", 4, ()),
        ("1f1b", 2, ()),
        ("1f1b", 4, (0, 1, 2)),
        ("interleaved", 2, ()),
        ("zb-h1", 4, ()),
        ("zb-h1", 2, (0,)),
        ("zb-v", 2, ()),
        ("chimera", 4, ()),
        ("chimera-halving", 4, ()),
    ],
)
def test_weights_behind_what_later_stages_ignore_stay_as_in_one_process(name: str, num_devices: int, again: tuple[int, ...]) -> None:
    model = model_of(First, User, Block, Last)
    run = pipeline(model, name, num_devices=num_devices, again=again)
    assert off(run, model) < 1e-13
    begun = pipeline(model, name, num_devices=num_devices)
    for index, copies in layers_of(run).items():
        # What the layer gives aside is ignored behind the second.
        stays = [torch.equal(a, b) for a, b in zip(copies[0][2:], layers_of(begun)[index][0][2:], strict=True)]
        assert stays == [index > 1] * 2


def test_gradients_that_nobody_has_or_wants_are_not_sent() -> None:
    run = pipeline(model_of(First, User, Block, Last), "1f1b", num_devices=4)
    assert [(tensor.takes_gradient, tensor.returns) for tensor in border(run, 0)] == [(True, True), (False, False), (True, True)]
    assert [(tensor.takes_gradient, tensor.returns) for tensor in border(run, 1)] == [(True, True), (False, False), (True, False)]
    second = run.executors[1].bound(run.programs[1], NUM_ROWS)
    coming = {(peer, len(expected.tensors)) for peer, messages in second.incoming.items() for expected in messages}
    leaving = {(peer, len(expected.tensors)) for peer, messages in second.outgoing.items() for expected in messages}
    assert coming == {(0, 3), (2, 1)}
    assert leaving == {(0, 2), (2, 3)}


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    return build().requires_grad_(False)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_nothing_goes_back_to_stages_that_are_frozen(name: str) -> None:
    model = model_of(partial(frozen, First), partial(frozen, Block), Block, Last)
    run = pipeline(model, name, num_devices=4)
    before = layers_of(run)[1][0][0].clone(), layers_of(run)[2][0][0].clone()
    run.run_window()
    assert not any(tensor.returns for source in (0, 1) for tensor in border(run, source))
    assert [tensor.returns for tensor in border(run, 2)] == [True, False, False]
    assert torch.equal(layers_of(run)[1][0][0], before[0])
    assert not torch.equal(layers_of(run)[2][0][0], before[1])


class Sometimes(First):
    """Has a way to its input, or uses it, where a rule says so."""

    def __init__(self, gives: bool, rule: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.gives = gives
        self.rule = rule

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y, opens = self.main(x), self.rule(self, x)
        if self.gives:
            return y, mask, self.side(x) if opens else torch.zeros_like(x)
        return y + side if opens else y, mask, y


def values(_: nn.Module, x: Tensor) -> bool:
    return bool(x.any())


def zeros(_: nn.Module, x: Tensor) -> bool:
    return not x.any() or bool(x.abs().max() < 1)


def training(module: nn.Module, _: Tensor) -> bool:
    return module.training


def late(_: nn.Module, x: Tensor) -> bool:
    """Neither zeros nor noise, of which none is below 0."""
    return bool((x < 0).any())


def off(run: LocalPipeline, model: Model) -> float:
    """How far three updates are from those of one process."""
    for _ in range(3):
        run.run_window()
    rows = RandomRows(width=WIDTH)
    return off_unsplit(run, model, rows, num_updates=3, num_microbatches=NUM_MICROBATCHES, learning_rate=RATE, optimizer=adamw)


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("rule", [values, zeros, training])
def test_a_way_of_gradients_that_some_values_open_is_seen_before_training(rule: Callable[[nn.Module, Tensor], bool], gives: bool) -> None:
    model = model_of(First, partial(Sometimes, gives, rule), User, Last)
    assert off(pipeline(model, "zb-h1", num_devices=4), model) < 1e-13


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("again", [(), (0, 1, 2)])
@pytest.mark.parametrize(
    ("gives", "problem"),
    [
        (True, r"output 2 of layer 'layer-1' takes a gradient in \S+, but none of the forwards.*'layer-1', \.\.\., gradients_vary=True"),
        (False, r"output 2 of layer 'layer-0' gets a gradient from \S+, but none of"),
    ],
)
def test_a_way_of_gradients_that_opens_later_is_refused_unless_it_may(name: str, again: tuple[int, ...], gives: bool, problem: str) -> None:
    model = model_of(First, partial(Sometimes, gives, late), User, Last)
    with pytest.raises(ConfigError, match=problem):
        pipeline(model, name, num_devices=4, again=again).run_window()
    varies = replace(model.layers[1 if gives else 0], gradients_vary=True)
    layers = tuple(varies if layer.name == varies.name else layer for layer in model.layers)
    told = replace(model, layers=layers)
    assert off(pipeline(told, name, num_devices=4, again=again), told) < 1e-13


class Draws(First):
    """Draws by its mask: of zeros it cannot in training."""

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        if self.training and not mask.abs().sum():
            raise ValueError("nothing to draw from")
        return self.main(x) * mask, mask, side


def test_layers_that_training_on_zeros_fails_in_train() -> None:
    model = model_of(First, Draws, User, Last)
    assert off(pipeline(model, "1f1b", num_devices=4), model) < 1e-13


class Picky(First):
    """Trains on what it is given in training alone."""

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        if self.training and not late(self, x):
            raise ValueError("out of range")
        return self.main(x) * mask, mask, side


def test_what_could_not_be_tried_in_training_gets_all_gradients() -> None:
    run = pipeline(model_of(First, Picky, User, Last), "1f1b", num_devices=4)
    run.run_window()
    assert [(tensor.takes_gradient, tensor.returns) for tensor in border(run, 1)] == [(True, True)] * 3


class Writes(First):
    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self.main(x), mask.mul_(2), side


def test_a_layer_that_writes_into_what_another_stage_sent_is_refused() -> None:
    model = model_of(First, Writes, User, Last)
    with pytest.raises(ConfigError, match=r"stage 1 .* writes in place into output 1 of layer 'layer-0', which .* clone"):
        pipeline(model, "1f1b", num_devices=4)


class Notes(First):
    """Notes what it saw in containers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.counts = {"forwards": 0}

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        self.seen.append(len(x))
        self.counts["forwards"] += 1
        return self.main(x), mask, side


def test_containers_of_layers_are_as_before() -> None:
    run = pipeline(model_of(First, Notes, User, Last), "1f1b", num_devices=4)
    layer = run.weights[1][1].module.layers["1"]
    assert isinstance(layer, Notes)
    assert (layer.seen, layer.counts) == ([], {"forwards": 0})
