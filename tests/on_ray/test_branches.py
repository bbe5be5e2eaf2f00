"""Branches of a model run side by side on Ray actors, as planned by name, by a file and on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ray.util import list_named_actors

from raypipe.actors.execution.batches import FileSource
from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Replica, make_plan
from raypipe.config import AdaptationConfig, DataConfig, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, Transport
from raypipe.data.fields import Rows, write_rows
from raypipe.errors import PlanError, StageFailedError
from raypipe.model import Model
from raypipe.models.towers import two_towers
from raypipe.planning import branches
from raypipe.planning.layout import Layout
from raypipe.schedules.passes import recompute
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import Trained, largest_difference, train_unsplit
from tests.models.test_branches import (
    CLIP_STAGES,
    NUM_ROWS,
    VQA_STAGES,
    Shifted,
    glyph_batch,
    placed_order,
    question_batch,
    small_clip,
    small_vqa,
)
from tests.on_ray.plans import in_turn, lab, profile_of, this_node
from tests.on_ray.test_adaptive import scripted

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default")]

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


@pytest.mark.usefixtures("local_ray", "shared_actors")
def test_a_run_by_name_plans_from_measured_layers_and_equals_the_unsplit_model(tmp_path: Path, data: Path, unsplit: Trained) -> None:
    result = trained(tmp_path, data)
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    plan = Plan.load(Path(result.path) / "plan.json")
    assert plan.schedule.name == "branch-aware"
    assert {layer.branch for layer in plan.profile.layers} == {"left", "right", None}
    # The plan that was made runs again, and is one that a run may leave.
    again = trained(tmp_path / "again", data, plan=str(Path(result.path) / "plan.json"), adapt=True)
    assert again.losses == pytest.approx(unsplit.losses, abs=1e-10)


@pytest.mark.usefixtures("local_ray", "shared_actors")
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


def glyphs(split: str) -> Shifted:
    assert split == "train"
    return Shifted(glyph_batch(), "name")


def questions(split: str) -> Shifted:
    assert split == "train"
    return Shifted(question_batch(), "image")


def placed_plan(
    model: Model,
    batches: Shifted,
    stages: tuple[tuple[int, ...], ...],
    workers: tuple[int, ...],
    *,
    num_parts: int,
    shares: Sequence[Sequence[float]] = (),
    again: bool = False,
) -> Plan:
    """A plan with the order found for these workers, which have a device each or share it so."""
    node, cut = this_node(), Cut(stages, model.edges())
    schedule = placed_order(workers, cut.graph, num_parts=num_parts, split=not again, num_updates=1)
    numbered = in_turn(node, shares or [(1.0,)] * schedule.num_workers)
    topology = lab({node: sum(map(len, numbered))})
    plan = make_plan(
        name="placed",
        planner="given",
        cut=cut,
        schedule=recompute(schedule, range(schedule.num_stages)) if again else schedule,
        profile=profile_of(model, batches.batch(0, (0.0, 1.0))),
        topology=topology,
        devices=tuple(device.name for device in topology.devices),
        microbatch_size=NUM_ROWS,
    )
    return replace(plan, workers=tuple(tuple(Replica(device=device, share=share) for device, share in worker) for worker in numbered))


def follower(
    folder: Path,
    plan: Plan,
    model: Callable[[], Model],
    batches: Callable[[str], Shifted],
    *,
    num_updates: int,
    updates_per_window: int = 2,
    transport: Transport = Transport.AUTO,
    faults: FaultScript | None = None,
) -> Trainer:
    plan.save(folder / "plan.json")
    return Trainer(
        model,
        batches=batches,
        data_config=DataConfig(path="", num_validation_microbatches=0),
        schedule_config=ScheduleConfig(updates_per_window=updates_per_window),
        optimizer_config=OptimizerConfig(learning_rate=1e-2, final_learning_rate=1e-2, warmup_updates=0, beta2=0.999, weight_decay=0.01),
        scaling_config=ScalingConfig(transport=transport),
        run_config=RunConfig(name="placed", storage_path=str(folder), num_updates=num_updates),
        failure_config=FailureConfig(max_failures=0),
        plan=str(folder / "plan.json"),
        faults=faults,
    )


@pytest.mark.usefixtures("local_ray", "shared_actors")
@pytest.mark.parametrize(
    ("model", "batches", "stages", "num_parts", "transport"),
    [
        pytest.param(small_clip, glyphs, CLIP_STAGES, 3, Transport.GLOO, id="clip-in-parts-over-gloo"),
        pytest.param(small_vqa, questions, VQA_STAGES, 1, Transport.SHM, id="vqa-through-shared-memory"),
    ],
)
def test_windows_of_several_updates_go_on_from_a_checkpoint_with_branches_elsewhere(
    tmp_path: Path,
    model: Callable[[], Model],
    batches: Callable[[str], Shifted],
    stages: tuple[tuple[int, ...], ...],
    num_parts: int,
    transport: Transport,
) -> None:
    """The second part runs forwards again, on branches of two devices each."""
    plan = partial(placed_plan, model(), batches("train"), stages, num_parts=num_parts)
    trained_with = partial(follower, tmp_path, model=model, batches=batches, transport=transport)
    first = trained_with(plan(workers=(0, 1, 1, 0, 1)), num_updates=4, updates_per_window=3).fit()
    shares = ((0.5, 0.5), (0.5, 0.5), (1.0,))
    second = trained_with(plan(workers=(0, 0, 1, 1, 2), shares=shares, again=True), num_updates=9).fit(resume=True)
    assert second.path == first.path
    expected = train_unsplit(
        model(), batches("train"), num_updates=9, num_microbatches=2, learning_rate=1e-2, max_grad_norm=1.0, decay_matrices_only=0.01
    )
    assert first.losses + second.losses == pytest.approx(expected.losses, abs=1e-10)
    for index, layer in enumerate(model().layers):
        saved = second.checkpoint.load_layer(index)
        assert largest_difference([saved[name] for name, _ in layer.build().named_parameters()], expected.layers[index]) < 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(FaultKind.RAISE, r"train-2, 2F1\.2 of text: ScriptedFault", id="raised"),
        pytest.param(FaultKind.KILL, r"train-2: its process died", id="killed"),
    ],
)
def test_a_fault_is_named_with_device_stage_and_branch_and_leaves_no_actor(tmp_path: Path, kind: FaultKind, message: str) -> None:
    plan = placed_plan(small_clip(), glyphs("train"), CLIP_STAGES, (0, 1, 1, 0, 1), num_parts=3)
    faults = FaultScript().fail_at(device=1, before="2F1.2", kind=kind, window=1)
    since = time.monotonic()
    with pytest.raises(StageFailedError, match=rf"stage 1 of image, 2 of text, 4 \(device .*/1, node .* window 1 of {message}"):
        follower(tmp_path, plan, small_clip, glyphs, num_updates=8, faults=faults).fit()
    assert time.monotonic() - since < 40
    deadline = time.monotonic() + 10
    while (left := [name for name in list_named_actors() if name.startswith("placed:")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_a_model_without_branches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the model's layers name 0 branches; name two or more"):
        Trainer(
            "raypipe.models.mlp:mlp",
            batches=lambda split: None,  # type: ignore[arg-type,return-value]
            schedule_config=ScheduleConfig(name="branch-aware", num_microbatches=2, microbatch_size=4),
            scaling_config=ScalingConfig(num_devices=2),
            run_config=RunConfig(storage_path=str(tmp_path), num_updates=2),
        ).fit()
