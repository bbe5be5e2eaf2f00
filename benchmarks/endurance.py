"""A long run of tiny updates with many faults: whether memory, descriptors and threads stay level.

    python benchmarks/endurance.py [--updates N] [--faults N] [--json FILE]

Two stages on a local Ray. Faults strike the second at even distances: its process is killed, or closes its connections, or an Op raises
an error. The first stage and the driver live through all of them. Printed are, at parts of the run, what each of the two has: memory that
is its own, open descriptors, threads; and how much memory it gains in a thousand updates of the second half.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rounds import print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the model's rows are those of the tests

from raypipe import FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, Trainer
from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.config import ClusterConfig
from tests.actors.oracles import NUM_ROWS, RandomRows

KINDS = (FaultKind.KILL, FaultKind.CUT, FaultKind.RAISE)
PER_WINDOW = 10
SHARES = (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Sample:
    """What a process has after an update."""

    update: int
    memory_mb: float
    descriptors: int
    threads: int


def sample(pid: int, update: int) -> Sample:
    """Look at a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Sample(
        update,
        memory_mb=int(status["RssAnon"].split()[0]) / 1e3,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


def stage_processes() -> list[int]:
    """Find the processes of stages, below this process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    found = []
    for pid in mine:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Stage"):
                found.append(pid)
    return found


class Watcher(Callback):
    """Notes what driver and first stage have behind windows."""

    def __init__(self) -> None:
        self.driver: list[Sample] = []
        self.began_s = time.monotonic()
        self._stages: dict[int, list[Sample]] = {}

    def on_window(self, run: Run, window: Window) -> None:
        """Look at driver and stages."""
        self.driver.append(sample(os.getpid(), window.update))
        for pid in stage_processes():
            with contextlib.suppress(OSError):
                self._stages.setdefault(pid, []).append(sample(pid, window.update))

    @property
    def samples(self) -> dict[str, list[Sample]]:
        """Those of the driver, and of the stage that is never struck."""
        return {"driver": self.driver, "first stage": max(self._stages.values(), key=len)}


def rows(split: str) -> RandomRows:
    """Make the rows of a split."""
    return RandomRows()


def run(folder: str, *, num_updates: int, num_faults: int) -> tuple[Watcher, int, float]:
    """Train, and return what was seen, the recovered failures and the seconds."""
    faults = FaultScript()
    num_windows = num_updates // PER_WINDOW
    for number in range(num_faults):
        window = (number + 1) * num_windows // (num_faults + 1)
        faults = faults.fail_at(device=1, before="1B2", kind=KINDS[number % len(KINDS)], window=window)
    watcher = Watcher()
    result = Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 8, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=PER_WINDOW),
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
        scaling_config=ScalingConfig(num_devices=2, layers_per_stage=(4, 4)),
        cluster_config=ClusterConfig(dashboard=False, log_to_driver=False, message_timeout_s=20.0),
        run_config=RunConfig(name="endurance", storage_path=folder, num_updates=num_updates, checkpoint_every_s=20.0, show_progress=False),
        failure_config=FailureConfig(),
        faults=faults,
        callbacks=[watcher],
    ).fit()
    return watcher, len(result.recoveries), time.monotonic() - watcher.began_s


def gain(samples: list[Sample]) -> float:
    """Fit the memory that a thousand updates of the second half add."""
    later = [one for one in samples if one.update > samples[-1].update / 2]
    return float(np.polyfit([one.update / 1e3 for one in later], [one.memory_mb for one in later], 1)[0])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        watcher, num_recovered, seconds = run(folder, num_updates=arguments.updates, num_faults=arguments.faults)
    table = []
    for name, samples in watcher.samples.items():
        for share in SHARES:
            at = samples[max(round(share * len(samples)), 1) - 1]
            figures = {"memory": f"{at.memory_mb:.1f} MB", "descriptors": str(at.descriptors), "threads": str(at.threads)}
            table.append({"process": name, "update": str(at.update), **figures})
    print_table(f"{arguments.updates} updates, {num_recovered} recovered failures, {seconds:.0f} s", table)
    gains = {name: gain(samples) for name, samples in watcher.samples.items()}
    print_table("memory gained in 1,000 updates of the second half", [{name: f"{mb:+.2f} MB" for name, mb in gains.items()}])
    document = {
        "seconds": seconds,
        "recovered": num_recovered,
        "gained_mb_per_1000": gains,
        "samples": {name: [asdict(one) for one in samples[::20]] for name, samples in watcher.samples.items()},
    }
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
