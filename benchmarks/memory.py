"""How much memory the devices of a training run hold: the prediction of the memory model against what Linux counts of their processes.

    python benchmarks/memory.py [--cases gpipe 1f1b ...] [--blocks 8] [--width 384] [--vocabulary 4096] [--rows 4]
                                [--windows 2] [--holes | --use-gpu] [--json FILE]

A GPT over four stage actors, each schedule in a run of its own. Predicted are the peaks of the simulated window, from layers as they
were measured; measured are those of the actors' processes (`raypipe.actors.measure.memory`), medians over the windows after the first.

The C library keeps what is freed, and does not fill all of the holes: glibc 2.36 does not give an aligned block to a request of the
same size. To see what the model says of tensors, they get pages of their own here, which the system takes back. `--holes` leaves that
to raypipe's usual settings. With `--use-gpu` the actors have GPUs, if need be a part of one each, and torch's allocator counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rounds import print_table, write_json

from raypipe import ClusterConfig, Model, RunConfig, ScalingConfig, ScheduleConfig, Trainer
from raypipe.analysis.comparison import ComparedFigure
from raypipe.cluster.session import session
from raypipe.errors import RaypipeError
from raypipe.model import Batch
from raypipe.models.gpt import gpt
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import recompute
from raypipe.training.result import Result

NUM_DEVICES = 4
NUM_POSITIONS = 128
_PAGES_OF_THEIR_OWN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        schedule: its name.
        num_microbatches: of an update.
        num_updates: of a window.
        num_chunks: stages a device.
        sharded: whether the copies of a stage divide the optimizer's state.
        recomputed: whether all stages run their forwards again.
    """

    schedule: str
    num_microbatches: int = 8
    num_updates: int = 1
    num_chunks: int | None = None
    sharded: bool = False
    recomputed: bool = False


CASES: Mapping[str, Case] = {
    "gpipe": Case("gpipe"),
    "1f1b": Case("1f1b"),
    "1f1b, recomputing": Case("1f1b", recomputed=True),
    "interleaved": Case("interleaved", num_chunks=2),
    "zb-h1": Case("zb-h1"),
    "chimera": Case("chimera"),
    "pipedream": Case("pipedream", num_microbatches=1, num_updates=12),
    "pipedream-2bw": Case("pipedream-2bw", num_microbatches=4, num_updates=3),
    "async-1f1b": Case("async-1f1b", num_microbatches=4, num_updates=3),
    "amdp": Case("amdp", num_microbatches=4, num_updates=3),
    "amdp, sharded": Case("amdp", num_microbatches=4, num_updates=3, sharded=True),
}


@dataclass(frozen=True)
class RandomTokens:
    """Rows of tokens drawn from the number of their microbatch; the same for both splits.

    Attributes:
        num_rows: of a microbatch.
        vocabulary_size: tokens are less than this.
    """

    num_rows: int
    vocabulary_size: int

    def __call__(self, split: str) -> RandomTokens:
        """The rows of a split."""
        assert split
        return self

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """The rows of a microbatch."""
        assert rows == (0.0, 1.0), "these stages have one device each"
        generator = torch.Generator().manual_seed(microbatch)
        tokens_BS = torch.randint(self.vocabulary_size, (self.num_rows, NUM_POSITIONS + 1), generator=generator)
        return {"tokens": tokens_BS[:, :-1].contiguous(), "targets": tokens_BS[:, 1:].contiguous()}


@dataclass(frozen=True)
class Work:
    """The model, its rows and the length of each run.

    Attributes:
        model: Function that describes the GPT.
        batches: Rows of the batches.
        num_blocks: Number of blocks of the GPT.
        num_windows: Number of windows of each run.
        folder: Folder that the runs write to.
        gpu_share: What a device has of a GPU; 0 for CPU slots.
    """

    model: partial[Model]
    batches: RandomTokens
    num_blocks: int
    num_windows: int
    folder: str
    gpu_share: float = 0.0

    def run(self, case: Case, *, plan: str | None = None) -> Result:
        """Trains."""
        num_stages = NUM_DEVICES * (case.num_chunks or 1)
        sizes = [self.num_blocks // num_stages] * num_stages
        sizes[0] += 1
        sizes[-1] += 1
        schedule = ScheduleConfig(
            name=case.schedule,
            num_microbatches=case.num_microbatches,
            microbatch_size=self.batches.num_rows,
            num_chunks=case.num_chunks,
            updates_per_window=case.num_updates,
        )
        scaling = ScalingConfig(
            num_devices=NUM_DEVICES,
            layers_per_stage=tuple(sizes),
            shard_optimizer=case.sharded,
            use_gpu=self.gpu_share > 0,
            gpus_per_device=self.gpu_share or 1.0,
        )
        return Trainer(
            self.model,
            batches=self.batches,
            schedule_config=schedule if plan is None else ScheduleConfig(updates_per_window=case.num_updates),
            scaling_config=scaling if plan is None else ScalingConfig(gpus_per_device=self.gpu_share or 1.0),
            run_config=RunConfig(name="memory", storage_path=self.folder, num_updates=self.num_windows * case.num_updates),
            plan=plan,
        ).fit()

    def result(self, case: Case) -> Result:
        """Trains; with recomputation by the plan of a run without."""
        found = self.run(case)
        if not case.recomputed:
            return found
        plan = found.plan
        schedule: Schedule = recompute(plan.schedule, range(plan.schedule.num_stages))
        path = str(Path(self.folder, "recomputing.json"))
        replace(plan, schedule=schedule).save(path)
        return self.run(case, plan=path)


def memory_of(result: Result) -> list[ComparedFigure]:
    """The figures of the devices' memory, by device."""
    found = [figure for figure in result.figures if figure.name.startswith("memory of device")]
    assert found, "the memory of a process is measured on Linux, where /proc/self/clear_refs can be written"
    return found


def row(name: str, figures: list[ComparedFigure]) -> dict[str, str]:
    """One line of the table."""
    worst = max(figures, key=lambda figure: abs(figure.error))
    return {
        "case": name,
        "predicted MB": " ".join(f"{figure.predicted / 1e6:.0f}" for figure in figures),
        "measured MB": " ".join(f"{figure.measured / 1e6:.0f}" for figure in figures),
        "error %": " ".join(f"{100 * figure.error:+.1f}" for figure in figures),
        "worst %": f"{100 * worst.error:+.1f}",
    }


def main() -> None:
    """Trains in every way and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--holes", action="store_true", help="let the C library keep memory, as it does in every run")
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    gpu_share = min(1.0, torch.cuda.device_count() / NUM_DEVICES) if arguments.use_gpu else 0.0
    if not arguments.holes:
        os.environ |= _PAGES_OF_THEIR_OWN
    model = partial(
        gpt,
        num_layers=arguments.blocks,
        d_model=arguments.width,
        num_heads=6,
        sequence_length=NUM_POSITIONS,
        vocabulary_size=arguments.vocabulary,
    )
    batches = RandomTokens(arguments.rows, arguments.vocabulary)
    found: dict[str, list[ComparedFigure]] = {}
    failed: dict[str, str] = {}
    with (
        session(ClusterConfig(dashboard=False, log_to_driver=False), num_devices=NUM_DEVICES, cpus_per_device=1.0),
        tempfile.TemporaryDirectory() as folder,
    ):
        work = Work(model, batches, arguments.blocks, arguments.windows, folder, gpu_share)
        for name in arguments.cases:
            try:
                found[name] = memory_of(work.result(CASES[name]))
            except RaypipeError as error:  # the others are measured all the same
                failed[name] = str(error)
                print(f"{name} failed: {error}", flush=True)
                continue
            print_table(name, [row(name, found[name])])
            write_json(arguments.json, {"figures": found, "failed": failed})  # the next case may take minutes
    size = f"{arguments.blocks} blocks of {arguments.width}, vocabulary {arguments.vocabulary}"
    if found:
        print_table(
            f"{size}, {arguments.rows} rows of {NUM_POSITIONS} tokens a microbatch, {NUM_DEVICES} devices",
            [row(name, figures) for name, figures in found.items()],
        )
    write_json(arguments.json, {"figures": found, "failed": failed})
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
