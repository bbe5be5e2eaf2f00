"""Where stages get their rows: a pure function of the microbatch's number, read on the node that needs them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from raypipe.data.fields import FieldDataset, holds_fields
from raypipe.data.masking import mask_rows
from raypipe.data.tokens import TokenDataset
from raypipe.model import Batch

WHOLE = (0.0, 1.0)
"""All rows of a microbatch."""


class BatchSource(Protocol):
    """Where the rows of microbatches come from."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return the fields of a microbatch, counted over training or the evaluation; `rows` is first and end, in shares from 0 to 1."""


Piece = tuple[int, tuple[float, float]]
"""Microbatch, and a share of its rows."""


@runtime_checkable
class AheadSource(BatchSource, Protocol):
    """A source of rows that can be told what comes, so that it reads ahead of the program."""

    def expect(self, order: Sequence[Piece]) -> None:
        """Take the order in which the program will read from now on."""

    def abort(self) -> None:
        """End the wait for rows with `AbortedError`. Called from another thread."""


def row_range(rows: tuple[float, float], num_rows: int) -> tuple[int, int]:
    """Return first row and end of a share of a microbatch; neighboring shares meet without gap or overlap."""
    return round(rows[0] * num_rows), round(rows[1] * num_rows)


class KeptBatches:
    """Rows of another source, which reads each microbatch once and whole; the newest `num_kept` are kept. Threads may share it."""

    def __init__(self, source: BatchSource, *, num_kept: int) -> None:
        self._source = source
        self._num_kept = num_kept
        self._kept: OrderedDict[int, Batch] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return some rows of a microbatch."""
        with self._lock:
            if microbatch not in self._kept:
                self._kept[microbatch] = self._source.batch(microbatch, WHOLE)
                if len(self._kept) > self._num_kept:
                    self._kept.popitem(last=False)
            whole = self._kept[microbatch]
        return share_of(whole, rows)


def share_of(whole: Batch, rows: tuple[float, float]) -> Batch:
    """Return a share of the rows of a microbatch."""
    if rows == WHOLE or not whole:
        return whole
    first, end = row_range(rows, len(next(iter(whole.values()))))
    return {name: tensor[first:end] for name, tensor in whole.items()}


@dataclass(frozen=True)
class TokenBatches:
    """Rows of a token dataset: `tokens` and `targets`, both int64 [rows, sequence_length], targets one token later."""

    dataset: TokenDataset
    microbatch_size: int

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return rows of the dataset's endless stream, from `microbatch * microbatch_size` on."""
        first, end = row_range(rows, self.microbatch_size)
        tokens_BS = torch.from_numpy(self.dataset.rows(microbatch * self.microbatch_size + first, end - first))
        return {"tokens": tokens_BS[:, :-1].contiguous(), "targets": tokens_BS[:, 1:].contiguous()}


@dataclass(frozen=True)
class MaskedTokenBatches:
    """Rows for a masked language model, `tokens` and `targets`, both int64 [rows, sequence_length]; see `raypipe.data.masking`."""

    dataset: TokenDataset
    microbatch_size: int

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return the rows that `TokenBatches` would, masked."""
        first, end = row_range(rows, self.microbatch_size)
        first_sample = microbatch * self.microbatch_size + first
        tokens_BT = self.dataset.rows(first_sample, end - first)[:, :-1]
        inputs_BT, targets_BT = mask_rows(
            tokens_BT, first=first_sample, seed=self.dataset.seed, vocabulary_size=self.dataset.vocabulary_size
        )
        return {"tokens": torch.from_numpy(inputs_BT), "targets": torch.from_numpy(targets_BT)}


@dataclass(frozen=True)
class FieldBatches:
    """Rows of a dataset of named fields: each field is [rows, ...] of the type that it has in the file."""

    dataset: FieldDataset
    microbatch_size: int

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return rows of the dataset's endless stream, from `microbatch * microbatch_size` on."""
        first, end = row_range(rows, self.microbatch_size)
        fields = self.dataset.rows(microbatch * self.microbatch_size + first, end - first)
        return {name: torch.from_numpy(values) for name, values in fields.items()}


@dataclass(frozen=True)
class FixedBatch:
    """The same rows for every microbatch, for generation and tests; each tensor is [rows, ...]."""

    fields: Batch

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """Return the same rows for every microbatch."""
        size = next(iter(self.fields.values())).shape[0]
        first, end = row_range(rows, size)
        return {name: tensor[first:end] for name, tensor in self.fields.items()}


@dataclass(frozen=True)
class FileSource:
    """How an actor opens its rows, small enough to be sent to it; `path` is a file of tokens or of named fields, `seed` orders its rows."""

    path: str
    sequence_length: int
    seed: int
    microbatch_size: int

    def __call__(self, split: str) -> BatchSource:
        """Return the rows of a split, `train` or `validation`."""
        if holds_fields(self.path):
            return FieldBatches(FieldDataset(self.path, seed=self.seed, split=split), self.microbatch_size)
        dataset = TokenDataset(self.path, sequence_length=self.sequence_length, seed=self.seed, split=split)
        return TokenBatches(dataset, self.microbatch_size)


@dataclass(frozen=True)
class MaskedTokenSource(FileSource):
    """How an actor opens the rows of a masked language model: `Trainer(bert, batches=MaskedTokenSource(...))`."""

    def __call__(self, split: str) -> BatchSource:
        """Return the masked rows of a split, `train` or `validation`."""
        dataset = TokenDataset(self.path, sequence_length=self.sequence_length, seed=self.seed, split=split)
        return MaskedTokenBatches(dataset, self.microbatch_size)
