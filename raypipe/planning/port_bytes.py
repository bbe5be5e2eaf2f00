"""Least bytes that must pass the port of a device which contributes some part of an update's work.

A device computes a part x_l of the rows of each layer l. For each boundary of layers of which it computes unequal parts, the difference
crosses its port, forth as an activation and back as its gradient: one of the two leaves it, the other one comes. Of layers that it
computes in part, all gradients leave it once, in shares or totals, and as many come. For a contribution v, with the value y_l of each
layer's work, these bytes are

    sum over boundaries |x_l - x_(l-1)| M c_l  +  sum of G_l over layers with 0 < x_l < 1       where sum of y_l x_l = v

They are least where each x_l is 0, 1 or one and the same part p: for given layers in part, the sum over boundaries is the Lovasz extension
of a submodular function. The sets that minimise it, less a multiple of the value, form a lattice, and v lies between two neighbors of a
chain from the least of them to the largest. A layer in part may come to be 0 or 1 by this, which is why an end of the model in part counts
as any part up to all of it.

Hence a dynamic program over layers, for intervals of p: the upper end counts for values, the nearer end for bytes. Values are counted in
units, upwards, with one more unit where a run of layers begins: no table shows less than v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raypipe.planning.problem import Floats

_LEAST_PART = 0.01
_RATIO = 1.05  # Of the upper end of an interval of parts over its lower one.
_SMALL = 1e-9


@dataclass(frozen=True)
class PortBytes:
    """Least bytes by value, in units, for one model.

    Attributes:
        prices: Value of each layer.
        crossing: Bytes of an update that cross each position one way; those of the smallest tensor everywhere if layers are no chain.
        sums: Bytes of gradients of each layer.
        most: Largest value that a device may contribute.
        num_units: Number of units that `most` is divided into.
        is_chain: Whether each layer reads only the one before it.
    """

    prices: Floats
    crossing: Floats
    sums: Floats
    most: float
    num_units: int
    is_chain: bool

    @property
    def unit(self) -> float:
        """Value of one unit."""
        return self.most / self.num_units

    @cached_property
    def _parts(self) -> tuple[Floats, Floats]:
        # Lower and upper ends of the intervals of p.
        count = math.ceil(math.log(1 / _LEAST_PART) / math.log(_RATIO))
        ends = np.concatenate(([0.0], np.geomspace(_LEAST_PART, 1.0, count + 1)))
        return ends[:-1], ends[1:]

    def admitted(self, values: Floats) -> Floats:
        """Return the most units that a table shows of contributions of some values."""
        lower, upper = self._parts
        ratio = float((upper[1:] / lower[1:]).max())
        slack = 2 * len(self.prices) + 1 + upper[0] * float(self.prices.sum()) / self.unit
        units: Floats = np.floor(values * ratio / self.unit + slack)
        return units

    @cached_property
    def _size(self) -> int:
        return int(self.admitted(np.array([self.most]))[0]) + 1

    @cached_property
    def single(self) -> Floats:
        """Bytes where no layer is computed in part, by [has the first layer, has the last layer, units].

        Infinite for what `each` leaves out, too.
        """
        nothing = np.full((1, len(self.prices)), math.inf)
        return self._of_chain(np.zeros(1), np.ones(1), nothing) if self.is_chain else self._of_graph(np.zeros(1), np.ones(1), nothing)

    @cached_property
    def each(self) -> Floats:
        """Bytes by [has the first layer alone, has the last layer alone, units].

        The first layers of a chain alone, and nothing else, are left out, and so are the last ones alone (`ends`).
        """
        lower, upper = self._parts
        sums = np.broadcast_to(self.sums, (len(lower), len(self.sums)))
        return self._of_chain(lower, upper, sums) if self.is_chain else self._of_graph(lower, upper, sums)

    @cached_property
    def ends(self) -> tuple[Floats, Floats, Floats]:
        """Values of the first layers, values of the last layers, and the bytes that cross between them, by positions within a chain."""
        if not self.is_chain:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        ahead = np.cumsum(self.prices)
        return ahead[:-1], ahead[-1] - ahead[:-1], self.crossing[1:-1]

    def _of_chain(self, lower: Floats, upper: Floats, sums: Floats) -> Floats:
        # The least bytes so far by [has the first layer, interval, units], where the latest layer is not computed, in part, or wholly.
        ahead = np.concatenate(([0.0], np.cumsum(self.prices))) / self.unit
        in_part = np.ceil(upper[:, None] * ahead - _SMALL).astype(int)
        whole = np.ceil(ahead - _SMALL).astype(int)
        none, part, wholly = (np.full((2, len(lower), self._size), math.inf) for _ in range(3))
        # The first layers alone, and then nothing; nothing, and then all others. Both become other sets only by what follows.
        first, rest = np.full(self._size, math.inf), np.full(self._size, math.inf)
        part[0] = self._at(in_part[:, 1] + 1) + sums[:, 0, None]
        wholly[0] = self._at(np.repeat(whole[1] + 1, len(lower))) + sums[:, 0, None]  # In part, up to all of it.
        for layer in range(1, len(self.prices)):
            num_bytes = self.crossing[layer]
            to_part, to_all = num_bytes * lower[:, None], num_bytes * (1 - upper)[:, None]
            before = self._at(whole[layer : layer + 1] + 1)[0]
            nothing = self._at(np.zeros(1, dtype=int))[0]
            gained, gained_all = in_part[:, layer + 1] - in_part[:, layer], np.repeat(whole[layer + 1] - whole[layer], len(lower))
            into_part = np.minimum(none + to_part, wholly + to_all)
            into_part[0] = np.minimum(into_part[0], np.minimum(rest + to_all, nothing + to_part))
            into_part[1] = np.minimum(into_part[1], np.minimum(first + to_part, before + to_all))
            into_all = np.minimum(none + num_bytes, part + to_all)
            into_all[1] = np.minimum(into_all[1], first + num_bytes)
            none = np.minimum(none, np.minimum(part + to_part, wholly + num_bytes))
            none[0] = np.minimum(none[0], rest + num_bytes)
            part = np.minimum(_gain(part, gained), _gain(into_part, gained + 1)) + sums[:, layer, None]
            wholly = np.minimum(_gain(wholly, gained_all), _gain(into_all, gained_all + 1))
            first = np.minimum(first, before + num_bytes)
            rest = np.minimum(_gain(rest[None], gained_all[:1]), _gain(nothing[None] + num_bytes, gained_all[:1] + 1))[0]
        in_part_at_last = np.minimum(np.minimum(none, part), wholly + sums[:, -1, None])
        table = np.stack((in_part_at_last.min(axis=1), wholly.min(axis=1)), axis=1)
        table[0, 0, 0] = 0.0
        table[1, 1] = np.minimum(table[1, 1], self._at(whole[-1:] + 1)[0])
        return table

    def _at(self, units: NDArray[np.int_]) -> Floats:
        # No bytes at one number of units of each row, infinitely many at all others.
        reached: Floats = np.where(np.arange(self._size) == units[:, None], 0.0, math.inf)
        return reached

    def _of_graph(self, lower: Floats, upper: Floats, sums: Floats) -> Floats:
        # Of a graph, whose parts are connected, one tensor crosses at least where parts differ. By [parts that occur, interval, units].
        so_far = np.full((8, len(lower), self._size), math.inf)
        so_far[0, :, 0] = 0.0
        for layer, price in enumerate(self.prices / self.unit):
            before, so_far = so_far, np.full_like(so_far, math.inf)
            whole = np.repeat(math.ceil(price - _SMALL), len(lower))
            in_part = np.ceil(upper * price - _SMALL).astype(int)
            choices = (before, _gain(before, in_part) + sums[:, layer, None], _gain(before, whole))
            for kind, of_kind in enumerate(choices):
                for seen in range(8):
                    so_far[seen | 1 << kind] = np.minimum(so_far[seen | 1 << kind], of_kind[seen])
        num_bytes = float(self.crossing[1:-1].min(initial=math.inf)) if len(self.prices) > 1 else 0.0
        part, rest = num_bytes * lower[:, None], num_bytes * (1 - upper[:, None])
        ends = (0.0, 0.0, 0.0, part, 0.0, num_bytes, rest, num_bytes)
        totals = [so_far[seen] + of_seen for seen, of_seen in enumerate(ends)]
        return np.array(np.broadcast_to(np.min(totals, axis=(0, 1)), (2, 2, self._size)))


def _gain(num_bytes: Floats, units: NDArray[np.int_]) -> Floats:
    """Return bytes by units after each row's units more; what exceeds all units is left out."""
    sources = np.arange(num_bytes.shape[-1]) - units[:, None]
    moved = np.take_along_axis(num_bytes, np.broadcast_to(np.maximum(sources, 0), num_bytes.shape), axis=-1)
    gained: Floats = np.where(sources >= 0, moved, math.inf)
    return gained
