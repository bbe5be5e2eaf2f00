"""Which split a document belongs to, and in which order the samples of a split come."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from raypipe.errors import ConfigError


class Split(StrEnum):
    """The use of a document in a run."""

    TRAIN = "train"
    VALIDATION = "validation"

    @property
    def count_key(self) -> str:
        """Return the metadata's key for the split's number of tokens."""
        return f"num_{self.value}_tokens"


def check_fraction(validation_fraction: float) -> None:
    """Raise `ConfigError` unless the share of documents for validation is at least 0 and less than 1."""
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction must be at least 0 and less than 1, not {validation_fraction}")


def split_of(name: str, validation_fraction: float) -> Split:
    """Return the split of a document by the hash of its name: the same whatever other documents there are."""
    return Split.VALIDATION if int.from_bytes(name_hash(name)[:8], "big") < validation_fraction * 2**64 else Split.TRAIN


def name_hash(name: str) -> bytes:
    """Return a hash that is the same on all machines."""
    return hashlib.sha256(name.encode()).digest()


def check_seed(seed: int) -> None:
    """Raise `ConfigError` for a seed that numpy does not take."""
    if seed < 0:
        raise ConfigError(f"the seed of the data order must be at least 0, not {seed}")


def places(first: int, count: int, *, size: int, seed: int, split: str) -> npt.NDArray[np.int64]:
    """Return the places, among `size` of a split, of the samples from `first` on.

    Sample k is place `permutation(seed, k // size, size)[k % size]` of the training split; of other splits, place k % size.
    """
    epochs, order = np.divmod(np.arange(first, first + count), size)
    if split != Split.TRAIN:
        return order
    found = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        found[of_epoch] = permutation(seed, int(epoch), size)[order[of_epoch]]
    return found


@lru_cache(maxsize=2)  # a batch touches two epochs at most, unless an epoch is shorter than the batch
def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Return an epoch's order of `size` samples, read-only because calls share it.

    It sorts PCG64's raw output, which numpy keeps across versions, unlike `Generator.permutation` (NEP 19).
    """
    order = np.argsort(np.random.PCG64([seed, epoch]).random_raw(size), kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
