"""Tables of a run's metrics: one row for each update."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import End, RecoveredFailure, Run, SavedCheckpoint, Window

COLUMNS = (
    "update",
    "loss",
    "validation_loss",
    "grad_norm",
    "learning_rate",
    "update_s",
    "samples_per_s",
    "tokens_per_s",
    "bubble_ratio",
)


def rows(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each update from the lines of `metrics.jsonl`; what is unknown is `None`."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        row = found.setdefault(line["update"], dict.fromkeys(COLUMNS))
        row.update((name, line[name]) for name in COLUMNS if line.get(name) is not None)
    return [found[update] for update in sorted(found)]


class _Table(Callback):
    name: str

    def __init__(self, *, path: str | None = None) -> None:
        self._path = path

    def file(self, run: Run) -> Path:
        """Return the file that the table goes to."""
        return Path(self._path) if self._path else run.records / self.name


class Csv(_Table):
    """Writes the metrics of a run as CSV while it goes on; a window adds its rows.

    Args:
        path: File; `metrics.csv` in the run's folder if left out.
    """

    name = "metrics.csv"

    def on_start(self, run: Run) -> None:
        """See `Callback`; what a resumed run has done before is written anew."""
        self._written = 0
        self._write(run, "w")

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        self._write(run, "a")

    def on_recovery(self, run: Run, recovery: RecoveredFailure) -> None:
        """See `Callback`; rows of updates that are repeated go."""
        self._write(run, "w")

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self._write(run, "w")

    def _write(self, run: Run, mode: str) -> None:
        lines = rows(run.metrics())
        new = lines if mode == "w" else [row for row in lines if row["update"] > self._written]
        with self.file(run).open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if mode == "w":
                writer.writeheader()
            writer.writerows(new)
        self._written = lines[-1]["update"] if lines else -1


class Parquet(_Table):
    """Writes the metrics of a run as Parquet, with each checkpoint and at the end.

    Args:
        path: File; `metrics.parquet` in the run's folder if left out.
    """

    name = "metrics.parquet"

    def on_checkpoint(self, run: Run, checkpoint: SavedCheckpoint) -> None:
        """See `Callback`."""
        self._write(run)

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self._write(run)

    def _write(self, run: Run) -> None:
        import pyarrow as pa  # noqa: PLC0415  # takes a while to load
        import pyarrow.parquet as pq  # noqa: PLC0415

        schema = pa.schema([pa.field(name, pa.int64() if name == "update" else pa.float64()) for name in COLUMNS])
        pq.write_table(pa.Table.from_pylist(rows(run.metrics()), schema=schema), self.file(run))
