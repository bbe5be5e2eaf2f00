"""A run of waiting layers on four nodes that tells how it goes: one JSON document a line, a window each, then its folder.

    python -m tests.multinode.adapting_run TOPOLOGY STORAGE UPDATES UPDATES_PER_WINDOW SCHEDULE [PLAN]

With `auto` for the schedule it adapts; else it is what is given, or planned, all the way.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.config import AdaptationConfig, ClusterConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.training.result import Progress
from raypipe.training.trainer import Trainer

NUM_LAYERS = 8
WIDTH = 100_000
NUM_ROWS = 1
"""Messages of 400 kB; one row cannot be divided among replicas."""
FORWARD_S, INPUT_GRAD_S, WEIGHT_GRAD_S = 0.008, 0.008, 0.008
NUM_MICROBATCHES = 8
NUM_DEVICES = 4


@dataclass(frozen=True)
class Rows:
    """Opens the same rows for both splits."""

    def __call__(self, split: str) -> BatchSource:
        return FixedBatch({"inputs": torch.zeros(NUM_ROWS, WIDTH)})


class Lines:
    """Writes what a run says."""

    def notice(self, text: str) -> None:
        tell(notice=text)

    def progress(self, progress: Progress) -> None:
        tell(update=progress.update, update_s=progress.update_s)


def tell(**document: object) -> None:
    """Writes one document."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main(topology: str, storage: str, num_updates: int, updates_per_window: int, schedule: str, plan: str | None = None) -> None:
    """Trains."""
    adapts = schedule == "auto"
    trainer = Trainer(
        "raypipe.models.waiting:waiting",
        model_options={
            "num_layers": NUM_LAYERS,
            "width": WIDTH,
            "forward_s": FORWARD_S,
            "input_grad_s": INPUT_GRAD_S,
            "weight_grad_s": WEIGHT_GRAD_S,
            "num_rows": NUM_ROWS,
        },
        batches=Rows(),
        schedule_config=ScheduleConfig(
            name="1f1b" if plan else schedule,
            num_microbatches=NUM_MICROBATCHES,
            microbatch_size=NUM_ROWS,
            updates_per_window=updates_per_window,
            max_staleness=1 if adapts else None,
            max_mismatch=1 if adapts else None,
        ),
        optimizer_config=OptimizerConfig(max_grad_norm=None),
        scaling_config=ScalingConfig(num_devices=NUM_DEVICES, topology=None if plan else topology),
        cluster_config=ClusterConfig(dashboard=False, log_to_driver=False),
        run_config=RunConfig(name="adapting", storage_path=storage, num_updates=num_updates),
        adaptation_config=AdaptationConfig(enabled=adapts, horizon_updates=100),
        plan=plan,
    )
    result = trainer.fit(listener=Lines())
    tell(path=str(Path(result.path)), plan=result.plan.schedule.name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
