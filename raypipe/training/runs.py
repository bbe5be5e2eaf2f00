"""What became of the runs in a storage path, as their folders tell."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raypipe.artifacts.checkpoint_files import finished_folders
from raypipe.artifacts.storage import Storage
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, FormatError
from raypipe.training.run_folder import CONFIG, ENDED_EARLY, FAILURE, METRICS
from raypipe.training.run_lock import living_owner


class RunState(StrEnum):
    """What a run does, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    """It has all of its updates, or a callback ended it."""
    STOPPED = "stopped"
    """Somebody asked it to end."""
    FAILED = "failed"
    LOST = "lost"
    """Its process ended without a word."""


_ENDS = {"StoppedRun": RunState.STOPPED, "KeyboardInterrupt": RunState.STOPPED, ENDED_EARLY: RunState.FINISHED}


@dataclass(frozen=True)
class RunSummary:
    """A run, as its folder tells.

    Attributes:
        name: Name of its folder.
        update: The last update that its metrics tell of; 0 before the first.
        checkpoint: Update of the newest complete checkpoint; `None` without one.
        idle_s: Seconds since the metrics grew; `None` before the first window.
        detail: Where it runs, or why it ended.
    """

    name: str
    state: RunState
    update: int
    num_updates: int
    loss: float | None
    checkpoint: int | None
    idle_s: float | None
    detail: str


def summarize_runs(storage_path: str) -> list[RunSummary]:
    """Return the runs in a storage path by name; folders that are no runs are left out.

    Raises:
        ConfigError: The path cannot be read.
    """
    try:
        folders = sorted(Storage.at(storage_path, key="--storage-path").folders(), key=lambda folder: folder.path)
    except OSError as error:
        raise ConfigError(f"--storage-path {storage_path!r} cannot be read ({error.strerror or error}); choose another") from None
    found = (_summary(folder) for folder in folders)
    return [run for run in found if run is not None]


def _summary(folder: Storage) -> RunSummary | None:
    try:
        config = TrainConfig.from_text(folder.read(CONFIG).decode(), path=f"{folder.name}/{CONFIG}")
    except (OSError, UnicodeDecodeError, FormatError):
        return None
    steps = [line for line in _lines(folder, METRICS) if "loss" in line]
    update = int(steps[-1]["update"]) if steps else 0
    checkpoints = [int(one.path.rpartition("-")[2]) for one in finished_folders(folder)]
    state, detail = _state(folder, is_complete=config.run.num_updates in checkpoints)
    return RunSummary(
        name=folder.path.rpartition("/")[2],
        state=state,
        update=update,
        num_updates=config.run.num_updates,
        loss=steps[-1]["loss"] if steps else None,
        checkpoint=max(checkpoints, default=None),
        idle_s=max(time.time() - folder.changed_s(METRICS), 0.0) if steps else None,
        detail=detail,
    )


def _state(folder: Storage, *, is_complete: bool) -> tuple[RunState, str]:
    if (owner := living_owner(folder)) is not None:
        return RunState.RUNNING, str(owner)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        failure = json.loads(folder.read(FAILURE))
        return _ENDS.get(failure["kind"], RunState.FAILED), str(failure["problem"]).splitlines()[0]
    return (RunState.FINISHED, "") if is_complete else (RunState.LOST, "its process ended without a word; `--resume auto` goes on")


def _lines(folder: Storage, name: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for text in folder.read(name).decode(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(text))
    return lines
