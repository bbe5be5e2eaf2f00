"""A run's folder as data for its page and for `raypipe show`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Trace
from raypipe.errors import ConfigError
from raypipe.show.run_sections import RunData
from raypipe.training.run_folder import CONFIG, FAILURE, RunFolder

PLAN, TRACE, PREDICTED = "plan.json", "trace.json", "predicted.json"


@dataclass(frozen=True)
class ShownRun:
    """A run and its traces: predicted and measured, as far as they are written."""

    data: RunData
    traces: tuple[Trace, ...]


def read_run(path: Path) -> ShownRun:
    """Read the folder of a run, whether it goes on, has ended or failed.

    Raises:
        ConfigError: It is no folder of a run, or of one that has no plan yet.
        FormatError: A file in it is damaged.
    """
    folder = RunFolder(path.absolute())
    if not folder.file(CONFIG).is_file():
        raise ConfigError(f"{path}: no folder of a run: it has no {CONFIG}; `raypipe runs --storage-path FOLDER` lists runs")
    if not folder.file(PLAN).is_file():
        raise ConfigError(f"{path}: this run has no {PLAN} yet: it ended, or goes on, before its first update{_why(folder)}")
    traces = tuple(Trace.load(folder.file(name)) for name in (PREDICTED, TRACE) if folder.file(name).is_file())
    return ShownRun(run_data(folder, traces[-1] if folder.file(TRACE).is_file() else None), traces)


def run_data(folder: RunFolder, trace: Trace | None) -> RunData:
    """Return what the page of a run has beside its traces, of which `trace` is the measured one."""
    return RunData(
        name=folder.path.name,
        plan=Plan.load(folder.file(PLAN)),
        metrics=folder.metrics(),
        config=folder.file(CONFIG).read_text(encoding="utf-8"),
        trace=trace,
        notes=[why.removeprefix("; ")] if (why := _why(folder)) else [],
    )


def _why(folder: RunFolder) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        failure = json.loads(folder.file(FAILURE).read_text(encoding="utf-8"))
        return f"; it ended after update {failure['updates']}: {failure['problem']}"
    return ""
