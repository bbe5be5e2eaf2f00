"""Tables and drawings of the runs of `convergence.py`: final losses, their distance from the synchronous schedule's."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from convergence_runs import (
    CASES,
    NUM_POSITIONS,
    NUM_ROWS,
    NUM_UPDATES,
    OPTIMIZERS,
    SYNCHRONOUS,
    TASKS,
    WINDOW,
    Row,
    Run,
    Runs,
    final_loss,
)
from curves import MOST_CURVES, Curve, Panel, draw
from rounds import print_table

from raypipe.schedules.metrics import metrics

LIMIT = 0.01
"""How far a validation loss may be above that of the synchronous schedule to count as equal."""
_SMOOTHED = 25
"""Updates over which losses are averaged in drawings."""
_BEYOND = 0.06
"""Range of the axis for differences, to both sides of zero."""

Table = list[dict[str, str]]


@dataclass(frozen=True)
class SeedGroup:
    """The runs that differ in nothing but their seeds, by seed."""

    optimizer: str
    case: str
    learning_rate: float
    runs: Mapping[int, Sequence[Row]]

    @property
    def losses(self) -> dict[int, float]:
        """The final validation losses."""
        return {seed: final_loss(rows) for seed, rows in self.runs.items()}

    @property
    def mean(self) -> float:
        """The mean of the final validation losses over the seeds."""
        return statistics.fmean(self.losses.values())

    def over(self, other: SeedGroup) -> list[float]:
        """For each seed, the final loss relative to the other group's: 0.01 is 1 % above."""
        theirs = other.losses
        return [loss / theirs[seed] - 1 for seed, loss in self.losses.items() if math.isfinite(theirs.get(seed, math.inf))]

    def curve(self) -> list[float]:
        """The training loss by update, the mean of the seeds."""
        return [statistics.fmean(row.loss for row in rows) for rows in zip(*self.runs.values(), strict=False)]

    def __str__(self) -> str:
        return f"{self.case}, {self.optimizer}, {self.learning_rate:g}"


def groups(there: Mapping[Run, Sequence[Row]], task: str) -> list[SeedGroup]:
    """The groups of a task, in the order of optimizers, cases and rates."""
    found: dict[tuple[str, str, float], dict[int, Sequence[Row]]] = {}
    for run, rows in there.items():
        if (run.task, run.num_updates) == (task, NUM_UPDATES):
            found.setdefault((run.optimizer, run.case, run.learning_rate), {})[run.seed] = rows
    optimizers, cases = list(OPTIMIZERS), list(CASES)
    ordered = sorted(found, key=lambda key: (optimizers.index(key[0]), cases.index(key[1]), key[2]))
    return [SeedGroup(*key, found[key]) for key in ordered]


def best(of: Sequence[SeedGroup], case: str) -> SeedGroup | None:
    """The group of a case with the lowest mean loss."""
    return min((group for group in of if group.case == case), key=lambda group: group.mean, default=None)


def table_of(of: Sequence[SeedGroup]) -> Table:
    """A line a group of one optimizer: its final validation loss, and how far it is above the synchronous schedule's."""
    synchronous = {group.learning_rate: group for group in of if group.case == SYNCHRONOUS}
    reference = best(of, SYNCHRONOUS)
    rows: Table = []
    for group in of:
        case = CASES[group.case]
        found = metrics(case.build(WINDOW))
        same = synchronous.get(group.learning_rate)
        rows.append({
            "optimizer": group.optimizer,
            "schedule": group.case,
            "microbatches": str(case.num_microbatches),
            "mismatch": str(found.max_mismatch),
            "delay": str(found.max_delay),
            "on average": f"{found.mean_delay:.2f}",
            "learning rate": f"{group.learning_rate:g}",
            "seeds": str(len(group.runs)),
            "validation loss": with_spread(list(group.losses.values()), ".4f"),
            f"over {SYNCHRONOUS} at this rate": over(group, same),
            "at its best": over(group, reference),
        })
    return rows


def over(group: SeedGroup, other: SeedGroup | None) -> str:
    """How far a group is above another one, in words."""
    differences = group.over(other) if other is not None else []
    return with_spread(differences, "+.2%") if differences else ""


def with_spread(values: Sequence[float], form: str) -> str:
    """The mean and, of several values, their standard deviation."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:{form}}" + (f" +-{statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "")


def verdicts(of: Sequence[SeedGroup]) -> list[str]:
    """For each AMDP that was run at several learning rates, those at which it is not within the limit of the synchronous schedule."""
    synchronous = {group.learning_rate: group for group in of if group.case == SYNCHRONOUS}
    words: list[str] = []
    for case in CASES:
        above = {
            group.learning_rate: statistics.fmean(differences)
            for group in of
            if group.case == case and group.learning_rate in synchronous and (differences := group.over(synchronous[group.learning_rate]))
        }
        if CASES[case].schedule != "amdp" or len(above) < 2:
            continue
        beyond = [f"{rate:g} ({difference:+.1%})" for rate, difference in above.items() if difference > LIMIT]
        if beyond:
            words.append(f"{of[0].optimizer}: {case} is more than {LIMIT:.0%} above {SYNCHRONOUS} at learning rate {', '.join(beyond)}")
        else:
            words.append(f"{of[0].optimizer}: {case} is within {LIMIT:.0%} of {SYNCHRONOUS} up to learning rate {max(above):g}")
    return words


def report(runs: Runs) -> None:
    """Prints the tables of all runs that are there, and writes them as CSV and the curves as SVG beside the runs."""
    there = runs.there()
    for task in TASKS:
        rows: Table = []
        words: list[str] = []
        curves: list[SeedGroup] = []
        for optimizer in OPTIMIZERS:
            of = [group for group in groups(there, task) if group.optimizer == optimizer]
            if best(of, SYNCHRONOUS) is not None:
                rows += table_of(of)
                words += verdicts(of)
                curves += [group for case in CASES if (group := best(of, case)) is not None]
        if rows:
            print_table(f"{task}, {NUM_UPDATES} updates of {NUM_ROWS * NUM_POSITIONS} tokens", rows)
            print(*words, sep="\n")
            write_csv(runs.folder / f"{task}.csv", rows)
            (runs.folder / f"{task}.svg").write_text(draw(curve_panels(task, curves[:MOST_CURVES])), encoding="utf-8")


def write_csv(path: Path, table: Table) -> None:
    """Writes a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def curve_panels(task: str, of: Sequence[SeedGroup]) -> list[Panel]:
    """The training losses, and how far they are above those of the first group, smoothed."""
    curves = {str(group): smoothed(group.curve()) for group in of}
    base = next(iter(curves.values()))
    above = {
        group: [(x, 100 * (y / of_base - 1)) for (x, y), (_, of_base) in zip(curve, base, strict=False)] for group, curve in curves.items()
    }
    shown = [y for curve in curves.values() for x, y in curve if math.isfinite(y) and x > base[-1][0] / 10]
    return [
        Panel(f"{task}: training loss", "million tokens", curves, low=min(shown), high=max(shown)),
        Panel(f"above {of[0]}, %", "million tokens", above, low=-100 * _BEYOND, high=100 * _BEYOND),
    ]


def smoothed(values: Sequence[float]) -> Curve:
    """Means of so many updates, by millions of tokens."""
    return [
        ((end - _SMOOTHED / 2) * NUM_ROWS * NUM_POSITIONS / 1e6, statistics.fmean(values[end - _SMOOTHED : end]))
        for end in range(_SMOOTHED, len(values) + 1, _SMOOTHED // 5)
    ]
