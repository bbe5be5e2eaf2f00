"""How many more updates late gradients take to the same loss, from finished runs: what `raypipe.planning.staleness_cost` holds.

    python benchmarks/staleness_cost.py

Runs of `convergence.py` (NAdamW, 500 updates at its best rate, three seeds) and of `time_to_loss.py` (Muon beside NAdamW with the gradient
correction, 120 updates at its best rate). A synchronous run of N updates has the loss L = a - b ln N, with b from its last two evaluations
(`convergence.py`), or from runs of half the updates (`time_to_loss.py`). A schedule that ends higher by d needs exp(d / b) times as many
updates. Where the first fifth of the updates of `time_to_loss.py`, which is the warm-up of the rate, is on time, a part of d is left: the
sum of the differences over the sum of those without that start, over all schedules and seeds that were run with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from convergence_runs import CASES, SYNCHRONOUS, WINDOW, Row, Run, final_loss, read
from rounds import print_table
from time_to_loss import LAYERS_OF
from time_to_loss_report import Found
from time_to_loss_runs import Store, delays_of, synchronous_delays

from raypipe.schedules.metrics import metrics

RESULTS = Path(__file__).parent / "results"


OPTIMIZER, NUM_UPDATES, RATE, SEEDS = "nadamw90", 500, 8e-3, (0, 1, 2)
"""Of the runs of `convergence.py`."""
LATE = ("amdp-auto-k8", "async-1f1b-m16", "amdp-k8", "amdp-k4", "async-1f1b", "pipedream-2bw")
FOUND = Found(Store(RESULTS / "time-to-loss"), 120)
START = 24
"""Updates on time."""
RECIPES = {"nadamw": "nadamw90", "muon": "muon-nadamw-corrected"}
"""Of the runs of `time_to_loss.py`."""


def rows(case: str, seed: int) -> list[Row]:
    """Return the rows of a run of `convergence.py`."""
    return read(Run("gpt", OPTIMIZER, case, NUM_UPDATES, RATE, seed).path(RESULTS / "convergence"))


@dataclass(frozen=True)
class Point:
    """What one schedule costs."""

    case: str
    mean_delay: float
    more_loss: float
    more_updates: float


def slope(rows: Sequence[Row]) -> float:
    """Return b of the last two evaluations."""
    (before, high), (update, low) = [(row.update, row.validation_loss) for row in rows if row.validation_loss is not None][-2:]
    return (high - low) / math.log(update / before)


def points(optimizer: str) -> Iterator[Point]:
    """Yield what is known of an optimizer where all updates are late, by rising mean delay."""
    found = _of_nadamw() if optimizer == "nadamw" else _of_time_to_loss(RECIPES[optimizer])
    yield from sorted(found, key=lambda point: point.mean_delay)


def _of_nadamw() -> Iterator[Point]:
    on_time = {seed: rows(SYNCHRONOUS, seed) for seed in SEEDS}
    falls = fmean(map(slope, on_time.values()))
    for case in LATE:
        more_loss = fmean(final_loss(rows(case, seed)) - final_loss(synchronous) for seed, synchronous in on_time.items())
        yield Point(case, metrics(CASES[case].build(WINDOW)).mean_delay, more_loss, math.exp(more_loss / falls))


def _of_time_to_loss(optimizer: str) -> Iterator[Point]:
    rate = FOUND.best_rate("gpt", optimizer)
    assert rate is not None, "there are synchronous runs"
    for case, delays in late_delays(optimizer).items():
        more = FOUND.more_updates("gpt", optimizer, delays, of_same_order=True)
        if more is not None:
            more_loss = fmean(differences(optimizer, rate, delays, 0).values())
            yield Point(case, delays_of(FOUND.store.folder, delays).mean_delay, more_loss, more)


def late_delays(optimizer: str) -> dict[str, str]:
    """Return the digests of the delays with curves, by the name of a schedule that has them."""
    there = {cell["delays"] for cell in FOUND.curves("gpt", optimizer)} - {synchronous_delays(FOUND.store, "gpt")}
    named = {cell["delays"]: str(each) for each, cell in reversed(FOUND.seconds("gpt", LAYERS_OF).items())}
    return {named[digest]: digest for digest in sorted(there)}


def differences(optimizer: str, rate: float, delays: str, start: int) -> dict[int, float]:
    """Return by how much runs with late gradients end above synchronous ones, by seed."""
    late = FOUND.losses("gpt", optimizer, rate, delays, start)
    on_time = FOUND.on_time("gpt", optimizer, rate, delays)
    return {seed: late[seed] - on_time[seed] for seed in late.keys() & on_time.keys()}


def left_by_start(optimizer: str) -> float:
    """Return the part of the loss by late gradients that a start on time leaves, over all rates."""
    name, pairs = RECIPES[optimizer], []
    rates = sorted({cell["learning_rate"] for cell in FOUND.curves("gpt", name)})
    for delays, rate in product(late_delays(name).values(), rates):
        without, behind = (differences(name, rate, delays, start) for start in (0, START))
        pairs += [(without[seed], behind[seed]) for seed in without.keys() & behind.keys()]
    return sum(behind for _, behind in pairs) / sum(without for without, _ in pairs)


def main() -> None:
    """Print the points of each optimizer."""
    for optimizer in RECIPES:
        shown = [
            {
                "schedule": point.case,
                "mean delay": f"{point.mean_delay:.2f}",
                "loss": f"{point.more_loss:+.3f}",
                "updates, times": f"{point.more_updates:.2f}",
            }
            for point in points(optimizer)
        ]
        print_table(f"{optimizer}: to the loss without late gradients", shown)
        print(f"{optimizer}: with a start on time, {left_by_start(optimizer):.2f} of the loss by late gradients is left\n")


if __name__ == "__main__":
    main()
