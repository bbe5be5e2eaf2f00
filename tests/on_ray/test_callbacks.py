"""Runs that tell callbacks what they do, and that end when one asks them to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.artifacts.trace import Trace
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import End, Evaluation, Failure, Phase, RecoveredFailure, Run, SavedCheckpoint, Window
from raypipe.config import DataConfig, FailureConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import CallbackError
from raypipe.training.runs import RunState, summarize_runs
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows
from tests.told import Told, telling

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("local_ray", "shared_actors"),
]


def rows(split: str) -> RandomRows:
    assert split in {"train", "validation"}
    return RandomRows()


def trainer(storage: Path, *callbacks: Callback | str, num_updates: int = 9, faults: FaultScript | None = None) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 4, "dtype": "float64"},
        batches=rows,
        data_config=DataConfig(path="", num_validation_microbatches=2),
        schedule_config=ScheduleConfig(num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=3),
        scaling_config=ScalingConfig(num_devices=2, layers_per_stage=(2, 2)),
        run_config=RunConfig(name="run", storage_path=str(storage), num_updates=num_updates, evaluate_every=3, show_progress=False),
        failure_config=FailureConfig(max_failures=2, copy_share=1.0),
        callbacks=callbacks,
        faults=faults,
    )


class Events(Callback):
    required = True

    def __init__(self) -> None:
        self.told: list[str] = []
        self.windows: list[Window] = []
        self.phase: Phase | None = None

    def on_start(self, run: Run) -> None:
        self.told.append(f"start {run.update}")

    def on_phase(self, run: Run, phase: Phase) -> None:
        self.told.append("phase")
        self.phase = phase

    def on_window(self, run: Run, window: Window) -> None:
        self.told.append(f"window {window.update}")
        self.windows.append(window)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self.told.append(f"evaluation {evaluation.update}")

    def on_checkpoint(self, run: Run, checkpoint: SavedCheckpoint) -> None:
        assert Path(checkpoint.path, "checkpoint.json").exists()
        self.told.append(f"checkpoint {checkpoint.update}")

    def on_failure(self, run: Run, failure: Failure) -> None:
        self.told.append(f"failure {failure.update}")

    def on_recovery(self, run: Run, recovery: RecoveredFailure) -> None:
        self.told.append(f"recovery {recovery.from_update}")

    def on_end(self, run: Run, end: End) -> None:
        self.told.append(f"end {end.update} {type(end.error).__name__}")

    def close(self) -> None:
        self.told.append("close")


def test_a_callback_sees_all_of_a_run_and_the_bundled_ones_write_beside_it(tmp_path: Path) -> None:
    events = Events()
    result = trainer(tmp_path, events, "csv", "parquet").fit()
    assert [line for line in events.told if not line.startswith("checkpoint")] == [
        "start 0",
        "phase",
        "evaluation 0",
        "evaluation 3",
        "window 3",
        "evaluation 6",
        "window 6",
        "evaluation 9",
        "window 9",
        "end 9 NoneType",
        "close",
    ]
    assert "checkpoint 9" in events.told
    assert events.phase is not None
    assert events.phase.stages == (("layer-0", "layer-1"), ("layer-2", "layer-3"))
    assert [update.loss for window in events.windows for update in window.updates] == result.losses
    figures = events.windows[-1].figures()
    assert {"loss", "grad_norm", "learning_rate", "samples_per_s", "bubble_ratio", "predicted_update_s"} < figures.keys()
    assert "tokens_per_s" not in figures
    assert any(name.startswith("idle_ratio/") for name in figures)
    assert events.windows[-1].validation_loss == result.validation_losses[-1][1]
    assert result.stop_reason == ""
    folder = Path(result.path)
    assert pq.read_table(folder / "metrics.parquet")["loss"].to_pylist()[1:] == result.losses
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 10  # an evaluation came before the first update


class StopsAt(Callback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.update >= self.update:
            run.stop("good enough")


def test_a_run_that_a_callback_ends_has_checkpoint_trace_and_result_and_can_go_on(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "straight").fit()
    told = Told()
    result = telling(trainer(tmp_path, StopsAt(3)), told).fit()
    assert result.stop_reason == "good enough"
    assert len(result.losses) == 3, "ended by the evaluation, not a window later"
    assert result.checkpoint.index.update == 3
    assert Trace.load(Path(result.path) / "trace.json").num_updates == 3
    assert (Path(result.path) / "timeline.html").exists()
    assert told.has("ended after update 3")
    (summary,) = [run for run in summarize_runs(str(tmp_path)) if run.name == "run"]
    assert (summary.state, summary.detail) == (RunState.FINISHED, "good enough")
    again = trainer(tmp_path, StopsAt(3)).fit(resume="auto")
    assert (again.losses, again.stop_reason, again.checkpoint) == ([], "good enough", result.checkpoint)
    rest = trainer(tmp_path).fit(resume="auto")
    assert result.losses + rest.losses == straight.losses
    assert rest.path == result.path
    assert [run.state for run in summarize_runs(str(tmp_path)) if run.name == "run"] == [RunState.FINISHED]


class Breaks(Callback):
    def __init__(self, *, required: bool) -> None:
        self.required = required

    def on_window(self, run: Run, window: Window) -> None:
        raise OSError("no network")


def test_a_run_goes_on_without_a_callback_that_fails_and_ends_saved_where_it_needs_it(tmp_path: Path) -> None:
    result = trainer(tmp_path / "one", Breaks(required=False)).fit()
    assert len(result.losses) == 9
    assert result.callback_errors == ("callback Breaks failed in on_window: OSError: no network",)
    with pytest.raises(CallbackError, match="Breaks failed in on_window"):
        trainer(tmp_path / "two", Breaks(required=True)).fit()
    (folder,) = (tmp_path / "two").iterdir()
    assert json.loads((folder / "failure.json").read_text())["kind"] == "CallbackError"
    assert (folder / "checkpoints" / "update-000003" / "checkpoint.json").exists()


def test_failures_and_recoveries_are_told_and_their_windows_come_again(tmp_path: Path) -> None:
    events = Events()
    faults = FaultScript().fail_at(stage=1, kind=FaultKind.RAISE, window=1)
    started = trainer(tmp_path, events, "csv", faults=faults)
    started.config = replace(started.config, data=DataConfig(path="", num_validation_microbatches=0))  # the fault strikes training
    result = started.fit()
    told = [line for line in events.told if line.partition(" ")[0] in {"window", "failure", "recovery"}]
    assert told == ["window 3", "failure 3", "recovery 3", "window 6", "window 9"]
    assert len((Path(result.path) / "metrics.csv").read_text().splitlines()) == 1 + 9


@pytest.mark.parametrize("profile", ["measured", "estimated", "profile.json"])
def test_costs_of_layers_are_measured_estimated_or_read(tmp_path: Path, profile: str) -> None:
    first = trainer(tmp_path, num_updates=3).fit()
    if profile.endswith("json"):
        first.plan.profile.save(path := str(tmp_path / profile))
        profile = path
    told = Told()
    started = telling(trainer(tmp_path, num_updates=3), told)
    started.config = replace(started.config, scaling=replace(started.config.scaling, profile=profile))
    again = started.fit()
    assert again.losses == first.losses
    costs = [layer.forward_s for layer in again.plan.profile.layers]
    assert (costs == [layer.forward_s for layer in first.plan.profile.layers]) == profile.endswith("json")
    assert told.has("estimating" if profile == "estimated" else "measuring" if profile == "measured" else "costs of layers: ")


def test_layers_that_an_earlier_run_measured_are_not_measured_again(tmp_path: Path) -> None:
    first, again = (trainer(tmp_path, num_updates=3).fit() for _ in range(2))
    assert first.plan.profile.layers == again.plan.profile.layers
