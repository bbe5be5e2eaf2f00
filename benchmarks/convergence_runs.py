"""The runs of `convergence.py`: which schedules on which model and rows, how one is trained, and the files in which they are kept."""

from __future__ import annotations

import csv
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
from in_turn import in_turn

from raypipe.actors.execution.batches import BatchSource, MaskedTokenBatches, TokenBatches
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig, OptimizerName, WeightGroup
from raypipe.data.samples import Split
from raypipe.data.tokens import TokenDataset
from raypipe.model import Model
from raypipe.models.bert import bert
from raypipe.models.gpt import gpt
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule, UpdateScope, WeightRule
from raypipe.schedules.passes import evaluation
from raypipe.schedules.request import ScheduleRequest

NUM_DEVICES = 4
NUM_POSITIONS = 128
NUM_ROWS = 32
"""Of an update."""
NUM_VALIDATION_ROWS = 512
NUM_UPDATES = 500
WINDOW = 100
FIRST_RATE = 4e-3
"""Where tuning begins."""


@dataclass(frozen=True)
class Case:
    """One schedule at one size.

    Attributes:
        schedule: its name.
        num_microbatches: into which an update's rows are divided.
        num_chunks: stages a device.
        scope: of the norm by which updates are clipped.
        rule: how backwards find their weights, where not by the schedule's own rule.
    """

    schedule: str
    num_microbatches: int
    num_chunks: int = 1
    scope: UpdateScope = UpdateScope.GLOBAL
    rule: WeightRule | None = None

    def build(self, num_updates: int) -> Schedule:
        """The order of a window."""
        schedule = build(
            self.schedule, ScheduleRequest(NUM_DEVICES, self.num_microbatches, num_updates, self.num_chunks, update_scope=self.scope)
        )
        return schedule if self.rule is None else replace(schedule, weight_rule=self.rule)


CASES = {
    "1f1b": Case("1f1b", 4),
    "pipedream": Case("pipedream", 1),
    "pipedream-2bw": Case("pipedream-2bw", 4),
    "async-1f1b": Case("async-1f1b", 4),
    "async-1f1b-m16": Case("async-1f1b", 16),
    "async-interleaved": Case("async-interleaved", 8, 2),  # with fewer than 2D, mismatch and delay are 2
    "async-interleaved-m16": Case("async-interleaved", 16, 2),
    **{f"amdp-k{rounds}": Case("amdp", NUM_DEVICES * rounds) for rounds in (1, 2, 4, 8)},
    **{f"amdp-auto-k{rounds}": Case("amdp-auto", NUM_DEVICES * rounds) for rounds in (1, 4, 8)},
    **{f"amdp-k{rounds}-stash": Case("amdp", NUM_DEVICES * rounds, rule=WeightRule.STASH) for rounds in (4,)},
    "amdp-k1-stage": Case("amdp", NUM_DEVICES, scope=UpdateScope.STAGE),  # clipped as it is unless one asks for another scope
}
SYNCHRONOUS = "1f1b"


@dataclass(frozen=True)
class Recipe:
    """How weights are stepped.

    Attributes:
        optimizer: but for its learning rate and warm-up.
        warmup: the part of the updates until the highest learning rate is reached.
    """

    optimizer: OptimizerConfig
    warmup: float = 0.2

    def config(self, run: Run) -> OptimizerConfig:
        """Of a run: the rate falls to a tenth."""
        rate, warmup_updates = run.learning_rate, round(self.warmup * run.num_updates)
        return replace(self.optimizer, learning_rate=rate, final_learning_rate=rate / 10, warmup_updates=warmup_updates)


_NADAMW = {f"nadamw{100 * beta1:.0f}": OptimizerConfig(name=OptimizerName.NADAMW, beta1=beta1) for beta1 in (0.8, 0.9, 0.95, 0.99)}
_BESIDE_MUON = (WeightGroup(weights=("embedding.*", "head.*", "*norm*", "*.bias"), optimizer="nadamw"),)


def _muon(momentum: float = 0.95, gradient_correction: float = 0.0, lookahead: float = 0.0) -> OptimizerConfig:
    """Muon for the matrices, NAdamW for all else."""
    return OptimizerConfig(
        name=OptimizerName.MUON,
        options={"momentum": momentum},
        groups=_BESIDE_MUON,
        gradient_correction=gradient_correction,
        lookahead=lookahead,
    )


_LATE = {
    "nadamw90-ahead": OptimizerConfig(name=OptimizerName.NADAMW, beta1=0.9, lookahead=1.0),
    "nadamw90-corrected": OptimizerConfig(name=OptimizerName.NADAMW, beta1=0.9, gradient_correction=1.0),
    "muon": OptimizerConfig(name=OptimizerName.MUON),
    "muon-ahead": OptimizerConfig(name=OptimizerName.MUON, lookahead=1.0),
    "muon-corrected": OptimizerConfig(name=OptimizerName.MUON, gradient_correction=1.0),
    "muon-nadamw": _muon(),
    "muon-nadamw-corrected": _muon(gradient_correction=1.0),
    "muon-nadamw-half": _muon(gradient_correction=0.5),
    "muon-nadamw-ahead": _muon(lookahead=1.0),
    "muon98-nadamw": _muon(0.98),
    "muon98-nadamw-half": _muon(0.98, gradient_correction=0.5),
}
OPTIMIZERS = {name: Recipe(optimizer) for name, optimizer in {"adamw": OptimizerConfig(), **_NADAMW, **_LATE}.items()}
OPTIMIZERS |= {f"{name}-short": replace(recipe, warmup=0.04) for name, recipe in OPTIMIZERS.items()}
"""By name; with a short warm-up, too, in which asynchronous schedules fail at rates that they can take later."""


@dataclass(frozen=True)
class Task:
    """A model and how rows of tokens are given to it."""

    model: Callable[[], Model]
    batches: Callable[[TokenDataset, int], BatchSource]


TASKS = {
    "gpt": Task(partial(gpt, num_layers=6, d_model=112, num_heads=4, sequence_length=NUM_POSITIONS), TokenBatches),
    "bert": Task(partial(bert, num_layers=6, d_model=112, num_heads=4, sequence_length=NUM_POSITIONS), MaskedTokenBatches),
}


@dataclass(frozen=True)
class Row:
    """An update: the mean loss of its rows with the weights that their forwards read, and of the held-out rows after it.

    These are evaluated at the end of a window; in between there is `None`.
    """

    update: int
    tokens: int
    loss: float
    validation_loss: float | None = None

    def cells(self) -> list[str]:
        """Of a CSV file."""
        return [str(self.update), str(self.tokens), *("" if loss is None else f"{loss:.5f}" for loss in (self.loss, self.validation_loss))]


@dataclass(frozen=True, order=True)
class Run:
    """All that a run depends on, but for the data. The seed is that of the first weights and of the order of the rows."""

    task: str
    optimizer: str
    case: str
    num_updates: int
    learning_rate: float
    seed: int

    def path(self, folder: Path) -> Path:
        """Its file."""
        return (
            folder / self.task / self.optimizer / self.case / f"updates{self.num_updates}-rate{self.learning_rate:.7f}-seed{self.seed}.csv"
        )

    @classmethod
    def of(cls, path: Path) -> Run:
        """The run of a file."""
        updates, rate, seed = path.stem.split("-")
        task, optimizer, case = path.parts[-4:-1]
        return cls(task, optimizer, case, int(updates[7:]), float(rate[4:]), int(seed[4:]))

    def __str__(self) -> str:
        return f"{self.task} {self.optimizer} {self.case}, {self.num_updates} updates, rate {self.learning_rate:g}, seed {self.seed}"


# Running


def train(run: Run, data: Path) -> Iterator[Row]:
    """Trains, window by window; ends early where a loss is no longer a number.

    Raises:
        RaypipeError: the data cannot be read.
    """
    case, task = CASES[run.case], TASKS[run.task]
    model = task.model()
    window = run.num_updates // math.ceil(run.num_updates / WINDOW)
    schedule = case.build(window)
    num_rows = NUM_ROWS // case.num_microbatches

    def rows(split: Split, seed: int) -> BatchSource:
        return task.batches(TokenDataset(data, sequence_length=NUM_POSITIONS, seed=seed, split=split), num_rows)

    optimizer = OPTIMIZERS[run.optimizer].config(run)
    pipeline = in_turn(
        LocalPipeline(
            model,
            cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges()),
            schedule=schedule,
            batches=rows(Split.TRAIN, run.seed),
            optimizer=partial(build_optimizer, optimizer),
            learning_rate=partial(optimizer.rate, num_updates=run.num_updates),
            seed=run.seed,
            max_grad_norm=optimizer.max_grad_norm,
            timeout_s=600.0,
        )
    )
    held_out = rows(Split.VALIDATION, 0)
    num_held_out = NUM_VALIDATION_ROWS // num_rows
    for first in range(0, run.num_updates, window):
        losses = mean_losses(pipeline.run_window(), num_microbatches=case.num_microbatches)
        reports = pipeline.evaluate(evaluation(schedule, num_microbatches=num_held_out), batches=held_out)
        (validation_loss,) = mean_losses(reports, num_microbatches=num_held_out)
        for number, loss in enumerate(losses, first + 1):
            yield Row(number, number * NUM_ROWS * NUM_POSITIONS, loss, validation_loss if number == first + window else None)
        if not math.isfinite(validation_loss):
            return


class Runs:
    """The finished runs of a folder, to which others are added.

    Args:
        folder: of the results.
        data: the token file.
        num_jobs: runs at once, each in a process of its own on one core.
    """

    def __init__(self, folder: Path, data: Path, *, num_jobs: int = 1) -> None:
        self.folder = folder
        self.data = data
        self.num_jobs = num_jobs

    def finish(self, runs: Sequence[Run]) -> list[list[Row]]:
        """The rows of each run, from its file or, where there is none, by training.

        Raises:
            RaypipeError: the data cannot be read.
        """
        missing = [run for run in dict.fromkeys(runs) if not run.path(self.folder).exists()]
        if missing:
            with ProcessPoolExecutor(self.num_jobs, multiprocessing.get_context("spawn")) as pool:
                for run, (rows, seconds) in zip(missing, pool.map(_finish, missing, repeat(self.folder), repeat(self.data)), strict=True):
                    print(f"{run}: {final_loss(rows):.4f} in {seconds:.0f} s, {rows[-1].tokens / seconds:.0f} tokens/s", flush=True)
        return [read(run.path(self.folder)) for run in runs]

    def tuned(self, task: str, optimizer: str, case: str) -> float:
        """The best of the learning rates 2**k FIRST_RATE for seed 0, the next ones to both sides being worse."""
        losses: dict[int, float] = {}

        def note(*powers: int) -> None:
            runs = [Run(task, optimizer, case, NUM_UPDATES, FIRST_RATE * 2.0**power, 0) for power in powers]
            losses.update(zip(powers, map(final_loss, self.finish(runs)), strict=True))

        note(-1, 0, 1)
        while (best := min(losses, key=losses.__getitem__)) in {min(losses), max(losses)}:
            note(best + (1 if best == max(losses) else -1))
        return FIRST_RATE * 2.0**best

    def there(self) -> dict[Run, list[Row]]:
        """All that are finished."""
        return {Run.of(path): read(path) for path in sorted(self.folder.glob("*/*/*/updates*.csv"))}


def _finish(run: Run, folder: Path, data: Path) -> tuple[list[Row], float]:
    """Trains and writes the file of a run; the seconds, too."""
    torch.set_num_threads(1)
    path = run.path(folder)
    since = time.perf_counter()
    rows = list(train(run, data))
    seconds = time.perf_counter() - since
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows(row.cells() for row in rows)
    part.rename(path)
    return rows, seconds


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(int(line["update"]), int(line["tokens"]), float(line["loss"]), float(text) if (text := line["validation_loss"]) else None)
            for line in csv.DictReader(file)
        ]


def final_loss(rows: Sequence[Row]) -> float:
    """The last validation loss; infinite where the losses did not stay numbers."""
    last = rows[-1].validation_loss
    return last if last is not None and math.isfinite(last) else math.inf
