"""A model of transformers trains on Ray actors as in one process, resumes, and is exported by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.cli import main
from raypipe.config import FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.models.transformers_models import TextRows, save, small_config, train_with_transformers

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]

LEARNING_RATE = 1e-2
ADAMW = OptimizerConfig(
    learning_rate=LEARNING_RATE, final_learning_rate=LEARNING_RATE, warmup_updates=0, beta2=0.999, weight_decay=0.0, max_grad_norm=None
)


def rows(split: str) -> TextRows:
    return TextRows(padded=split == "train")


def train(folder: str, runs: Path, *, num_updates: int, resume: bool = False) -> Result:
    return Trainer(
        f"hf:{folder}",
        model_options={"dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(name="zb-h1", num_microbatches=4, microbatch_size=2, updates_per_window=5),
        optimizer_config=ADAMW,
        scaling_config=ScalingConfig(num_devices=3),
        run_config=RunConfig(name="hf", storage_path=str(runs), num_updates=num_updates),
    ).fit(resume=resume)


@pytest.mark.usefixtures("shared_actors")
def test_ten_updates_of_a_resumed_run_equal_those_of_transformers_and_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One of the families that round nothing to float32, so that float64 can be compared to the last digits.
    folder = save(small_config("phi", tie_word_embeddings=True), tmp_path / "model")
    losses = list(train(folder, tmp_path / "runs", num_updates=5).losses)
    losses += train(folder, tmp_path / "runs", num_updates=10, resume=True).losses
    expected, weights = train_with_transformers(
        folder, TextRows(padded=True), num_updates=10, num_microbatches=4, learning_rate=LEARNING_RATE, weight_decay=0.0
    )
    assert losses == pytest.approx(expected, abs=1e-10)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "runs" / "hf"), "--to", str(tmp_path / "exported"), "--json"]) == 0
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["files"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64).state_dict()
    assert exported.keys() == weights.keys()
    assert max(float((exported[name] - weights[name]).abs().max()) for name in weights) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_a_recovered_run_has_the_losses_of_a_run_without_a_fault(schedule: str, tmp_path: Path) -> None:
    folder = save(small_config("llama", tie_word_embeddings=True), tmp_path / "model", dtype=torch.float32)

    def losses(name: str, faults: FaultScript | None) -> tuple[tuple[float, ...], int]:
        result = Trainer(
            f"hf:{folder}",
            batches=rows,
            schedule_config=ScheduleConfig(name=schedule, num_microbatches=4, microbatch_size=2, updates_per_window=3),
            optimizer_config=ADAMW,
            scaling_config=ScalingConfig(num_devices=2),
            run_config=RunConfig(name=name, storage_path=str(tmp_path / "runs"), num_updates=9),
            failure_config=FailureConfig(max_failures=3 if faults else 0, copy_share=1.0),
            faults=faults,
        ).fit()
        return tuple(result.losses), len(result.recoveries)

    calm, _ = losses("calm", None)
    struck, num_recoveries = losses("struck", FaultScript().fail_at(device=1, before="1B2", kind=FaultKind.KILL, window=1))
    assert struck == calm
    assert num_recoveries == 1
