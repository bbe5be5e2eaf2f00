"""How much sooner is the same loss? Synchronous and asynchronous schedules on 8 devices, by updates and by seconds, for one model.

    python benchmarks/time_to_loss.py [--models gpt] [--optimizers nadamw90] [--budget 30]     the next cells; goes on where it stopped
    python benchmarks/time_to_loss.py --report [--json FILE] [--svg FILE]                      tables and curves of what is there
    python benchmarks/time_to_loss.py --models gpt --rehearse "amdp K=1" "1f1b K=8"            seconds by rehearsal

A GPT and a BERT of about a million parameters, 14 blocks; BERT's head weighs two of them. An update has 64 rows of 64 tokens, K rounds
divide them into 8 K microbatches. *Losses* are the executor's, with its devices taking turns (`in_turn.py`). They depend on
which update's weights each layer reads for each row and on nothing else, so that all synchronous schedules have one curve, and
an asynchronous schedule has that of its delays (`same_delays.py`). *Seconds* are those of the same orders with the model's layers as
measured on a core, optimizer steps included, each schedule on its own best cut of 16 layers (`async_cases.py`); simulated for eight
processes of one node, or rehearsed there. They are those of an update far from the ends of a window, without filling and draining; the
orders behind the curves drain at the end of each window, so that the first update of each has nothing late. All clip by the norm over
all stages.

The learning rate is the best of those that were run with the synchronous schedule. Cells are files in benchmarks/results/time-to-loss:
curves, seconds, profiles and tables of delays. Printed: the seconds until the loss with which the fastest synchronous schedule ends, as a
ratio to that schedule's; what each asynchronous schedule loses or gains in an update. A schedule that ends above that loss needs more
updates: so many as the synchronous curve of the same optimizer, L = a - b ln N through runs of N / 2 and N updates, says of the difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from convergence_runs import OPTIMIZERS
from rounds import print_table, write_json
from time_to_loss_report import Found, figure, tables
from time_to_loss_runs import (
    SCHEDULED,
    TASKS,
    LossKey,
    Scheduled,
    Store,
    delays_of,
    is_simulated,
    rehearsed,
    simulated,
    synchronous_delays,
    train,
    without_corrections,
)

from raypipe.errors import RaypipeError

RESULTS = Path(__file__).parent / "results" / "time-to-loss"
NUM_UPDATES = 120
FIRST_RATES = (8e-3, 4e-3, 16e-3)
"""Of the synchronous schedule; the best serves all others."""
INFORMATIVE = ("pipedream-2bw K=1", "amdp K=4", "amdp K=8", "amdp K=1", "amdp-auto K=1", "async-1f1b K=1", "amdp K=2")
"""Asynchronous schedules whose curves are computed first."""
LAYERS_OF = "muon-nadamw"
"""The optimizer whose steps are in the seconds of all: the ratios compare schedules, not optimizers."""


def informative(scheduled: Scheduled) -> tuple[int, str]:
    """Return the place of an asynchronous schedule in the order of its curves."""
    name = str(scheduled)
    return (INFORMATIVE.index(name) if name in INFORMATIVE else len(INFORMATIVE)), name


class Cells:
    """The cells of one model, computed as they are needed, until the time is over."""

    def __init__(self, task: str, store: Store, options: argparse.Namespace) -> None:
        self.task = task
        self.store = store
        self.options = options
        self.without = synchronous_delays(store, task)
        self.found = Found(store, options.updates)
        self.end_s = time.monotonic() + 60 * options.budget if options.budget else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether no further cell is begun."""
        return time.monotonic() > self.end_s

    def curve(self, optimizer: str, rate: float, seed: int, delays: str, synchronous_updates: int = 0) -> None:
        """Compute a curve, if there is time and none is there."""
        optimizer = without_corrections(optimizer) if delays == self.without else optimizer
        key = LossKey(self.task, optimizer, rate, self.options.updates, seed, delays, synchronous_updates)
        if self.is_over or self.store.get("losses", str(key)) is not None:
            return
        since_s = time.process_time()
        cell = train(key, delays_of(self.store.folder, delays), self.options.data)
        self.store.put("losses", str(key), vars(key) | cell)
        print(f"{key}: {list(cell['validation'].values())[-1]} in {time.process_time() - since_s:.0f} s of a core", flush=True)

    def digest(self, scheduled: Scheduled) -> str | None:
        """Simulate a schedule, if there is time or it is known; return the digest of its delays."""
        if self.is_over and not is_simulated(self.store, self.task, LAYERS_OF, scheduled):
            return None
        since_s = time.process_time()
        found = simulated(self.store, self.task, LAYERS_OF, scheduled, self.options.data)
        if (took_s := time.process_time() - since_s) > 1:
            print(f"{self.task} {scheduled}: {found.update_s:.4f} s, simulated in {took_s:.0f} s of a core", flush=True)
        return found.delays

    def run(self) -> None:
        """Compute cells, the most informative first."""
        if "seconds" in self.options.halves:
            for scheduled in sorted(SCHEDULED, key=lambda each: (each.rounds not in {1, 4, 8}, each.rounds)):
                self.digest(scheduled)
        if "losses" in self.options.halves:
            self._losses()

    def _losses(self) -> None:
        for rate in self.options.rates:
            for optimizer in self.options.optimizers:
                self.curve(optimizer, rate, 0, self.without)
        wanted = self.options.cases
        late = [each for each in SCHEDULED if not each.is_synchronous and (wanted is None or str(each) in wanted)]
        for seed in self.options.seeds:
            for optimizer in self.options.optimizers:
                rate = self.found.best_rate(self.task, optimizer)
                if rate is not None:
                    self.curve(optimizer, rate, seed, self.without)
            for scheduled in sorted(late, key=informative):
                for optimizer, start in product(self.options.optimizers, self.options.synchronous):
                    best = self.found.best_rate(self.task, optimizer)
                    for rate in self.options.late_rates or ([] if best is None else [best]):
                        if not self.is_over and (digest := self.digest(scheduled)) is not None:
                            self.curve(optimizer, rate, seed, digest, start)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["muon-nadamw", "nadamw90"])
    parser.add_argument("--rates", nargs="+", type=float, default=list(FIRST_RATES), help="of the synchronous schedule")
    parser.add_argument("--late-rates", type=float, nargs="+", metavar="RATES", help="of asynchronous schedules; left out: the best one")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--cases", nargs="*", metavar="SCHEDULE", help="asynchronous schedules such as 'amdp K=4'; left out: all")
    parser.add_argument("--synchronous", nargs="+", type=int, default=[0], metavar="UPDATES", help="`schedule.synchronous_updates`")
    parser.add_argument("--halves", nargs="+", choices=["seconds", "losses"], default=["seconds", "losses"])
    parser.add_argument("--updates", type=int, default=NUM_UPDATES)
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="begin no cell later")
    parser.add_argument("--report", action="store_true", help="compute nothing")
    parser.add_argument("--rehearse", nargs="+", metavar="SCHEDULE", default=[], help="schedules such as '1f1b K=8'")
    parser.add_argument("--data", type=Path, default=Path("data/python-stdlib.parquet"))
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--json", help="file for all values")
    parser.add_argument("--svg", type=Path, help="file for the curves")
    return parser.parse_args()


def cases(names: list[str]) -> Iterator[Scheduled]:
    """Yield the schedules of these names."""
    by_name = {str(each): each for each in SCHEDULED}
    for name in names:
        if name not in by_name:
            sys.exit(f"there is no {name!r}; there are {', '.join(by_name)}")
        yield by_name[name]


def main() -> None:
    """Compute and report."""
    options = parsed()
    store = Store(options.output)
    try:
        for task in options.models:
            for scheduled in cases(options.rehearse):
                print(f"{task} {scheduled}: {rehearsed(store, task, LAYERS_OF, scheduled, options.data)}", flush=True)
            if not options.report and not options.rehearse:
                Cells(task, store, options).run()
    except RaypipeError as error:
        sys.exit(str(error))
    found = Found(store, options.updates)
    results: list[object] = []
    for task in options.models:
        for title, rows in tables(found, task, LAYERS_OF):
            if rows:
                print_table(title, rows)
            results.append({"title": title, "rows": rows})
    write_json(options.json, results)
    if options.svg:
        options.svg.write_text(figure(found, options.models, LAYERS_OF), encoding="utf-8")


if __name__ == "__main__":
    main()
