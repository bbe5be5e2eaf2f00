"""A bound by what passes the ports of devices: what one contributes to an update crosses all wires between it and the others.

In T seconds a device does no more work than its speed allows, and its port carries no more bytes each way than r T: the least for what it
contributes (`port_bytes`). At most one device has the first layer alone, and one the last. The bound is the least T for which all
contributions add up to an update.

Of a chain, a device that computes the first layers alone, and nothing else, sends activations only. Before the first of them, the layers
before the border have computed a row. After the last one, the layers behind the border compute a row forth and back, its gradient passes
the port the other way, and the layers before the border take it back. So this port has T less the seconds of one row through all layers and
over the link. The same holds of what a device receives that computes the last layers alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from raypipe.planning.port_bytes import PortBytes
from raypipe.planning.problem import Floats, Problem

_NUM_UNITS = 512
_NUM_HALVINGS = 20
_TIMES_WORK = 2.0  # Of the seconds up to which contributions are tabulated first, over those of all work on all devices.
_EXACT = 1 + 1e-9


@dataclass(frozen=True)
class PortBound:
    """Bound for one problem.

    Attributes:
        prices: Value of each layer's work of an update; the values of all layers add up to `total`.
        powers: Most value that each device contributes per second; they add up to 1.
        rates: Bytes per second that leave and enter each device at most, in the slower direction.
        row_s: Least seconds of one row through all forwards and back through all input gradients.
    """

    problem: Problem
    prices: Floats
    powers: Floats
    rates: Floats
    row_s: float

    @cached_property
    def total(self) -> float:
        """Value of all work of an update."""
        return float(self.prices.sum())

    @cached_property
    def sums(self) -> Floats:
        """Bytes of gradients of each layer; weights that layers share may be summed with another one of them."""
        problem = self.problem
        summed = np.diff(problem.summed_prefix)
        for tie in problem.profile.ties():
            for layer in tie:
                summed[layer] = max(summed[layer] - problem.profile.layers[layer].shared_bytes, 0.0)
        return summed

    @cached_property
    def is_chain(self) -> bool:
        """Whether each layer reads only the one before it."""
        return set(self.problem.edges) == set(pairwise(range(self.problem.num_layers)))

    @cached_property
    def _crossing(self) -> Floats:
        """Bytes of an update that cross each border of layers, one way; those of one tensor at least where layers are no chain."""
        problem = self.problem
        if self.is_chain:
            return problem.crossing_bytes * problem.num_microbatches
        fewest = min((edge.bytes * problem.scale for edge in problem.profile.edges()), default=0.0)
        return np.full(problem.num_layers + 1, fewest * problem.num_microbatches)

    def _bytes_until(self, seconds: float) -> PortBytes:
        most = min(self.total, float(self.powers.max()) * seconds)
        return PortBytes(self.prices, self._crossing, self.sums, most, _NUM_UNITS, self.is_chain)

    def _contributions(self, bytes_of: PortBytes, table: Floats, seconds: float) -> Floats:
        """Return the most value of each device within some seconds, by [has the first layer, has the last layer, device]."""
        most = np.minimum(self.powers * seconds, self.total)
        finite = np.where(np.isfinite(self.rates), self.rates, 0.0)
        room = np.where(np.isfinite(self.rates), finite * seconds * _EXACT, math.inf)
        units = np.arange(table.shape[-1])
        fits = (table[:, :, None, :] <= room[:, None]) & np.isfinite(table[:, :, None, :]) & (units <= bytes_of.admitted(most)[:, None])
        last = np.where(fits.any(axis=-1), table.shape[-1] - 1 - fits[..., ::-1].argmax(axis=-1), 0)
        values: Floats = np.minimum(most, bytes_of.unit * last)
        *of_ends, num_bytes = bytes_of.ends
        num_rows = self.problem.num_microbatches * self.problem.microbatch_size
        in_time = num_bytes * (1 + 1 / num_rows) <= (finite * max(seconds - self.row_s, 0.0) * _EXACT)[:, None]
        in_time |= ~np.isfinite(self.rates)[:, None]
        for place, of_end in zip(((1, 0), (0, 1)), of_ends, strict=True):
            values[place] = np.maximum(
                values[place], np.where(in_time & (of_end <= most[:, None] * _EXACT), of_end, 0.0).max(axis=1, initial=0.0)
            )
        # A device may do without the end of the model that it might have.
        best: Floats = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)
        return best

    def _suffices(self, bytes_of: PortBytes, seconds: float, *, copies: bool) -> bool:
        values = self._contributions(bytes_of, bytes_of.each if copies else bytes_of.single, seconds)
        gains = values - values[0, 0]
        of_ends = max(gains[1, 1].max(), gains[1, 0].max() + gains[0, 1].max())
        return float(values[0, 0].sum() + of_ends) * _EXACT >= self.total

    def least_s(self, *, copies: bool = True) -> float:
        """Return the seconds in which all devices together can do an update's work, without copies of layers on request."""
        if not self.total:
            return 0.0  # Each layer takes no time on some device.
        alone_s = self.total / float(self.powers.max())
        low, high = self.total, min(self.total * _TIMES_WORK, alone_s)
        while not self._suffices(bytes_of := self._bytes_until(high), high, copies=copies):
            if high == alone_s:
                return high
            low, high = high, min(high * _TIMES_WORK, alone_s)
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            if self._suffices(bytes_of, middle, copies=copies):
                high = middle
            else:
                low = middle
        return low
