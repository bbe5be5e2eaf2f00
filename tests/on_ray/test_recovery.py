"""Runs that go on after a device is lost: their losses are those of a run without the fault, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from raypipe.actors.execution.faults import CONNECT, SAVE, FaultKind, FaultScript
from raypipe.artifacts.plan import Plan
from raypipe.callbacks.base import Callback
from raypipe.cluster.discovery import spare_slots
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import (
    AdaptationConfig,
    ClusterConfig,
    DataConfig,
    FailureConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    TrainConfig,
)
from raypipe.data.prepare import prepare
from raypipe.errors import ConfigError, StageFailedError, StageRaisedError
from raypipe.training.drill import DrillFault, drill
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows
from tests.marks import slow_unless
from tests.on_ray.actor_pool import ActorPool, runs_take_their_actors_from

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]

NUM_UPDATES = 12
PER_WINDOW = 3
_ACTIVATION, _GRADIENT = "activation 0->1 of microbatch 2", "gradient 1->0 of microbatch 1"


def rows(split: str) -> RandomRows:
    assert split in {"train", "validation"}
    return RandomRows()


def trainer(
    folder: Path,
    *,
    faults: FaultScript | None = None,
    schedule: str = "1f1b",
    scaling: ScalingConfig | None = None,
    checkpoint_every: int = 0,
    max_failures: int = 3,
    message_timeout_s: float = 60.0,
    plan: Path | None = None,
    adapts: bool = False,
    spares: bool | None = False,
) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 8, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(name=schedule, num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=PER_WINDOW),
        optimizer_config=OptimizerConfig(learning_rate=1e-2, warmup_updates=4),
        scaling_config=scaling or ScalingConfig(num_devices=2, layers_per_stage=(4, 4)),
        cluster_config=ClusterConfig(message_timeout_s=message_timeout_s, silence_timeout_s=5.0),
        run_config=RunConfig(name="test", storage_path=str(folder), num_updates=NUM_UPDATES, checkpoint_every=checkpoint_every),
        failure_config=FailureConfig(max_failures=max_failures, copy_share=1.0, spare_processes=spares),
        adaptation_config=AdaptationConfig(enabled=adapts, schedules=("1f1b", "zb-h1")) if adapts else AdaptationConfig(),
        plan=None if plan is None else str(plan),
        faults=faults,
    )


@pytest.fixture(scope="module")
def calm(actor_pool: ActorPool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run without a fault."""
    with runs_take_their_actors_from(actor_pool):
        return trainer(tmp_path_factory.mktemp("calm")).fit()


def failures(path: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (Path(path) / "failures.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", slow_unless({FaultKind.KILL}, list(FaultKind)))
def test_a_run_goes_on_after_an_actor_is_killed_raises_or_hangs(tmp_path: Path, calm: Result, kind: FaultKind) -> None:
    faults = FaultScript().fail_at(device=1, before="1B2", kind=kind, window=2, hang_s=100.0)
    timeout_s = 3.0 if kind in {FaultKind.HANG, FaultKind.STOP} else 60.0
    found = trainer(tmp_path / "struck", faults=faults, message_timeout_s=timeout_s).fit()
    assert found.losses == calm.losses
    assert found.validation_losses == calm.validation_losses
    lines = [json.loads(line) for line in (Path(found.path) / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == list(range(1, NUM_UPDATES + 1))
    (failure,) = failures(found.path)
    assert (failure["update"], failure["from_update"], failure["source"]) == (6, 6, "the copies in memory")


@pytest.mark.parametrize(
    ("before", "kind"),
    slow_unless(
        {(_ACTIVATION, FaultKind.CUT)},
        list(product((_ACTIVATION, _GRADIENT), (FaultKind.KILL, FaultKind.CUT, FaultKind.HANG))),
    ),
)
def test_a_fault_at_a_message_is_recovered_from_at_either_end(tmp_path: Path, calm: Result, kind: FaultKind, before: str) -> None:
    faults = FaultScript()
    for device, window in ((0, 1), (1, 2)):
        faults = faults.fail_at(device=device, before=before, kind=kind, window=window, hang_s=100.0)
    found = trainer(tmp_path / "struck", faults=faults, message_timeout_s=3.0).fit()
    assert found.losses == calm.losses
    assert [failure["from_update"] for failure in failures(found.path)] == [3, 6]


@pytest.mark.parametrize("kind", slow_unless({FaultKind.CUT}, [FaultKind.KILL, FaultKind.CUT]))
def test_a_fault_at_a_sum_is_recovered_from(tmp_path: Path, actor_pool: ActorPool, kind: FaultKind) -> None:
    scaling = ScalingConfig(num_devices=2, replicas=2, layers_per_stage=(8,))
    with runs_take_their_actors_from(actor_pool):
        calm = trainer(tmp_path / "calm", scaling=scaling).fit()
    faults = FaultScript().fail_at(device=1, before="gradients of stage 0 for update 1", kind=kind, window=1)
    found = trainer(tmp_path / "struck", scaling=scaling, faults=faults).fit()
    assert found.losses == calm.losses
    assert [failure["from_update"] for failure in failures(found.path)] == [3]


@pytest.mark.parametrize("kind", slow_unless({FaultKind.HANG}, list(FaultKind)))
def test_a_fault_while_a_checkpoint_is_written_costs_that_checkpoint_at_most(tmp_path: Path, calm: Result, kind: FaultKind) -> None:
    faults = FaultScript().fail_at(device=1, before=SAVE, kind=kind, window=1, hang_s=5.0)
    found = trainer(tmp_path / "struck", faults=faults, checkpoint_every=PER_WINDOW, message_timeout_s=3.0).fit()
    assert found.losses == calm.losses
    kept = {folder.name for folder in (Path(found.path) / "checkpoints").iterdir()}
    assert {"update-000009", "update-000012"} <= kept


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.RAISE, FaultKind.CUT])
def test_a_device_that_is_lost_again_while_a_run_recovers_is_replaced_again(tmp_path: Path, calm: Result, kind: FaultKind) -> None:
    faults = FaultScript().fail_at(device=1, before="1B2", kind=FaultKind.KILL, window=1)
    # The devices have met once when the survivor meets the new actor.
    faults = faults.fail_at(device=0, before=CONNECT, kind=kind, window=1)
    faults = faults.fail_at(device=0, before="0B2", kind=FaultKind.KILL, window=2)
    said: list[str] = []
    struck = trainer(tmp_path / "struck", faults=faults)
    struck.callbacks.append(Said(said))
    found = struck.fit()
    assert found.losses == calm.losses
    assert [failure["from_update"] for failure in failures(found.path)] == [3, 6]
    assert sum("recovering failed, trying again" in text for text in said) == 1


def test_a_fault_in_the_first_window_begins_the_run_anew(tmp_path: Path, calm: Result) -> None:
    faults = FaultScript().fail_at(device=0, before="0F1", kind=FaultKind.KILL)
    found = trainer(tmp_path / "struck", faults=faults).fit()
    assert found.losses == calm.losses
    (failure,) = failures(found.path)
    assert (failure["from_update"], failure["source"]) == (0, "the beginning")


def test_a_run_that_adapts_recovers_and_goes_on_adapting(tmp_path: Path, calm: Result) -> None:
    faults = FaultScript().fail_at(stage=0, kind=FaultKind.KILL, window=1)
    scaling = ScalingConfig(num_devices=2)
    found = trainer(tmp_path / "struck", schedule="auto", scaling=scaling, faults=faults, adapts=True).fit()
    assert found.losses == pytest.approx(calm.losses, abs=1e-10)
    assert [failure["from_update"] for failure in failures(found.path)] == [3]
    decisions = [json.loads(line) for line in (Path(found.path) / "adaptation.jsonl").read_text().splitlines()]
    assert max(decision["update"] for decision in decisions) > 3


def test_a_stage_that_fails_twice_at_the_same_place_ends_the_run(tmp_path: Path) -> None:
    faults = FaultScript().fail_at(device=1, before="1F3", window=1, repeats=True)
    with pytest.raises(StageRaisedError, match=r"scripted fault before 1F3.*twice"):
        trainer(tmp_path, faults=faults, max_failures=5).fit()
    assert len(failures(str(tmp_path / "test"))) == 1


def test_more_failures_in_a_row_than_allowed_end_the_run(tmp_path: Path) -> None:
    again = FaultScript().fail_at(device=1, before="1F3", kind=FaultKind.KILL, window=1, repeats=True)
    with pytest.raises(StageFailedError, match="process died"):
        trainer(tmp_path, faults=again, max_failures=1).fit()


@pytest.mark.slow
def test_failures_are_counted_anew_after_progress(tmp_path: Path, calm: Result) -> None:
    faults = FaultScript()
    for window in (1, 3):
        faults = faults.fail_at(device=0, before="0B1", kind=FaultKind.KILL, window=window)
    found = trainer(tmp_path / "apart", faults=faults, max_failures=1).fit()
    assert found.losses == calm.losses
    assert [failure["from_update"] for failure in failures(found.path)] == [3, 9]


@pytest.mark.parametrize(
    ("schedule", "scaling"),
    [
        ("pipedream-2bw", ScalingConfig(num_devices=4, replicas=2, layers_per_stage=(4, 4))),
        pytest.param("amdp", ScalingConfig(num_devices=2, layers_per_stage=(4, 4)), marks=pytest.mark.slow),
    ],
)
def test_copies_of_stages_and_late_updates_recover_to_the_last_bit(
    tmp_path: Path, actor_pool: ActorPool, schedule: str, scaling: ScalingConfig
) -> None:
    with runs_take_their_actors_from(actor_pool):
        calm = trainer(tmp_path / "calm", schedule=schedule, scaling=scaling).fit()
    op = {"pipedream-2bw": "1B2", "amdp": "1B1"}[schedule]
    faults = FaultScript().fail_at(device=1, before=op, kind=FaultKind.KILL, window=2)
    # The order of an asynchronous schedule may follow measured times: both runs have the plan of the first.
    struck = trainer(tmp_path / "struck", schedule=schedule, scaling=ScalingConfig(), faults=faults, plan=Path(calm.path) / "plan.json")
    assert struck.fit().losses == calm.losses


def test_without_another_device_a_run_goes_on_with_a_new_plan_until_the_device_is_back(
    tmp_path: Path, calm: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def none_at_first(
        slots: Sequence[DeviceSlot], lost: Sequence[int], needs: Mapping[str, float], *, without: Collection[str]
    ) -> dict[int, DeviceSlot]:
        looks.append(len(lost))
        return spare_slots(slots, lost, needs, without=without) if len(looks) > 2 else {}

    monkeypatch.setattr("raypipe.training.recovery.spare_slots", none_at_first)
    monkeypatch.setattr("raypipe.training.recovery._LOOK_S", 0.0)
    faults = FaultScript().fail_at(device=1, before="1B2", kind=FaultKind.KILL, window=1)
    found = trainer(tmp_path / "struck", faults=faults).fit()
    assert found.losses == pytest.approx(calm.losses, abs=1e-10)
    assert looks == [1, 1, 1]
    folder = Path(found.path)
    plans = [Plan.load(folder / name) for name in ("plan-until-update-000003.json", "plan-until-update-000009.json", "plan.json")]
    assert [len(plan.devices) for plan in plans] == [2, 1, 2]
    (failure,) = failures(found.path)
    assert failure["from_update"] == 3


class Said(Callback):
    """Keeps what a run says."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def on_notice(self, text: str) -> None:
        self.said.append(text)


def test_a_drill_strikes_stages_and_compares(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("practice makes perfect\n" * 40)
    prepare(str(source), output=tmp_path / "tokens.parquet", validation_fraction=0.3)
    config = TrainConfig(
        model=ModelConfig(
            function="raypipe.models.gpt:gpt", options={"num_layers": 2, "d_model": 32, "num_heads": 2, "sequence_length": 32}
        ),
        data=DataConfig(path=str(tmp_path / "tokens.parquet"), sequence_length=32),
        schedule=ScheduleConfig(num_microbatches=2, microbatch_size=2, updates_per_window=2),
        scaling=ScalingConfig(num_devices=2, layers_per_stage=(2, 2)),
        run=RunConfig(name="gpt", storage_path=str(tmp_path)),
        failure=FailureConfig(copy_share=1.0, spare_processes=False),
    )
    kill, fail = partial(DrillFault.parse, FaultKind.KILL), partial(DrillFault.parse, FaultKind.RAISE)
    found = drill(
        config,
        [
            kill("stage=1"),
            fail("0"),
            kill("device=1,before=save"),
            kill("stage=0,before=gradient 1->0 of microbatch 1"),
            kill("stage=1,before=connect"),
        ],
    )
    assert found.largest_difference == 0.0
    # Windows of two updates: first that with the fault before the devices meet. What is killed while it saves is missed in the next window.
    assert [(failure.update, failure.from_update) for failure in found.struck.recoveries] == [(4, 4), (6, 6), (8, 8), (12, 12), (14, 14)]
    assert Path(found.struck.path).name == "gpt-drill-2"
    with pytest.raises(ConfigError, match="the run has the stages 0 to 1, not 2; choose one of them to kill"):
        drill(config, [kill("stage=2")])
    with pytest.raises(ConfigError, match=r"stage 1 never does '1B5'; did you mean '1B[0-3]'"):
        drill(config, [kill("stage=1,before=1B5")])
