from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raypipe.actors.stage.checkpoint import Checkpoint, load_modules
from raypipe.actors.stage.gradient_flow import LayerOutput, output_specs
from raypipe.actors.stage.layers import RngKey, layer_seed
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.state import export_layers, import_layers
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport.protocol import TensorSpec
from raypipe.artifacts.checkpoint_files import CheckpointIndex, layer_file
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError, FormatError
from raypipe.model import Batch, Layer, Model
from raypipe.models.mlp import mean_squared_error
from raypipe.schedules.ir import WeightRule


class Tied(nn.Module):
    """Two uses of one weight under two names, a buffer, and a part called as the optimizer's state might be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.optimizer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.optimizer(self.second(self.first(x)))
        return result


class Mixed(nn.Module):
    """Weights of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.low(x.bfloat16()).float() * self.gain
        return result


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class WithMask(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.ones(2, 2)


def model_of(*builds: Callable[[], nn.Module]) -> Model:
    first, *rest = builds
    layers = (Layer("layer-0", first, inputs=(), batch=("inputs",)), *(Layer(f"layer-{n}", build) for n, build in enumerate(rest, start=1)))
    return Model(layers, mean_squared_error)


def held(model: Model, *, stage: int = 0, seed: int = 0, rule: WeightRule = WeightRule.FLUSH) -> Weights:
    module = StageModule(model, Cut.equal(len(model.layers), len(model.layers), model.edges()), stage, seed=seed)
    return Weights(module, optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.1), rule=rule)


def rows() -> Batch:
    return {"inputs": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "targets": torch.zeros(3, 4)}


def step(weights: Weights) -> None:
    weights.begin_window()
    weights.bind(0, 0)
    weights.run(0, {}, rows(), RngKey(0))[0][0].sum().backward()  # type: ignore[no-untyped-call]
    weights.update(0, scale=1.0, learning_rate=0.1, keep_old=False)
    weights.end_window()


def test_a_checkpoint_of_a_tied_weight_has_it_once_and_is_read_back(tmp_path: Path) -> None:
    model = model_of(Tied)
    before, after = held(model), held(model, seed=1)
    step(before)
    state = export_layers(before)[0]
    assert "second.weight" not in state
    save_file(state, tmp_path / layer_file(0, "layer-0"))
    import_layers(after, {0: state})
    assert all(torch.equal(a, b) for a, b in zip(before.masters, after.masters, strict=True))
    step(before)
    step(after)
    assert all(torch.equal(a, b) for a, b in zip(before.masters, after.masters, strict=True))


def test_a_checkpoint_loads_unsplit_into_one_process(tmp_path: Path) -> None:
    model = model_of(Tied)
    weights = held(model)
    step(weights)
    save_file(export_layers(weights)[0], tmp_path / layer_file(0, "layer-0"))
    checkpoint = Checkpoint.finish(tmp_path, CheckpointIndex(update=1, layers=("layer-0",), model="tied", seed=0))
    (module,) = load_modules(checkpoint, model)
    x = rows()["inputs"]
    assert torch.equal(module(x), weights.run(0, {}, rows(), RngKey(0))[0][0])
    with pytest.raises(FormatError, match="another model"):
        load_modules(checkpoint, model_of(partial(nn.Linear, 4, 4)))


def test_a_damaged_layer_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / layer_file(0, "layer-0")).write_bytes(b"\x00" * 100)
    checkpoint = Checkpoint.finish(tmp_path, CheckpointIndex(update=1, layers=("layer-0",), model="tied", seed=0))
    with pytest.raises(FormatError, match=r"layer-0000-layer-0.safetensors: cannot be read as safetensors"):
        checkpoint.load_layer(0)


def test_the_newest_readable_checkpoint_is_taken(tmp_path: Path) -> None:
    for update in (1, 2):
        folder = tmp_path / "checkpoints" / f"update-{update}"
        folder.mkdir(parents=True)
        Checkpoint.finish(folder, CheckpointIndex(update=update, layers=(), model="m", seed=0))
    (tmp_path / "checkpoints" / "update-2" / "checkpoint.json").write_text("{")
    found = Checkpoint.latest(tmp_path)
    assert found is not None
    assert found.index.update == 1


def test_a_checkpoint_with_a_damaged_layer_is_not_taken_while_another_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files: list[Path] = []
    for update in (1, 2):
        folder = tmp_path / "checkpoints" / f"update-{update}"
        folder.mkdir(parents=True)
        files.append(folder / layer_file(0, "a"))
        save_file({"weight": torch.zeros(1000)}, files[-1])
        Checkpoint.finish(folder, CheckpointIndex(update=update, layers=("a",), model="m", seed=0))
    assert (found := Checkpoint.latest(tmp_path)) is not None
    assert found.index.update == 2
    files[1].write_bytes(files[1].read_bytes()[:2000])
    assert (found := Checkpoint.latest(tmp_path)) is not None
    assert found.index.update == 1
    assert "update-2 is left out: " in caplog.text
    files[0].write_bytes(b"")
    with pytest.raises(FormatError, match="remove the folder of this checkpoint"):
        Checkpoint.latest(tmp_path)


def test_gradients_of_mixed_precision_pass_through_one_vector() -> None:
    weights = held(model_of(Mixed))
    weights.begin_window()
    weights.bind(0, 0)
    weights.run(0, {}, rows(), RngKey(0))[0][0].sum().backward()  # type: ignore[no-untyped-call]
    before = [gradient.clone() for gradient in weights.gradients.of(0) if gradient is not None]
    weights.gradients.set_flat(0, weights.gradients.flatten(0))
    after = weights.gradients.of(0)
    assert [gradient.dtype for gradient in after if gradient is not None] == [gradient.dtype for gradient in before]
    weights.update(0, scale=1.0, learning_rate=0.1, keep_old=False)


def test_gradients_that_are_summed_lie_in_their_vector_alone() -> None:
    weights = held(model_of(partial(nn.Linear, 4, 4)))
    weights.begin_window()
    weights.bind(0, 0)
    weights.run(0, {}, rows(), RngKey(0))[0][0].sum().backward()  # type: ignore[no-untyped-call]
    flat = weights.gradients.flatten(0)
    assert {gradient.untyped_storage().data_ptr() for gradient in weights.gradients.of(0) if gradient is not None} == {flat.data_ptr()}
    weights.update(0, scale=1.0, learning_rate=0.1, keep_old=False)


@pytest.mark.parametrize("received", [False, True])
def test_the_module_itself_keeps_no_version_that_nobody_reads(received: bool) -> None:
    weights = held(model_of(partial(nn.Linear, 4, 4)), rule=WeightRule.STASH)
    weights.begin_window()
    weights.bind(0, 0)
    weights.run(0, {}, rows(), RngKey(0))[0][0].sum().backward()  # type: ignore[no-untyped-call]
    if received:
        weights.divide([1], copy=0, num_copies=2, num_buckets=1)
        weights.receive(0, weights.flat(), keep_old=True)
    else:
        weights.update(0, scale=1.0, learning_rate=0.1, keep_old=True)
    own = [weight.data_ptr() for weight in weights.module.parameters()]
    assert own == [weight.data_ptr() for weight in weights.versions.tensors(1)]
    assert own != [weight.data_ptr() for weight in weights.versions.tensors(0)]


def test_a_layer_that_changes_its_input_in_place_is_refused_before_training() -> None:
    weights = held(model_of(partial(nn.Linear, 4, 4), InPlace), stage=1)
    with pytest.raises(ConfigError, match=r"stage 1 \(layers layer-1\) failed: .*in-place"):
        output_specs(weights.module, {0: (LayerOutput(TensorSpec((3, 4), torch.float32), takes_gradient=True),)}, {}, num_rows=3)


def test_a_tensor_without_rows_cannot_cross_stages() -> None:
    weights = held(model_of(WithMask, partial(nn.Linear, 4, 4)))
    with pytest.raises(ConfigError, match=r"'layer-0' of stage 0 .* gives \(2, 2\).*first dimension"):
        output_specs(weights.module, {}, rows(), num_rows=3)


def test_seeds_differ_between_layers_microbatches_and_rows() -> None:
    rng_keys = [None, *(RngKey(microbatch, row) for microbatch in range(20) for row in (0, 3, 7))]
    seeds = [layer_seed(seed, layer, rng_key) for seed in range(5) for layer in range(20) for rng_key in rng_keys]
    assert len(set(seeds)) == len(seeds)


def test_a_layer_whose_name_is_no_name_for_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="'enc/0'; use letters"):
        Model((Layer("enc/0", Tied, inputs=(), batch=("inputs",)),), mean_squared_error)


def test_what_the_optimizer_noted_of_weights_that_are_frozen_now_is_left_out() -> None:
    before = held(model_of(partial(nn.Linear, 4, 4)))
    for weight in before.masters:
        weight.grad = torch.ones_like(weight)
    assert before.optimizer is not None
    before.optimizer.step()
    after = held(model_of(lambda: nn.Linear(4, 4).requires_grad_(False)))
    import_layers(after, export_layers(before))
    assert torch.equal(after.module.get_parameter("layers.0.weight"), before.module.get_parameter("layers.0.weight"))
