"""A run of two devices as its callbacks would see it, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.callbacks.events import Run, Update, Window
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.planning.plan import plan
from raypipe.simulation.simulator import simulate

PROFILE = ModelProfile.uniform(4, forward_s=0.01, backward_s=0.02, output_bytes=1000)
PLAN = plan(PROFILE, ClusterTopology.uniform(2, latency_s=1e-5, bandwidth_bytes_per_s=1e9), num_microbatches=4, schedule="1f1b", effort=0.1)


def run(folder: Path, *, num_updates: int = 10, first_update: int = 0, evaluate_every: int = 2) -> Run:
    config = TrainConfig(
        model=ModelConfig(function="models:gpt"),
        data=DataConfig(path="", num_validation_microbatches=2),
        run=RunConfig(num_updates=num_updates, evaluate_every=evaluate_every),
    )
    lines: list[dict[str, Any]] = []
    return Run(
        name="gpt",
        path=str(folder),
        records=folder,
        config=config,
        first_update=first_update,
        read_metrics=lambda: lines,
        update=first_update,
    )


def window(losses: Sequence[float], *, first_update: int = 0, num_updates: int = 10, tokens_per_s: float | None = 900.0) -> Window:
    updates = tuple(Update(first_update + number, loss, 0.5, 1e-3) for number, loss in enumerate(losses, 1))
    trace = replace(simulate(PLAN), memory=(((0.0, 100),), ((0.0, 200),)))
    return Window(
        updates=updates,
        update_s=2.0,
        samples_per_s=9.0,
        tokens_per_s=tokens_per_s,
        trace=trace,
        plan=PLAN,
        num_updates_left=num_updates - updates[-1].number,
        links={("a", "b"): 1e9},
    )


def lines(happened: Window) -> list[dict[str, Any]]:
    """What a run writes into `metrics.jsonl`."""
    speed = {"update_s": happened.update_s, "samples_per_s": happened.samples_per_s, "bubble_ratio": happened.bubble_ratio}
    return [{"update": one.number, "loss": one.loss, "grad_norm": one.grad_norm, **speed} for one in happened.updates]
