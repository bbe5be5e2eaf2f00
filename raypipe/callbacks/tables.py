"""Tables of a run's metrics: one row for each update."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import OWN_FIGURES, End, Evaluation, RecoveredFailure, Run, SavedCheckpoint, Window

COLUMNS = tuple(name for name in OWN_FIGURES if name != "predicted_update_s")


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
        self._evaluated: dict[int, float] = {}
        self._written = -1
        self._write_anew(run)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """See `Callback`; the loss is written with the window that it belongs to."""
        self._evaluated[evaluation.update] = evaluation.loss

    def on_window(self, run: Run, window: Window) -> None:
        """See `Callback`."""
        evaluated = ({"update": at, "validation_loss": loss} for at, loss in self._evaluated.items() if at > self._written)
        new = rows([*_window_lines(window), *evaluated])
        self._evaluated.clear()
        self._written = new[-1]["update"]
        with self.file(run).open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerows(new)

    def on_recovery(self, run: Run, recovery: RecoveredFailure) -> None:
        """See `Callback`; rows of updates that are repeated go."""
        self._evaluated.clear()
        self._write_anew(run)

    def on_end(self, run: Run, end: End) -> None:
        """See `Callback`."""
        self._write_anew(run)

    def _write_anew(self, run: Run) -> None:
        known = rows(run.metrics())
        with self.file(run).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(known)
        self._written = known[-1]["update"] if known else -1


def _window_lines(window: Window) -> Iterator[dict[str, Any]]:
    """Yield a line for each update of a window, as `metrics.jsonl` has it."""
    speed = {
        "update_s": window.update_s,
        "samples_per_s": window.samples_per_s,
        "tokens_per_s": window.tokens_per_s,
        "bubble_ratio": window.bubble_ratio,
    }
    for update in window.updates:
        figures = {"loss": update.loss, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
        yield {"update": update.number, **figures, **speed}


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
