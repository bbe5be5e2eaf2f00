"""The folder of a run: everything needed to know what ran, and to see how it went.

runs/gpt/
    config.yaml          every value, defaults included
    versions.json        of raypipe, Python, torch, ray and the machine
    plan.json            stages, devices, order, profile, topology: `raypipe simulate plan.json`
                         (of a run that was resumed, what ran before is in config- and plan-until-update-000100.yaml and .json)
    metrics.jsonl        one line an update or evaluation
    adaptation.jsonl     of an adaptive run, one line a decision, with the facts that it was made of; what ran before a switch is in
                         plan-, trace- and predicted-until-update-000030.json
    trace.json           the measured window nearest the median; predicted.json the same window, simulated
    trace.perfetto.json  both, for https://ui.perfetto.dev
    timeline.html        both, as a page to zoom in; timeline.svg two updates of them
    sample.txt           generated text
    checkpoints/update-000100/
"""

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
    """The folder of one run.

    Attributes:
        path: absolute.
    """

    path: Path

    @classmethod
    def create(cls, storage_path: str, name: str) -> RunFolder:
        """A new folder: `name`, or `name-2`, `name-3` and so on where there are earlier runs.

        Raises:
            ConfigError: it cannot be made.
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
        """The newest folder of runs of that name that has a checkpoint.

        Raises:
            ConfigError: there is none.
        """
        numbered = re.compile(re.escape(name) + r"(?:-(\d+))?")
        base = Path(storage_path).absolute()
        found = {
            int(match[1] or 1): path
            for path in (base.iterdir() if base.is_dir() else ())
            if (match := numbered.fullmatch(path.name)) and _is_of(name, path) and any(path.glob("checkpoints/*/checkpoint.json"))
        }
        if not found:
            raise ConfigError(
                f"no run called {name!r} in {storage_path!r} has a checkpoint to resume from; leave --resume out to begin one"
            )
        return cls(found[max(found)])

    def file(self, name: str) -> Path:
        """The path of a file in it."""
        return self.path / name

    @property
    def config(self) -> TrainConfig:
        """What runs, or ran last.

        Raises:
            FormatError: the file is missing or damaged.
        """
        return TrainConfig.load(self.file(_CONFIG))

    def begin(self, config: TrainConfig) -> None:
        """Writes what is to run."""
        config.save(self.file(_CONFIG))
        self.write_json("versions.json", versions())

    def begin_again(self, config: TrainConfig, *, update: int) -> None:
        """Writes what is to run from an update on; what ran until then stays beside it, what ran after it is forgotten."""
        self._forget_after(update)
        for name in (_CONFIG, "plan.json"):
            path = self.file(name)
            kept = self.file(f"{path.stem}-until-update-{update:06d}{path.suffix}")
            # Where there is one, it is what ran until then: what would have followed it never came as far as a checkpoint.
            if path.exists() and not kept.exists():
                path.rename(kept)
        self.begin(config)

    def new_checkpoint(self, update: int) -> Path:
        """An empty folder for a checkpoint; what an interrupted one left there is removed."""
        folder = self.path / "checkpoints" / f"update-{update:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            left.unlink()
        return folder

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Adds one line to the metrics."""
        with self.file("metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(line)) + "\n")

    def add_decision(self, line: dict[str, Any]) -> None:
        """Adds one line to the decisions of an adaptive run."""
        with self.file("adaptation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(line)) + "\n")

    def _forget_after(self, update: int) -> None:
        """Leaves out what a resumed run does again: updates after this one, and what came of it after its checkpoint."""
        # The evaluation at its checkpoint is done again.
        _keep_lines(self.file("metrics.jsonl"), lambda line: line["update"] <= update if "loss" in line else line["update"] < update)
        _keep_lines(self.file("adaptation.jsonl"), lambda line: line["update"] < update)
        for path in self.path.iterdir():
            if (match := _UNTIL.fullmatch(path.name)) and int(match[1]) > update:
                path.unlink()

    def write_json(self, name: str, content: Any) -> None:
        """Writes a file of the run as JSON."""
        self.file(name).write_text(json.dumps(without_nan(content), indent=1) + "\n", encoding="utf-8")


def without_nan(content: Any) -> Any:
    """The same for JSON, which has neither NaN nor infinity: `None` in their place."""
    if isinstance(content, Mapping):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _is_of(name: str, folder: Path) -> bool:
    """Whether a folder is of a run of this name, and not of one that is called like its second."""
    try:
        return RunFolder(folder).config.run.name == name
    except FormatError:
        return False


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Leaves the wanted lines of a file of JSON lines; the last one may have been interrupted, and is left out then."""
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
