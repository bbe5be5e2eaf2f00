"""A run of waiting layers on nodes whose links change, that tells how it goes: one JSON document a line, a window each, then its folder.

    python -m tests.multinode.adapting_run TOPOLOGY STORAGE SETTINGS

The settings are a JSON document of `Settings`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.config import AdaptationConfig, ClusterConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.training.trainer import Trainer

NUM_ROWS = 1
"""One row cannot be divided among replicas."""


@dataclass(frozen=True)
class Settings:
    """What runs, for how long, and whether it adapts.

    Attributes:
        width: Numbers of a message, of 4 bytes.
        among: Schedules to choose from; all where none is named.
        plan: File of the plan to run; none for one that is made.
    """

    num_updates: int
    updates_per_window: int
    schedule: str = "auto"
    adapts: bool = True
    among: tuple[str, ...] = ()
    plan: str | None = None
    num_devices: int = 4
    num_layers: int = 8
    num_microbatches: int = 8
    width: int = 100_000
    forward_s: float = 0.008
    input_grad_s: float = 0.008
    weight_grad_s: float = 0.008

    def command(self, topology: Path, storage: Path) -> list[str]:
        """Return the command of the run."""
        return [sys.executable, "-m", __name__, str(topology), str(storage), json.dumps(dataclasses.asdict(self))]


@dataclass(frozen=True)
class Rows:
    """Opens the same rows for both splits."""

    width: int

    def __call__(self, split: str) -> BatchSource:
        return FixedBatch({"inputs": torch.zeros(NUM_ROWS, self.width)})


class Lines(Callback):
    """Writes what a run says."""

    def on_notice(self, text: str) -> None:
        tell(notice=text)

    def on_window(self, run: Run, window: Window) -> None:
        tell(update=window.update, update_s=window.update_s)


def tell(**document: object) -> None:
    """Writes one document."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main(topology: str, storage: str, settings: Settings) -> None:
    """Trains."""
    limit = 1 if settings.adapts else None
    trainer = Trainer(
        callbacks=[Lines()],
        model="raypipe.models.waiting:waiting",
        model_options={
            "num_layers": settings.num_layers,
            "width": settings.width,
            "forward_s": settings.forward_s,
            "input_grad_s": settings.input_grad_s,
            "weight_grad_s": settings.weight_grad_s,
            "num_rows": NUM_ROWS,
        },
        batches=Rows(settings.width),
        schedule_config=ScheduleConfig(
            name="1f1b" if settings.plan else settings.schedule,
            num_microbatches=settings.num_microbatches,
            microbatch_size=NUM_ROWS,
            updates_per_window=settings.updates_per_window,
            max_staleness=limit,
            max_mismatch=limit,
        ),
        optimizer_config=OptimizerConfig(max_grad_norm=None),
        scaling_config=ScalingConfig(num_devices=settings.num_devices, topology=None if settings.plan else topology),
        cluster_config=ClusterConfig(dashboard=False, log_to_driver=False),
        run_config=RunConfig(name="adapting", storage_path=storage, num_updates=settings.num_updates),
        adaptation_config=AdaptationConfig(enabled=settings.adapts, horizon_updates=100, schedules=tuple(settings.among)),
        plan=settings.plan,
    )
    result = trainer.fit()
    tell(path=str(Path(result.path)), plan=result.plan.schedule.name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Settings(**json.loads(sys.argv[3])))
