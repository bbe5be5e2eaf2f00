"""A bound by what passes the ports of devices: what one contributes to an update crosses all wires between it and the others.

A device d computes a part x_l of the rows of each layer l. For each boundary of layers of which it computes unequal parts, the difference
crosses its port, forth as an activation and back as its gradient: one of the two leaves it, the other one comes. Of layers that it computes
in part, all gradients leave it once, in shares or totals, and as many come. So in T seconds, over ports of r bytes per second each way,

    sum over boundaries |x_l - x_(l-1)| M c_l  +  sum of G_l over layers with 0 < x_l < 1  <=  r T

What a device can contribute within that is bounded by three cases: all layers in part (all gradients); some layer on this device alone;
some layers in part and others not at all. The last two are Lagrangian relaxations over sets of layers. At most two devices have an end
of the model alone and only one border with others. The bound is the least T for which all contributions add up to an update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from raypipe.planning.problem import Floats, Problem

_NUM_PRICES = 40  # Around each size that matters: all gradients, the smallest and the largest tensor.
_NUM_PARTS = 48
_NUM_HALVINGS = 30
_MOST_ENDS = 2  # Devices that have the first or the last layer alone.


@dataclass(frozen=True)
class PortBound:
    """Bound for one problem.

    Attributes:
        prices: Value of each layer's work of an update; the values of all layers add up to `total`.
        powers: Most value that each device contributes per second.
        rates: Bytes per second that leave and enter each device at most, in the slower direction.
    """

    problem: Problem
    prices: Floats
    powers: Floats
    rates: Floats

    @cached_property
    def total(self) -> float:
        """Value of all work of an update."""
        return float(self.prices.sum())

    @cached_property
    def _sums(self) -> Floats:
        """Bytes of gradients of each layer; weights that layers share may be summed with another one of them."""
        problem = self.problem
        summed = np.diff(problem.summed_prefix)
        for tie in problem.profile.ties():
            for layer in tie:
                summed[layer] = max(summed[layer] - problem.profile.layers[layer].shared_bytes, 0.0)
        return summed

    @cached_property
    def _is_chain(self) -> bool:
        return set(self.problem.edges) == set(pairwise(range(self.problem.num_layers)))

    @cached_property
    def _crossing(self) -> Floats:
        """Bytes of an update that cross each border of layers, one way; those of one tensor at least where layers are no chain."""
        problem = self.problem
        if self._is_chain:
            return problem.crossing_bytes * problem.num_microbatches
        fewest = min((edge.bytes * problem.scale for edge in problem.profile.edges()), default=0.0)
        return np.full(problem.num_layers + 1, fewest * problem.num_microbatches)

    @cached_property
    def _price_range(self) -> Floats:
        """Values per byte that are tried as multipliers."""
        borders = self._crossing[1:-1]
        sizes = {float(self._sums.sum()), float(borders.min(initial=math.inf)), float(borders.max(initial=0.0))}
        centers = [self.total / num_bytes for num_bytes in sizes if 0 < num_bytes < math.inf] or [1.0]
        around = np.geomspace(1e-2, 1e3, _NUM_PRICES)
        return np.unique(np.concatenate([center * around for center in centers]))

    def _best_sets(self, gains: Floats, costs: Floats) -> Floats:
        """Return the most gains of a set of layers, neither empty nor all, less the costs of its borders.

        Args:
            gains: Of each layer, by [layer, ...].
            costs: Of each border, by [position, ...].
        """
        if not self._is_chain:
            # Of a graph, the one border that there is at least.
            kept = np.maximum(gains, 0.0)
            least: Floats = kept.sum(axis=0) - np.where((gains > 0).all(axis=0), gains.min(axis=0), 0.0) - costs[1]
            return least
        # The best so far by whether the last layer is in the set; sets that have no layer or all layers so far stand apart.
        outside = inside = np.full(gains.shape[1:], -math.inf)
        everything = gains[0]
        for layer in range(1, len(gains)):
            entered = np.maximum(inside, np.maximum(outside, 0.0) - costs[layer])
            left = np.maximum(outside, np.maximum(inside, everything) - costs[layer])
            outside, inside, everything = left, entered + gains[layer], everything + gains[layer]
        best: Floats = np.maximum(outside, inside)
        return best

    @cached_property
    def _alone(self) -> tuple[Floats, Floats]:
        """Values of sets of layers less what crosses their borders, by multiplier; the second without the model's ends."""
        prices = self._price_range
        gains = np.broadcast_to(self.prices[:, None], (len(self.prices), len(prices)))
        costs = self._crossing[:, None] * prices
        with_ends = self._best_sets(gains, costs)
        if not self._is_chain:
            return with_ends, with_ends
        inner = gains.copy()
        inner[0] = inner[-1] = -math.inf
        # An end that is computed in part has gradients to sum.
        ends = float(min(self._sums[0], self._sums[-1]))
        return with_ends, np.maximum(self._best_sets(inner, costs), with_ends - ends * prices)

    @cached_property
    def _in_part(self) -> Floats:
        """The same of layers of which at most a part is computed, by [multiplier, part]."""
        parts = np.linspace(0.0, 1.0, _NUM_PARTS + 1)
        prices = self._price_range[None, :, None]
        # Between two parts, the larger one counts for the gains and the smaller one for the costs.
        gains = self.prices[:, None, None] * parts[None, None, 1:] - self._sums[:, None, None] * prices
        costs = self._crossing[:, None, None] * prices * parts[None, None, :-1]
        return self._best_sets(gains, costs)

    @cached_property
    def _alone_bytes(self) -> tuple[Floats, Floats]:
        """For work of rising value on one device alone: the value, and the most bytes of gradients that need no sum then."""
        by_density = np.argsort(-self._sums / np.maximum(self.prices, 1e-300), kind="stable")
        values = np.concatenate(([0.0], np.cumsum(self.prices[by_density])))
        return values, np.concatenate(([0.0], np.cumsum(self._sums[by_density])))

    def contributions(self, seconds: float, *, copies: bool = True) -> Floats:
        """Return the most value of each device within some seconds, ends of the model included; without copies of layers on request."""
        most_s = self.powers * seconds
        room = self.rates * seconds
        with_ends, inner = (self._relaxed(values, room) for values in self._alone)
        if copies:
            shared = np.max([self._relaxed(values, room) for values in self._in_part.T], axis=0)
            saved = np.interp(most_s, *self._alone_bytes)
            everywhere = np.where(room >= float(self._sums.sum()) - saved - 1e-6, math.inf, 0.0)
            inner = np.maximum(np.maximum(inner, shared), everywhere)
        inner = np.where(most_s >= self.total, self.total, np.minimum(inner, most_s))
        with_ends = np.maximum(np.minimum(with_ends, most_s), inner)
        at_ends = np.sort(with_ends - inner)[::-1][:_MOST_ENDS]
        inner[np.argsort(inner - with_ends, kind="stable")[:_MOST_ENDS]] += at_ends
        return inner

    def _relaxed(self, values: Floats, room: Floats) -> Floats:
        """Return the least, over all multipliers, of the price of the room and of what a set of layers is worth at that price."""
        finite = np.where(np.isfinite(room), room, 0.0)
        best: Floats = (finite[:, None] * self._price_range + values).min(axis=1)
        return np.where(np.isfinite(room), np.maximum(best, 0.0), self.total)

    def least_s(self, *, copies: bool = True) -> float:
        """Return the seconds in which all devices together can do an update's work, without copies of layers on request."""
        if not self.total:
            return 0.0  # Each layer takes no time on some device.
        low, high = 0.0, self.total / float(self.powers.max())
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            if float(self.contributions(middle, copies=copies).sum()) >= self.total * (1 - 1e-9):
                high = middle
            else:
                low = middle
        return low
