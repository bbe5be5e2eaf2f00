"""What a new user gets wrong about data is told at once, before a cluster is started."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.utils.data import DataLoader

from raypipe.actors.data.reader import RowReader
from raypipe.actors.data.source import DataSource
from raypipe.config import CheckpointMetric, DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainConfig
from raypipe.errors import ConfigError, FormatError
from raypipe.model import Batch, Model
from raypipe.models.mlp import mlp
from raypipe.training.check_rows import check_rows, rows_of_batches, tell_evaluations
from raypipe.training.trainer import Trainer

ROWS: list[dict[str, Any]] = [{"inputs": np.zeros(16), "targets": np.zeros(16)} for _ in range(20)]


def weighted(weigh: Any) -> Any:
    def model() -> Model:
        return dataclasses.replace(mlp(), loss_weight=weigh)

    return model


def mask_sum(batch: Batch) -> torch.Tensor:
    return batch["mask"].sum()


def mask_mean(batch: Batch) -> torch.Tensor:
    return batch["inputs"].float().mean() + 1


@pytest.mark.parametrize(
    ("model", "data", "problem"),
    [
        pytest.param(
            mlp,
            [{"input": np.zeros(16)}],
            r"'layer-0' takes the field 'inputs'; did you mean 'input'\?; the train data has input",
            id="field",
        ),
        pytest.param(mlp, [{"inputs": [0] * (3 + at % 2)} for at in range(9)], r"has the shapes \[3\] and \[4\]; .*Pad", id="shape"),
        pytest.param(mlp, [], r"the train data has no row", id="empty"),
        pytest.param(mlp, "no_file.py:rows", r"data.train 'no_file.py:rows': there is no file 'no_file.py'", id="path"),
        pytest.param(
            weighted(mask_sum), ROWS, r"loss_weight of the model takes the field 'mask'; the train data has inputs, targets", id="mask"
        ),
        pytest.param(weighted(mask_mean), ROWS, r"loss_weight .* is 1 .* but 2 for its two halves .* not a mean", id="a-mean"),
        pytest.param(mlp, {"train": ROWS, "test": ROWS}, r"data.train is a dict of lists of rows", id="splits"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused_before_a_cluster_starts(model: Any, data: Any, problem: str, tmp_path: Path) -> None:
    was_connected = ray.is_initialized()
    with pytest.raises(ConfigError, match=problem):
        Trainer(model, train_data=data, run_config=RunConfig(storage_path=str(tmp_path / "runs"))).fit()
    assert ray.is_initialized() == was_connected
    assert not (tmp_path / "runs").exists(), "no folder of a run is made"


def test_the_generators_of_the_users_program_are_left_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    with pytest.raises(ConfigError, match="takes the field 'inputs'"):
        Trainer(mlp, train_data=[{"x": 1}], run_config=RunConfig(storage_path=str(tmp_path / "runs"))).fit()
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        pytest.param({}, r"give the trainer one of train_data, batches, and a data_config", id="nothing"),
        pytest.param({"data_config": DataConfig()}, r"data.path names no file, and data.train no function", id="an-empty-config"),
        pytest.param({"train_data": ROWS, "data_config": DataConfig(path="a")}, r"give the trainer one of", id="both"),
        pytest.param({"eval_data": ROWS, "data_config": DataConfig(path="a")}, r"eval_data and collate need train_data", id="eval-alone"),
    ],
)
def test_a_trainer_takes_rows_from_one_place(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Trainer(mlp, **given)


def test_a_configuration_takes_rows_from_one_place() -> None:
    with pytest.raises(FormatError, match=r"expected either data.path or data.train"):
        DataConfig(path="a", train="b:c")
    with pytest.raises(FormatError, match=r"needs data.train"):
        DataConfig(path="a", eval="b:c")


def test_without_rows_for_evaluations_there_are_none() -> None:
    assert Trainer(mlp, train_data=ROWS).config.data.num_validation_microbatches == 0
    assert Trainer(mlp, train_data=ROWS, eval_data=ROWS).config.data.num_validation_microbatches == 8


def test_the_best_by_validation_cannot_be_kept_without_validation() -> None:
    best = RunConfig(keep_best_by=CheckpointMetric.VALIDATION_LOSS)
    with pytest.raises(
        ConfigError, match=r"run.keep_best_by is validation_loss, .* give rows for it, data.eval or eval_data, or keep by loss"
    ):
        Trainer(mlp, train_data=ROWS, run_config=best)
    never = DataConfig(path="tokens.parquet", num_validation_microbatches=0)
    with pytest.raises(ConfigError, match=r"run.keep_best_by is validation_loss, .* set data.num_validation_microbatches, or keep by loss"):
        Trainer(mlp, data_config=never, run_config=best)
    Trainer(mlp, data_config=never, run_config=RunConfig(keep_best_by=CheckpointMetric.LOSS))
    Trainer(mlp, train_data=ROWS, eval_data=ROWS, run_config=best)


@dataclasses.dataclass
class CountedRows:
    """Rows that are numbered as they are read, whatever microbatch is asked for."""

    num_read: int = 0

    def __call__(self, split: str) -> CountedRows:
        return self

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        self.num_read += 1
        return {"inputs": torch.full((4, 16), float(self.num_read)), "targets": torch.zeros(4, 16)}


def test_batches_are_read_from_a_copy_so_that_actors_get_them_as_they_were() -> None:
    batches = CountedRows()
    assert rows_of_batches(batches, mlp()).first["inputs"][0, 0] == 1
    assert batches.num_read == 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_connected", [False, True])
def test_a_cluster_that_batches_started_ends_with_the_check(was_connected: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = [was_connected]
    monkeypatch.setattr(ray, "is_initialized", lambda: connected[-1])
    monkeypatch.setattr(ray, "shutdown", lambda: connected.append(False))

    class OnRay(CountedRows):
        def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
            connected.append(True)
            return {} if fails else super().batch(microbatch, rows)

    # Pickled by value, a class of a function would append to a copy of the list.
    monkeypatch.setattr("raypipe.training.check_rows.cloudpickle.dumps", lambda batches: batches)
    monkeypatch.setattr("raypipe.training.check_rows.cloudpickle.loads", lambda batches: batches)
    if fails:
        with pytest.raises(ConfigError, match="takes the field 'inputs'"):
            rows_of_batches(OnRay(), mlp())
    else:
        assert rows_of_batches(OnRay(), mlp()).first
    assert True in connected[1:], "no batches were read"
    assert connected[-1] == was_connected, "a cluster that was there before stays, another one ends"
    assert connected[-1] is was_connected


@pytest.mark.parametrize(
    ("num_rows", "told"),
    [
        (None, []),
        (64, []),
        (1000, ["an evaluation reads the first 64 of 1000 rows; data.num_validation_microbatches=125 would read all"]),
        (70, ["an evaluation reads the first 64 of 70 rows"]),
        (44, ["an evaluation reads 64 rows of 44, some of them twice; data.num_validation_microbatches=5 would read 40"]),
    ],
)
def test_evaluations_that_leave_out_rows_or_read_some_twice_are_told(num_rows: int | None, told: list[str]) -> None:
    config = TrainConfig(model=ModelConfig(function="m:f"), schedule=ScheduleConfig(microbatch_size=8), data=DataConfig(path="rows"))
    notices: list[str] = []
    tell_evaluations(num_rows, config, notice=notices.append)
    assert notices == told


def test_a_loader_over_a_dataset_tells_how_many_rows_it_has() -> None:
    loader: DataLoader[Any] = DataLoader([{"inputs": np.zeros(16), "targets": np.zeros(16)}] * 20, batch_size=3)  # type: ignore[arg-type]
    found = check_rows(DataSource({"train": loader, "validation": ROWS[:7]}), mlp(), microbatch_size=2)
    assert (found.is_stream, found.num_rows, found.num_eval_rows) == (True, 20, 7)


def test_a_function_that_fails_is_an_answer_of_the_reader_and_not_its_end() -> None:
    reader = RowReader(DataSource({"train": "no_file.py:rows"}).packed(), "train", num_kept=2, mark_every=2)
    with pytest.raises(ConfigError, match=r"data.train 'no_file.py:rows': there is no file 'no_file.py' in "):
        reader.rows(0, 2, (0.0, 1.0))
