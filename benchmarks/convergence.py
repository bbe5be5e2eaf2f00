"""Do schedules whose weights are stale learn as well? Losses of a small GPT and a small BERT on the sources of Python's library.

    python benchmarks/convergence.py all [--jobs 2]                     everything, in the order of importance; goes on where it stopped
    python benchmarks/convergence.py run --task gpt --optimizer nadamw90 --cases 1f1b amdp-k4 --seeds 0 1 2 --learning-rate 2e-3
    python benchmarks/convergence.py report                             tables and drawings of what has been run

About a million parameters (6 blocks of width 112, one byte a token), 4 devices, 500 updates of 32 rows of 128 tokens: 2.05 million tokens.
An update has the same rows whatever the schedule; it divides them into its own number of microbatches. A linear warm-up over a fifth of the
updates (`-short`: over a twenty-fifth), then a cosine to a tenth of the rate. All schedules clip by the norm over all stages, so that
they differ in nothing but the weights that their Ops read. A window has 100 updates; at its end the pipeline drains and 512 held-out rows
are evaluated, the same for all.

What runs is the executor with its devices taking turns on one core (`in_turn.py`). For each optimizer the learning rate is tuned for `1f1b`
by powers of two, and serves all schedules but `pipedream`, which has its own. The sweep compares at parts of
it, each time with `1f1b` at the same rate and rows. Every finished run is a CSV file: update, tokens, loss, validation_loss. Those of
this repository are in benchmarks/results/convergence; to run them yourself, name another folder with `-o`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from convergence_report import report
from convergence_runs import CASES, NUM_UPDATES, OPTIMIZERS, SYNCHRONOUS, TASKS, Run, Runs

from raypipe.errors import RaypipeError

SWEPT = (SYNCHRONOUS, "amdp-auto-k4", "amdp-auto-k8", "amdp-k1", "amdp-k4", "amdp-k8")
OTHERS = ("pipedream", "pipedream-2bw", "async-1f1b", "async-1f1b-m16", "async-interleaved-m16")
OWN_RATE = ("pipedream",)
FACTORS = (0.5, 0.25)
"""Of the tuned rate, in the sweep."""


@dataclass(frozen=True)
class Part:
    """Runs that are reported together: each case with each seed at each multiple of its tuned learning rate, or of a given one."""

    task: str
    optimizer: str
    cases: Sequence[str]
    seeds: Sequence[int] = (0,)
    factors: Sequence[float] = (1.0,)
    learning_rate: float | None = None

    def runs(self, runs: Runs) -> Iterator[Run]:
        """Them, the seeds one after the other; tunes what is not tuned yet."""
        for seed in self.seeds:
            for case in self.cases:
                tuned = self.learning_rate or runs.tuned(self.task, self.optimizer, case if case in OWN_RATE else SYNCHRONOUS)
                for factor in self.factors:
                    yield Run(self.task, self.optimizer, case, NUM_UPDATES, factor * tuned, seed)


ALL = (
    Part("gpt", "nadamw90", SWEPT),
    Part("gpt", "nadamw90", SWEPT, factors=FACTORS),
    Part("gpt", "nadamw90", OTHERS),
    Part("gpt", "nadamw90", [*SWEPT, *OTHERS], seeds=(1, 2)),
    # Where 1f1b learns fastest it is by the moment at which it leaves a plateau, which differs from seed to seed.
    Part("bert", "nadamw90", [*SWEPT, *OTHERS], seeds=(0, 1, 2), learning_rate=2e-3),
    Part("gpt", "adamw", SWEPT),
    Part("gpt", "adamw", SWEPT, factors=FACTORS),
    Part("gpt", "adamw", OTHERS),
    Part("gpt", "nadamw90", ["amdp-k4-stash", "amdp-auto-k1"]),
    Part("gpt", "adamw", [*SWEPT, *OTHERS], seeds=(1, 2)),
    Part("gpt", "nadamw90", ["amdp-k1-stage"], seeds=(0, 1, 2)),
)
"""What matters most first."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "run", "report"])
    parser.add_argument("--task", choices=list(TASKS), default="gpt")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="nadamw90")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=[*SWEPT, *OTHERS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=NUM_UPDATES, help="a multiple of the number of windows of at most 100")
    parser.add_argument("--learning-rate", type=float, help="left out: the tuned one")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "convergence")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on a core")
    parser.add_argument("--data", type=Path, default=Path("data/python-stdlib.parquet"))
    return parser.parse_args()


def main() -> None:
    """Runs and reports."""
    arguments = parsed()
    runs = Runs(arguments.output, arguments.data, num_jobs=arguments.jobs)
    try:
        if arguments.what == "all":
            for part in ALL:
                runs.finish(list(part.runs(runs)))
                report(runs)
        elif arguments.what == "run" and arguments.learning_rate is not None:
            cells = itertools.product(arguments.seeds, arguments.cases)
            task, optimizer, rate = arguments.task, arguments.optimizer, arguments.learning_rate
            runs.finish([Run(task, optimizer, case, arguments.updates, rate, seed) for seed, case in cells])
        elif arguments.what == "run":
            part = Part(arguments.task, arguments.optimizer, arguments.cases, arguments.seeds)
            runs.finish([replace(run, num_updates=arguments.updates) for run in part.runs(runs)])
    except RaypipeError as error:
        sys.exit(str(error))
    report(runs)


if __name__ == "__main__":
    main()
