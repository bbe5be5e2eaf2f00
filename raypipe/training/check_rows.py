"""Checks the user's data on the driver, before anything starts: its first rows must have what the model takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import ray
import torch

from raypipe.actors.data.reader import RowReader, unpacked
from raypipe.actors.data.source import DataSource, is_ray_dataset
from raypipe.actors.execution.batches import WHOLE, share_of
from raypipe.data.samples import Split
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Batch, Model

_HALVES = ((0.0, 0.5), (0.5, 1.0))


_TOKENS = ("input_ids", "tokens")


class CheckedRows(NamedTuple):
    """What the first rows of the data tell: whether training rows are a stream, and how many tokens each has, if any."""

    is_stream: bool
    tokens_per_row: int | None = None


def check_rows(source: DataSource, model: Model, *, microbatch_size: int) -> CheckedRows:
    """Return what kind of rows the data has; refuse data that does not fit the model.

    A Dataset of Ray Data is read on the cluster alone, and not checked here.

    Raises:
        ConfigError: The first microbatch cannot be read, lacks a field of the model's layers, or is weighed wrongly. Names the split, the
            field and what there is.
    """
    packed, was_connected = source.packed(), ray.is_initialized()
    found: dict[str, CheckedRows] = {}
    with _generators_kept():
        for split, data in source.data.items():
            if is_ray_dataset(data):
                found[split] = CheckedRows(is_stream=True)
                continue
            reader = RowReader(packed, split, num_kept=2, mark_every=microbatch_size)
            batch = unpacked(reader.rows(0, microbatch_size, WHOLE))
            _check_fields(batch, model, where=f"the {split} data")
            lengths = [batch[name].shape[1] for name in _TOKENS if name in batch and batch[name].dim() == 2]
            found[split] = CheckedRows(reader.is_stream, next(iter(lengths), None))
    if ray.is_initialized() and not was_connected:
        ray.shutdown()  # Ray Data starts a cluster where there is none, which is not that of the run
    return found[Split.TRAIN]


def _check_fields(batch: Batch, model: Model, *, where: str) -> None:
    for layer in model.layers:
        for name in layer.batch:
            if name not in batch:
                near = suggestion(name, batch)
                raise ConfigError(f"layer {layer.name!r} takes the field {name!r}{near}; {where} has {', '.join(batch)}")
    model.check_fields(batch, where=where)
    if model.loss_weight is None:
        return
    try:
        whole, *halves = (float(model.loss_weight(share_of(batch, rows))) for rows in (WHOLE, *_HALVES))
    except KeyError as error:
        name = str(error.args[0]) if error.args else ""
        raise ConfigError(
            f"loss_weight of the model takes the field {name!r}{suggestion(name, batch)}; {where} has {', '.join(batch)}"
        ) from None
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(f"loss_weight of the model fails on the first rows of {where}: {type(error).__name__}: {error}") from error
    if abs(whole - sum(halves)) > 1e-6 * max(abs(whole), 1.0):
        raise ConfigError(
            f"loss_weight of the model is {whole:g} for the first microbatch of {where}, but {sum(halves):g} for its two halves together; "
            "return the sum over the rows, not a mean"
        )


@contextmanager
def _generators_kept() -> Iterator[None]:
    # The user's program may have seeded them.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
