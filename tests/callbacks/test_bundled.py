"""What the bundled callbacks show, write and decide; the loggers with their real packages where these are installed."""

from __future__ import annotations

import csv
import importlib.metadata
import math
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raypipe.callbacks.base import Callback
from raypipe.callbacks.early_stopping import EarlyStopping
from raypipe.callbacks.events import End, Evaluation, RecoveredFailure, Run, SavedCheckpoint
from raypipe.callbacks.mlflow import MLflow
from raypipe.callbacks.progress import Progress
from raypipe.callbacks.tables import COLUMNS, Csv, Parquet
from raypipe.callbacks.tensorboard import TensorBoard
from raypipe.callbacks.wandb import WandB
from raypipe.errors import ConfigError
from tests.callbacks.events import lines, run, window


def play(callback: Callback, seen: Run, *, evaluates: bool = True) -> None:
    """Two windows of two updates, with an evaluation behind each."""
    callback.on_start(seen)
    for first, losses in ((0, (4.0, 3.0)), (2, (2.0, 1.0))):
        happened = window(losses, first_update=first)
        if evaluates:
            seen.metrics().append({"update": happened.update, "validation_loss": 5.0})
            callback.on_evaluation(seen, Evaluation(happened.update, 5.0))
        seen.metrics().extend(lines(happened))
        callback.on_window(seen, happened)
        callback.on_checkpoint(seen, SavedCheckpoint(happened.update, "here", 1.0, {}))
    callback.on_end(seen, End(4))
    callback.close()


def test_a_window_knows_all_figures() -> None:
    figures = window([1.5]).figures()
    assert {"loss", "grad_norm", "learning_rate", "update_s", "samples_per_s", "tokens_per_s", "bubble_ratio"} < figures.keys()
    assert figures["predicted_update_s"] == window([1.5]).plan.predicted.update_s  # type: ignore[union-attr]
    assert sum(value for name, value in figures.items() if name.startswith("idle_ratio/")) == pytest.approx(
        figures["bubble_ratio"], rel=1e-2
    )
    assert [value for name, value in figures.items() if name.startswith("peak_memory_bytes/")] == [100, 200]
    assert figures["link_bytes_per_s/a -> b"] == 1e9
    assert "loss" not in window([math.nan]).figures()


def test_without_a_terminal_progress_is_plain_lines_that_tell_long_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("raypipe.callbacks.progress._QUIET_S", 0.05)
    progress, seen = Progress(), run(tmp_path, num_updates=100)
    progress.on_notice("starting 4 actors")
    time.sleep(0.3)
    progress.on_start(seen)
    progress.on_window(seen, window([1.0], first_update=9, num_updates=100, tokens_per_s=None))
    time.sleep(0.3)
    progress.on_window(seen, window([1.0], first_update=10, num_updates=100))
    progress.on_evaluation(seen, Evaluation(11, 0.5))
    progress.on_window(seen, replace(window([1.0], first_update=11, num_updates=100), validation_loss=0.5))
    progress.on_end(seen, End(12))
    progress.close()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "starting 4 actors"
    assert told.count("starting 4 actors: 0 s so far") >= 2
    assert "update 10/100  loss 1.000  validation -  9 rows/s  left 3:00" in told
    assert told.count("training after update 10: 0 s so far") >= 2
    assert "update 11/100  loss 1.000  validation -  900 tokens/s  left 2:58" in told
    assert told[-1] == "update 12/100  loss 1.000  validation 0.500 (update 11)  900 tokens/s  left 2:56"


def stopped_after(callback: EarlyStopping, seen: Run, losses: list[float]) -> int | None:
    callback.on_start(seen)
    for number, loss in enumerate(losses, 1):
        callback.on_evaluation(seen, Evaluation(2 * number, loss))
        if seen.stop_reason:
            return number
    return None


def test_a_run_ends_when_its_validation_loss_has_not_fallen_for_long_enough(tmp_path: Path) -> None:
    assert stopped_after(EarlyStopping(patience=2), run(tmp_path), [3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.0]) == 6
    assert stopped_after(EarlyStopping(patience=2, least_gain=0.2), run(tmp_path), [3.0, 2.0, 1.9, 1.85, 1.0]) == 4
    assert stopped_after(EarlyStopping(patience=2), run(tmp_path), [3.0, 2.0, 1.0]) is None
    assert stopped_after(EarlyStopping(patience=1), run(tmp_path), [3.0, math.nan]) == 2


def test_a_resumed_run_counts_what_was_evaluated_before(tmp_path: Path) -> None:
    seen = run(tmp_path, first_update=6)
    seen.metrics().extend({"update": update, "validation_loss": loss} for update, loss in ((2, 1.0), (4, 2.0), (6, 2.0)))
    assert stopped_after(EarlyStopping(patience=2), seen, []) is None
    callback = EarlyStopping(patience=2)
    callback.on_start(seen)
    callback.on_evaluation(seen, Evaluation(6, 2.0))  # repeated when the run begins
    assert "not fallen for 2 evaluations: it was 1 after update 2" in seen.stop_reason


def test_an_evaluation_that_a_recovery_repeats_counts_once(tmp_path: Path) -> None:
    seen, callback = run(tmp_path), EarlyStopping(patience=2)
    callback.on_start(seen)
    for update, loss in ((10, 1.0), (20, 2.0), (20, 2.0)):
        callback.on_evaluation(seen, Evaluation(update, loss))
    assert not seen.stop_reason
    callback.on_evaluation(seen, Evaluation(30, 2.0))
    assert "2 evaluations" in seen.stop_reason


def test_the_training_loss_can_be_waited_for_too(tmp_path: Path) -> None:
    seen, callback = run(tmp_path), EarlyStopping(by="loss", patience=1)
    callback.on_start(seen)
    callback.on_window(seen, window([3.0]))
    callback.on_window(seen, window([4.0], first_update=1))
    assert "loss has not fallen for 1 windows" in seen.stop_reason


def test_early_stopping_refuses_a_run_that_never_evaluates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set run\.evaluate_every"):
        EarlyStopping().on_start(run(tmp_path, evaluate_every=0))


def test_tables_have_a_row_for_each_update(tmp_path: Path) -> None:
    for callback in (Csv(), Parquet()):
        play(callback, run(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [(row["update"], row["loss"], row["validation_loss"]) for row in found] == [
        ("1", "4.0", ""),
        ("2", "3.0", "5.0"),
        ("3", "2.0", ""),
        ("4", "1.0", "5.0"),
    ]
    table = pq.read_table(tmp_path / "metrics.parquet")
    assert table.column_names == list(COLUMNS)
    assert table["loss"].to_pylist() == [4.0, 3.0, 2.0, 1.0]
    assert table["validation_loss"].to_pylist() == [None, 5.0, None, 5.0]


def test_a_window_adds_its_rows_and_a_recovery_takes_rows_back(tmp_path: Path) -> None:
    seen, callback = run(tmp_path), Csv()
    callback.on_start(seen)
    for first in (0, 2):
        seen.metrics().extend(lines(window([1.0, 1.0], first_update=first)))
        callback.on_window(seen, window([1.0, 1.0], first_update=first))
    path = tmp_path / "metrics.csv"
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["update", "1", "2", "3", "4"]
    del seen.metrics()[2:]
    callback.on_recovery(seen, RecoveredFailure(4, 2, "memory", 1.0, "", ""))
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["update", "1", "2"]


@pytest.mark.filterwarnings("default")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(TensorBoard(), run(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert [event.step for event in events.Scalars("validation_loss")] == [2, 4]
    assert {"bubble_ratio", "tokens_per_s", "grad_norm", "link_bytes_per_s/a_to_b"} < set(events.Tags()["scalars"])


@pytest.mark.filterwarnings("default")
def test_mlflow_keeps_figures_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs the whole of mlflow
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    play(MLflow(experiment="tests", tracking_uri=uri), run(tmp_path))
    client = MlflowClient(tracking_uri=uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert kept.info.status == "FINISHED"
    assert kept.data.params["run.evaluate_every"] == "2"
    assert [(metric.step, metric.value) for metric in client.get_metric_history(kept.info.run_id, "loss")] == [
        (1, 4.0),
        (2, 3.0),
        (3, 2.0),
        (4, 1.0),
    ]
    assert kept.data.metrics["link_bytes_per_s/a to b"] == 1e9


@pytest.mark.filterwarnings("default")
def test_where_mlflow_cannot_log_is_refused_with_what_would_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"tracking_uri.* to a server's URI.* or set MLFLOW_ALLOW_FILE_STORE=true in the environment"):
        MLflow(tracking_uri=str(tmp_path / "mlruns")).on_start(run(tmp_path))
    if has_distribution("mlflow"):
        pytest.skip("the whole of mlflow takes databases")
    for uri in (None, "sqlite:///of-my-own.db", "postgresql://me:secret@host/runs"):
        with pytest.raises(ConfigError, match=r"URIs of '(sqlite|postgresql)'; .* to a server's URI.* pip install mlflow") as told:
            MLflow(tracking_uri=uri).on_start(run(tmp_path))
        assert "secret" not in str(told.value)


def has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(120)
def test_wandb_keeps_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    play(WandB(project="tests", mode="offline"), run(tmp_path))
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    names = (b"bubble_ratio", b"validation_loss", b"evaluate_every")
    deadline = time.monotonic() + 60
    # A process of wandb's writes the file, at times behind the end of `finish`.
    while not all(name in log.read_bytes() for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    content = log.read_bytes()
    for name in names:
        assert name in content
