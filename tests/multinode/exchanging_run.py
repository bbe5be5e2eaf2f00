"""A run of one stage on four nodes whose sums may go another way, which tells how it goes: one JSON document a line, then its folder.

python -m tests.multinode.exchanging_run PLAN STORAGE UPDATES UPDATES_PER_WINDOW exact|free
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.config import ClusterConfig, CommunicationConfig, OptimizerConfig, RunConfig, ScheduleConfig
from raypipe.training.trainer import Trainer
from tests.multinode.adapting_run import Lines, tell

NUM_ROWS = 4
"""A row for each device."""
WIDTH = 250_000
"""Of two layers, so that a sum has 2 MB."""
WAIT_S = 0.08
MODEL: dict[str, Any] = {
    "num_layers": 1,
    "width": WIDTH,
    "forward_s": WAIT_S,
    "input_grad_s": WAIT_S,
    "weight_grad_s": WAIT_S,
    "num_rows": NUM_ROWS,
}
"""Each device computes for 60 ms a microbatch, of which it has a row."""
NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Rows:
    """Opens the same rows for both splits."""

    def __call__(self, split: str) -> BatchSource:
        return FixedBatch({"inputs": torch.zeros(NUM_ROWS, WIDTH)})


def main(plan: str, storage: str, num_updates: int, updates_per_window: int, bits: str) -> None:
    """Trains."""
    trainer = Trainer(
        callbacks=[Lines()],
        model="raypipe.models.waiting:waiting",
        model_options=MODEL,
        batches=Rows(),
        schedule_config=ScheduleConfig(updates_per_window=updates_per_window),
        optimizer_config=OptimizerConfig(max_grad_norm=None),
        cluster_config=ClusterConfig(dashboard=False, log_to_driver=False),
        run_config=RunConfig(name="exchanging", storage_path=storage, num_updates=num_updates),
        communication_config=CommunicationConfig(exact=bits == "exact"),
        plan=plan,
    )
    result = trainer.fit()
    tell(path=str(Path(result.path)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
