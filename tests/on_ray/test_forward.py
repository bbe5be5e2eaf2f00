"""Callbacks run the model that the stages of a run hold: its outputs are those of the checkpoint of that moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import raypipe.hf
from raypipe.actors.stage.checkpoint import Checkpoint, load_modules
from raypipe.artifacts.storage import Storage
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import End, Evaluation, Run, SavedCheckpoint, Window
from raypipe.config import DataConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import ConfigError
from raypipe.models.mlp import mlp
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows
from tests.models.transformers_models import TextRows, save, small_config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]

OPTIONS = {"num_layers": 4, "dtype": "float64"}


def rows(split: str) -> RandomRows:
    return RandomRows()


class Forwards(Callback):
    """Keeps outputs for 7 rows at each checkpoint, and logs a figure with each evaluation."""

    required = True

    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.figures: list[dict[str, float]] = []
        self.refused = ""

    def on_start(self, run: Run) -> None:
        assert run.forward is not None
        try:
            run.forward({"inputs": torch.zeros(1, 16)})
        except ConfigError as error:
            self.refused = str(error)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        assert run.forward is not None
        inputs = RandomRows().batch(5, (0.0, 1.0))["inputs"]
        run.log("largest", float(run.forward({"inputs": inputs}).abs().max()))

    def on_window(self, run: Run, window: Window) -> None:
        self.figures.append(window.figures())

    def on_checkpoint(self, run: Run, checkpoint: SavedCheckpoint) -> None:
        assert run.forward is not None
        self.outputs[checkpoint.path] = run.forward({"inputs": seven_rows()})


def seven_rows() -> torch.Tensor:
    return torch.randn(7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [pytest.param("1f1b", 1, marks=pytest.mark.slow), pytest.param("1f1b", 2, marks=pytest.mark.slow), ("amdp", 1)],
    ids=["chain", "shared-rows", "two-pipelines"],
)
def test_outputs_between_windows_are_those_of_the_checkpoint(schedule: str, replicas: int, tmp_path: Path) -> None:
    callback = Forwards()
    result = Trainer(
        "raypipe.models.mlp:mlp",
        model_options=OPTIONS,
        batches=rows,
        data_config=DataConfig(path="", num_validation_microbatches=1),
        schedule_config=ScheduleConfig(name=schedule, num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=3),
        optimizer_config=OptimizerConfig(learning_rate=1e-2),
        scaling_config=ScalingConfig(num_devices=2 * replicas, replicas=replicas),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), num_updates=6, evaluate_every=3),
        callbacks=[callback],
    ).fit()
    assert callback.refused.startswith("run.forward works between the first window and the last")
    assert callback.outputs
    for path, outputs in callback.outputs.items():
        layers = load_modules(Checkpoint.open(Storage.at(path)), mlp(num_layers=4, dtype="float64"))
        expected = seven_rows()
        for layer in layers:
            expected = layer.eval()(expected)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    assert [figures["largest"] > 0 for figures in callback.figures] == [True, True]
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "largest" in line] == [0, 3, 6]


class Mistaken(Callback):
    """Runs rows of another dtype than the training data has."""

    def __init__(self, *, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        assert run.forward is not None
        if evaluation.update:
            run.forward({"inputs": torch.zeros(1, 16, dtype=self.dtype)})


class Interrupts(Callback):
    """Interrupts the run between windows, and uses the model at the end."""

    def on_window(self, run: Run, window: Window) -> None:
        raise KeyboardInterrupt

    def on_end(self, run: Run, end: End) -> None:
        assert run.forward is not None
        try:
            run.forward({"inputs": seven_rows()})
        except ConfigError as error:
            self.refused = str(error)


def small_trainer(storage: Path, callback: Callback) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options=OPTIONS,
        batches=rows,
        data_config=DataConfig(path="", num_validation_microbatches=1),
        schedule_config=ScheduleConfig(num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=3),
        scaling_config=ScalingConfig(num_devices=2, profile="estimated"),
        run_config=RunConfig(name="run", storage_path=str(storage), num_updates=6, evaluate_every=3),
        callbacks=[callback],
    )


@pytest.mark.slow
def test_rows_of_another_dtype_cost_the_callback_and_not_the_run(tmp_path: Path) -> None:
    result = small_trainer(tmp_path, Mistaken(dtype=torch.float32)).fit()
    assert len(result.losses) == 6
    assert not result.recoveries, "no stage has seen them"
    (error,) = result.callback_errors
    assert "the field 'inputs' has torch.float32; expected torch.float64" in error


@pytest.mark.slow
def test_a_run_that_is_interrupted_between_windows_takes_no_forward_at_its_end(tmp_path: Path) -> None:
    callback = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        small_trainer(tmp_path, callback).fit()
    assert callback.refused.startswith("run.forward works between the first window and the last")


class Writer(Callback):
    """Writes a text and takes a perplexity when a run is evaluated."""

    required = True

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self.found.append((raypipe.hf.generate(run, "w5 w6", max_new_tokens=3, do_sample=False), raypipe.hf.perplexity(run, ["w5 w6 w7"])))


def text_rows(split: str) -> TextRows:
    return TextRows()


def test_text_and_perplexity_come_from_the_stages_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.hf.words import write_tokenizer

    source = save(small_config("llama", tie_word_embeddings=True), tmp_path / "model", dtype=torch.float32)
    write_tokenizer(source)
    callback = Writer()
    options: dict[str, Any] = {"name": "run", "storage_path": str(tmp_path), "num_updates": 4, "evaluate_every": 2}
    result = Trainer(
        f"hf:{source}",
        batches=text_rows,
        data_config=DataConfig(path="", num_validation_microbatches=1),
        schedule_config=ScheduleConfig(name="zb-h1", num_microbatches=4, microbatch_size=2, updates_per_window=2),
        optimizer_config=OptimizerConfig(learning_rate=1e-2, warmup_updates=0),
        scaling_config=ScalingConfig(num_devices=3),
        run_config=RunConfig(**options),
        callbacks=[callback],
    ).fit()
    text, perplexity = callback.found[-1]
    assert raypipe.hf.generate(result.path, "w5 w6", max_new_tokens=3, do_sample=False) == text
    assert raypipe.hf.perplexity(result.path, ["w5 w6 w7"]) == pytest.approx(perplexity, rel=1e-5)
    assert len({round(perplexity, 6) for _, perplexity in callback.found}) == 3, "it is trained"
