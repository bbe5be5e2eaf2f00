"""What saving costs: windows of a run that saves, beside windows of the same run that does not.

    raypipe data prepare python-stdlib -o data/python-stdlib.parquet
    python benchmarks/checkpoints.py [--data FILE] [--rounds 6] [--updates 5] [--d-model 256] [--num-layers 6] [--json FILE]

A GPT on two stages, each with a CPU of this machine. A cell is two windows of `--updates` updates. In the cell `saved` all layers are
copied between the two, and written while the second runs: with checksums, onto the disk, under names that they have once they are whole.
In the cell `plain` they are not. Both cells run in every round of one run, in turn, and the next begins when everything is written.

`clock` is the time of a cell, from the first window's begin to the second's end; `processors` is what driver and actors have
used by the time everything is written. Printed are medians over the rounds with half the distance of the quartiles, and the cost of one
saving as a share of `--updates` updates: the median of the differences of the cells of a round over the median of the plain ones. A run
that saves every ten minutes has that cost once in ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rounds import Summary, in_rounds, print_table, write_json

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.callbacks.base import Callback
from raypipe.callbacks.group import CallbackGroup
from raypipe.config import DataConfig, ModelConfig, RunConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.training.fit import Fit
from raypipe.training.trainer import Trainer
from raypipe.units import size


@dataclass(frozen=True)
class Cell:
    """Two windows: seconds by the clock and of the processors, and what came between them."""

    clock_s: float
    processors_s: float
    copy_s: float = 0.0
    write_s: float = 0.0


@dataclass
class Results:
    """What all rounds gave, by cell."""

    cells: dict[str, list[Cell]] = field(default_factory=dict)
    saved_bytes: int = 0


class Measured(Fit):
    """A run that measures instead of training to its end."""

    num_rounds: int
    results: Results

    def _train(self) -> Checkpoint:
        self.notice("measuring")
        size_of_window = self.config.schedule.updates_per_window
        done = 0

        def window() -> None:
            nonlocal done
            self.coordinator.run_window(f"train-{size_of_window}", num_updates=size_of_window, first_update=done)
            done += size_of_window

        def cell(between: Callable[[], None]) -> Cell:
            self.checkpoints.wait()
            before_s, since_s = processors_s(), time.perf_counter()
            window()
            at_s = time.perf_counter()
            between()
            copied_s = time.perf_counter() - at_s
            at_s = time.perf_counter()
            window()
            clock_s = time.perf_counter() - since_s
            self.checkpoints.wait()
            # Longer than the window where it is not written by then.
            return Cell(clock_s, processors_s() - before_s, copied_s, time.perf_counter() - at_s)

        def save() -> None:
            self.checkpoints.save(self.coordinator, done, {})

        cell(save)  # memory and connections warm up
        cells = {"plain": lambda: cell(lambda: None), "saved": lambda: cell(save)}
        self.results.cells = in_rounds(cells, num_rounds=self.num_rounds)
        checkpoint = self.checkpoints.newest
        assert checkpoint is not None, "every saved cell ends with a checkpoint"
        self.results.saved_bytes = sum(file.size_bytes for file in checkpoint.index.files.values())
        raise Done


class Done(Exception):  # noqa: N818  # the end of the measurement
    """All rounds are measured."""


class Printed(Callback):
    """Prints what the run says."""

    def on_notice(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


def processors_s() -> float:
    """Return the processor seconds of this process and of the stage actors of its run."""
    fields: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            fields[int(path.parent.name)] = [name.partition("(")[2], *rest.split()]
    own = os.getpid()
    actors = [pid for pid, (name, *_) in fields.items() if name.startswith("ray::Stage") and own in _ancestors(pid, fields)]
    assert actors, "the actors of a run are this process's own"
    # Ticks in user and in system mode.
    return sum(int(fields[pid][12]) + int(fields[pid][13]) for pid in (own, *actors)) / os.sysconf("SC_CLK_TCK")


def _ancestors(pid: int, fields: dict[int, list[str]]) -> list[int]:
    found: list[int] = []
    while pid in fields and len(found) < len(fields):
        pid = int(fields[pid][2])
        found.append(pid)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/python-stdlib.parquet")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model=ModelConfig(
                function="raypipe.models.gpt:gpt",
                options={"num_layers": arguments.num_layers, "d_model": arguments.d_model, "sequence_length": 128},
            ),
            data=DataConfig(path=arguments.data, sequence_length=128, num_validation_microbatches=0),
            schedule=ScheduleConfig(num_microbatches=4, microbatch_size=4, updates_per_window=arguments.updates),
            scaling=ScalingConfig(num_devices=2),
            run=RunConfig(storage_path=folder, num_updates=10_000 * arguments.updates, checkpoint_every_s=0.0),
        )
        trainer = Trainer.of(config)
        run = Measured(
            trainer.config,
            model=trainer.model_function,
            batches=trainer.batches,
            plan=None,
            faults=trainer.faults,
            callbacks=CallbackGroup([Printed()]),
            resume=False,
        )
        run.num_rounds, run.results = arguments.rounds, results
        with contextlib.suppress(Done):
            run.run()
    print_results(results, arguments.updates)
    write_json(arguments.json, results)


def print_results(results: Results, num_updates: int) -> None:
    """Print the table, and what a saving costs."""
    rows: list[dict[str, str]] = []
    for name in ("clock_s", "processors_s"):
        plain, saved = ([float(getattr(cell, name)) for cell in results.cells[kind]] for kind in ("plain", "saved"))
        cost_s = statistics.median(b - a for a, b in zip(plain, saved, strict=True))
        one, other = Summary.of(plain), Summary.of(saved)
        rows.append({
            "seconds of a cell": name.removesuffix("_s"),
            "plain": f"{one.median:.3f} +- {one.spread:.3f}",
            "saved": f"{other.median:.3f} +- {other.spread:.3f}",
            "one saving": f"{cost_s:+.3f}",
            f"of {num_updates} updates": f"{cost_s / (one.median / 2):+.2%}",  # a cell has two windows
            "every 10 minutes": f"{cost_s / 600:+.4%}",
        })
    print_table(f"saving {size(results.saved_bytes)} of weights and optimizer state", rows)
    saved_cells = results.cells["saved"]
    copy_s, write_s = (statistics.median(values) for values in zip(*((cell.copy_s, cell.write_s) for cell in saved_cells), strict=True))
    print(f"between two windows a saving takes {copy_s * 1e3:.1f} ms; it is written {write_s:.2f} s later, or with its window's end")


if __name__ == "__main__":
    main()
