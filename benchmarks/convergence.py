"""Do schedules whose weights are stale learn as well? Losses of a small GPT and a small BERT on the sources of Python's library.

    python benchmarks/convergence.py all [-o runs/convergence]          everything, in the order of importance; goes on where it stopped
    python benchmarks/convergence.py run --task gpt --optimizer nadamw90 --cases 1f1b amdp-k4 --seeds 0 1 2 --learning-rate 2e-3
    python benchmarks/convergence.py report [-o runs/convergence]       tables and drawings of what has been run

About a million parameters (6 blocks of width 112, one byte a token), 4 devices, 500 updates of 32 rows of 128 tokens: 2.05 million tokens.
An update has the same rows whatever the schedule; it divides them into its own number of microbatches. A linear warm-up over a fifth of the
updates (`-short`: over a twenty-fifth), then a cosine to a tenth of the rate. All schedules clip by the norm over all stages, so that
they differ in nothing but the weights that their Ops read. A window has 100 updates; at its end the pipeline drains and 512 held-out rows
are evaluated, the same for all.

What runs is the executor with its devices taking turns on one core (`in_turn.py`). For each optimizer the learning rate is tuned for `1f1b`
by powers of two, on runs of 150 updates, and serves all schedules but `pipedream`, which has its own. The sweep compares at multiples of
it, each time with `1f1b` at the same rate, rows and length. Every finished run is a CSV file: update, tokens, loss, validation_loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from convergence_report import report
from convergence_runs import CASES, NUM_UPDATES, OPTIMIZERS, SYNCHRONOUS, TASKS, Run, Runs

from raypipe.errors import RaypipeError

FIRST = (SYNCHRONOUS, "amdp-k1", "amdp-k4")
OTHERS = ("pipedream", "pipedream-2bw", "async-1f1b", "async-1f1b-m16", "async-interleaved-m16", "amdp-k8")
OWN_RATE = ("pipedream",)
SWEPT = (SYNCHRONOUS, "amdp-k1", "amdp-k4", "amdp-k8")
BOTH = ("adamw", "nadamw90")
FACTORS = (0.25, 0.5, 2)
"""Of the tuned rate, in the sweep."""


def do_all(runs: Runs, report: Callable[[], None]) -> None:
    """Everything, what matters most first; each part ends with a new report."""

    def do(task: str, cases: Iterable[str], seeds: Iterable[int]) -> None:
        wanted = list(cases)
        for seed in seeds:
            for optimizer in BOTH:
                for case in wanted:
                    rate = runs.tuned(task, optimizer, case if case in OWN_RATE else SYNCHRONOUS)
                    runs.finish(Run(task, optimizer, case, NUM_UPDATES, rate, seed))
        report()

    def sweep(cases: Iterable[str], seeds: Iterable[int]) -> None:
        wanted = list(cases)
        for seed in seeds:
            for optimizer in BOTH:
                rate = runs.tuned("gpt", optimizer, SYNCHRONOUS)
                for case in wanted:
                    runs.finish_all(Run("gpt", optimizer, case, NUM_UPDATES, factor * rate, seed) for factor in FACTORS)
        report()

    do("gpt", FIRST, (0, 1, 2))
    do("gpt", OTHERS, (0,))
    sweep(SWEPT, (0,))
    do("bert", FIRST, (0,))
    do("gpt", OTHERS, (1, 2))
    do("bert", OTHERS, (0,))
    do("bert", FIRST, (1, 2))
    do("bert", OTHERS, (1, 2))
    do("gpt", ("amdp-k1-stage",), (0, 1, 2))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "run", "report"])
    parser.add_argument("--task", choices=list(TASKS), default="gpt")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="nadamw90")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=[*FIRST, *OTHERS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=NUM_UPDATES, help="a multiple of the number of windows of at most 100")
    parser.add_argument("--learning-rate", type=float, help="left out: the tuned one")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--data", type=Path, default=Path("data/python-stdlib.parquet"))
    return parser.parse_args()


def main() -> None:
    """Runs and reports."""
    arguments = parsed()
    torch.set_num_threads(1)
    runs = Runs(arguments.output, arguments.data)
    write_report = partial(report, runs)
    try:
        if arguments.what == "all":
            do_all(runs, write_report)
        elif arguments.what == "run":
            for seed in arguments.seeds:
                for case in arguments.cases:
                    tuned = case if case in OWN_RATE else SYNCHRONOUS
                    rate = arguments.learning_rate or runs.tuned(arguments.task, arguments.optimizer, tuned)
                    runs.finish(Run(arguments.task, arguments.optimizer, case, arguments.updates, rate, seed))
    except RaypipeError as error:
        sys.exit(str(error))
    write_report()


if __name__ == "__main__":
    main()
