"""Layers that people write and dense ones are not: other orders of memory, hooks, randomness, buffers, weights without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint, load_modules, load_stages
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.snapshot import save_stages
from raypipe.actors.stage.state import export_layers, import_layers
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.artifacts.checkpoint_files import CheckpointIndex
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig, OptimizerName, Precision
from raypipe.errors import ConfigError
from raypipe.model import Batch, Layer, Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, WeightRule
from raypipe.schedules.lower import Compute
from raypipe.schedules.passes import over_graph, recompute
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import layers_of, off_unsplit

WIDTH, RATE = 8, 0.01
NUM_MICROBATCHES = 4
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Rows:
    """Four rows of a shape, a pure function of the microbatch's number."""

    shape: tuple[int, ...] = (WIDTH,)

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        generator = torch.Generator().manual_seed(1000 + microbatch)
        first, end = (round(4 * share) for share in rows)
        return {name: torch.randn(4, *self.shape, generator=generator)[first:end] for name in ("inputs", "targets")}


def squared(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["targets"])


def noisy(output: Tensor, batch: Batch) -> Tensor:
    return squared(output + torch.rand_like(output), batch)


def model_of(*builds: Build, loss: Callable[[Tensor, Batch], Tensor] = squared, ties: Any = ()) -> Model:
    first, *rest = builds
    layers = (Layer("layer-0", first, inputs=(), batch=("inputs",)), *(Layer(f"layer-{n}", build) for n, build in enumerate(rest, start=1)))
    return Model(layers, loss, ties)


def dense() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def sgd(weights: list[nn.Parameter] | NamedWeights) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=RATE)


adamw = partial(build_optimizer, OptimizerConfig(learning_rate=RATE))
nadamw = partial(build_optimizer, OptimizerConfig(name=OptimizerName.NADAMW, learning_rate=RATE))


def pipeline(
    model: Model,
    name: str = "1f1b",
    *,
    num_devices: int = 2,
    num_updates: int = 1,
    rows: Rows | None = None,
    again: Sequence[int] = (),
    optimizer: Optimizer = adamw,
    precision: Precision = Precision.FLOAT32,
) -> LocalPipeline:
    schedule = build(name, ScheduleRequest(num_devices, NUM_MICROBATCHES, num_updates))
    cut = Cut.equal(len(model.layers), schedule.num_stages, model.edges(), model.tied_layers())
    if again:
        schedule = recompute(schedule, again)
    return LocalPipeline(
        model,
        cut=cut,
        schedule=over_graph(schedule, cut.graph),
        batches=rows or Rows(),
        optimizer=optimizer,
        learning_rate=lambda _: RATE,
        precision=precision,
    )


def run(trained: LocalPipeline, num_windows: int) -> list[float]:
    return [loss for _ in range(num_windows) for loss in mean_losses(trained.run_window(), num_microbatches=NUM_MICROBATCHES)]


def off(trained: LocalPipeline, model: Model, *, num_updates: int, rows: Rows | None = None) -> float:
    """How far the weights of all copies are from those of the unsplit model."""
    return off_unsplit(
        trained, model, rows or Rows(), num_updates=num_updates, num_microbatches=NUM_MICROBATCHES, learning_rate=RATE, optimizer=adamw
    )


def save(trained: LocalPipeline, model: Model, folder: Path) -> Checkpoint:
    for on_device in trained.weights:
        for weights in on_device.values():
            save_stages(folder, [weights])
    names = tuple(layer.name for layer in model.layers)
    return Checkpoint.finish(folder, CheckpointIndex(update=1, layers=names, model="m", seed=0))


def load(trained: LocalPipeline, model: Model, folder: Path) -> None:
    for on_device in trained.weights:
        for weights in on_device.values():
            load_stages(folder, [weights])


# The order of memory


def convolution() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3, padding=1)
    layer.weight = nn.Parameter(layer.weight.data.contiguous(memory_format=torch.channels_last))
    return layer


@pytest.mark.parametrize("name", ["1f1b", "chimera", "amdp-flush"])
def test_weights_with_the_channels_last_equal_the_unsplit_model(name: str) -> None:
    model, rows = model_of(*[convolution] * 4), Rows((3, 6, 6))
    trained = pipeline(model, name, num_devices=4, rows=rows)
    run(trained, 4)
    assert off(trained, model, num_updates=4, rows=rows) < 1e-6


def test_moments_come_back_in_the_order_of_their_weights(tmp_path: Path) -> None:
    model, rows = model_of(*[convolution] * 2), Rows((3, 6, 6))
    whole, half, resumed = (pipeline(model, rows=rows) for _ in range(3))
    run(whole, 4)
    run(half, 2)
    save(half, model, tmp_path)
    load(resumed, model, tmp_path)
    resumed.num_windows = resumed.num_updates = 2
    run(resumed, 2)
    for index, copies in layers_of(whole).items():
        assert all(torch.equal(a, b) for a, b in zip(copies[0], layers_of(resumed)[index][0], strict=True))


def transposed() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight = nn.Parameter(layer.weight.data.t())
    return layer


def test_a_tied_weight_that_lies_transposed_trains_alike_on_one_stage_and_on_two() -> None:
    model = model_of(transposed, nn.Tanh, nn.Tanh, transposed, ties=((("layer-0", "weight"), ("layer-3", "weight")),))
    one, two = pipeline(model, num_devices=1), pipeline(model, num_devices=2)
    run(one, 4)
    run(two, 4)
    assert torch.allclose(layers_of(one)[0][0][0], layers_of(two)[0][0][0], rtol=0, atol=1e-6)


# Weights


class Replacing(nn.Linear):
    def __init__(self, *, always: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.training:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1.0)
        return super().forward(x)


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("name", ["1f1b", "async-1f1b", "pipedream-2bw"])
def test_a_layer_that_puts_another_tensor_in_its_weights_place_is_refused(name: str, precision: Precision, always: bool) -> None:
    with pytest.raises(ConfigError, match=r"layer 'layer-0' .* its weight 'weight'.*in place"):
        run(pipeline(model_of(partial(Replacing, always=always), dense), name, num_updates=4, precision=precision), 1)


class Hooked(nn.Module):
    """Trains the first half of its rows alone."""

    def __init__(self, *, when_summed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        kept = (torch.arange(WIDTH) < WIDTH // 2).float()[:, None]

        def halve(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(kept)

        if when_summed:
            self.layer.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        else:
            self.layer.weight.register_hook(lambda gradient: gradient * kept)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("when_summed", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "async-1f1b", "pipedream-2bw"])
def test_hooks_of_weights_run_whatever_version_is_computed_with(name: str, when_summed: bool) -> None:
    model = model_of(partial(Hooked, when_summed=when_summed), dense)
    trained = pipeline(model, name, num_updates=4, optimizer=sgd)
    before = layers_of(trained)[0][0][0].clone()
    run(trained, 2)
    moved = (layers_of(trained)[0][0][0] - before).abs().amax(dim=1)
    assert (moved[: WIDTH // 2] > 0).all()
    assert (moved[WIDTH // 2 :] == 0).all()


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    kept = (torch.arange(WIDTH) < WIDTH // 2).float()[:, None]
    layer.weight.register_hook(lambda gradient: gradient * kept)  # type: ignore[no-untyped-call]
    return layer


def test_hooks_of_a_tied_weight_run_on_all_of_its_stages() -> None:
    model = model_of(hooked, nn.Tanh, nn.Tanh, hooked, ties=((("layer-0", "weight"), ("layer-3", "weight")),))
    trained = pipeline(model, optimizer=sgd)
    before = layers_of(trained)[0][0][0].clone()
    run(trained, 2)
    moved = (layers_of(trained)[3][0][0] - before).abs().amax(dim=1)
    assert (moved[: WIDTH // 2] > 0).all()
    assert (moved[WIDTH // 2 :] == 0).all()


class Experts(nn.Module):
    """One of two layers, by the rows; the other has no gradient. A third one never has."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(dense() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[int(x[0, 0] > 0)](x))


@pytest.mark.parametrize("name", ["1f1b", "chimera", "amdp-flush"])
def test_weights_without_a_gradient_stay_as_they_are_also_where_there_are_copies(name: str) -> None:
    model = model_of(*[Experts] * 4)
    trained = pipeline(model, name, num_devices=4)
    run(trained, 8)
    assert off(trained, model, num_updates=8) < 1e-5


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // 2 + 1
        self.weight = nn.Parameter(torch.randn(size, size, dtype=torch.cfloat) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=WIDTH)
        return result


def test_complex_weights_train_with_the_default_optimizer() -> None:
    model = model_of(Complex, dense)
    trained = pipeline(model)
    run(trained, 2)
    assert off(trained, model, num_updates=2) < 1e-6


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_moments_of_a_weight_of_one_number_are_loaded_to_where_it_is() -> None:
    model = model_of(Scaled, dense)
    first = pipeline(model, optimizer=nadamw)
    run(first, 2)
    stage = StageModule(model, Cut.equal(2, 2, model.edges()), 0, seed=0, on=torch.device("meta"))
    elsewhere = Weights(stage, optimizer=nadamw, rule=WeightRule.FLUSH)
    import_layers(elsewhere, export_layers(first.weights[0][0]))
    assert elsewhere.optimizer is not None
    state = elsewhere.optimizer.state[elsewhere.masters[elsewhere.names.index("layers.0.scale")]]
    assert {key: value.device.type for key, value in state.items()} == {
        "step": "cpu",
        "mu_product": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


# Outputs and inputs


class WithNothing(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.tanh(super().forward(x)), None


class TakesNothing(nn.Linear):
    def forward(self, x: Tensor, cache: None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_what_is_no_tensor_may_pass_within_a_stage(name: str) -> None:
    model = model_of(partial(WithNothing, WIDTH, WIDTH), partial(TakesNothing, WIDTH, WIDTH), dense, dense)
    assert all(loss > 0 for loss in run(pipeline(model, name), 2))


class Counts(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.tanh(super().forward(x)), (x > 0).long()


class CountsOn(nn.Linear):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        counts += 1
        return super().forward(x) * counts


def test_a_forward_that_runs_again_finds_what_another_wrote_into() -> None:
    model = model_of(partial(Counts, WIDTH, WIDTH), partial(CountsOn, WIDTH, WIDTH))
    kept, again = pipeline(model), pipeline(model, again=(1,))
    assert run(kept, 2) == run(again, 2)


# Randomness


class Dropping(nn.Module):
    """Notes what it drops; the rate is set from outside, and one number more is drawn on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rate = 0.0
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(torch.tanh(self.layer(x)), self.rate, self.training)
        if self.training and self.rate:
            self.masks.append((y == 0).detach())
        return y


def test_a_layer_that_drops_out_later_drops_the_same_when_its_forward_runs_again() -> None:
    trained = pipeline(model_of(Dropping, dense), again=(0,))
    run(trained, 1)
    layer = trained.weights[0][0].module.layers["0"]
    assert isinstance(layer, Dropping)
    layer.rate = 0.5
    run(trained, 1)
    ops = [op for item in trained.programs[0].items if isinstance(item, Compute) for op in item.ops]
    masks = dict(zip([op for op in ops if op.kind in {OpKind.FORWARD, OpKind.RECOMPUTE}], layer.masks, strict=True))
    found = [masks[Op(OpKind.FORWARD, 0, number)] for number in range(NUM_MICROBATCHES)]
    assert all(torch.equal(mask, masks[Op(OpKind.RECOMPUTE, 0, number)]) for number, mask in enumerate(found))
    assert not torch.equal(found[0], found[1])


def test_a_loss_that_draws_gives_the_same_whatever_the_cut_and_when_its_forward_runs_again() -> None:
    model = model_of(dense, dense, loss=noisy)
    one, two, again = pipeline(model, num_devices=1), pipeline(model), pipeline(model, again=(1,))
    assert run(one, 2) == pytest.approx(run(two, 2), abs=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(layers_of(two)[1][0], _after(again, 2), strict=True))


def _after(trained: LocalPipeline, num_windows: int) -> list[Tensor]:
    run(trained, num_windows)
    return layers_of(trained)[1][0]


# Buffers and checkpoints


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


def test_running_statistics_are_of_training_alone() -> None:
    trained = pipeline(model_of(Normed, dense))
    layer = trained.weights[0][0].module.layers["0"]
    run(trained, 1)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert before["norm.num_batches_tracked"] == NUM_MICROBATCHES
    trained.executors[0].warm_up(Rows().batch(0, (0.0, 1.0)), trained.programs[:1])
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


@lru_cache
def triangle() -> Tensor:
    return torch.tril(torch.ones(WIDTH, WIDTH))


class Masked(nn.Module):
    """Has a buffer that all layers of its kind in a process share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = dense()
        self.register_buffer("mask", triangle())

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mask, Tensor)
        result: Tensor = x + self.layer(x @ self.mask)
        return result


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2)])
def test_buffers_that_layers_share_are_read_by_any_cut(before: int, after: int, tmp_path: Path) -> None:
    model = model_of(*[Masked] * 4)
    written, read = pipeline(model, num_devices=before), pipeline(model, num_devices=after)
    run(written, 1)
    checkpoint = save(written, model, tmp_path)
    load(read, model, tmp_path)
    for index, copies in layers_of(written).items():
        assert all(torch.equal(a, b) for a, b in zip(copies[0], layers_of(read)[index][0], strict=True))
    assert len(load_modules(checkpoint, model)) == 4


class Overlapping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        table = torch.arange(16.0)
        self.register_buffer("table", table)
        self.register_buffer("head", table[:WIDTH])


def test_buffers_that_overlap_are_saved(tmp_path: Path) -> None:
    model = model_of(Overlapping, dense)
    trained = pipeline(model)
    run(trained, 1)
    save(trained, model, tmp_path)
    load(pipeline(model), model, tmp_path)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


class Sparse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("table", torch.eye(WIDTH).to_sparse())


class Expanded(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("ids", torch.arange(8.0).expand(2, -1))


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (Extra, r"'_extra_state' of layer 'layer-0' is dict"),
        (Sparse, r"'table' of layer 'layer-0' is a tensor of torch.sparse_coo"),
        (Expanded, r"'ids' of layer 'layer-0' has .*clone"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_before_training(layer: Build, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        pipeline(model_of(layer, dense))


class BeginsByWhatItSees(nn.Module):
    """Scales by what its first rows are like, as ActNorm does (Kingma and Dhariwal 2018), and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.has_begun = False
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_begun:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std() + 1e-6))
            self.has_begun = True
        self.count += 1
        scaled: Tensor = x * self.scale
        return scaled


def test_layers_that_begin_by_what_they_see_first_see_rows_and_no_zeros() -> None:
    trained = pipeline(model_of(dense, dense, BeginsByWhatItSees, dense))
    layer: Any = trained.weights[1][1].module.layers["2"]
    assert (layer.scale.item(), layer.has_begun, layer.count.item()) == (1.0, False, 0)
    trained.executors[1].warm_up(Rows().batch(0, (0.0, 1.0)), trained.programs[1:])
    assert (layer.scale.item(), layer.has_begun, layer.count.item()) == (1.0, False, 0)
    run(trained, 1)
    assert layer.count.item() == NUM_MICROBATCHES
    assert 0.1 < layer.scale.item() < 100


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, _: output.detach().mean(), "has no gradient"),
        (lambda *_: 1.0, "is of type float"),
        (lambda output, _: output, r"has shape \("),
    ],
)
def test_a_loss_that_trains_nothing_is_refused(loss: Callable[..., Tensor], said: str) -> None:
    trained = pipeline(replace(model_of(dense, dense), loss=loss))
    with pytest.raises(ConfigError, match=f"the model's loss {said}"):
        run(trained, 1)


def test_a_weight_that_was_given_before_is_refused() -> None:
    module = dense()
    build_layer(Layer("a", lambda: module), index=0, seed=0)
    with pytest.raises(ConfigError, match=r"layer 'b': .* layer 'a' .* copy.deepcopy"):
        build_layer(Layer("b", lambda: module), index=0, seed=0)
    build_layer(Layer("c", lambda: copy.deepcopy(module)), index=0, seed=0)


class Queries(nn.Module):
    """Learned rows, from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self) -> Tensor:
        return self.rows * 2


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = dense()

    def forward(self, queries: Tensor, inputs: Tensor) -> Tensor:
        added: Tensor = self.dense(queries + inputs)
        return added


@pytest.mark.parametrize("precision", Precision)
def test_a_stage_may_begin_with_nothing(precision: Precision) -> None:
    layers = (Layer("queries", Queries, inputs=()), Layer("added", Added, inputs=("queries",), batch=("inputs",)))
    trained = pipeline(Model(layers, squared), precision=precision)
    before = trained.weights[0][0].masters[0].detach().clone()
    run(trained, 1)
    assert not torch.equal(trained.weights[0][0].masters[0], before)
