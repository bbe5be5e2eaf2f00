"""Rounds of measurements, their medians, and how they are printed and kept.

All candidates run in every round, in turn, so that what else the machine does meets them alike.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from raypipe.artifacts.versions import versions

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def in_rounds(candidates: Mapping[K, Callable[[], V]], *, num_rounds: int) -> dict[K, list[V]]:
    """What each candidate gave in each round; every round begins with another one."""
    names = list(candidates)
    found: dict[K, list[V]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(candidates[name]())
    return found


@dataclass(frozen=True)
class Summary:
    """The values of all rounds, the one in the middle, and half the distance of the quartiles."""

    values: tuple[float, ...]
    median: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """The summary of these values."""
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return cls(tuple(values), quartiles[1], (quartiles[2] - quartiles[0]) / 2)


def print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Prints rows whose keys are the columns; columns of numbers are set to the right."""
    table = Table(title=title, box=SIMPLE)
    for column in rows[0]:
        is_text = any(row[column][:1].isalpha() for row in rows)
        table.add_column(column, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row.values())
    Console(width=160).print(table)


def write_json(path: str | None, results: object) -> None:
    """Writes results with the command, the date, the versions and the machine; no path, no file."""
    if path is None:
        return
    content = {"command": sys.argv, "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(), "results": results}
    Path(path).write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")
