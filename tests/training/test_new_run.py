"""Which folder a new run begins in after one that ended before it trained."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from raypipe.artifacts.storage import Storage
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.training.new_run import new_run
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_lock import RunLock

NUM_AT_ONCE = 6


def failed(config: RunConfig, *, name: str = "") -> RunFolder:
    """The folder of a run that ended before its first update."""
    folder = RunFolder.create(config.storage_path, config.name)
    folder.begin(TrainConfig(model=ModelConfig(function="m:f"), data=DataConfig(), run=RunConfig(name=name or config.name)))
    folder.write_json("plan.json", {})
    folder.write_json("failure.json", {"problem": "no cluster", "kind": "RunError", "updates": 0})
    folder.publish()
    return folder


def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="run", storage_path=str(tmp_path))


def begun(config: RunConfig, told: list[str] | None = None) -> RunFolder:
    folder, lock = new_run(config, (told if told is not None else []).append)
    lock.release()
    return folder


@pytest.mark.parametrize("says_why", [True, False])
def test_a_run_that_ended_before_it_trained_begins_again_in_its_folder(tmp_path: Path, says_why: bool) -> None:
    before, told = failed(config(tmp_path)), list[str]()
    if not says_why:  # its process was killed
        before.file("failure.json").unlink()
    folder = begun(config(tmp_path), told)
    assert folder.path == before.path
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not {"failure.json", "plan.json"} & {path.name for path in folder.path.iterdir()}
    assert told == [f"{before.name}: its run ended before it trained, and begins again"]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.add_metrics({"update": 1, "loss": 1.0}),
        lambda folder: folder.new_checkpoint(1),
        lambda folder: folder.write_json("trace.json", {}),
        lambda folder: folder.write_json("trace-until-update-000001.json", {}),
        lambda folder: folder.file("config.yaml").write_text("no configuration"),
        lambda folder: RunLock(folder.storage).acquire(print),
    ],
    ids=["metrics", "checkpoint", "trace", "earlier trace", "damaged", "another writer"],
)
def test_what_trained_or_goes_on_is_left_alone(tmp_path: Path, change: Callable[[RunFolder], object]) -> None:
    change(failed(config(tmp_path)))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert begun(config(tmp_path)).path.name == "run-2"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_only_the_last_folder_of_the_run_is_used_again(tmp_path: Path) -> None:
    failed(config(tmp_path)).add_metrics({"update": 1, "loss": 1.0})
    failed(config(tmp_path))
    assert begun(config(tmp_path)).path.name == "run-2"
    failed(config(tmp_path), name="run-3")
    assert begun(config(tmp_path)).path.name == "run-4"


@pytest.mark.parametrize("after_failure", [True, False])
def test_runs_that_begin_at_once_have_folders_of_their_own(tmp_path: Path, after_failure: bool) -> None:
    if after_failure:
        failed(config(tmp_path))
    gate = threading.Barrier(NUM_AT_ONCE)

    def begin(_: int) -> str:
        gate.wait()
        return new_run(config(tmp_path), print)[0].path.name  # which keeps the lock

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        names = sorted(threads.map(begin, range(NUM_AT_ONCE)))
    assert names == ["run", *(f"run-{number}" for number in range(2, NUM_AT_ONCE + 1))]


def test_a_run_at_a_uri_begins_again_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bucket").mkdir()
    bucket = Storage("sub://runs", fs.SubTreeFileSystem(str(tmp_path / "bucket"), fs.LocalFileSystem()), "runs")
    at = Storage.at
    monkeypatch.setattr(Storage, "at", lambda location, key="": bucket if location == bucket.name else at(location, key=key))
    runs = RunConfig(name="run", storage_path=bucket.name)
    failed(runs).storage.remove("failure.json")  # it may have trained, and not yet written so
    assert begun(runs).name == "sub://runs/run-2"
    (bucket / "run-2").remove_all()
    (bucket / "run").remove_all()
    failed(runs)
    folder = begun(runs)
    assert (folder.name, folder.storage.names()) == ("sub://runs/run", ["config.yaml", "versions.json"])
    assert not list(folder.path.iterdir())
