"""How many more updates late gradients take to the same loss, from finished runs: the points of `raypipe.planning.staleness_cost`.

    python benchmarks/staleness_cost.py

Runs of `convergence.py` (NAdamW, 500 updates at its best rate, three seeds) and of `late_gradients.py` (Muon beside NAdamW with the
gradient correction, 300 updates at 0.004, one seed). Near its end a synchronous run of N updates has the loss L = a - b ln N, with b from
its last two evaluations. A schedule that ends higher by d needs exp(d / b) times as many updates. (Between synchronous runs of 60 and
120 updates b is 0.43, and 0.40 within the longer one: `gpt-muon-nadamw-rate0.016-*` in results/time-to-loss.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from convergence_runs import CASES, SYNCHRONOUS, WINDOW, Row, Run, final_loss, read
from rounds import print_table

from raypipe.schedules.metrics import metrics

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Source:
    """Finished runs of one optimizer at one rate.

    Attributes:
        synchronous: Optimizer of the synchronous runs; corrections are for late gradients.
        late: Optimizer of the others.
    """

    folder: str
    synchronous: str
    late: str
    num_updates: int
    learning_rate: float
    seeds: Sequence[int]
    cases: Sequence[str]

    def rows(self, optimizer: str, case: str, seed: int) -> list[Row]:
        """Return the rows of a run."""
        return read(Run("gpt", optimizer, case, self.num_updates, self.learning_rate, seed).path(RESULTS / self.folder))


SOURCES = {
    "nadamw": Source(
        "convergence",
        "nadamw90",
        "nadamw90",
        500,
        8e-3,
        (0, 1, 2),
        ("amdp-auto-k8", "async-1f1b-m16", "amdp-k8", "amdp-k4", "async-1f1b", "pipedream-2bw"),
    ),
    "muon": Source("late-gradients", "muon", "muon-nadamw-corrected", 300, 4e-3, (0,), ("pipedream-2bw",)),
}


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
    """Yield what is known of an optimizer, by rising mean delay."""
    source = SOURCES[optimizer]
    on_time = {seed: source.rows(source.synchronous, SYNCHRONOUS, seed) for seed in source.seeds}
    falls = fmean(map(slope, on_time.values()))
    found = []
    for case in source.cases:
        more_loss = fmean(final_loss(source.rows(source.late, case, seed)) - final_loss(rows) for seed, rows in on_time.items())
        found.append(Point(case, metrics(CASES[case].build(WINDOW)).mean_delay, more_loss, math.exp(more_loss / falls)))
    yield from sorted(found, key=lambda point: point.mean_delay)


def main() -> None:
    """Print the points of each optimizer."""
    for optimizer in SOURCES:
        rows = [
            {
                "schedule": point.case,
                "mean delay": f"{point.mean_delay:.2f}",
                "loss": f"{point.more_loss:+.3f}",
                "updates, times": f"{point.more_updates:.2f}",
            }
            for point in points(optimizer)
        ]
        print_table(f"{optimizer}: to the loss without late gradients", rows)


if __name__ == "__main__":
    main()
