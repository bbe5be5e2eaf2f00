"""Cuts for orders with split backwards, whose devices wait for their first forward only.

Weight gradients fill what would be idle behind the last forwards (Qi et al., ICLR 2024, arXiv 2401.10241, section 2). So a worker is busy
from the arrival of its first activation to the end: later workers start later, and get less work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from raypipe import stopping
from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Floats

_RAMPS = (1.0, 0.6, 0.3)  # Parts of its head that each worker's work is shortened by: few activations in flight leave other gaps.
_NUM_HALVINGS = 20
_RUN_WORK_S = 20e-9  # For each run of layers of a worker.
MOST_RUNS = 2**24  # Of layers, over all workers: their two tables take 256 MiB.


def ramped(estimator: Estimator, layout: Layout) -> Iterator[Layout]:
    """Yield the layout, of one stage for each worker, with cuts that give later workers less work."""
    if layout.num_stages != len(layout.workers) or layout.num_stages < 2 or layout.listed is not None:
        return
    cuts = RampCuts.of(estimator, layout.workers)
    if cuts is None:
        return
    seen = {layout.cuts}
    for ramp in _RAMPS:
        found = cuts.best(ramp)
        if found is not None and found not in seen:
            seen.add(found)
            yield replace(layout, cuts=found, recomputed=None, ahead=())


@dataclass(frozen=True)
class RampCuts:
    """Cuts for workers in one order.

    Attributes:
        forward_s: Seconds of a forward of each run of layers, by worker and [first layer, end]; infinite where a run is impossible.
        busy_s: Seconds of an update's work and sums for each run of layers, in the same form.
        hop_s: For each worker, seconds of a message to it across each position.
    """

    forward_s: tuple[Floats, ...]
    busy_s: tuple[Floats, ...]
    hop_s: tuple[Floats, ...]

    @classmethod
    def of(cls, estimator: Estimator, workers: Sequence[Devices]) -> RampCuts | None:
        """Return the tables of these workers; `None` where one has more devices than rows, or the tables have more than `MOST_RUNS`."""
        problem = estimator.problem
        if len(workers) * problem.num_layers**2 > MOST_RUNS:
            return None
        tables: list[tuple[Floats, Floats]] = []
        num_bytes = problem.summed_prefix[None, :] - problem.summed_prefix[:, None]
        for group in workers:
            runs = estimator.runs_s(group)
            if runs is None:
                return None
            busy_s = problem.num_microbatches * (runs[0] + runs[1])
            if len(group) > 1 and problem.can_sum(group):
                busy_s = busy_s + problem.sum_s(group, np.maximum(num_bytes, 0.0))
            tables.append((runs[0], busy_s))
        channels = [estimator.channel(one, other) for one, other in pairwise(workers)]
        hops = [problem.crossing_bytes * channel.s_per_byte + channel.latency_s for channel in channels]
        return cls(tuple(of_forwards for of_forwards, _ in tables), tuple(of_all for _, of_all in tables), (np.zeros_like(hops[0]), *hops))

    @cached_property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.hop_s[0]) - 1

    def best(self, ramp: float) -> tuple[int, ...] | None:
        """Return the cuts with the least of the largest head times `ramp`, and work, of any worker; `None` where no cuts are possible."""
        hops_s = sum(float(hop_s[np.isfinite(hop_s)].max(initial=0.0)) for hop_s in self.hop_s)
        high = float(max(busy_s[np.isfinite(busy_s)].max(initial=0.0) for busy_s in self.busy_s)) * 2 + hops_s
        low, best = 0.0, self._within(high, ramp)
        for _ in range(_NUM_HALVINGS if best is not None else 0):
            middle = (low + high) / 2
            found = self._within(middle, ramp)
            if found is None:
                low = middle
            else:
                high, best = middle, found
        return best

    def _within(self, limit_s: float, ramp: float) -> tuple[int, ...] | None:
        """Return cuts such that each worker ends in time, if there are any.

        For each worker and first layer, the earliest start is enough to know: what fits behind a later one fits behind it, too.
        """
        stopping.spend(_RUN_WORK_S * len(self.busy_s) * self.num_layers**2)
        starts = np.full(self.num_layers + 1, np.inf)
        starts[0] = 0.0
        origins: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
        for hop_s, forward_s, busy_s in zip(self.hop_s, self.forward_s, self.busy_s, strict=True):
            starts = starts + hop_s
            ends = np.where(ramp * starts[:, None] + busy_s <= limit_s, starts[:, None] + forward_s, np.inf)
            origins.append(ends.argmin(axis=0))
            starts = ends.min(axis=0)
        if not np.isfinite(starts[-1]):
            return None
        cuts = [self.num_layers]
        for origin in reversed(origins):
            cuts.append(int(origin[cuts[-1]]))
        return tuple(reversed(cuts))
