"""Branches of a model run side by side on Ray actors, as planned by name, by a file and on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypipe.actors.execution.batches import FileSource
from raypipe.artifacts.plan import Plan
from raypipe.config import AdaptationConfig, DataConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.data.fields import Rows, write_rows
from raypipe.errors import PlanError
from raypipe.models.towers import two_towers
from raypipe.planning import branches
from raypipe.planning.layout import Layout
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import Trained, train_unsplit
from tests.on_ray.test_adaptive import scripted

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

NUM_UPDATES = 8
DIVISION = (4, 8)  # microbatches, rows of each
OPTIONS = {"num_left_layers": 3, "num_right_layers": 5, "dtype": "float64"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    fields = {name: random.normal(size=(50, 16)) for name in ("left", "right", "targets")}
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    write_rows(path, Rows(fields, ["train"] * 50))
    return path


@pytest.fixture(scope="module")
def unsplit(data: Path) -> Trained:
    return train_unsplit(
        two_towers(**OPTIONS),  # type: ignore[arg-type]
        FileSource(str(data), sequence_length=1, seed=5, microbatch_size=DIVISION[1])("train"),
        num_updates=NUM_UPDATES,
        num_microbatches=DIVISION[0],
        learning_rate=1e-2,
        max_grad_norm=1.0,
        seed=5,
        decay_matrices_only=0.01,
    )


def trained(folder: Path, data: Path, *, schedule: str = "branch-aware", adapt: bool = False, plan: str | None = None) -> Result:
    return Trainer(
        "raypipe.models.towers:two_towers",
        model_options=OPTIONS,
        data_config=DataConfig(path=str(data), num_validation_microbatches=0),
        schedule_config=ScheduleConfig(name=schedule, num_microbatches=DIVISION[0], microbatch_size=DIVISION[1], updates_per_window=2),
        optimizer_config=OptimizerConfig(learning_rate=1e-2, final_learning_rate=1e-2, warmup_updates=0, beta2=0.999, weight_decay=0.01),
        scaling_config=ScalingConfig(num_devices=3),
        run_config=RunConfig(name="towers", storage_path=str(folder), num_updates=NUM_UPDATES, seed=5),
        adaptation_config=AdaptationConfig(enabled=adapt),
        plan=plan,
    ).fit()


@pytest.mark.usefixtures("local_ray")
def test_a_run_by_name_plans_from_measured_layers_and_equals_the_unsplit_model(tmp_path: Path, data: Path, unsplit: Trained) -> None:
    result = trained(tmp_path, data)
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    plan = Plan.load(Path(result.path) / "plan.json")
    assert plan.schedule.name == "branch-aware"
    assert {layer.branch for layer in plan.profile.layers} == {"left", "right", None}
    # The plan that was made runs again, and is one that a run may leave.
    again = trained(tmp_path / "again", data, plan=str(Path(result.path) / "plan.json"), adapt=True)
    assert again.losses == pytest.approx(unsplit.losses, abs=1e-10)


@pytest.mark.usefixtures("local_ray")
def test_a_run_that_is_moved_to_branches_and_away_equals_the_unsplit_model(
    tmp_path: Path, data: Path, unsplit: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [
        (((0,), (1, 2), (3, 4, 5), (6, 7), (8,)), (0, 1, 2, 0, 1)),
        (((0, 1, 2), (3, 4, 5, 6, 7), (8,)), (2, 1, 2)),  # of three devices, one has nothing to do
    ]
    strategies: list[AdaptiveStrategy] = []
    prepare = AdaptiveStrategy.prepare

    def noted(self: AdaptiveStrategy, *arguments: object, **options: object) -> None:
        prepare(self, *arguments, **options)  # type: ignore[arg-type]
        strategies.append(self)
        layouts: list[Layout] = []
        for stages, placed in ways:
            used = sorted(set(placed))
            evaluator = self.policy.planner.evaluator(DIVISION)
            groups = tuple((device,) for device in used)
            workers = tuple(used.index(worker) for worker in placed)
            layout = branches.placed_stages(evaluator, groups, stages, workers, num_parts=1, split=bool(layouts))
            assert layout is not None
            layouts += [layout, Layout((0, 4, 6, 9), ((1,), (2,), (0,)), "1f1b")]
        scripted(monkeypatch, layouts[:3], division=DIVISION)

    monkeypatch.setattr(AdaptiveStrategy, "prepare", noted)
    result = trained(tmp_path, data, schedule="1f1b", adapt=True)
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    assert len(list(Path(result.path).glob("plan-until-update-*.json"))) == 3
    assert Plan.load(Path(result.path) / "plan.json").schedule.name == "branch-aware"


def test_a_model_without_branches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the model's layers name 0 branches; name two or more"):
        Trainer(
            "raypipe.models.mlp:mlp",
            batches=lambda split: None,  # type: ignore[arg-type,return-value]
            schedule_config=ScheduleConfig(name="branch-aware", num_microbatches=2, microbatch_size=4),
            scaling_config=ScalingConfig(num_devices=2),
            run_config=RunConfig(storage_path=str(tmp_path), num_updates=2),
        ).fit()
