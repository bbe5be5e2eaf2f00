"""A bound for plans of one pipeline with two runs of layers a worker.

The pipeline goes down the workers and up again (`zb-v`, `dualpipe-v`), or around twice (`interleaved`). The devices of a worker divide the
rows of each microbatch, the same rows in both runs. All microbatches are computed in both, their tensors pass the ports of the worker at
all four ends, and no copy is summed before all forwards of the worker are done: those of the second run are summed first. When the first
microbatch comes, it has passed all layers before the first run.

All ways to give pairs of runs to sets of devices are tried at once, by the devices that are used so far and the two places to which layers
are covered: from both ends of the model inwards, or from its start and from where the second round begins, for all such places at once.
The last worker on the way down has one run, in which the pipeline turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe import stopping
from raypipe.planning.problem import Floats
from raypipe.planning.run_bound import RunBound, Worker, inverse, longest

_MOST_STEPS = 3e8  # Most pairs of runs from all first layers, times the states to which their worker can be added.
_STEP_WORK_S = 4e-9
_WORD_BITS = 64
_EXACT = 1 + 1e-9

Truths = NDArray[np.bool_]
Words = NDArray[np.uint64]


class _Pairs(NamedTuple):
    """Pairs of runs of a worker: [end of the first run, start of the second one, length of the second one], each from the least one on.

    Attributes:
        own_s: From the arrival of the first microbatch until all is computed and summed; never for no pair.
        port_s: While tensors and gradients pass the ports.
    """

    own_s: Floats
    port_s: Floats


@dataclass(frozen=True)
class TwoRunBound:
    """Bound for the problem of that of plans with one run a worker."""

    one_run: RunBound

    @property
    def _num_layers(self) -> int:
        return self.one_run.problem.num_layers

    @cached_property
    def _prefix_s(self) -> Floats:
        """Seconds of all microbatches through the layers before a place, by device and part of the work: [device, part, place]."""
        own_s = self.one_run.own_s * self.one_run.problem.num_microbatches
        return np.concatenate((np.zeros((*own_s.shape[:2], 1)), own_s.cumsum(axis=2)), axis=2)

    @cached_property
    def _summed(self) -> Floats:
        """Bytes of gradients of the layers before a place."""
        return np.concatenate(([0.0], self.one_run.sums.cumsum()))

    @cached_property
    def _passed_s(self) -> Floats:
        """Least seconds until the first microbatch has passed the layers before a place, on the devices of a state: [state, place]."""
        bound = self.one_run
        passed_s = np.full((len(bound.states), self._num_layers + 1), math.inf)
        passed_s[0, 0] = 0.0
        for first in range(self._num_layers):
            for number, worker in enumerate(bound.workers):
                left_s = self._come_s(passed_s, worker, first)[:, None] + bound.run(number, first).forward_s
                passed_s[worker.after, first + 1 :] = np.minimum(passed_s[worker.after, first + 1 :], left_s)
        return passed_s

    def _come_s(self, passed_s: Floats, worker: Worker, first: int) -> Floats:
        """Return when the first microbatch has come to a worker, by the state before."""
        come_s: Floats = passed_s[worker.before, first] + float(self.one_run.crossing[first]) * worker.into_s
        return come_s

    def _most_layers(self, worker: Worker, seconds: float) -> int:
        """Return the most consecutive layers that a worker computes in some time."""
        whole_s = self._prefix_s[worker.members].sum(axis=1)
        runs_s = longest(worker, whole_s[:, None, :] - whole_s[:, :, None])
        return int((np.triu(runs_s <= seconds, 1)).sum(axis=1).max(initial=0))

    def is_small(self, seconds: float) -> bool:
        """Return whether devices are of few kinds, or layers are few, for all pairs of runs that may take some time."""
        lengths = ((len(worker.before), self._most_layers(worker, seconds)) for worker in self.one_run.workers)
        return self._num_layers**2 * sum(count * length**2 for count, length in lengths) <= _MOST_STEPS

    def _pairs(self, worker: Worker, first: int, most: int) -> _Pairs:
        """Return the pairs whose first run begins at a layer, of at most so many layers a run."""
        num_layers, count = self._num_layers, self.one_run.problem.num_microbatches
        starts = np.arange(first + 2, num_layers)[:, None]
        ends = np.minimum(starts + np.arange(1, most + 1), num_layers)
        firsts = np.arange(first + 1, min(first + most, num_layers) + 1)
        exists = (starts > firsts[:, None, None]) & (starts + np.arange(1, most + 1) <= num_layers)
        prefix_s, shares = self._prefix_s[worker.members], worker.shares[:, None, None, None]

        def of_both(prefix: Floats) -> Floats:  # [..., place] -> [..., end, start, length]
            of_first: Floats = (prefix[..., firsts] - prefix[..., first, None])[..., None, None]
            return of_first + (prefix[..., ends] - prefix[..., starts])[..., None, :, :]

        crossing = self.one_run.crossing * count
        passing = (crossing[first] + crossing[firsts])[:, None, None] + crossing[starts] + crossing[ends]
        rates = worker.rates
        slower_s = np.array([inverse(min(out, into)) for out, into in zip(rates.out, rates.into, strict=True)])[:, None, None, None]
        own_s = longest(worker, of_both(prefix_s.sum(axis=1)))
        port_s = (shares * passing * slower_s).max(axis=0)
        copies = len(worker.members) - 1
        if copies:
            sums = of_both(self._summed)
            forward_s = shares * of_both(prefix_s[:, 0])
            all_s, each_s = (
                np.array([inverse(rate) for rate in of_members])[:, None, None, None] for of_members in (rates.of_sums, rates.port)
            )
            # Members send each number 2 (n - 1) times, and once at least across each border.
            together_s = sums * max(inverse(rates.border), 2 * copies * inverse(float(rates.of_sums.sum())))
            own_s = np.maximum(own_s, (forward_s + sums * all_s).max(axis=0))
            own_s = np.maximum(own_s, forward_s.min(axis=0) + together_s)
            port_s = np.maximum(port_s, ((shares * passing + sums) * each_s).max(axis=0))
            port_s = np.maximum(port_s, (passing + 2 * copies * sums) * inverse(float(rates.port.sum())))
        return _Pairs(np.where(exists, own_s, math.inf), port_s)

    def is_possible(self, seconds: float) -> bool:
        """Return whether an update of some such plan may take so little time."""
        seconds *= _EXACT
        bound, num_layers = self.one_run, self._num_layers
        # Down and up: whether all layers before one place, and from another one on, have a worker. Around: the layers where a second round
        # may begin, as bits, so that the first round has workers up to one place and the second one up to another: [state, place, place].
        down = np.zeros((len(bound.states), num_layers + 1, num_layers + 1), dtype=bool)
        around = np.zeros((*down.shape, num_layers // _WORD_BITS + 1), dtype=np.uint64)
        down[0, 0, num_layers] = True
        rounds = np.arange(1, num_layers)
        bits = np.zeros((num_layers + 1, around.shape[-1]), dtype=np.uint64)
        bits[rounds, rounds // _WORD_BITS] = np.uint64(1) << (rounds % _WORD_BITS).astype(np.uint64)
        around[0, 0] = bits
        lengths = [self._most_layers(worker, seconds) for worker in bound.workers]
        for first in range(num_layers):
            for number, worker in enumerate(bound.workers):
                reached = down[worker.before, first].any(axis=1) | around[worker.before, first].any(axis=(1, 2))
                if not reached.any() or not lengths[number]:
                    continue
                stopping.spend(_STEP_WORK_S * int(reached.sum()) * num_layers * lengths[number] ** 2)
                pairs = self._pairs(worker, first, lengths[number])
                passes = pairs.port_s <= seconds
                come_s = self._come_s(self._passed_s, worker, first)
                for origin, target, arrival_s in zip(
                    worker.before[reached].tolist(), worker.after[reached].tolist(), come_s[reached].tolist(), strict=True
                ):
                    if first and self._turns(number, first, down[origin, first], seconds - arrival_s):
                        return True
                    fits = passes & (pairs.own_s <= seconds - arrival_s)
                    if fits.any():
                        _down(down[target], down[origin, first], fits, first)
                        _around(around[target], around[origin, first], fits, first, begins=not origin)
        ends = around[1:, :, num_layers]
        return bool((ends & bits).any())

    def _turns(self, number: int, first: int, covered: Truths, seconds: float) -> bool:
        """Return whether a worker may compute all that is left, from one layer to a covered place."""
        ended_s = self.one_run.run(number, first).arrived_s
        return bool((covered[first + 1 :] & (ended_s <= seconds)).any())


def _down(to: Truths, covered: Truths, fits: Truths, first: int) -> None:
    """Add to what is covered the pairs whose second run ends where layers are covered."""
    num_ends, num_starts, most = fits.shape
    num_layers = first + 2 + num_starts
    ends = np.minimum(np.arange(first + 2, num_layers)[:, None] + np.arange(1, most + 1), num_layers)
    to[first + 1 : first + 1 + num_ends, first + 2 : num_layers] |= (fits & covered[ends]).any(axis=2)


def _around(to: Words, covered: Words, fits: Truths, first: int, *, begins: bool) -> None:
    """Add to what is covered the pairs whose second run begins where layers are covered."""
    num_ends, num_starts, most = fits.shape
    least = first + 2
    for length in range(1, min(most, num_starts) + 1):
        # The first worker leaves the last layers to another one.
        num_fitting = num_starts - length + (not begins)
        fitting = np.where(fits[:, :num_fitting, length - 1, None], covered[least : least + num_fitting], np.uint64(0))
        to[first + 1 : first + 1 + num_ends, least + length : least + length + num_fitting] |= fitting
