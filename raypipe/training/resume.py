"""Which checkpoint a run goes on from, and what must not have changed since."""

from __future__ import annotations

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.model import Model
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_topology import Notice


def checkpoint_to_resume(folder: RunFolder, config: TrainConfig, model: Model, notice: Notice) -> Checkpoint:
    """Return the newest checkpoint of a run's folder.

    Raises:
        ConfigError: Its model, seed, optimizer or rows per update differ from the configuration's, or it has all updates already.
    """
    checkpoint = Checkpoint.latest(folder.path)
    assert checkpoint is not None, "a folder to resume from has a checkpoint"
    index, before = checkpoint.index, folder.config
    layers = tuple(layer.name for layer in model.layers)
    if index.layers != layers:
        raise ConfigError(f"{checkpoint.path} is of a model with the layers {', '.join(index.layers)}; this one has {', '.join(layers)}")
    if index.seed != config.run.seed:
        raise ConfigError(
            f"{checkpoint.path} is of a run with run.seed={index.seed}, got {config.run.seed}; the order of rows would change"
        )
    if before.optimizer.name is not config.optimizer.name:
        raise ConfigError(
            f"{checkpoint.path} has the state of optimizer.name={before.optimizer.name}, which {config.optimizer.name} cannot go on from; "
            f"set it to {before.optimizer.name}"
        )
    # An update's number says which rows it reads: with another number of rows, some would be skipped or read twice.
    old_rows, new_rows = (of_run.schedule.num_microbatches * of_run.schedule.microbatch_size for of_run in (before, config))
    if old_rows != new_rows:
        raise ConfigError(
            f"{checkpoint.path} is of a run with {old_rows} rows an update, got {new_rows}; choose schedule.num_microbatches and "
            f"schedule.microbatch_size with the product {old_rows}"
        )
    if config.data.path and before.data.sequence_length != config.data.sequence_length:
        raise ConfigError(
            f"{checkpoint.path} is of a run with data.sequence_length={before.data.sequence_length}, got {config.data.sequence_length}; "
            "the order of rows would change"
        )
    if before.data.path != config.data.path:  # the same file may have moved
        notice(f"data.path was {before.data.path} and is {config.data.path}: losses on other text do not compare")
    if index.update >= config.run.num_updates:
        raise ConfigError(f"{checkpoint.path} has done {index.update} updates already; raise run.num_updates ({config.run.num_updates})")
    return checkpoint
