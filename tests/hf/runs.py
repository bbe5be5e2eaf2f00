"""Folders of runs of small models of transformers, trained in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.snapshot import save_stages
from raypipe.artifacts.checkpoint_files import CheckpointIndex
from raypipe.artifacts.cut import Cut
from raypipe.config import DataConfig, ModelConfig, TrainConfig
from raypipe.schedules.catalogue import build
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.run_folder import RunFolder
from raypipe.user_code import make_model
from tests.models.transformers_models import TextRows

NUM_MICROBATCHES = 2


def trained_run(folder: Path, source: str, *, num_updates: int = 2, windows: int = 1, **options: Any) -> Path:
    """Train `hf:source` for some windows of updates over three stages, with a checkpoint after each, and return the folder of the run."""
    model = make_model(f"hf:{source}", options)
    order = build("1f1b", ScheduleRequest(3, NUM_MICROBATCHES, num_updates))
    cut = Cut.equal(len(model.layers), 3, model.edges(), model.tied_layers())
    pipeline = LocalPipeline(
        model,
        cut=cut,
        schedule=over_graph(order, cut.graph),
        batches=TextRows(),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        learning_rate=lambda _: 1e-2,
    )
    run = RunFolder.create(str(folder), "run")
    run.begin(TrainConfig(model=ModelConfig(function=f"hf:{source}", options=options), data=DataConfig(path="")))
    for _ in range(windows):
        pipeline.run_window()
        checkpoint = run.new_checkpoint(pipeline.num_updates)
        files: dict[str, Any] = {}
        for on_device in pipeline.weights:
            files |= save_stages(checkpoint, on_device.values())
        names = tuple(layer.name for layer in model.layers)
        index = CheckpointIndex(update=pipeline.num_updates, layers=names, model=f"hf:{source}", seed=0, files=files)
        Checkpoint.finish(checkpoint, index)
    return run.path
