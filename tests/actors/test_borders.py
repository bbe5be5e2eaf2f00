"""What crosses the borders of stages: gradients go back where somebody has one and somebody wants one, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from raypipe.actors.borders import EdgeTensor
from raypipe.actors.local import LocalPipeline
from raypipe.actors.optimizers import build_optimizer
from raypipe.config import OptimizerConfig
from raypipe.cut import Cut
from raypipe.errors import ConfigError
from raypipe.model import Batch, Layer, Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Size
from raypipe.schedules.passes import over_graph, recompute
from tests.actors.oracles import NUM_ROWS, RandomRows, layers_of, train_unsplit

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
        name, Size(num_devices, NUM_MICROBATCHES, 1, num_chunks=len(model.layers) // num_devices if name in {"zb-v", "interleaved"} else 1)
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
    return [tensor for tensors in run.executors[0].wirer.edge_specs[source, source + 1] for tensor in tensors]


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
    for _ in range(3):
        run.run_window()
    whole = train_unsplit(
        model,
        RandomRows(width=WIDTH),
        num_updates=3,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=RATE,
        max_grad_norm=1e9,
        optimizer=adamw,
    )
    begun = pipeline(model, name, num_devices=num_devices)
    for index, copies in layers_of(run).items():
        for copy in copies:
            for found, expected in zip(copy, whole.layers[index], strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        # What the layer gives aside is ignored behind the second.
        stays = [torch.equal(a, b) for a, b in zip(copies[0][2:], layers_of(begun)[index][0][2:], strict=True)]
        assert stays == [index > 1] * 2


def test_gradients_that_nobody_has_or_wants_are_not_sent() -> None:
    run = pipeline(model_of(First, User, Block, Last), "1f1b", num_devices=4)
    assert [(tensor.takes_gradient, tensor.returns) for tensor in border(run, 0)] == [(True, True), (False, False), (True, True)]
    assert [(tensor.takes_gradient, tensor.returns) for tensor in border(run, 1)] == [(True, True), (False, False), (True, False)]
    second = run.executors[1].wirer.wire(run.jobs[1], NUM_ROWS)
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
    """Has a way to its input, or uses it, for rows other than zeros alone."""

    def __init__(self, gives: bool) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y, zeros = self.main(x), not x.any()
        if self.gives:
            return y, mask, torch.zeros_like(x) if zeros else self.side(x)
        return y if zeros else y + side, mask, y


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("gives", "problem"),
    [
        (True, r"output 2 of layer 'layer-1' takes a gradient in \S+, but had none when .* over zeros.* adding 0 times"),
        (False, r"output 2 of layer 'layer-0' gets a gradient from \S+, but had none when"),
    ],
)
def test_a_way_of_gradients_that_opens_later_is_refused(name: str, again: bool, gives: bool, problem: str) -> None:
    model = model_of(First, partial(Sometimes, gives), User, Last)
    run = pipeline(model, name, num_devices=4, again=(0, 1, 2) if again else ())
    with pytest.raises(ConfigError, match=problem):
        run.run_window()
