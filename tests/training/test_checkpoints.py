"""When a run saves, which checkpoints it keeps, and what it says where one cannot be written; without actors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayError

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.state import packed
from raypipe.artifacts.checkpoint_files import CheckpointIndex, FileSums
from raypipe.artifacts.storage import Storage
from raypipe.cluster.actor_group import Member
from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.cluster.state_copies import StateCopy
from raypipe.config import CheckpointMetric, ClusterConfig, RunConfig
from raypipe.errors import NonFiniteError, RunError
from raypipe.training.checkpoints import Checkpoints
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_lock import RunLock


class OneActor:
    """Stands in for the coordinator: one actor, whose call is a function that `ray.get` is made to run."""

    def __init__(self, *, problem: Exception | None = None) -> None:
        self.num_copies = 0
        self.problem = problem
        self.may_write = threading.Event()
        self.may_write.set()

    def take_snapshot(self) -> None:
        self.num_copies += 1

    @property
    def cluster(self) -> ClusterConfig:
        return ClusterConfig()

    def write_snapshot(self, folder: Storage) -> dict[Any, Member]:
        def write() -> dict[str, FileSums]:
            assert self.may_write.wait(20)
            if self.problem is not None:
                raise self.problem
            folder.write("layer-0000-a.safetensors", b"content")
            return {"layer-0000-a.safetensors": FileSums(size_bytes=7, header="", tensors={})}

        return {write: Member(None, DeviceSlot(ClusterNode("id", "10.0.0.1"), "node/0"))}


class Run:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        monkeypatch.setattr("raypipe.training.checkpoints.ray.get", lambda calls: [call() for call in calls])
        monkeypatch.setattr("raypipe.training.checkpoints.ray.wait", lambda calls, **_: (calls, []))
        self.clock_s = 100.0
        monkeypatch.setattr("raypipe.training.checkpoints.time.monotonic", lambda: self.clock_s)
        self.told: list[str] = []
        self.events: list[int] = []
        self.problem_of_callback: Exception | None = None
        self.folder = RunFolder.create(str(tmp_path), "run")
        lock = RunLock(self.folder.storage)
        index = CheckpointIndex(update=0, layers=("a",), model="m", seed=0)
        settings = RunConfig(**config)
        self.checkpoints = Checkpoints(
            self.folder, lock, settings, index=index, resumed=None, notice=self.told.append, on_saved=self._on_saved
        )
        self.checkpoints.begin()

    def _on_saved(self, checkpoint: Checkpoint, seconds: float) -> None:
        self.events.append(checkpoint.index.update)
        if self.problem_of_callback is not None:
            raise self.problem_of_callback

    def save(self, update: int, actor: OneActor | None = None, **metrics: float) -> None:
        self.checkpoints.save(actor or OneActor(), update, metrics)  # type: ignore[arg-type]

    def saved(self) -> list[int]:
        self.checkpoints.wait()
        folder = self.folder.path / "checkpoints"
        return sorted(Checkpoint.open(path).index.update for path in folder.iterdir())


def test_a_checkpoint_is_due_by_updates_by_time_and_never_while_one_by_time_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, checkpoint_every=4, checkpoint_every_s=60.0)
    assert [update for update in range(1, 9) if run.checkpoints.is_due(update)] == [4, 8]
    run.clock_s += 61
    assert run.checkpoints.is_due(5)
    actor = OneActor()
    actor.may_write.clear()
    run.save(5, actor)
    run.clock_s += 61
    assert not run.checkpoints.is_due(6), "the one before is still being written"
    assert run.checkpoints.is_due(8)
    actor.may_write.set()
    run.checkpoints.wait()
    assert run.checkpoints.is_due(6)
    assert not Run(tmp_path, monkeypatch, checkpoint_every_s=0.0).checkpoints.is_due(10**6)


def test_a_writer_that_does_not_answer_is_named_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    monkeypatch.setattr("raypipe.training.checkpoints.ray.wait", lambda calls, **_: ([], calls))
    monkeypatch.setattr("raypipe.training.checkpoints.dead", lambda members, **_: list(members))
    run.save(1)
    assert run.saved() == []
    assert "update 1 was not saved: no answer from 1 device that wrote it: node/0" in run.told[-1]


def test_by_default_a_checkpoint_is_due_every_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run.clock_s += 599
    assert not run.checkpoints.is_due(1000)
    run.clock_s += 1
    assert run.checkpoints.is_due(1000)


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (0, [1, 2, 3, 4, 5])])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, left: list[int]) -> None:
    run = Run(tmp_path, monkeypatch, num_to_keep=keep)
    for update in range(1, 6):
        run.save(update)
    assert run.saved() == left


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, num_to_keep=1, keep_best_by=CheckpointMetric.VALIDATION_LOSS)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan}
    for update, loss in losses.items():
        run.save(update, loss=-float(update), validation_loss=loss)
    assert run.saved() == [2, 4], "a loss that is no number is not the best"
    run.save(5, loss=0.0)
    assert run.saved() == [2, 5], "one that was not evaluated is not the best"
    run.save(6, validation_loss=1.0)
    assert run.saved() == [6], "of equals the newest"


@pytest.mark.parametrize(
    "problem", [RunError("layer-0000 cannot be written on node n: No space left on device"), NonFiniteError("weight is no number")]
)
def test_what_cannot_be_saved_is_said_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    run = Run(tmp_path, monkeypatch, num_to_keep=1)
    run.save(1)
    run.save(2, OneActor(problem=problem))
    assert run.saved() == [1], "nothing is left of the other"
    assert run.told[-1] == f"update 2 was not saved: {problem}; earlier checkpoints stay"
    with pytest.raises(RunError, match=r"update 2 was not saved .* the last checkpoint is .*update-000001"):
        run.checkpoints.finish(2)
    run.save(3)
    assert run.checkpoints.finish(3).index.update == 3


def test_an_update_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, actor = Run(tmp_path, monkeypatch), OneActor()
    run.save(1, actor)
    run.save(1, actor)
    assert actor.num_copies == 1
    assert run.checkpoints.finish(1).index.update == 1


def test_a_run_that_was_taken_over_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run.save(1)
    run.checkpoints.wait()
    monkeypatch.setattr(RunLock, "check", lambda lock: (_ for _ in ()).throw(RunError("taken over")))
    with pytest.raises(RunError, match="taken over"):
        run.save(2)
    assert run.saved() == [1]


def test_what_nobody_ended_writing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run.save(1)
    run.checkpoints.wait()
    run.folder.new_checkpoint(2).write("layer-0000-a.safetensors", b"half")
    run.folder.remove_unfinished()
    assert run.saved() == [1]


def test_the_copy_in_memory_is_written_where_no_time_is_left_for_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run.save(5)
    run.checkpoints.wait()
    monkeypatch.setattr("raypipe.training.checkpoints.ray.get", lambda parts, **_: parts)
    states = {update: packed({"weight": torch.full((3,), float(update))}) for update in (5, 10, 15)}
    run.checkpoints.save_copy([StateCopy(5, {0: [states[5]]})], reason="no time is left")
    assert run.saved() == [5], "that is saved already"
    run.checkpoints.save_copy([StateCopy(15, {0: [states[15]]}), StateCopy(10, {0: [states[10]]})], reason="no time is left")
    assert run.told[-1] == "no time is left: writing the copy of update 15 that is in memory"
    newest = Checkpoint.latest(run.folder.path)
    assert newest is not None
    assert newest == run.checkpoints.newest
    assert newest.index.update == 15
    assert newest.load_layer(0)["weight"].tolist() == [15.0, 15.0, 15.0]
    run.checkpoints.save_copy([StateCopy(20, {0: [packed({"weight": torch.tensor([math.inf])})]})], reason="no time is left")
    assert "update 20 was not saved: weight in layer-0000-a.safetensors is infinite" in run.told[-1]
    assert not run.events, "the run is not between windows"


def test_where_parts_of_the_newest_copy_are_lost_the_one_before_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    lost = object()

    def get(parts: list[Any], **_: object) -> list[Any]:
        if lost in parts:
            raise RayError("its node is gone")
        return parts

    monkeypatch.setattr("raypipe.training.checkpoints.ray.get", get)
    whole = StateCopy(10, {0: [packed({"weight": torch.ones(3)})]})
    run.checkpoints.save_copy([StateCopy(15, {0: [lost]}), whole], reason="the run fails")
    assert run.checkpoints.newest is not None
    assert run.checkpoints.newest.index.update == 10
    assert "update 15 was not saved: its node is gone" in run.told[-2]


def test_a_checkpoint_that_takes_long_is_told_and_given_up_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, looked = Run(tmp_path, monkeypatch), threading.Semaphore(0)

    def wait(calls: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        assert looked.acquire(timeout=20)
        return [], calls

    monkeypatch.setattr("raypipe.training.checkpoints.ray.wait", wait)
    monkeypatch.setattr("raypipe.training.checkpoints.dead", lambda *_, **__: [])
    run.save(1)
    looked.release()
    run.clock_s += 301
    run.checkpoints.poll()
    run.checkpoints.poll()
    told = [text for text in run.told if "is being written for 301 s" in text]
    assert len(told) == 1, "once in five minutes"
    run.clock_s += 3600
    looked.release(10)
    run.checkpoints.wait()
    assert "update 1 was not saved: node/0 did not write it within 3600 s" in run.told[-1]


def test_a_checkpoint_is_told_between_windows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, actor = Run(tmp_path, monkeypatch), OneActor()
    actor.may_write.clear()
    run.save(1, actor)
    run.checkpoints.poll()
    assert not run.events, "it is still being written"
    actor.may_write.set()
    run.checkpoints.give_time(20)
    assert [checkpoint.index.update for checkpoint in run.checkpoints.usable()] == [1]
    assert not run.events, "a device may have failed"
    run.checkpoints.poll()
    run.checkpoints.poll()
    assert run.events == [1]
    run.save(2)
    run.save(3)
    assert run.events == [1, 2]
    run.checkpoints.finish(3)
    assert run.events == [1, 2, 3]


@pytest.mark.parametrize("tells", ["poll", "save", "finish"])
def test_a_checkpoint_is_told_again_where_a_device_failed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str) -> None:
    run = Run(tmp_path, monkeypatch)
    run.save(1)
    run.checkpoints.wait()
    calls: dict[str, Callable[[], object]] = {
        "poll": run.checkpoints.poll,
        "save": lambda: run.save(1),
        "finish": lambda: run.checkpoints.finish(1),
    }
    tell = calls[tells]
    run.problem_of_callback = RunError("a device failed")
    with pytest.raises(RunError, match="a device failed"):
        tell()
    run.problem_of_callback = None
    tell()
    tell()
    assert run.events == [1, 1]
