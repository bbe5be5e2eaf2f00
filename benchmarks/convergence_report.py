"""Tables and drawings of the runs of `convergence.py`: final losses, their distance from the synchronous schedule's, and the sweep."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from convergence_runs import (
    CASES,
    NUM_POSITIONS,
    NUM_ROWS,
    NUM_UPDATES,
    SYNCHRONOUS,
    TASKS,
    TUNING_UPDATES,
    WINDOW,
    Row,
    Run,
    Runs,
    final_loss,
)
from curves import MOST_CURVES, Curve, Panel, draw
from rounds import print_table

from raypipe.schedules.validate import facts

LIMIT = 0.01
"""How far a validation loss may be above that of the synchronous schedule to count as equal."""
_SMOOTHED = 25
"""Updates over which losses are averaged in drawings."""
_BEYOND = 0.06
"""What the drawings show of differences, to both sides."""

Table = list[dict[str, str]]


@dataclass(frozen=True)
class Group:
    """The runs that differ in nothing but their seeds, by seed."""

    case: str
    learning_rate: float
    runs: Mapping[int, Sequence[Row]]

    @property
    def losses(self) -> dict[int, float]:
        """The final validation losses."""
        return {seed: final_loss(rows) for seed, rows in self.runs.items()}

    @property
    def mean(self) -> float:
        """Of these losses."""
        return statistics.fmean(self.losses.values())

    def over(self, other: Group) -> list[float]:
        """How far the final losses are above those of another group with the same seeds, in shares of them."""
        theirs = other.losses
        return [loss / theirs[seed] - 1 for seed, loss in self.losses.items() if math.isfinite(theirs.get(seed, math.inf))]

    def curve(self) -> list[float]:
        """The training loss by update, the mean of the seeds."""
        return [statistics.fmean(row.loss for row in rows) for rows in zip(*self.runs.values(), strict=False)]


def groups(there: Mapping[Run, Sequence[Row]], task: str, num_updates: int) -> list[Group]:
    """The groups of a task and length, in the order of the cases and of their rates."""
    found: dict[tuple[str, float], dict[int, Sequence[Row]]] = {}
    for run, rows in sorted(there.items(), key=lambda item: item[0]):
        if (run.task, run.num_updates) == (task, num_updates):
            found.setdefault((run.case, run.learning_rate), {})[run.seed] = rows
    order = list(CASES)
    return [Group(*key, found[key]) for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def best(of: Sequence[Group], case: str) -> Group | None:
    """The group of a case with the lowest mean loss."""
    return min((group for group in of if group.case == case), key=lambda group: group.mean, default=None)


def final_table(of: Sequence[Group], reference: Group) -> Table:
    """A line a group: its final validation loss, and its distance from the synchronous schedule's."""
    rows: Table = []
    for group in of:
        case = CASES[group.case]
        found = facts(case.build(WINDOW))
        differences = group.over(reference)
        rows.append({
            "schedule": group.case,
            "microbatches": str(case.num_microbatches),
            "mismatch": str(found.max_mismatch),
            "delay": str(found.max_delay),
            "on average": f"{found.mean_delay:.2f}",
            "learning rate": f"{group.learning_rate:g}",
            "seeds": str(len(group.runs)),
            "validation loss": with_spread(list(group.losses.values()), ".4f"),
            f"over {SYNCHRONOUS}": with_spread(differences, "+.2%") if differences else "",
            "within 1 %": ("yes" if statistics.fmean(differences) <= LIMIT else "no") if differences else "",
        })
    return rows


def with_spread(values: Sequence[float], form: str) -> str:
    """The mean and, of several values, their standard deviation."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:{form}}" + (f" +-{statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "")


def swept(of: Sequence[Group]) -> list[str]:
    """The cases of AMDP that were run at several learning rates, in order."""
    counts = Counter(group.case for group in of)
    return [case for case in CASES if CASES[case].schedule == "amdp" and counts[case] > 1]


def sweep_table(of: Sequence[Group]) -> Table:
    """A line a learning rate: the synchronous loss there, and how far AMDP's are above it at the same rate and seeds."""
    at = {(group.case, group.learning_rate): group for group in of}
    tuned = best(of, SYNCHRONOUS)
    rows: Table = []
    for group in of:
        if group.case == SYNCHRONOUS and tuned is not None:
            row = {
                "learning rate": f"{group.learning_rate:g}",
                "of the best": f"{group.learning_rate / tuned.learning_rate:g}",
                "seeds": str(len(group.runs)),
                SYNCHRONOUS: with_spread(list(group.losses.values()), ".4f"),
            }
            for case in swept(of):
                other = at.get((case, group.learning_rate))
                row[case] = with_spread(other.over(group), "+.2%") if other else ""
            rows.append(row)
    return rows


def verdicts(of: Sequence[Group]) -> list[str]:
    """For each AMDP of the sweep, the first learning rate at which it is no longer within the limit."""
    synchronous = {group.learning_rate: group for group in of if group.case == SYNCHRONOUS}
    words: list[str] = []
    for case in swept(of):
        above = {
            group.learning_rate: statistics.fmean(differences)
            for group in of
            if group.case == case and group.learning_rate in synchronous and (differences := group.over(synchronous[group.learning_rate]))
        }
        beyond = [f"{rate:g} ({difference:+.1%})" for rate, difference in above.items() if difference > LIMIT]
        if beyond:
            words.append(f"{case} is more than {LIMIT:.0%} above {SYNCHRONOUS} at learning rate {', '.join(beyond)}")
        elif above:
            words.append(f"{case} is within {LIMIT:.0%} of {SYNCHRONOUS} up to learning rate {max(above):g}, the highest that was tried")
    return words


def report(runs: Runs) -> None:
    """Prints the tables of all runs that are there, and writes them as CSV and the curves as SVG beside the runs."""
    there = runs.there()
    for task in TASKS:
        of = groups(there, task, NUM_UPDATES)
        if (reference := best(of, SYNCHRONOUS)) is not None:
            table = final_table(of, reference)
            print_table(f"{task}, {NUM_UPDATES} updates of {NUM_ROWS * NUM_POSITIONS} tokens", table)
            write_csv(runs.folder / f"{task}.csv", table)
            (runs.folder / f"{task}.svg").write_text(draw(curve_panels(task, of, reference)), encoding="utf-8")
        of = groups(there, task, TUNING_UPDATES)
        if best(of, SYNCHRONOUS) is not None:
            table = sweep_table(of)
            print_table(f"{task}, {TUNING_UPDATES} updates, by learning rate", table)
            write_csv(runs.folder / f"{task}-rates.csv", table)
            print(*verdicts(of), sep="\n")


def write_csv(path: Path, table: Table) -> None:
    """Writes a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def curve_panels(task: str, of: Sequence[Group], reference: Group) -> list[Panel]:
    """The training losses of each case at its best rate, and how far they are above the synchronous one's, smoothed."""
    bests = [group for case in CASES if (group := best(of, case)) is not None][:MOST_CURVES]
    curves = {f"{group.case}, {group.learning_rate:g}": smoothed(group.curve()) for group in bests}
    base = smoothed(reference.curve())
    above = {
        group: [(x, 100 * (y / of_base - 1)) for (x, y), (_, of_base) in zip(curve, base, strict=False)] for group, curve in curves.items()
    }
    shown = [y for curve in curves.values() for x, y in curve if math.isfinite(y) and x > base[-1][0] / 10]
    return [
        Panel(f"{task}: training loss", "million tokens", curves, low=min(shown), high=max(shown)),
        Panel(f"above {SYNCHRONOUS}, %", "million tokens", above, low=-100 * _BEYOND, high=100 * _BEYOND),
    ]


def smoothed(values: Sequence[float]) -> Curve:
    """Means of so many updates, by millions of tokens."""
    return [
        ((end - _SMOOTHED / 2) * NUM_ROWS * NUM_POSITIONS / 1e6, statistics.fmean(values[end - _SMOOTHED : end]))
        for end in range(_SMOOTHED, len(values) + 1, _SMOOTHED // 5)
    ]
