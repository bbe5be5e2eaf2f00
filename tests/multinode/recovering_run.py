"""A run that tells what happens to it: one JSON document a line, a notice or a window each, and at last its losses and its folder.

    python -m tests.multinode.recovering_run STORAGE SETTINGS

The settings are a JSON document of `Settings`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.config import ClusterConfig, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows
from tests.multinode.adapting_run import tell
from tests.spares import watch_spares


@dataclass(frozen=True)
class Settings:
    """What runs, and for how long."""

    num_devices: int
    num_updates: int = 100_000
    schedule: str = "1f1b"
    checkpoint_every: int = 0
    updates_per_window: int = 5
    message_timeout_s: float = 8.0
    silence_timeout_s: float = 3.0
    max_failures: int = 10
    num_layers: int = 6
    waits_for_spares: bool = False

    def command(self, storage: Path) -> list[str]:
        """Return the command of the run."""
        return [sys.executable, "-m", __name__, str(storage), json.dumps(dataclasses.asdict(self))]


class Lines(Callback):
    """Writes what a run says."""

    def on_notice(self, text: str) -> None:
        tell(notice=text)

    def on_window(self, run: Run, window: Window) -> None:
        tell(update=window.update, update_s=window.update_s)


def rows(split: str) -> RandomRows:
    """Open the same rows for both splits."""
    assert split
    return RandomRows()


def main() -> None:
    """Run."""
    storage, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    if settings.waits_for_spares:
        watch_spares(pytest.MonkeyPatch())
    result = Trainer(
        callbacks=[Lines()],
        model="raypipe.models.mlp:mlp",
        model_options={"num_layers": settings.num_layers, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(
            name=settings.schedule, num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=settings.updates_per_window
        ),
        optimizer_config=OptimizerConfig(learning_rate=1e-2, warmup_updates=4),
        scaling_config=ScalingConfig(num_devices=settings.num_devices),
        cluster_config=ClusterConfig(message_timeout_s=settings.message_timeout_s, silence_timeout_s=settings.silence_timeout_s),
        run_config=RunConfig(
            name="run", storage_path=storage, num_updates=settings.num_updates, checkpoint_every=settings.checkpoint_every
        ),
        failure_config=FailureConfig(max_failures=settings.max_failures, copy_share=0.5, spare_processes=settings.waits_for_spares or None),
    ).fit()
    tell(losses=result.losses, path=result.path)


if __name__ == "__main__":
    main()
