"""What `raypipe runs` tells of the folders in a storage path."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from raypipe.cli import main
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.errors import ConfigError
from raypipe.training.run_folder import FAILURE, METRICS, RunFolder
from raypipe.training.run_lock import LOCK, RunLock
from raypipe.training.runs import RunState, summarize_runs


def begun(base: Path, *, num_updates: int = 20) -> RunFolder:
    folder = RunFolder.create(str(base), "run")
    folder.begin(TrainConfig(model=ModelConfig(function="m:f"), data=DataConfig(path="x"), run=RunConfig(num_updates=num_updates)))
    return folder


def test_a_run_whose_process_lives_is_running_and_one_without_is_lost(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    for update in (1, 2):
        folder.add_metrics({"update": update, "loss": 3.0 - update})
    folder.add_metrics({"update": 2, "validation_loss": 9.0})
    lock = RunLock(folder.storage)
    lock.acquire(print)
    (run,) = summarize_runs(str(tmp_path))
    assert (run.name, run.state, run.update, run.num_updates, run.loss, run.checkpoint) == ("run", RunState.RUNNING, 2, 20, 1.0, None)
    assert str(os.getpid()) in run.detail
    lock.release()
    assert [run.state for run in summarize_runs(str(tmp_path))] == [RunState.LOST]


def test_a_lock_of_a_dead_process_is_no_life(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    lock = RunLock(folder.storage)
    lock.acquire(print)
    text = folder.file(LOCK).read_text()
    lock.release()
    tree = json.loads(text) | {"began": "0"}
    folder.file(LOCK).write_text(json.dumps(tree))
    assert [run.state for run in summarize_runs(str(tmp_path))] == [RunState.LOST]
    tree |= {"machine": "another"}
    folder.file(LOCK).write_text(json.dumps(tree))
    assert [run.state for run in summarize_runs(str(tmp_path))] == [RunState.RUNNING]
    long_ago_s = time.time() - 3600
    os.utime(folder.file(LOCK), (long_ago_s, long_ago_s))
    assert [run.state for run in summarize_runs(str(tmp_path))] == [RunState.LOST]


@pytest.mark.parametrize(("kind", "state"), [("StoppedRun", RunState.STOPPED), ("StageFailedError", RunState.FAILED)])
def test_a_run_that_ended_early_says_why(tmp_path: Path, kind: str, state: RunState) -> None:
    folder = begun(tmp_path)
    folder.write_json(FAILURE, {"problem": "this\nand that", "kind": kind, "updates": 3})
    (run,) = summarize_runs(str(tmp_path))
    assert (run.state, run.detail, run.update, run.idle_s) == (state, "this", 0, None)


def test_what_is_no_run_is_left_out_and_damaged_lines_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    begun(tmp_path).file(METRICS).write_text('{"update": 1, "loss": null}\n{"upd')
    (run,) = summarize_runs(str(tmp_path))
    assert (run.update, run.loss) == (1, None)


def test_the_command_lists_runs_as_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--storage-path", str(tmp_path)]) == 0
    assert "no run" in capsys.readouterr().out
    begun(tmp_path)
    assert main(["runs", "--storage-path", str(tmp_path)]) == 0
    assert "1 lost" in capsys.readouterr().out
    assert main(["runs", "--storage-path", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "lost"
    assert main(["runs", "--storage-path", "nowhere://x"]) == 2
    with pytest.raises(ConfigError):
        summarize_runs("nowhere://x")
