"""A file of named fields, named by a configuration, trains a model with branches on Ray actors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypipe.actors.execution.batches import FileSource
from raypipe.config import DataConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.data.fields import Rows, write_rows
from raypipe.models.towers import two_towers
from raypipe.training.trainer import Trainer
from tests.actors.oracles import train_unsplit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default")]


@pytest.mark.usefixtures("local_ray", "shared_actors")
def test_a_run_of_a_file_of_fields_is_that_of_the_unsplit_model_on_the_same_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    fields = {name: random.normal(size=(50, 16)) for name in ("left", "right", "targets")}
    write_rows(tmp_path / "rows.parquet", Rows(fields, ["validation" if row % 5 == 0 else "train" for row in range(50)]))
    optimizer = OptimizerConfig(learning_rate=1e-2, final_learning_rate=1e-2, warmup_updates=0, beta2=0.999, weight_decay=0.01)
    result = Trainer(
        "raypipe.models.towers:two_towers",
        model_options={"dtype": "float64"},
        data_config=DataConfig(path=str(tmp_path / "rows.parquet"), num_validation_microbatches=2),
        schedule_config=ScheduleConfig(num_microbatches=2, microbatch_size=8, updates_per_window=3),
        optimizer_config=optimizer,
        scaling_config=ScalingConfig(num_devices=3, layers_per_stage=(3, 3, 1)),
        run_config=RunConfig(name="fields", storage_path=str(tmp_path / "runs"), num_updates=6, seed=5),
    ).fit()
    source = FileSource(str(tmp_path / "rows.parquet"), sequence_length=1, seed=5, microbatch_size=8)
    expected = train_unsplit(
        two_towers(dtype="float64"),
        source("train"),
        num_updates=6,
        num_microbatches=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        seed=5,
        decay_matrices_only=0.01,
    )
    assert result.losses == pytest.approx(expected.losses, abs=1e-10)
    assert [update for update, _ in result.validation_losses] == [0, 6]
    assert result.metrics["samples_per_s"] * result.metrics["update_s"] == pytest.approx(16)
    assert "tokens_per_s" not in result.metrics
