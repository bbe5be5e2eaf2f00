"""How long after the last backward the sum of a stage's gradients ends, for all runs of layers at once.

The rule of `communication.buckets`, on arrays: what the simulator sees of a stage, estimates must see, too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raypipe.communication.buckets import LEAST_BUCKET_BYTES, MOST_BUCKETS

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]


@dataclass(frozen=True)
class LateSums:
    """The buckets of the layers first..end-1, by [bucket, first, end]; what a run has no bucket for is zero.

    Attributes:
        complete: Share of the backward after which a bucket is complete.
        left: Share of the bytes that this bucket and those behind it have.
    """

    complete: Floats
    left: Floats

    @classmethod
    def of(cls, *, trained_bytes: Floats, summed_bytes: Floats, backward_s: Floats) -> LateSums:
        """Return the buckets for the bytes and seconds before each position."""
        size = len(trained_bytes)
        first, end = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
        closes = _closes(trained_bytes, first, end)
        count = (closes >= 0).sum(axis=0) + 1
        # The layers of bucket k go down to `closes[k - 1]`; the last bucket is the rest.
        numbers = np.arange(MOST_BUCKETS)[:, None, None]
        lowest = np.where(numbers < count - 1, np.concatenate((closes, first[None])), first)
        highest = np.concatenate((end[None], lowest[:-1]))
        totals = [prefix[end] - prefix[first] for prefix in (backward_s, summed_bytes)]
        total_s, total_bytes = (np.where(total > 0, total, 1.0) for total in totals)
        complete: Floats = (backward_s[end] - backward_s[lowest]) / total_s
        left: Floats = (summed_bytes[highest] - summed_bytes[first]) / total_bytes
        complete[numbers >= count] = left[numbers >= count] = 0.0
        return cls(np.clip(complete, 0.0, 1.0), np.clip(left, 0.0, 1.0))

    def at(self, positions: Integers) -> LateSums:
        """Return the buckets of the runs between these positions alone."""
        chosen = np.ix_(np.arange(MOST_BUCKETS), positions, positions)
        return LateSums(self.complete[chosen], self.left[chosen])

    def late_s(self, sum_s: Floats, backward_s: Floats) -> Floats:
        """Return the seconds by which sums end behind the backward, by [first, end], given those of both alone."""
        late_s: Floats = (self.complete * backward_s + self.left * sum_s).max(axis=0) - backward_s
        return late_s

    def late_of(self, first: int, end: int, sum_s: float, backward_s: float) -> float:
        """Return the same for one run of layers."""
        ends_s = self.complete[:, first, end] * backward_s + self.left[:, first, end] * sum_s
        return float(ends_s.max()) - backward_s

    def buckets_of(self, first: int, end: int) -> list[tuple[float, float]]:
        """Return for each bucket of one run of layers the share of the backward after which it is complete, and its share of the bytes."""
        left = [*self.left[:, first, end].tolist(), 0.0]
        shares = [here - behind for here, behind in itertools.pairwise(left)]
        return [pair for pair in zip(self.complete[:, first, end].tolist(), shares, strict=True) if pair[1] > 0]


def _closes(trained_bytes: Floats, first: Integers, end: Integers) -> Integers:
    """Return the lowest layer of each bucket but the last, by [bucket, first, end]; -1 where there is none."""
    total = trained_bytes[end] - trained_bytes[first]
    below = _next_with_bytes(trained_bytes)
    best = np.full((MOST_BUCKETS - 1, *first.shape), -1)
    undecided = end > first
    for count in range(MOST_BUCKETS, 1, -1):
        found = np.full_like(best, -1)
        at = end
        for number in range(1, count):
            target = trained_bytes[end] - number * total / count
            reached = np.searchsorted(trained_bytes, target + 1e-9 * total, side="right") - 1
            at = np.minimum(reached, below[np.maximum(at, 0)])
            found[number - 1] = at
        fits = undecided & (total // LEAST_BUCKET_BYTES >= count) & (at > first)
        fits &= trained_bytes[np.maximum(at, 0)] > trained_bytes[first]
        best = np.where(fits, found, best)
        undecided = undecided & ~fits
    return best


def _next_with_bytes(trained_bytes: Floats) -> Integers:
    """Return for each position the nearest layer before it that has bytes; -1 where there is none."""
    found = np.full(len(trained_bytes), -1)
    for position in range(1, len(trained_bytes)):
        has_bytes = trained_bytes[position] > trained_bytes[position - 1]
        found[position] = position - 1 if has_bytes else found[position - 1]
    return found
