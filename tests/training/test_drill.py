"""How the places of a drill's faults are written, and which are refused before its first run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from raypipe.actors.execution.faults import CONNECT, SAVE, Fault, FaultKind, FaultScript, ScriptedFault
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.config import DataConfig, ModelConfig, RunConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.errors import ConfigError
from raypipe.planning.plan import plan
from raypipe.training.drill import DrillFault, drill

KILL, HANG = FaultKind.KILL, FaultKind.HANG


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("2", DrillFault(KILL, stage=2)),
        ("stage=2", DrillFault(KILL, stage=2)),
        ("stage=0,before=0B1", DrillFault(KILL, stage=0, before="0B1")),
        ("device=3,before=save", DrillFault(KILL, device=3, before=SAVE)),
        ("stage=1,before=connect", DrillFault(KILL, stage=1, before=CONNECT)),
        (
            "stage=1,for=2.5,before=activation 0->1 of microbatch 2",
            DrillFault(KILL, stage=1, before="activation 0->1 of microbatch 2", hang_s=2.5),
        ),
    ],
)
def test_a_place_is_a_stage_or_a_device_and_what_it_is_about_to_do(text: str, fault: DrillFault) -> None:
    assert DrillFault.parse(KILL, text) == fault


@pytest.mark.parametrize(
    "text", ["", "stage", "stage=x", "node=2", "stage=1,device=1,before=save", "device=1", "before=save", "stage=1,for=ever"]
)
def test_other_places_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write stage=N, or device=N,before=WHAT"):
        DrillFault.parse(HANG, text)


def strikes(script: FaultScript, **where: object) -> bool:
    try:
        script.strike(**{"device": 1, "stages": {2}, "before": "2B1", "window": 3, "is_op": True} | where)  # type: ignore[arg-type]
    except ScriptedFault:
        return True
    return False


def test_a_fault_on_a_stage_strikes_before_any_op_or_before_what_it_names() -> None:
    any_op = FaultScript().fail_at(stage=2, window=3)
    assert strikes(any_op)
    assert strikes(any_op, device=7, before="2F0")
    assert not strikes(any_op, window=2)
    assert not strikes(any_op, stages={1})
    assert not strikes(any_op, before=SAVE, is_op=False)
    at_save = FaultScript().fail_at(stage=2, before=SAVE, window=3)
    assert strikes(at_save, before=SAVE, is_op=False)
    assert not strikes(at_save)
    on_device = FaultScript().fail_at(device=1, before="2B1", window=3)
    assert strikes(on_device, stages=())
    assert not strikes(on_device, device=2)


def test_what_is_left_behind_a_failed_window_are_later_faults_and_those_of_later_meetings() -> None:
    script = FaultScript().fail_at(stage=0, window=1).fail_at(stage=0, before=CONNECT, window=1).fail_at(stage=0, window=2)
    assert [(fault.before, fault.window) for fault in script.after(1).faults] == [(CONNECT, 1), (None, 2)]


@pytest.mark.parametrize("place", [{}, {"device": 1, "stage": 1}, {"device": 1}])
def test_a_fault_is_on_a_stage_or_before_something_on_a_device(place: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a fault"):
        FaultScript().fail_at(**place)  # type: ignore[arg-type]
    assert Fault(1, "2B1", KILL).stage is None


def named(name: str) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(function="raypipe.models.mlp:mlp"),
        data=DataConfig(path="rows.parquet"),
        schedule=ScheduleConfig(name=name, num_microbatches=4, microbatch_size=4, updates_per_window=1),
        scaling=ScalingConfig(num_devices=2),
        run=RunConfig(keep_best_by="validation_loss"),  # type: ignore[arg-type]
    )


def planned(folder: Path) -> TrainConfig:
    uniform = ModelProfile.uniform(4, forward_s=0.01, backward_s=0.02, output_bytes=1000, microbatch_size=4)
    profile = replace(uniform, layers=tuple(replace(layer, name=f"layer-{number}") for number, layer in enumerate(uniform.layers)))
    topology = ClusterTopology.uniform(2, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    plan(profile, topology, 4, planner="1f1b-equal").save(folder / "plan.json")
    config = TrainConfig(model=ModelConfig(function="raypipe.models.mlp:mlp"), data=DataConfig(path="rows.parquet"))
    return replace(config, schedule=ScheduleConfig(updates_per_window=1), plan=str(folder / "plan.json"))


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("stage=7", "the run has the stages 0 to 1, not 7; choose one of them to kill"),
        ("device=2,before=save", "the run has the devices 0 to 1, not 2; choose one of them to kill"),
        ("stage=1,before=1B5", r"stage 1 never does '1B5'; did you mean '1B[0-3]'"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused_before_the_first_run(
    place: str, problem: str, is_planned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.training.trainer.Fit", begun)
    config = planned(tmp_path) if is_planned else named("1f1b")
    with pytest.raises(ConfigError, match=problem):
        drill(config, [DrillFault.parse(KILL, place)])
    with pytest.raises(AssertionError, match="the run has begun"):
        drill(config, [DrillFault.parse(KILL, "stage=1,before=1B3")])


def test_where_raypipe_chooses_the_schedule_places_are_checked_behind_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.training.trainer.Fit", begun)
    with pytest.raises(AssertionError, match="the run has begun"):
        drill(named("auto"), [DrillFault.parse(KILL, "stage=1")])


def begun(*_: object, **__: object) -> NoReturn:
    raise AssertionError("the run has begun")
