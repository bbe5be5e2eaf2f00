"""Updates that go bad are left out on all stages alike, and a run whose updates stay bad ends."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.config import FailureConfig, OnNonFinite, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import NonFiniteError
from raypipe.model import Batch
from raypipe.models.mlp import mlp
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows, train_unsplit
from tests.marks import slow_unless
from tests.told import Told, telling

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]

NUM_MICROBATCHES = 4
NUM_UPDATES = 9


@dataclass(frozen=True)
class Rows:
    """Random rows, of which some updates have one without a number in it, or are left out."""

    bad: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def __call__(self, split: str) -> BatchSource:
        return self

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        update, number = divmod(microbatch, NUM_MICROBATCHES)
        for skipped in sorted(self.left_out):
            update += update >= skipped
        found = RandomRows().batch(update * NUM_MICROBATCHES + number, rows)
        if update in self.bad and number == 2:
            found["inputs"][0, 0] = torch.nan
        return found


def trainer(folder: Path, rows: Rows, *, policy: OnNonFinite = OnNonFinite.STOP, schedule: str = "1f1b", max_failures: int = 3) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 4, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(name=schedule, num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS, updates_per_window=3),
        optimizer_config=OptimizerConfig(
            learning_rate=1e-2, final_learning_rate=1e-2, warmup_updates=0, beta2=0.999, weight_decay=0.01, max_grad_norm=0.5
        ),
        scaling_config=ScalingConfig(num_devices=2, layers_per_stage=(2, 2)),
        run_config=RunConfig(name="run", storage_path=str(folder), num_updates=NUM_UPDATES, on_nonfinite=policy),
        failure_config=FailureConfig(max_failures=max_failures, copy_share=1.0),
    )


@pytest.mark.usefixtures("shared_actors")
def test_a_bad_update_is_named_and_left_out_as_if_its_rows_were_not_there(tmp_path: Path) -> None:
    notices = Told()
    found = telling(trainer(tmp_path, Rows(bad=(4, 6))), notices).fit()
    torch.set_num_threads(1)
    expected = train_unsplit(
        mlp(num_layers=4, dtype="float64"),
        Rows(left_out=(4, 6)),
        num_updates=NUM_UPDATES - 2,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        decay_matrices_only=0.01,
    )
    assert [loss for loss in found.losses if math.isfinite(loss)] == pytest.approx(expected.losses, abs=1e-10)
    assert [number for number, loss in enumerate(found.losses) if not math.isfinite(loss)] == [4, 6]
    for index, weights in enumerate(expected.layers):
        assert torch.allclose(found.checkpoint.load_layer(index)["linear.weight"], weights[0], rtol=0, atol=1e-10)
    told = [text for text in notices.texts if "without this update" in text]
    assert [text.partition(";")[0] for text in told] == [
        "update 5: the loss of microbatch 2 is nan",
        "update 7: the loss of microbatch 2 is nan",
    ]
    assert "(stage 0)" in told[0]
    lines = [json.loads(line) for line in (Path(found.path) / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "learning_rate" in line] == list(range(1, NUM_UPDATES + 1))


@pytest.mark.usefixtures("shared_actors")
@pytest.mark.parametrize("schedule", slow_unless({"amdp"}, ["amdp", "pipedream-2bw"]))
def test_asynchronous_stages_leave_out_the_same_updates(tmp_path: Path, schedule: str) -> None:
    found = trainer(tmp_path, Rows(bad=(4,)), schedule=schedule).fit()
    assert [number for number, loss in enumerate(found.losses) if not math.isfinite(loss)] == [4]


@pytest.mark.usefixtures("shared_actors")
def test_three_bad_updates_in_a_row_end_the_run_unless_all_are_to_be_skipped(tmp_path: Path) -> None:
    bad = Rows(bad=(3, 4, 5))
    with pytest.raises(NonFiniteError, match=r"update 6: the loss of microbatch 2 is nan.*so were the 2 updates before"):
        trainer(tmp_path / "stop", bad).fit()
    assert math.isfinite(trainer(tmp_path / "skip", bad, policy=OnNonFinite.SKIP).fit().losses[-1])
    with pytest.raises(NonFiniteError, match=r"update 4: .*failure.max_failures"):
        trainer(tmp_path / "none", bad, max_failures=0).fit()


@pytest.mark.usefixtures("shared_actors")
def test_who_wants_to_goes_on_with_bad_numbers_but_saves_none(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="infinite or no number"):
        trainer(tmp_path, Rows(bad=(4,)), policy=OnNonFinite.CONTINUE).fit()
    assert Checkpoint.latest(tmp_path / "run") is None
