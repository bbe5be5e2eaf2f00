"""Which folder a run goes on in, and what it leaves of what ran before."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import random
import resource
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from raypipe.artifacts.storage import Storage
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.errors import ConfigError
from raypipe.training.run_folder import RunFolder


def config(name: str, *, num_updates: int = 10) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(function="models:gpt"), data=DataConfig(path=""), run=RunConfig(name=name, num_updates=num_updates)
    )


def begun(storage: Path, name: str) -> RunFolder:
    """A new run with a checkpoint."""
    folder = RunFolder.create(str(storage), name)
    folder.begin(config(name))
    folder.new_checkpoint(4).write("checkpoint.json", b"{}")
    return folder


def bucket(tmp_path: Path) -> Storage:
    """A folder at a URI."""
    (tmp_path / "bucket").mkdir()
    remote = Storage("sub://run", fs.SubTreeFileSystem(str(tmp_path / "bucket"), fs.LocalFileSystem()), "run")
    remote.make()
    return remote


@contextlib.contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes: as on a full disk, the first bytes of what is written are taken."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def updates(folder: RunFolder, name: str) -> list[int]:
    return [json.loads(line)["update"] for line in folder.file(name).read_text().splitlines()]


def test_the_newest_run_of_a_name_is_found_whatever_others_are_called(tmp_path: Path) -> None:
    for name in ("gpt", "gpt-2024", "gpt-1", "gpt", "a[1]", "gpt-old"):
        begun(tmp_path, name)
    assert RunFolder.latest(str(tmp_path), "gpt").path.name == "gpt-2"
    assert RunFolder.latest(str(tmp_path), "gpt-2024").path.name == "gpt-2024"
    assert RunFolder.latest(str(tmp_path), "a[1]").path.name == "a[1]"
    for name in ("gp", "gpt-2", "a1"):
        with pytest.raises(ConfigError, match="no run called"):
            RunFolder.latest(str(tmp_path), name)
    with pytest.raises(ConfigError, match="no run called"):
        RunFolder.latest(str(tmp_path / "nowhere"), "gpt")


def test_a_run_whose_configuration_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(str(tmp_path), "gpt")
    folder.begin(config("gpt"))
    folder.file("config.yaml").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
        RunFolder.newest(str(tmp_path), "gpt")
    assert folder.name in str(caught.value)
    folder.begin(config("gpt"))

    def no_answer(_: Storage, name: str) -> bytes:
        raise OSError(errno.EIO, "Input/output error", name)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "read", no_answer)
        with pytest.raises(ConfigError, match="Input/output error"):
            RunFolder.newest(str(tmp_path), "gpt")
    newest = RunFolder.newest(str(tmp_path), "gpt")
    assert newest is not None
    assert newest.path == folder.path


def test_a_folder_without_a_configuration_is_passed_over_only_without_checkpoints(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    (tmp_path / "gpt-2").mkdir()
    newest = RunFolder.newest(str(tmp_path), "gpt")
    assert newest is not None
    assert newest.path == folder.path
    folder.file("config.yaml").unlink()
    for find in (RunFolder.newest, RunFolder.latest):
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            find(str(tmp_path), "gpt")


def test_a_configuration_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    with full_disk(20):
        with pytest.raises(ConfigError, match="make room"):
            folder.begin(config("gpt", num_updates=20))
        with pytest.raises(ConfigError, match="make room"):
            folder.continue_from(config("gpt", num_updates=20), update=4)
    assert folder.config.run.num_updates == 10
    newest = RunFolder.newest(str(tmp_path), "gpt")
    assert newest is not None
    assert newest.path == folder.path


def test_a_run_is_seen_at_its_uri_as_soon_as_it_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = bucket(tmp_path)
    folder = RunFolder(tmp_path / "records", remote)
    folder.path.mkdir()
    folder.begin(config("gpt"))
    assert {"config.yaml", "versions.json"} <= set(remote.names())
    write = Storage.write

    def no_room(to: Storage, name: str, content: bytes) -> None:
        if not to.is_local:
            raise OSError(errno.ENOSPC, "No space left on device", f"{to.name}/{name}")
        write(to, name, content)

    monkeypatch.setattr(Storage, "write", no_room)
    with pytest.raises(ConfigError, match="No space left"):
        folder.begin(config("gpt", num_updates=20))


def test_what_ran_until_a_checkpoint_stays_beside_what_runs_on_however_often_that_fails(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    folder.file("plan.json").write_text("first")
    for num_updates, plan in ((20, "second"), (30, "third")):
        folder.continue_from(config("gpt", num_updates=num_updates), update=4)
        folder.file("plan.json").write_text(plan)
    kept = TrainConfig.load(folder.file("config-until-update-000004.yaml"))
    assert (kept.run.num_updates, folder.config.run.num_updates) == (10, 30)
    assert folder.file("plan-until-update-000004.json").read_text() == "first"


def test_what_comes_again_is_left_out_of_the_records(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    for update in range(1, 7):
        folder.add_metrics({"update": update, "loss": 1.0})
        if update % 2 == 0:
            folder.add_metrics({"update": update, "validation_loss": 1.0})
            folder.add_decision({"update": update, "switch": True})
    for update in (2, 4, 6):
        folder.file(f"trace-until-update-{update:06d}.json").write_text("{}")
    with folder.file("metrics.jsonl").open("a") as file:
        file.write('{"update": 7, "lo')  # the disk was full
    folder.continue_from(config("gpt"), update=4)
    assert updates(folder, "metrics.jsonl") == [1, 2, 2, 3, 4], "the evaluation at the checkpoint is done again"
    assert updates(folder, "adaptation.jsonl") == [2], "what was decided there came after the checkpoint"
    assert sorted(path.name for path in folder.path.glob("trace-until*")) == [
        "trace-until-update-000002.json",
        "trace-until-update-000004.json",
    ]


def test_what_callbacks_logged_until_a_checkpoint_stays_in_the_records(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    for update in (2, 4, 6):
        folder.add_metrics({"update": update, "loss": 1.0})
        folder.add_metrics({"update": update, "validation_loss": 1.0})
        folder.add_metrics({"update": update, "accuracy": 0.5})
    folder.continue_from(config("gpt"), update=4)
    assert [(line["update"], *line.keys() - {"update"}) for line in folder.metrics()] == [
        (2, "loss"),
        (2, "validation_loss"),
        (2, "accuracy"),
        (4, "loss"),
        (4, "accuracy"),
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 16])
@pytest.mark.parametrize("end", ["", "\n", '\n{"update": 9, "lo', "\n{}}\n\n"], ids=["no-newline", "whole", "half", "garbage"])
def test_a_rewind_keeps_the_lines_that_a_pass_over_all_of_them_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, end: str
) -> None:
    monkeypatch.setattr("raypipe.training.run_folder._BLOCK_BYTES", block_bytes)
    rng = random.Random(end)
    folder = begun(tmp_path, "gpt")
    lines: list[dict[str, Any]] = [{"update": 0, "validation_loss": 3.0}, {"update": 0, "start": 1.0}]
    for done in range(2, 10, 2):
        lines += [{"update": update, "loss": rng.random()} for update in (done - 1, done)]
        lines += [{"update": done - 2, "late": 1.0}] * rng.randrange(2)  # by a callback that was not yet told of the window
        lines += [{"update": done, "validation_loss": rng.random()}] * rng.randrange(2)
        lines += [{"update": done, "text": "x" * rng.randrange(20)}] * rng.randrange(3)
    text = "\n".join(map(json.dumps, lines)) + end
    for update in range(11):
        folder.file("metrics.jsonl").write_text(text)
        folder.rewind_metrics(update)
        expected = [line for line in lines if line["update"] < update or (line["update"] == update and "validation_loss" not in line)]
        assert folder.file("metrics.jsonl").read_text() == "".join(f"{json.dumps(line)}\n" for line in expected)


def test_a_rewind_reads_and_writes_only_the_end_of_a_long_record(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    num_updates = 200_000
    path = folder.file("metrics.jsonl")
    path.write_text("".join(f'{{"update": {update}, "loss": 1.0}}\n' for update in range(1, num_updates + 1)))
    before = path.stat()
    tracemalloc.start()
    try:
        folder.rewind_metrics(num_updates - 10)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
    assert path.stat().st_ino == before.st_ino
    with path.open("rb") as file:
        file.seek(-40, 2)
        assert json.loads(file.read().splitlines()[-1])["update"] == num_updates - 10


def test_a_rewind_needs_no_room_and_no_file(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    folder.rewind_metrics(4)
    assert not folder.file("metrics.jsonl").exists()
    for update in (2, 4, 6):
        folder.add_metrics({"update": update, "loss": 1.0})
        folder.add_metrics({"update": update, "validation_loss": 1.0})
        folder.add_metrics({"update": update, "accuracy": 0.5})
    with full_disk(folder.file("metrics.jsonl").stat().st_size):
        folder.rewind_metrics(4)
    assert updates(folder, "metrics.jsonl") == [2, 2, 2, 4, 4]
    with full_disk(10):
        folder.rewind_metrics(4)
        with pytest.raises(OSError, match=r"File too large|No space left"):
            folder.rewind_metrics(2)
    assert updates(folder, "metrics.jsonl") == [2, 2, 2, 4, 4]


def test_decisions_that_were_made_again_out_of_order_go_as_well(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    for update in (2, 6, 3, 4):
        folder.add_decision({"update": update})
    folder.continue_from(config("gpt"), update=4)
    assert updates(folder, "adaptation.jsonl") == [2, 3]


def test_records_go_to_a_uri_where_they_changed_and_those_that_vanish_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "records", bucket(tmp_path))
    (folder.file("logs") / "inner").mkdir(parents=True)
    for name in ("a", "logs/b", "logs/inner/c", "vanishes"):
        folder.file(name).write_text(name)
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "vanishes":
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    folder.publish()
    sent = tmp_path / "bucket" / "run"
    assert sorted(str(path.relative_to(sent)) for path in sent.rglob("*") if path.is_file()) == ["a", "logs/b", "logs/inner/c"]
    written: list[str] = []
    write = Storage.write

    def noted(to: Storage, name: str, content: bytes) -> None:
        written.append(name)
        write(to, name, content)

    monkeypatch.setattr(Storage, "write", noted)
    folder.publish()
    assert not written
    with folder.file("logs/b").open("a") as file:
        file.write("more")
    folder.publish()
    assert written == ["b"]
    assert (sent / "logs" / "b").read_text() == "logs/bmore"


def test_figures_that_are_no_numbers_are_null_in_files_of_json(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    folder.add_metrics({"update": 1, "loss": math.nan, "norms": (math.inf, 1.0)})
    assert json.loads(folder.file("metrics.jsonl").read_text(), parse_constant=pytest.fail) == {
        "update": 1,
        "loss": None,
        "norms": [None, 1.0],
    }


def test_a_line_that_a_full_disk_takes_in_part_is_taken_back(tmp_path: Path) -> None:
    folder = begun(tmp_path, "gpt")
    folder.add_metrics({"update": 1, "loss": 1.0})
    size = folder.file("metrics.jsonl").stat().st_size
    with full_disk(size + 10), pytest.raises(OSError, match=r"File too large|No space left"):
        folder.add_metrics({"update": 2, "loss": 2.0})
    assert updates(folder, "metrics.jsonl") == [1]
    folder.add_metrics({"update": 2, "loss": 2.0})
    assert updates(folder, "metrics.jsonl") == [1, 2]


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = begun(tmp_path, "gpt"), list[str]()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("raypipe.training.run_folder.shutil.disk_usage", lambda _: usage._replace(free=2_000_000))
    with pytest.raises(ConfigError, match=r"takes about 3 MB, but 2 MB are free there; make room"):
        folder.check_room(1_000_000, num_to_keep=1, notice=told.append)
    folder.check_room(500_000, num_to_keep=1, notice=told.append)
    assert "2 MB are free, 2 checkpoints take about 3 MB" in told.pop()
    folder.check_room(300_000, num_to_keep=1, notice=told.append)
    folder.check_room(600_000, num_to_keep=0, notice=told.append)
    assert told == []
