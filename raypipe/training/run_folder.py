"""The folder of a run; `*-until-update-N` files hold what ran before a resume or a switch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from raypipe.artifacts import codec
from raypipe.artifacts.checkpoint_files import FOLDER, INDEX, checkpoint_name, finished_folders, remove_checkpoint
from raypipe.artifacts.storage import Storage
from raypipe.artifacts.versions import versions
from raypipe.config import FORMAT, TrainConfig, cache_folder
from raypipe.errors import ConfigError, FormatError
from raypipe.training.run_lock import LOCK
from raypipe.units import size

FAILURE = "failure.json"
"""Why a run ended before its last update."""
ENDED_EARLY = "EndedEarly"
"""Kind of this end where a callback asked for it."""
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
_MOST_RUNS = 10_000
_STATES = 3  # a weight and two moments of the optimizer
_BLOCK_BYTES = 1 << 16  # of a file that is read from its end
_UNTIL = re.compile(r".*-until-update-(\d+)\.(?:json|yaml)")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: Absolute path of its records. For a run at a URI they are kept on this machine and copied there by `publish`.
        remote: Where a run at a URI has its records and checkpoints.
    """

    path: Path
    remote: Storage | None = None
    _published: dict[Path, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)  # sizes and times of files

    @property
    def storage(self) -> Storage:
        """The folder where checkpoints go."""
        return self.remote or Storage.at(self.path)

    @property
    def name(self) -> str:
        """The folder as users know it: a path or a URI."""
        return self.storage.name

    @classmethod
    def create(cls, storage_path: str, name: str) -> RunFolder:
        """Make a folder called `name`, or `name-2` and so on after earlier runs.

        Raises:
            ConfigError: The folder cannot be made.
        """
        base = Storage.at(storage_path)
        try:
            base.make()
            there = set(base.names())
            for number in range(1, _MOST_RUNS):
                path = base / _numbered(name, number)
                if path.path.rpartition("/")[2] in there:
                    continue
                try:
                    return cls._new(path)
                except FileExistsError:
                    continue
        except OSError as error:
            raise ConfigError(
                f"run.storage_path {storage_path!r}: no folder can be made there ({error.strerror or error}); choose another"
            ) from None
        raise ConfigError(
            f"run.storage_path {storage_path!r} holds {_MOST_RUNS} runs called {name!r}; remove some or choose another run.name"
        )

    @classmethod
    def _new(cls, storage: Storage) -> RunFolder:
        if storage.is_local:
            Path(storage.path).mkdir()
            return cls(Path(storage.path))
        storage.make()
        records = _records(storage)
        _make_empty(records)
        return cls(records, storage)

    @classmethod
    def last(cls, storage_path: str, name: str) -> RunFolder | None:
        """Return the last of the folders after which `create` would make one, if there is any; it may be of another run."""
        base = Storage.at(storage_path)
        try:
            there = set(base.names())
        except OSError:  # which `create` says
            return None
        number = next(number for number in itertools.count(1) if _numbered(name, number) not in there) - 1
        return cls._of(base / _numbered(name, number)) if number else None

    def clear(self) -> None:
        """Remove what a run that ended before it trained has left to be seen; raises `OSError`."""
        for name in (FAILURE, "plan.json"):
            if self.storage.size(name) is not None:
                self.storage.remove(name)
        if self.remote is not None:
            _make_empty(self.path)

    @classmethod
    def planned(cls, storage_path: str, name: str) -> RunFolder:
        """Return the folder of a run that is not made yet; raises `ConfigError` for a place that cannot be."""
        return cls._of(Storage.at(storage_path) / name)

    @classmethod
    def latest(cls, storage_path: str, name: str) -> RunFolder:
        """Return the newest folder of a run of this name with a checkpoint.

        Raises:
            ConfigError: There is none.
        """
        folders = cls._of_name(storage_path, name)
        found = next((folder for folder in folders if finished_folders(folder.storage)), None)
        if found is None:
            raise ConfigError(
                f"no run called {name!r} in {storage_path!r} has a checkpoint to resume from; leave --resume out to begin one, or give "
                "--resume auto to begin or go on, whichever it is"
            )
        return found

    @classmethod
    def newest(cls, storage_path: str, name: str) -> RunFolder | None:
        """Return the newest folder of a run of this name, with or without a checkpoint, if there is any."""
        return next(iter(cls._of_name(storage_path, name)), None)

    @classmethod
    def _of_name(cls, storage_path: str, name: str) -> list[RunFolder]:
        # The newest first.
        numbered = re.compile(re.escape(name) + r"(?:-(\d+))?")
        try:
            folders = {
                int(match[1] or 1): folder
                for folder in Storage.at(storage_path).folders()
                if (match := numbered.fullmatch(folder.path.rpartition("/")[2])) and _is_of(name, folder)
            }
        except OSError as error:
            raise ConfigError(f"run.storage_path {storage_path!r} cannot be read ({error.strerror or error}); choose another") from None
        return [cls._of(folders[number]) for number in sorted(folders, reverse=True)]

    @classmethod
    def _of(cls, storage: Storage) -> RunFolder:
        return cls(Path(storage.path)) if storage.is_local else cls(_records(storage), storage)

    def fetch(self) -> None:
        """Copy the records of a run at a URI to this machine; raises `ConfigError` if they cannot be had."""
        if self.remote is None:
            return
        try:
            _make_empty(self.path)
            for name in self.remote.names():
                if name != LOCK and self.remote.size(name) is not None:
                    self.file(name).write_bytes(self.remote.read(name))
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be read ({error}); check run.storage_path") from None

    def publish(self) -> None:
        """Copy the records of a run at a URI there, with the folders that callbacks write, where they changed; raises `OSError`."""
        if self.remote is None:
            return
        for path in sorted(self.path.rglob("*")):
            try:
                known = path.stat()
                stamp = (known.st_size, known.st_mtime_ns)
                if not path.is_file() or self._published.get(path) == stamp:
                    continue
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # a callback has removed it meanwhile
            *folders, name = path.relative_to(self.path).parts
            to = self.remote
            for folder in folders:
                to = to / folder
                to.make()
            to.write(name, content)
            self._published[path] = stamp

    def file(self, name: str) -> Path:
        """Return the path of a file."""
        return self.path / name

    @property
    def config(self) -> TrainConfig:
        """The configuration that ran last, as it is on this machine.

        Raises:
            FormatError: The file is missing or damaged.
        """
        return TrainConfig.load(self.file(CONFIG))

    def begin(self, config: TrainConfig) -> None:
        """Write configuration and versions, also at a URI: whoever looks for a run to go on with sees this one from now on.

        Raises:
            ConfigError: They cannot be written.
        """
        self._write_start(config)
        try:
            self.publish()
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be written ({error.strerror or error}); try again, or check run.storage_path") from None

    def _write_start(self, config: TrainConfig) -> None:
        self._write_config(CONFIG, codec.to_yaml(config, format_name=FORMAT).encode())
        self.write_json("versions.json", versions())
        self.file(FAILURE).unlink(missing_ok=True)

    def _write_config(self, name: str, content: bytes) -> None:
        # Whole or not at all, whatever ends the process or the machine: its folder is known by it.
        records = Storage.at(self.path)
        try:
            records.write(name, content)
            records.sync()
        except OSError as error:
            problem = f"{self.file(name)} cannot be written ({error.strerror or error})"
            raise ConfigError(f"{problem}; make room there, or check that the folder is yours") from None

    def continue_from(self, config: TrainConfig, *, update: int) -> None:
        """Write what runs after an update; rename what ran before, drop what ran after.

        Raises:
            ConfigError: The configuration cannot be written; the earlier one is still there then.
        """
        self._drop_after(update)
        for name in (CONFIG, "plan.json", FAILURE):
            path = self.file(name)
            kept = self.file(f"{path.stem}-until-update-{update:06d}{path.suffix}")
            # An earlier resume from this update already kept what led to it; what ran since led to no checkpoint.
            if path.exists() and not kept.exists():
                if name == CONFIG:  # until the new one takes its place: a folder without it would not be known for a run's
                    self._write_config(kept.name, path.read_bytes())
                else:
                    path.rename(kept)
        self._write_start(config)

    def restart(self, config: TrainConfig) -> None:
        """Begin again in the folder of a run that ended before its first checkpoint."""
        self._drop_after(0)
        self._write_start(config)

    def check_room(self, weight_bytes: int, *, num_to_keep: int, notice: Callable[[str], None]) -> None:
        """Refuse a disk without room for one checkpoint of so many bytes of weights; tell `notice` of one without room for all.

        Raises:
            ConfigError: Says what is free and what a checkpoint takes.
        """
        if self.remote is not None:
            return
        there = next(path for path in (self.path, *self.path.parents) if path.exists())
        free_bytes, checkpoint_bytes = shutil.disk_usage(there).free, weight_bytes * _STATES
        remedy = f"make room, or choose another run.storage_path than {self.path.parent}"
        if free_bytes < checkpoint_bytes:
            problem = f"a checkpoint of this model takes about {size(checkpoint_bytes)}, but {size(free_bytes)} are free there"
            raise ConfigError(f"{self.name}: {problem}; {remedy}")
        num_at_once = num_to_keep + 1  # the oldest goes when the newest is there
        if num_to_keep and free_bytes < num_at_once * checkpoint_bytes:
            notice(
                f"{self.name}: {size(free_bytes)} are free, {num_at_once} checkpoints take about {size(num_at_once * checkpoint_bytes)}: "
                f"{remedy}, or lower run.num_to_keep"
            )

    def end_early(self, reason: str, *, update: int) -> None:
        """Write why a run has all the updates that it will have, though fewer than configured."""
        self.write_json(FAILURE, {"problem": reason, "kind": ENDED_EARLY, "updates": update})

    def new_checkpoint(self, update: int) -> Storage:
        """Return an empty folder for a checkpoint; raises `OSError`."""
        folder = self.storage / FOLDER / checkpoint_name(update)
        remove_checkpoint(folder)
        folder.make()
        return folder

    def remove_unfinished(self) -> None:
        """Remove the checkpoints that no run ended writing; raises `OSError`."""
        for folder in (self.storage / FOLDER).folders():
            if folder.size(INDEX) is None:
                folder.remove_all()

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        self._append(METRICS, line)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without one that is only half written."""
        return _lines(self.file(METRICS))

    def add_decision(self, line: dict[str, Any]) -> None:
        """Append a line to `adaptation.jsonl`."""
        self._append("adaptation.jsonl", line)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        content = f"{json.dumps(without_nan(line))}\n".encode()
        # Without a buffer, which would try once more what a full disk has refused, behind the part that it took.
        with self.file(name).open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                _write_whole(file, content, self.file(name))
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    def add_failure(self, line: dict[str, Any]) -> None:
        """Append a line to `failures.jsonl`."""
        self._append("failures.jsonl", line)

    def rewind_metrics(self, update: int) -> None:
        """Drop the metrics of what came after an update, and the evaluation that followed it, which a run that goes on repeats.

        Figures that callbacks logged at the update stay: not all of their events come again.
        """
        _keep_lines_at_end(
            self.file(METRICS),
            lambda line: line["update"] < update + ("validation_loss" not in line),
            # Lines of training come in order, each behind whatever tells of earlier updates; those of callbacks may come late.
            is_last=lambda line: "loss" in line and line["update"] < update,
        )

    def _drop_after(self, update: int) -> None:
        # A resumed run repeats the decision that followed its checkpoint.
        self.rewind_metrics(update)
        _keep_lines(self.file("adaptation.jsonl"), lambda line: line["update"] < update)
        for path in self.path.iterdir():
            if (match := _UNTIL.fullmatch(path.name)) and int(match[1]) > update:
                path.unlink()

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file."""
        self.file(name).write_text(json.dumps(without_nan(content), indent=1) + "\n", encoding="utf-8")


def without_nan(content: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by `None`."""
    if isinstance(content, Mapping):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _records(storage: Storage) -> Path:
    # One place on this machine for each URI.
    digest = hashlib.sha256(storage.name.encode()).hexdigest()[:16]
    return cache_folder().absolute() / "runs" / digest / storage.path.rpartition("/")[2]


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _is_of(name: str, folder: Storage) -> bool:
    # `gpt-2` may be the second run of `gpt`, or one called `gpt-2`. One that cannot be told is not passed over: a new run would begin
    # beside it, and be the newest from then on.
    path = f"{folder.name}/{CONFIG}"
    try:
        if folder.size(CONFIG) is None and not finished_folders(folder):
            return False
        return TrainConfig.from_text(folder.read(CONFIG).decode(), path=path).run.name == name
    except (OSError, UnicodeDecodeError, FormatError) as error:
        raise ConfigError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}), so that it is not known whether {folder.name} is the "
            f"folder of a run called {name!r}; try again, restore the file (a config-until-update-*.yaml beside it is an earlier one), "
            "or move the folder out of run.storage_path"
        ) from None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [line for text in file if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> dict[str, Any] | None:
    # `None` for a line that is only half written.
    try:
        line: dict[str, Any] | None = json.loads(text.decode(errors="replace"))
    except json.JSONDecodeError:
        return None
    return line


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    # A last line that is only half written goes, too.
    if not path.exists():
        return
    beside = path.with_suffix(".partial")
    with path.open("rb") as file, beside.open("wb") as kept:
        kept.writelines(text.rstrip(b"\n") + b"\n" for text in file if (line := _parsed(text)) is not None and wanted(line))
    beside.replace(path)


def _keep_lines_at_end(path: Path, wanted: Callable[[dict[str, Any]], bool], *, is_last: Callable[[dict[str, Any]], bool]) -> None:
    """Drop lines as `_keep_lines` does, but read from the end, and no further than the last line of those that all stay.

    What stays behind that line is written in place, where a full disk has room for it.
    """
    texts: list[bytes] = []
    begin = 0
    try:
        with path.open("rb") as file:
            for begin, text in _from_end(file):  # noqa: B007  # where the last of them begins
                if (line := _parsed(text)) is not None and wanted(line):
                    texts.append(text + b"\n")
                    if is_last(line):
                        break
            else:
                begin = 0
            num_bytes = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return
    content = b"".join(reversed(texts))
    if begin + len(content) == num_bytes:
        return  # all of them stay
    with path.open("r+b", buffering=0) as file:
        file.seek(begin)
        _write_whole(file, content, path)
        file.truncate()


def _from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield where each line that is not empty begins, and the line, from the last one to the first."""
    begin, head = file.seek(0, os.SEEK_END), b""
    while begin:
        end, begin = begin, max(begin - _BLOCK_BYTES, 0)
        file.seek(begin)
        head, *texts = (file.read(end - begin) + head).split(b"\n")
        place = begin + len(head) + sum(len(text) + 1 for text in texts)
        for text in reversed(texts):
            place -= len(text)
            if text:
                yield place, text
            place -= 1
    if head:
        yield 0, head


def _write_whole(file: BinaryIO, content: bytes, path: Path) -> None:
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
