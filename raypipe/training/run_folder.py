"""The folder of a run; `*-until-update-N` files hold what ran before a resume or a switch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.artifacts.versions import versions
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, FormatError

_CONFIG = "config.yaml"
_UNTIL = re.compile(r".*-until-update-(\d+)\.(?:json|yaml)")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, at an absolute path."""

    path: Path

    @classmethod
    def create(cls, storage_path: str, name: str) -> RunFolder:
        """Make a folder called `name`, or `name-2` and so on after earlier runs.

        Raises:
            ConfigError: The folder cannot be made.
        """
        base = Path(storage_path).absolute()
        try:
            base.mkdir(parents=True, exist_ok=True)
            for number in range(1, 10_000):
                path = base / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path)
        except OSError as error:
            raise ConfigError(
                f"run.storage_path {storage_path!r}: no folder can be made there ({error.strerror}); choose another"
            ) from None
        raise ConfigError(f"run.storage_path {storage_path!r} holds 10000 runs called {name!r}; remove some or choose another run.name")

    @classmethod
    def latest(cls, storage_path: str, name: str) -> RunFolder:
        """Return the newest folder of a run of this name with a checkpoint.

        Raises:
            ConfigError: There is none.
        """
        numbered = re.compile(re.escape(name) + r"(?:-(\d+))?")
        base = Path(storage_path).absolute()
        runs = {
            int(match[1] or 1): path
            for path in (base.iterdir() if base.is_dir() else ())
            if (match := numbered.fullmatch(path.name)) and _is_of(name, path) and any(path.glob("checkpoints/*/checkpoint.json"))
        }
        if not runs:
            raise ConfigError(
                f"no run called {name!r} in {storage_path!r} has a checkpoint to resume from; leave --resume out to begin one"
            )
        return cls(runs[max(runs)])

    def file(self, name: str) -> Path:
        """Return the path of a file."""
        return self.path / name

    @property
    def config(self) -> TrainConfig:
        """The configuration that ran last.

        Raises:
            FormatError: The file is missing or damaged.
        """
        return TrainConfig.load(self.file(_CONFIG))

    def begin(self, config: TrainConfig) -> None:
        """Write configuration and versions."""
        config.save(self.file(_CONFIG))
        self.write_json("versions.json", versions())

    def continue_from(self, config: TrainConfig, *, update: int) -> None:
        """Write what runs after an update; rename what ran before, drop what ran after."""
        self._drop_after(update)
        for name in (_CONFIG, "plan.json"):
            path = self.file(name)
            kept = self.file(f"{path.stem}-until-update-{update:06d}{path.suffix}")
            # An earlier resume from this update already kept what led to it; what ran since led to no checkpoint.
            if path.exists() and not kept.exists():
                path.rename(kept)
        self.begin(config)

    def new_checkpoint(self, update: int) -> Path:
        """Return an empty folder for a checkpoint."""
        folder = self.path / "checkpoints" / f"update-{update:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for remnant in folder.iterdir():
            remnant.unlink()
        return folder

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        self._append("metrics.jsonl", line)

    def add_decision(self, line: dict[str, Any]) -> None:
        """Append a line to `adaptation.jsonl`."""
        self._append("adaptation.jsonl", line)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with self.file(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(line)) + "\n")

    def add_failure(self, line: dict[str, Any]) -> None:
        """Append a line to `failures.jsonl`."""
        self._append("failures.jsonl", line)

    def rewind_metrics(self, update: int) -> None:
        """Drop the metrics of what came after an update, and the evaluation that followed it, which a run that goes on repeats."""
        _keep_lines(self.file("metrics.jsonl"), lambda line: line["update"] <= update if "loss" in line else line["update"] < update)

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


def _is_of(name: str, folder: Path) -> bool:
    # `gpt-2` may be the second run of `gpt`, or one called `gpt-2`.
    try:
        return RunFolder(folder).config.run.name == name
    except FormatError:
        return False


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    # A last line that is only half written goes, too.
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if wanted(json.loads(line)):
                kept.append(f"{line}\n")
        except json.JSONDecodeError:
            continue
    beside = path.with_suffix(".partial")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)
