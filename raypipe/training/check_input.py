"""Looks at the user's model and data before anything starts, and refuses what can be known to fail."""

from __future__ import annotations

from raypipe.actors.data.source import DataSource
from raypipe.actors.orders import BatchFunction
from raypipe.actors.stage.optimizers import check_patterns
from raypipe.config import Precision, TrainConfig
from raypipe.model import Model
from raypipe.training.check_layers import DraftLayers
from raypipe.training.check_rows import CheckedRows, check_rows, rows_of_batches, tell_epochs, tell_evaluations
from raypipe.training.checks import check_data
from raypipe.training.run_cluster import Notice


def check_run_rows(
    config: TrainConfig, model: Model, rows: BatchFunction | DataSource, *, vocabulary_size: object, is_done: bool, notice: Notice
) -> CheckedRows:
    """Return what is known of the training rows; a run that is done needs no more of them.

    Raises:
        InputError: They do not fit the model.
    """
    if isinstance(rows, DataSource):
        found = check_rows(rows, model, microbatch_size=config.schedule.microbatch_size)
    else:
        num_tokens = check_data(config, model, vocabulary_size=vocabulary_size) if config.data.path else 1
        found = rows_of_batches(rows, model)._replace(tokens_per_row=num_tokens if num_tokens > 1 else None)
    if not is_done:
        tell_epochs(found.num_rows, config, notice=notice)
        tell_evaluations(found.num_eval_rows, config, notice=notice)
    return found


def draft_layers(config: TrainConfig, model: Model, rows: CheckedRows) -> DraftLayers | None:
    """Return the layers without memory if they can be made, tried on the first rows unless the run is in low precision or on GPUs.

    Args:
        config: Optimizer, precision and devices.
        model: Layers that are not compiled.
        rows: What is known of the training rows.

    Raises:
        ConfigError: A tied weight is missing or unlike the others, a pattern of the optimizer gets no weight, or a layer or the loss fails.
    """
    draft = DraftLayers.of(model)
    if draft is not None:
        draft.check_ties()
        check_patterns(config.optimizer, draft.weight_names())
        # In low precision, stages cast what they take; layers for GPUs may have kernels that run on nothing else.
        if rows.first and config.model.precision is Precision.FLOAT32 and not config.scaling.use_gpu:
            draft.check_forward(rows.first)
    return draft
