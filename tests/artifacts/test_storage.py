"""Folders of results on paths and at URIs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyarrow import fs

from raypipe.artifacts.storage import Storage
from raypipe.errors import ConfigError


def storages(tmp_path: Path) -> list[Storage]:
    inner = fs.SubTreeFileSystem(str(tmp_path / "sub"), fs.LocalFileSystem())
    (tmp_path / "sub").mkdir()
    return [
        Storage.at(tmp_path / "plain"),
        Storage("sub://runs", inner, "runs"),
        Storage.at("mock:///runs"),
        Storage.at(f"file://{tmp_path}/uri"),
    ]


def test_every_file_system_keeps_what_is_written_and_replaces_it_as_a_whole(tmp_path: Path) -> None:
    for base in storages(tmp_path):
        assert base.folders() == []
        assert base.names() == []
        folder = base / "a" / "b"
        folder.make()
        folder.write("file", b"one")
        folder.write("file", b"three")
        folder.sync()
        assert (folder.read("file"), folder.size("file"), folder.size("none")) == (b"three", 5, None)
        assert folder.names() == ["file"]
        assert [found.name for found in base.folders()] == [f"{base.name}/a"]
        assert folder.changed_s("file") > 0
        with pytest.raises(OSError, match="none"):
            folder.read("none")
        folder.remove("file")
        assert folder.names() == []
        (base / "a").remove_all()
        assert base.folders() == []


def test_a_file_has_its_name_only_when_all_of_it_is_there(tmp_path: Path) -> None:
    for base in storages(tmp_path):
        base.make()
        base.write("file", b"before")
        with pytest.raises(TypeError), base.writing("file") as stream:
            stream.write(b"half" if base.size("file") is None else None)
        assert base.read("file") == b"before"


def test_two_writers_of_one_name_do_not_disturb_each_other_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for base in storages(tmp_path):
        base.make()
        with base.writing("lock") as one, base.writing("lock") as other:
            one.write(b"one")
            other.write(b"other")
        assert base.read("lock") == b"one", "the last that ends counts"
        with pytest.raises(TypeError), base.writing("lock") as stream:
            stream.write(None)
        assert base.names() == ["lock"]


def test_actors_on_other_nodes_may_be_sent_a_folder(tmp_path: Path) -> None:
    for base in storages(tmp_path)[:2]:
        base.make()
        base.write("file", b"one")
        sent: Storage = pickle.loads(pickle.dumps(base))
        assert sent.read("file") == b"one"


@pytest.mark.parametrize("uri", ["nope://bucket/runs", "s3:/bucket/runs", "s3://", "S3://bucket/runs", "https://host/runs"])
def test_a_uri_that_no_file_system_serves_is_never_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run.storage_path .*pyarrow has no file system for this URI"):
        Storage.at(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_path_with_a_colon_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Storage.at("runs:2026").path == str(tmp_path / "runs:2026")
    assert Storage.at("a b/s3").is_local


def test_the_name_of_a_folder_in_a_bucket_keeps_the_options_of_its_uri() -> None:
    base = Storage.at("s3://key:secret@bucket/runs?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1")
    assert (base / "gpt").name == "s3://key:secret@bucket/runs/gpt?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    assert (base / "gpt").path == "bucket/runs/gpt"
