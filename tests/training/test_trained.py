"""The trained model of a run in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raypipe
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.snapshot import save_stages
from raypipe.artifacts.checkpoint_files import CheckpointIndex
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.storage import Storage
from raypipe.config import CheckpointMetric, DataConfig, ModelConfig, Precision, RunConfig, TrainConfig
from raypipe.errors import ConfigError, FormatError
from raypipe.model import Batch, Layer, Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.result import Result
from raypipe.training.run_folder import RunFolder
from tests.callbacks.events import PLAN

WIDTH, NUM_MICROBATCHES = 6, 2
LOSSES = (3.0, 1.0, 2.0)


class Rows:
    """Four rows a microbatch, a pure function of its number."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        generator = torch.Generator().manual_seed(1000 + microbatch)
        first, end = (round(4 * share) for share in rows)
        return {name: torch.randn(4, WIDTH, generator=generator)[first:end] for name in ("inputs", "targets")}


class Normed(nn.Module):
    """A layer with buffers, one of which counts in whole numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        result: Tensor = self.norm(self.linear(x))
        return result if scale is None else result * scale


def tied(width: int = WIDTH) -> Model:
    return Model(
        (
            Layer("first", partial(nn.Linear, width, width), inputs=(), batch=("inputs",)),
            Layer("middle.0", partial(Normed, width), batch_if_present=("scale",)),
            Layer("last", partial(nn.Linear, width, width)),
        ),
        lambda output, batch: nn.functional.mse_loss(output, batch["targets"]),
        ties=((("first", "weight"), ("last", "weight")),),
    )


def untied(width: int = WIDTH) -> Model:
    model = tied(width)
    return Model(model.layers[:2], model.loss)


def without_options() -> Model:
    return tied()


def trained_run(folder: Path, *, precision: Precision = Precision.FLOAT32, **run_options: Any) -> tuple[RunFolder, LocalPipeline]:
    """A run with checkpoints after the updates 1, 2 and 3, whose losses are `LOSSES`, and the stages behind the last."""
    model = tied()
    cut = Cut.equal(len(model.layers), 3, model.edges(), model.tied_layers())
    pipeline = LocalPipeline(
        model,
        cut=cut,
        schedule=over_graph(build("1f1b", ScheduleRequest(3, NUM_MICROBATCHES, 1)), cut.graph),
        batches=Rows(),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        precision=precision,
    )
    run = RunFolder.create(str(folder), "run")
    function = f"{__name__}:tied"
    run.begin(
        TrainConfig(
            model=ModelConfig(function=function, options={"width": WIDTH}, precision=precision),
            data=DataConfig(),
            run=RunConfig(storage_path=str(folder), **run_options),
        )
    )
    for update, loss in enumerate(LOSSES, start=1):
        pipeline.run_window()
        save(run.new_checkpoint(update), pipeline, update=update, loss=loss)
    pipeline.close()
    return run, pipeline


def save(folder: Storage, pipeline: LocalPipeline, *, update: int, loss: float) -> None:
    files: dict[str, Any] = {}
    for on_device in pipeline.weights:
        files |= save_stages(folder, on_device.values())
    names = tuple(layer.name for layer in tied().layers)
    index = CheckpointIndex(update=update, layers=names, model=f"{__name__}:tied", seed=0, metrics={"loss": loss}, files=files)
    Checkpoint.finish(folder, index)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return trained_run(tmp_path)[0]


@pytest.mark.parametrize("precision", list(Precision))
def test_the_weights_are_those_of_the_stages(tmp_path: Path, precision: Precision) -> None:
    run, pipeline = trained_run(tmp_path, precision=precision)
    weights = raypipe.load(run.path).state_dict()
    stages = {name: tensor for on_device in pipeline.weights for stage in on_device.values() for name, tensor in masters(stage).items()}
    assert weights.keys() == stages.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.int64 if name.endswith("num_batches_tracked") else torch.float32)
        assert torch.equal(tensor, stages[name].to(tensor.dtype)), name
    assert weights["middle.0.norm.num_batches_tracked"] == len(LOSSES) * NUM_MICROBATCHES


def masters(stage: Any) -> dict[str, Tensor]:
    """The weights that the optimizer steps, and the buffers, by `LAYER.WEIGHT`."""
    tensors = {**stage.module.state_dict(), **{name: master.data for name, master in zip(stage.names, stage.masters, strict=True)}}
    parted = {name: name.split(".", 2) for name in tensors}
    return {f"{stage.module.names[int(parted[name][1])]}.{parted[name][2]}": tensor for name, tensor in tensors.items()}


def test_a_tied_weight_is_one_and_stands_under_each_of_its_names(run: RunFolder) -> None:
    trained = raypipe.load(run.path)
    weights = trained.state_dict()
    assert weights["first.weight"].data_ptr() == weights["last.weight"].data_ptr()
    assert trained.modules["first"].get_parameter("weight") is trained.modules["last"].get_parameter("weight")
    assert list(trained.modules) == ["first", "middle.0", "last"]


def test_it_computes_what_the_layers_do_one_after_the_other(run: RunFolder) -> None:
    trained = raypipe.load(run.path)
    batch = Rows().batch(0, (0.0, 1.0))
    first, middle, last = trained.modules.values()
    assert not middle.training
    assert torch.equal(trained(batch), last(middle(first(batch["inputs"]))))
    scale = torch.full((4, 1), 3.0)
    assert torch.equal(trained({**batch, "scale": scale}), last(middle(first(batch["inputs"]), scale=scale)))
    with pytest.raises(ConfigError, match="'inputs'"):
        trained({"targets": batch["targets"]})


def test_the_newest_a_numbered_and_the_best_checkpoint_are_found(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, keep_best_by=CheckpointMetric.LOSS)
    assert raypipe.load(run.path).checkpoint.index.update == 3
    assert raypipe.load(run.path, checkpoint=1).checkpoint.index.update == 1
    assert raypipe.load(str(run.path), checkpoint="best").checkpoint.index.update == 2
    with pytest.raises(ConfigError, match=r"after update 7; it has 1, 2, 3"):
        raypipe.load(run.path, checkpoint=7)


def test_a_run_that_keeps_no_best_checkpoint_has_none(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"run\.keep_best_by; choose one by its update: 1, 2, 3"):
        raypipe.load(run.path, checkpoint="best")


def test_a_checkpoint_is_loaded_from_its_folder_wherever_that_is(run: RunFolder, tmp_path: Path) -> None:
    folder = run.path / "checkpoints" / "update-000002"
    assert raypipe.load(folder).checkpoint.index.update == 2
    with pytest.raises(ConfigError, match="name the folder of its run"):
        raypipe.load(folder, checkpoint=1)
    moved = folder.rename(tmp_path / "moved")
    assert raypipe.load(moved).checkpoint.index.update == 2
    assert raypipe.load(moved, tied, model_options={"width": WIDTH}).checkpoint.index.update == 2


def test_a_run_at_a_uri_is_loaded_as_one_on_a_path(run: RunFolder) -> None:
    uri = f"file://{run.path}"
    assert raypipe.load(uri).checkpoint.index.update == 3
    assert raypipe.load(f"{uri}/checkpoints/update-000001").checkpoint.index.update == 1


def test_the_model_is_given_by_a_function_a_name_or_a_file(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(f"from {__name__} import tied\n")
    expected = raypipe.load(run.path).state_dict()
    for model in (tied, f"{__name__}:tied", f"{tmp_path}/models.py:tied"):
        weights = raypipe.load(run.path, model).state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_random_generator_goes_on_as_if_nothing_was_loaded(run: RunFolder) -> None:
    before = torch.get_rng_state()
    raypipe.load(run.path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        (untied, None, r"layer 2 is 'last', that of the model missing"),
        (partial(tied, 7), {}, r"first\.safetensors: bias: .* shape \[6\] there, and has the shape \[7\]"),
        (without_options, None, r"unexpected keyword argument 'width'.*model_options=\{\} for none"),
    ],
)
def test_another_model_is_refused(run: RunFolder, model: Callable[..., Model], options: Any, problem: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=problem):
        raypipe.load(run.path, model, model_options=options)


def test_a_model_that_no_name_stands_for_must_be_given(run: RunFolder) -> None:
    run.begin(TrainConfig(model=ModelConfig(function="no_such_module:tied"), data=DataConfig()))
    with pytest.raises(ConfigError, match=r"or give the function of the model, as in raypipe\.load\(.*, my_model\)"):
        raypipe.load(run.path)
    assert raypipe.load(run.path, tied).checkpoint.index.update == 3


def test_what_is_no_run_and_no_checkpoint_is_refused(run: RunFolder, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere", run.path / "checkpoints"):
        with pytest.raises(ConfigError, match="is no folder of a run and none of a checkpoint") as caught:
            raypipe.load(folder)
        assert str(folder) in str(caught.value)


def test_a_run_without_checkpoints_is_refused(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        raypipe.load(run.path)


def test_a_damaged_checkpoint_is_refused(run: RunFolder) -> None:
    folder = run.path / "checkpoints" / "update-000003"
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(FormatError, match="altered"):
        raypipe.load(folder)


def result_of(run: RunFolder, model: Callable[[], Model] | None) -> Result:
    return Result(
        path=run.name,
        metrics={"loss": 2.0, "updates": 3},
        losses=list(LOSSES),
        validation_losses=[],
        checkpoint=Checkpoint.open(run.path / "checkpoints" / "update-000003"),
        plan=PLAN,
        figures=[],
        sample="",
        model=model,
    )


def test_a_result_loads_its_model(run: RunFolder) -> None:
    weights = result_of(run, tied).load().state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in raypipe.load(run.path).state_dict().items())
    with pytest.raises(ConfigError, match=r"raypipe\.load\("):
        result_of(run, None).load()


def test_loading_needs_no_ray(run: RunFolder) -> None:
    code = f"import sys, raypipe; raypipe.load({str(run.path)!r}); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
