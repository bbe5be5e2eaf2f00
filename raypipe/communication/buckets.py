"""Buckets: the parts in which a stage's gradients are summed, so that the sum begins inside the last backward.

A backward has the gradients of the last layer first. So the first bucket is the last layers of the stage, and each is whole layers (after
PyTorch's DistributedDataParallel, Li et al., VLDB 2020). Planner, simulator and actors ask the same functions.
"""

from __future__ import annotations

from functools import lru_cache

MOST_BUCKETS = 4
"""With n buckets, all but the last n-th of the gradients may leave before the backward has ended."""
LEAST_BUCKET_BYTES = 1 << 20
"""Each bucket is a collective of its own: a smaller one costs more than it gains."""


@lru_cache(maxsize=1 << 16)
def num_buckets(layer_bytes: tuple[int, ...]) -> int:
    """Return into how many buckets the gradients of a stage are best divided, given the bytes of each of its layers in order."""
    most = min(MOST_BUCKETS, sum(layer_bytes) // LEAST_BUCKET_BYTES)
    for count in range(most, 1, -1):
        if all(sum(layer_bytes[position] for position in bucket) for bucket in buckets(layer_bytes, count)):
            return count
    return 1


@lru_cache(maxsize=1 << 16)
def buckets(layer_bytes: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the layers of each bucket, from the last layer to the first.

    Buckets have about as many bytes each. Layers without bytes make no difference. With fewer others than buckets, the last are empty.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    total, done, at = sum(layer_bytes), 0, 0
    for position in reversed(range(len(layer_bytes))):
        found[at].append(position)
        done += layer_bytes[position]
        if layer_bytes[position] and at < count - 1 and done * count >= (at + 1) * total:
            at += 1
    return tuple(map(tuple, found))
