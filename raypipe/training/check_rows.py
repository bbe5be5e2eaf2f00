"""Checks the user's data on the driver, before anything starts: its first rows must have what the model takes, and be enough."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import ray
import torch
from ray import cloudpickle

from raypipe.actors.data.reader import RowReader, unpacked
from raypipe.actors.data.source import DataSource, is_ray_dataset
from raypipe.actors.execution.batches import WHOLE, BatchSource, FieldBatches, MaskedTokenBatches, TokenBatches, share_of
from raypipe.actors.orders import BatchFunction
from raypipe.config import TrainConfig
from raypipe.data.samples import Split
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Batch, Model

_HALVES = ((0.0, 0.5), (0.5, 1.0))


_TOKENS = ("input_ids", "tokens")


class CheckedRows(NamedTuple):
    """What is known of training rows before a run.

    Attributes:
        is_stream: Whether they can only be read one after the other.
        tokens_per_row: Tokens of each, if they have tokens.
        num_rows: Rows of an epoch; `None` if that is not known.
        num_eval_rows: Rows for evaluations; `None` if that is not known.
        first: The first microbatch; empty if it can be read on the cluster only.
    """

    is_stream: bool = False
    tokens_per_row: int | None = None
    num_rows: int | None = None
    num_eval_rows: int | None = None
    first: Batch = MappingProxyType({})


def check_rows(source: DataSource, model: Model, *, microbatch_size: int) -> CheckedRows:
    """Return what kind of rows the data has; refuse data that does not fit the model.

    A Dataset of Ray Data is read on the cluster alone, and not checked here.

    Raises:
        ConfigError: The first microbatch cannot be read, lacks a field of the model's layers, or is weighed wrongly. Names the split, the
            field and what there is.
    """
    packed = source.packed()
    found: dict[str, CheckedRows] = {}
    with generators_kept(), _no_cluster_left():
        for split, data in source.data.items():
            if is_ray_dataset(data):
                found[split] = CheckedRows(is_stream=True)
                continue
            reader = RowReader(packed, split, num_kept=2, mark_every=microbatch_size)
            batch = unpacked(reader.rows(0, microbatch_size, WHOLE))
            _check_fields(batch, model, where=f"the {split} data")
            lengths = [batch[name].shape[1] for name in _TOKENS if name in batch and batch[name].dim() == 2]
            found[split] = CheckedRows(reader.is_stream, next(iter(lengths), None), reader.num_rows, first=batch)
    of_evaluations = found.get(Split.VALIDATION)
    return found[Split.TRAIN]._replace(num_eval_rows=None if of_evaluations is None else of_evaluations.num_rows)


def rows_of_batches(batches: BatchFunction, model: Model) -> CheckedRows:
    """Return what is known of the rows of `batches`, of which the first microbatch is checked where this machine can read it.

    Raises:
        ConfigError: As `check_rows`.
    """
    num_rows: int | None = None
    with generators_kept(), _no_cluster_left():
        try:
            copied: BatchFunction = cloudpickle.loads(cloudpickle.dumps(batches))  # actors get the user's object as it was
            rows = copied(Split.TRAIN)
            num_rows = _num_rows(rows)
            first = rows.batch(0, WHOLE)
            is_batch = all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in first.values())
        except Exception:  # it may work on the actors, which tell if it does not
            return CheckedRows()
        if not is_batch:
            return CheckedRows()
        _check_fields(first, model, where="the first microbatch of `batches`")
    return CheckedRows(num_rows=num_rows, first=first)


def _num_rows(rows: BatchSource) -> int | None:
    match rows:
        case TokenBatches() | MaskedTokenBatches():
            return rows.dataset.num_sequences
        case FieldBatches():
            return rows.dataset.num_rows
    return None


def tell_epochs(num_rows: int | None, config: TrainConfig, *, notice: Callable[[str], None]) -> None:
    """Tell `notice` how often a run reads its training rows, if more than once, or that one update reads some of them twice."""
    per_update = config.schedule.num_microbatches * config.schedule.microbatch_size
    if num_rows is None:
        return
    if num_rows < per_update:
        notice(
            f"the training data has {num_rows} rows, but an update reads {per_update} (schedule.num_microbatches times "
            "schedule.microbatch_size), so that it reads some of them twice; more data, shorter rows or fewer rows an update would help"
        )
    num_updates = config.run.num_updates
    if num_updates * per_update > num_rows:
        notice(
            f"the training data has {num_rows} rows, which is {num_rows / per_update:.4g} updates: {num_updates} updates read it "
            f"{num_updates * per_update / num_rows:.3g} times"
        )


def tell_evaluations(num_rows: int | None, config: TrainConfig, *, notice: Callable[[str], None]) -> None:
    """Tell `notice` where evaluations leave out some rows that there are for them, or read some twice."""
    size = config.schedule.microbatch_size
    num_read = config.data.num_validation_microbatches * size
    if not num_read or num_rows in {None, num_read}:
        return
    assert num_rows is not None, "it is known"
    whole = max(num_rows // size, 1)
    some = f"the first {num_read} of {num_rows} rows" if num_read < num_rows else f"{num_read} rows of {num_rows}, some of them twice"
    if whole != config.data.num_validation_microbatches:
        some += f"; data.num_validation_microbatches={whole} would read {'all' if whole * size == num_rows else whole * size}"
    notice(f"an evaluation reads {some}")


def _check_fields(batch: Batch, model: Model, *, where: str) -> None:
    for layer in model.layers:
        for name in layer.batch:
            if name not in batch:
                near = suggestion(name, batch)
                raise ConfigError(f"layer {layer.name!r} takes the field {name!r}{near}; {where} has {', '.join(batch)}")
    model.check_fields(batch, where=where)
    _check_tokens(batch, model, where=where)
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


def _check_tokens(batch: Batch, model: Model, *, where: str) -> None:
    tokens = next((batch[name] for name in _TOKENS if name in batch), None)
    if model.vocabulary_size is None or tokens is None or not tokens.numel():
        return
    largest = int(tokens.max())
    if largest >= model.vocabulary_size:
        raise ConfigError(
            f"{where} has the token {largest}, but the model knows {model.vocabulary_size} tokens, 0 to {model.vocabulary_size - 1}; make "
            "tokens with the model's own tokenizer"
        )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the random generators of Python, NumPy and torch as they were: the user's program may have seeded them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _no_cluster_left() -> Iterator[None]:
    # What uses Ray starts a cluster where there is none, which is not that of the run.
    was_connected = ray.is_initialized()
    try:
        yield
    finally:
        if ray.is_initialized() and not was_connected:
            ray.shutdown()
