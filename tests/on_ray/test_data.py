"""Runs on the user's own data: rows by number and streams, resumed at other cuts, slow, and lost."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from raypipe.analysis.idle import Cause, divide
from raypipe.artifacts.trace import SpanKind, Trace
from raypipe.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.training.trainer import Trainer
from tests.marks import slow_unless

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("local_ray", "shared_actors"),
]

NUM_ROWS = 50
NUM_UPDATES = 9
SCHEDULE = ScheduleConfig(num_microbatches=4, microbatch_size=3, updates_per_window=3)


class Table(Dataset[dict[str, Tensor]]):
    """Rows that draw from all generators; 12 of the 50 are an update."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        time.sleep(self.sleep_s)
        noise = torch.randn(16, dtype=torch.float64) + random.random() + np.random.rand()
        return {"inputs": noise + place / NUM_ROWS, "targets": torch.full((16,), place / NUM_ROWS, dtype=torch.float64)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows in order, from a state."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.at, self.begin = self.begin, 0
        while self.at < NUM_ROWS:
            self.at += 1
            yield Table()[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def loader() -> Any:
    return DataLoader(Table(), batch_size=4, shuffle=True)


def loader_of_workers() -> Any:
    return DataLoader(Table(), batch_size=4, shuffle=True, num_workers=1)


def stateful_loader() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(Table(), batch_size=4, shuffle=True)


def columns() -> dict[str, Any]:
    values = np.random.default_rng(1).normal(size=(NUM_ROWS, 16))
    return {"inputs": values, "targets": values.cumsum(axis=1)}


def arrow() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({name: values.tolist() for name, values in columns().items()})


def arrow_stream() -> Any:
    return arrow().to_iterable_dataset(num_shards=2)


def ray_data() -> Any:
    data = pytest.importorskip("ray.data")
    return data.from_items([{name: values[at] for name, values in columns().items()} for at in range(NUM_ROWS)])


KINDS: dict[str, Callable[[], Any]] = {
    "table": Table,
    "columns": columns,
    "stream": Stream,
    "loader": loader,
    "loader-of-workers": loader_of_workers,
    "stateful-loader": stateful_loader,
    "arrow": arrow,
    "arrow-stream": arrow_stream,
    "ray-data": ray_data,
}


def trainer(
    folder: Path, data: Any, *, num_updates: int = NUM_UPDATES, devices: int = 2, run_config: RunConfig | None = None, **more: Any
) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 6, "dtype": "float64"},
        train_data=data,
        schedule_config=SCHEDULE,
        optimizer_config=OptimizerConfig(learning_rate=1e-2, final_learning_rate=1e-2, warmup_updates=0),
        scaling_config=ScalingConfig(num_devices=devices, layers_per_stage=(6 // devices,) * devices),
        run_config=run_config or RunConfig(name="run", storage_path=str(folder), num_updates=num_updates, seed=3),
        **more,
    )


@pytest.mark.parametrize("kind", slow_unless({"ray-data"}, list(KINDS)))
def test_a_run_goes_on_in_the_middle_of_an_epoch_at_another_number_of_stages_with_the_same_rows(kind: str, tmp_path: Path) -> None:
    # A loader with a generator of its own draws its seed when it is made: the reader, which is seeded, makes it.
    straight, first, again = (KINDS[kind] if kind == "stateful-loader" else KINDS[kind]() for _ in range(3))
    expected = trainer(tmp_path / "straight", straight).fit()
    trainer(tmp_path / "cut", first, num_updates=6).fit()
    second = trainer(tmp_path / "cut", again, devices=3).fit(resume=True)
    assert second.losses == pytest.approx(expected.losses[6:], abs=1e-12)
    assert len(set(expected.losses)) == NUM_UPDATES


@pytest.mark.slow
def test_a_lost_reader_starts_again_and_changes_no_row(tmp_path: Path) -> None:
    calm = trainer(tmp_path / "calm", Stream()).fit()
    struck = trainer(tmp_path / "struck", Struck(tmp_path / "once")).fit()
    assert struck.losses == calm.losses
    assert (tmp_path / "once").exists()


def test_a_lost_reader_goes_on_from_the_newest_saved_position(tmp_path: Path) -> None:
    calm = trainer(tmp_path / "calm", Stream()).fit()
    config = dataclasses.replace(trainer(tmp_path / "struck", Stream()).config.run, checkpoint_every=3)
    struck = trainer(tmp_path / "struck", Struck(tmp_path / "once"), run_config=config).fit()
    assert struck.losses == calm.losses
    begun = [int(line) for line in (tmp_path / "once.begun").read_text().split()]
    # The driver looks at the first rows; a reader reads an epoch and dies in the second; the next one begins where update 3 ended.
    assert begun[:4] == [0, 0, 0, 36]


class Struck(Stream):
    """A stream whose process is killed at row 70, once."""

    def __init__(self, once: Path) -> None:
        super().__init__()
        self.once, self.num = once, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        with self.once.with_suffix(".begun").open("a") as file:
            file.write(f"{self.begin}\n")
        for row in super().__iter__():
            self.num += 1
            if self.num == 70 and not self.once.exists():
                self.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield row


def test_a_slow_loader_shows_as_a_wait_for_data_and_not_as_a_bubble(tmp_path: Path) -> None:
    result = trainer(tmp_path, Table(sleep_s=0.01)).fit()
    trace = Trace.load(Path(result.path) / "trace.json")
    assert any(span.kind is SpanKind.DATA and span.name.startswith("rows of microbatch") for span in trace.spans)
    division = divide(trace)
    data_s = division.by_cause_s[0].get(Cause.DATA, 0.0)
    assert data_s > 0.5 * trace.makespan_s, "12 rows of 10 ms an update, and milliseconds of work"
    assert trace.device_bubble_ratios[0] < 0.5
    assert division.culprits[0].root == "data"


@pytest.mark.slow
def test_readers_ahead_hide_what_a_loader_takes_behind_other_work(tmp_path: Path) -> None:
    """Two processes read a microbatch each at the same time."""
    waits = {}
    for num_readers in (1, 4):
        data = DataConfig(num_readers=num_readers, prefetch=8)
        result = trainer(tmp_path / str(num_readers), Table(sleep_s=0.03), data_config=data).fit()
        waits[num_readers] = Trace.load(Path(result.path) / "trace.json").data_s[0]
    assert waits[4] < 0.6 * waits[1]


def test_a_configuration_names_functions_in_files_of_the_drivers_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.py").write_text(
        "import torch\n"
        "def rows(num, seed):\n"
        "    values = torch.randn(num, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)\n"
        "    return [(row, row.cumsum(0)) for row in values]\n"
        "def pairs(rows):\n"
        "    return {'inputs': torch.stack([x for x, _ in rows]), 'targets': torch.stack([y for _, y in rows])}\n",
        encoding="utf-8",
    )
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from raypipe.models.mlp import mlp\n"
        "def model():\n"
        "    return mlp(num_layers=4, dtype='float64')\n"
        "class Plain(torch.optim.SGD):\n"
        "    pass\n"
        "def constant(update, num_updates):\n"
        "    return 1.0\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)  # the processes of the cluster work elsewhere
    config = TrainConfig(
        model=ModelConfig(function="own.py:model"),
        optimizer=OptimizerConfig(name="own.py:Plain", learning_rate_schedule="own.py:constant", learning_rate=0.05),
        data=DataConfig(
            train="rows.py:rows",
            eval="rows.py:rows",
            collate="rows.py:pairs",
            options={"num": 40, "seed": 2},
            num_validation_microbatches=2,
        ),
        schedule=SCHEDULE,
        scaling=ScalingConfig(num_devices=2),
        run=RunConfig(storage_path=str(tmp_path / "runs"), num_updates=3),
    )
    config.save(tmp_path / "config.yaml")
    result = Trainer.of(TrainConfig.load(tmp_path / "config.yaml")).fit()
    assert [update for update, _ in result.validation_losses] == [0, 3]
    assert result.validation_losses[1][1] < result.validation_losses[0][1]
