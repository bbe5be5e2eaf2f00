"""One writer at a time: who holds the lock of a run's folder, and when it is stale."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import fs

from raypipe.artifacts import codec
from raypipe.artifacts.storage import Storage
from raypipe.errors import ConfigError, RunTakenOverError
from raypipe.training.run_lock import FORMAT, LOCK, LockOwner, RunLock, _put_back

HOST = os.uname().nodename


def folder(tmp_path: Path, kind: str) -> Storage:
    if kind == "path":
        return Storage.at(tmp_path)
    return Storage("sub://run", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "run")


def lock(of: Storage, **times: float) -> RunLock:
    return RunLock(of, **{"settle_s": 0.0} | times)


def held_by(of: Storage, owner: LockOwner, *, silent_s: float = 0.0) -> None:
    of.make()
    of.write(LOCK, codec.to_json(owner, format_name=FORMAT).encode())
    path = Path(of.path, LOCK) if of.is_local else Path(of.filesystem.base_path, of.path, LOCK)
    os.utime(path, (time.time() - silent_s,) * 2)


KINDS = pytest.mark.parametrize("kind", ["path", "uri"])


@KINDS
def test_a_second_writer_is_refused_by_name_and_host(tmp_path: Path, kind: str) -> None:
    of, told = folder(tmp_path, kind), list[str]()
    first = lock(of)
    first.acquire(told.append)
    with pytest.raises(ConfigError, match=f"is being written by process {os.getpid()} on host {HOST}") as caught:
        lock(of).acquire(told.append)
    assert of.name in str(caught.value)
    first.check()
    first.release()
    second = lock(of)
    second.acquire(told.append)
    second.release()
    second.release()
    assert told == []
    assert of.names() == [], "nothing is left"


@KINDS
def test_the_lock_of_a_process_that_was_killed_here_is_taken_over_at_once(tmp_path: Path, kind: str) -> None:
    of, told = folder(tmp_path, kind), list[str]()
    code = (
        "import pickle, sys, time; from raypipe.training.run_lock import RunLock;"
        "RunLock(pickle.loads(sys.stdin.buffer.read()), settle_s=0).acquire(print); print('held', flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as sent:
        sent.write(pickle.dumps(of))
    process.stdin = None
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on host {HOST}"):
            lock(of).acquire(told.append)
    finally:
        process.kill()
        process.communicate()
    mine = lock(of)
    mine.acquire(told.append)
    mine.release()
    assert [f"process {process.pid} on host {HOST}, which has ended" in line for line in told] == [True]


@KINDS
def test_a_process_number_that_came_again_holds_no_lock(tmp_path: Path, kind: str) -> None:
    of, told = folder(tmp_path, kind), list[str]()
    held_by(of, replace(LockOwner.here(), began="1"))
    mine = lock(of)
    mine.acquire(told.append)
    mine.release()
    assert len(told) == 1


@KINDS
def test_a_lock_of_another_host_is_stale_when_its_owner_is_silent(tmp_path: Path, kind: str) -> None:
    of, told = folder(tmp_path, kind), list[str]()
    elsewhere = replace(LockOwner.here(), host="node-7", machine="another machine", pid=1)
    held_by(of, elsewhere, silent_s=20)
    with pytest.raises(ConfigError, match="process 1 on host node-7, which gave a sign of life 20 s ago"):
        lock(of, stale_s=60).acquire(told.append)
    held_by(of, elsewhere, silent_s=70)
    mine = lock(of, stale_s=60)
    mine.acquire(told.append)
    mine.release()
    assert told[0].endswith("was locked by process 1 on host node-7, which has been silent for 70 s: taken over")


@KINDS
def test_an_owner_gives_signs_of_life_and_notices_who_took_over(tmp_path: Path, kind: str) -> None:
    of, told = folder(tmp_path, kind), list[str]()
    mine = lock(of, renew_s=0.05)
    mine.acquire(told.append)
    before = of.changed_s(LOCK)
    deadline = time.monotonic() + 20
    while of.changed_s(LOCK) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert of.changed_s(LOCK) > before
    other = replace(LockOwner.here(), host="node-7", token="another")
    while time.monotonic() < deadline:
        held_by(of, other)  # until it is not renewed by what had read the file before
        time.sleep(0.1)
        try:
            mine.check()
        except RunTakenOverError:
            break
    with pytest.raises(RunTakenOverError, match=r"on host node-7 has taken over this run"):
        mine.check()
    mine.release()
    assert LOCK in of.names(), "the lock of another is not removed"


def test_a_half_written_lock_is_stale_only_after_a_while(tmp_path: Path) -> None:
    of, told = Storage.at(tmp_path), list[str]()
    (tmp_path / LOCK).write_bytes(b"{")
    with pytest.raises(ConfigError, match="is being written by another process"):
        lock(of).acquire(told.append)
    os.utime(tmp_path / LOCK, (time.time() - 100,) * 2)
    mine = lock(of)
    mine.acquire(told.append)
    mine.release()


def test_of_two_that_find_a_stale_lock_one_takes_it_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, told = Storage.at(tmp_path), list[str]()
    held_by(of, replace(LockOwner.here(), began="1"))
    first, second = lock(of), lock(of)
    has_looked, is_taken = threading.Event(), threading.Event()
    silent_s = RunLock._silent_s

    def after_looking(which: RunLock) -> float:
        found = silent_s(which)
        if which is second:
            has_looked.set()
            assert is_taken.wait(20)
        return found

    monkeypatch.setattr(RunLock, "_silent_s", after_looking)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(second.acquire, told.append)
        assert has_looked.wait(20)
        first.acquire(told.append)
        is_taken.set()
        with pytest.raises(ConfigError, match="is being written by another process"):
            late.result(20)
    assert of.names() == [LOCK]
    assert first.owner.token in (tmp_path / LOCK).read_text()
    first.check()
    first.release()
    assert len(told) == 1
    assert of.names() == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["another is writing it", "another has taken it"])
def test_a_half_written_lock_is_not_taken_from_one_who_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    of = Storage.at(tmp_path)
    (tmp_path / LOCK).write_bytes(b"{")
    os.utime(tmp_path / LOCK, (time.time() - 100,) * 2)
    silent_s = RunLock._silent_s

    def then_another_comes(which: RunLock) -> float:
        found = silent_s(which)
        (tmp_path / LOCK).unlink()
        if not is_gone:
            (tmp_path / LOCK).write_bytes(b"")
        return found

    monkeypatch.setattr(RunLock, "_silent_s", then_another_comes)
    with pytest.raises(ConfigError, match="is being written by another process"):
        lock(of).acquire(print)
    assert of.names() == ([] if is_gone else [LOCK])


def test_a_lock_is_put_back_also_without_hard_links_and_never_over_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside, kept = tmp_path / "aside", tmp_path / LOCK
    aside.write_text("taken")
    kept.write_text("new")
    _put_back(aside, kept)
    assert kept.read_text() == "new"
    kept.unlink()

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("raypipe.training.run_lock.os.link", refused)
    _put_back(aside, kept)
    assert kept.read_text() == "taken"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"choose another run\.storage_path"):
        lock(Storage.at(tmp_path / "file" / "run")).acquire(print)
