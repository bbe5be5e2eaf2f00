"""A bound for plans of several pipelines, or of three runs of layers a worker and more, by what ports carry and what workers compute.

The shape of a schedule says which worker has which stage in which pipeline. Where the same stage lies on n devices, each of its gradients
is sent 2 (n - 1) times at least, in shares and totals, once by each device; and at each border of stages, the activations of the
microbatches of a pipeline and their gradients. For each shape and each number of devices of every worker, within T seconds

    all ports together carry all bytes;
    those of each worker carry its part of them;
    each worker computes its part of all its stages;
    each worker computes all forwards of the stages that it has alone, and then its ports carry the sums of these;
    the port of the slowest device carries its part of what its worker sends, and sums only behind the forwards of one pipeline.

A dynamic program over stages finds the cut with the least bytes. Each stage alone fits into T there. What a worker has too much of gets a
price, which rises step by step until no cut is cheap enough, or one fits: the Lagrangian dual of the second to fourth line.

Each worker may have the fastest devices and the fastest ports here, but for one that has the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe import stopping
from raypipe.planning.problem import Floats
from raypipe.schedules.families import chimera
from raypipe.schedules.search.ring import Pipelines, placements

_MOST_DEVICES = 8  # There are 255 ways to divide so many devices among workers in some order.
_MOST_LAYERS = 100
_MOST_STEPS = 100  # Of prices; fewer of more stages, whose bytes alone exclude more.
_MOST_PRICED = 600  # Stages, times steps.
_AIM = 2.0  # Times what all ports carry, towards which prices rise.
_STEP_WORK_S = 4e-8  # For a stage, a place and a choice of sizes.
_EXACT = 1 + 1e-9
_NOTHING = np.zeros((1, 1))

Counts = NDArray[np.int_]
Truths = NDArray[np.bool_]


class _Costs(NamedTuple):
    """What a cut costs, in seconds of the fastest port: [choice of sizes, stage].

    Attributes:
        before: For a second of what crosses the border before a stage.
        sums: For a second of its gradients.
        work: For a second of its work.
        forward: For a second of its forwards.
    """

    before: Floats
    sums: Floats
    work: Floats = _NOTHING
    forward: Floats = _NOTHING


class _Shape:
    """Which worker has which stage in which pipeline.

    Attributes:
        parts: The part of the microbatches that each worker computes of each stage, at least: [stage, worker].
        holds: Whether a worker has a stage: [stage, worker].
        alone: Whether no other worker has it: [stage, worker].
        sends: How often it sends what crosses the border before a stage for all microbatches: [stage, worker].
    """

    def __init__(self, pipelines: Pipelines, num_microbatches: int) -> None:
        # Pipelines differ by one microbatch at most.
        self.part = num_microbatches // len(pipelines) / num_microbatches
        workers = np.array(pipelines)
        has = workers[:, :, None] == np.arange(workers.max() + 1)
        self.parts: Floats = self.part * has.sum(axis=0)
        self.holds: Truths = has.any(axis=0)
        self.alone: Truths = self.holds & (self.holds.sum(axis=1, keepdims=True) == 1)
        self.sends: Floats = np.zeros(self.parts.shape)
        hops = (workers[:, 1:] != workers[:, :-1])[:, :, None]
        # An activation from the stage before, and its gradient from this one.
        self.sends[1:] = self.part * (hops * (has[:, :-1].astype(int) + has[:, 1:])).sum(axis=0)


@dataclass(frozen=True)
class ShapeBound:
    """Bound for one problem, whose layers are a chain.

    Attributes:
        num_microbatches: Microbatches of an update.
        least_shares: Least part of a microbatch's rows that a device of a worker has, by the number of its devices, from one on.
        own_s: Least seconds of the F, I and W of each layer for a microbatch on any device: [part, layer].
        crossing: Bytes of a microbatch that cross each border of layers, one way; none at the ends.
        sums: Bytes of gradients of each layer.
        rates: Bytes per second that leave each device at most.
    """

    num_microbatches: int
    least_shares: Floats
    own_s: Floats
    crossing: Floats
    sums: Floats
    rates: Floats

    @property
    def is_small(self) -> bool:
        """Whether devices and layers are few, and all devices have ports of some rate."""
        is_small = len(self.rates) <= _MOST_DEVICES and len(self.sums) <= _MOST_LAYERS
        return is_small and bool(np.isfinite(self.rates).all()) and float(self.rates.min()) > 0

    @cached_property
    def _work_s(self) -> Floats:
        """Seconds of all microbatches through the layers before a place."""
        return np.concatenate(([0.0], self.own_s.sum(axis=0).cumsum())) * self.num_microbatches

    @cached_property
    def _forward_s(self) -> Floats:
        """Seconds of their forwards."""
        return np.concatenate(([0.0], self.own_s[0].cumsum())) * self.num_microbatches

    @cached_property
    def _summed_s(self) -> Floats:
        """Seconds in which the fastest port carries the gradients of the layers before a place."""
        return np.concatenate(([0.0], self.sums.cumsum())) / float(self.rates.max())

    @cached_property
    def _crossing_s(self) -> Floats:
        """Seconds in which it carries what crosses a place, one way."""
        crossing_s: Floats = self.crossing * self.num_microbatches / float(self.rates.max())
        return crossing_s

    @cached_property
    def _fastest(self) -> Floats:
        """Rates of the fastest ports, over that of the very fastest."""
        fastest: Floats = np.sort(self.rates)[::-1] / float(self.rates.max())
        return fastest

    def is_possible(self, seconds: float) -> bool:
        """Return whether an update of some such plan may take so little time."""
        seconds *= _EXACT
        fewest = math.ceil(float(self._work_s[-1]) / seconds)
        for num_workers in range(2, len(self.rates) + 1):
            sizes = _sizes(num_workers, fewest, len(self.rates))
            shapes = self._shapes(num_workers, seconds) if len(sizes) else ()
            if any(self._fits(_Shape(pipelines, self.num_microbatches), sizes, seconds) for pipelines in shapes):
                return True
        return False

    def _shapes(self, num_workers: int, seconds: float) -> Iterator[Pipelines]:
        num_layers = len(self.sums)
        if num_workers > num_layers:
            return
        room_s = seconds * float(self._fastest.sum())
        cheapest_s = 2 * np.sort(self._crossing_s[1:-1]).cumsum()
        for num_rounds in range(3, num_layers // num_workers + 1):
            if cheapest_s[num_workers * num_rounds - 2] > room_s:
                break
            yield (tuple(range(num_workers)) * num_rounds,)
        for num_pipelines in range(2, min(num_workers, self.num_microbatches) + 1):
            yield from placements(num_workers, num_pipelines)
        for num_pipelines in range(2, num_workers + 1, 2):
            if num_workers % num_pipelines == 0:
                # Copies in pipelines without microbatches only add. Of one microbatch, both halves are on their way back at once.
                yield chimera.pipelines(num_workers, num_pipelines)[: self.num_microbatches]

    def _fits(self, shape: _Shape, sizes: Counts, seconds: float) -> bool:
        """Return whether some cut may do, for some numbers of devices of the workers: [choice, worker]."""
        # The longest that each stage may be.
        with np.errstate(divide="ignore"):
            most_s = seconds * (sizes[:, None] / shape.parts).min(axis=2, where=shape.holds, initial=math.inf)
        possible = self._least(self._costs(shape, sizes), most_s)[0] <= self._room_s(sizes, seconds)
        for suit in (self._suit_workers, self._suit_the_slowest):
            if not possible.any():
                return False
            sizes, most_s = sizes[possible], most_s[possible]
            possible = suit(shape, sizes, most_s, seconds)
        return bool(possible.any())

    def _room_s(self, sizes: Counts, seconds: float) -> Floats:
        """Return what all ports carry, for the fastest port."""
        room_s: Floats = self._fastest.cumsum()[sizes.sum(axis=1) - 1] * seconds
        return room_s

    def _suit_workers(self, shape: _Shape, sizes: Counts, most_s: Floats, seconds: float) -> Truths:
        """Return whether some cut may suit what each worker computes and sends, too, by choice: at prices for these."""
        room_s = self._room_s(sizes, seconds)
        possible = np.zeros(len(sizes), dtype=bool)
        left = np.arange(len(sizes))
        limits_s = seconds * np.stack((sizes, self._fastest.cumsum()[sizes - 1], sizes), axis=1)
        prices = np.zeros(limits_s.shape)
        num_steps = min(_MOST_STEPS, _MOST_PRICED // most_s.shape[1])
        for aim in np.linspace(_AIM, 1.0, num_steps):
            least_s, cuts = self._least(self._costs(shape, sizes[left], prices[left]), most_s[left])
            excess_s = self._of_workers(shape, sizes[left], cuts) - limits_s[left]
            dual_s = least_s - (prices[left] * limits_s[left]).sum(axis=(1, 2))
            # A step of Polyak's.
            slopes = np.where((prices[left] > 0) | (excess_s > 0), excess_s, 0.0)
            steps = (room_s[left] * aim - dual_s) / np.maximum((slopes**2).sum(axis=(1, 2)), 1e-300)
            prices[left] = np.maximum(prices[left] + steps[:, None, None] * slopes, 0.0)
            suits = (excess_s <= 0).all(axis=(1, 2))
            possible[left[suits]] = True
            left = left[~suits & (dual_s <= room_s[left])]
            if not left.size:
                break
        possible[left] = True
        return possible

    def _costs(self, shape: _Shape, sizes: Counts, prices: Floats | None = None) -> _Costs:
        """Return what all ports carry, and at prices what workers do."""
        copies = (sizes @ shape.holds.T - 1).astype(float)
        before = np.broadcast_to(shape.sends.sum(axis=1), copies.shape)
        if prices is None:
            return _Costs(before, 2 * copies)
        of_work, of_ports, of_sums = prices.transpose(1, 0, 2)
        sums = 2 * copies + (copies > 0) * ((of_ports * sizes) @ (shape.holds & ~shape.alone).T)
        sums += 2 * copies * ((of_ports + of_sums * self._sharing(sizes)) @ shape.alone.T)
        forward = (of_sums * self._even(sizes)) @ shape.alone.T
        return _Costs(before + of_ports @ shape.sends.T, sums, of_work @ shape.parts.T, forward)

    def _of_workers(self, shape: _Shape, sizes: Counts, cuts: Counts) -> Floats:
        """Return the seconds of each worker's work, of what its ports carry, and of sums after forwards: [choice, kind, worker]."""
        copies = sizes @ shape.holds.T - 1
        work_s, forward_s, sums_s = (np.diff(each[cuts], axis=1) for each in (self._work_s, self._forward_s, self._summed_s))
        within_s = (2 * copies * sums_s) @ shape.alone
        between_s = sizes * (((copies > 0) * sums_s) @ (shape.holds & ~shape.alone))
        crossing_s = self._crossing_s[cuts[:, :-1]] @ shape.sends
        late_s = self._even(sizes) * (forward_s @ shape.alone) + within_s * self._sharing(sizes)
        return np.stack((work_s @ shape.parts, crossing_s + within_s + between_s, late_s), axis=1)

    def _even(self, sizes: Counts) -> Floats:
        """Return the least share of a worker's devices over an even one: [choice, worker]."""
        even: Floats = sizes * self.least_shares[sizes - 1]
        return even

    def _sharing(self, sizes: Counts) -> Floats:
        """Return the devices of a worker over the rates of their ports together: [choice, worker]."""
        sharing: Floats = sizes / self._fastest.cumsum()[sizes - 1]
        return sharing

    def _suit_the_slowest(self, shape: _Shape, sizes: Counts, most_s: Floats, seconds: float) -> Truths:
        """Return whether some worker may have the device with the slowest port of as many devices as there are, by choice."""
        rates = self._fastest[sizes.sum(axis=1) - 1]
        copied = (sizes @ shape.holds.T > 1).astype(float)
        # Before a device sends gradients, its rows of some pipeline have passed each stage, on a device that computes a whole share there.
        # Of some stage that takes as long as that of all of them on all devices.
        begun_s = shape.part * self._forward_s[-1] * self._even(sizes).min(axis=1) / sizes.sum(axis=1)
        finds = np.zeros(len(sizes), dtype=bool)
        for worker in range(sizes.shape[1]):
            shares = self.least_shares[sizes[:, worker, None] - 1]
            sums = copied * shape.holds[:, worker]
            sent_s, _ = self._least(_Costs(shares * shape.sends[:, worker], sums), most_s)
            summed_s, _ = self._least(_Costs(np.zeros(most_s.shape), sums), most_s)
            finds |= (sent_s <= rates * seconds) & (summed_s <= rates * (seconds - begun_s))
        return finds

    def _least(self, costs: _Costs, most_s: Floats) -> tuple[Floats, Counts]:
        """Return the least costs of a cut, and the cut: its places, by choice of sizes."""
        stopping.spend(_STEP_WORK_S * most_s.size * len(self._work_s))
        num_choices, num_stages = most_s.shape
        places = np.arange(len(self._work_s))
        least = np.full((num_choices, len(places)), math.inf)
        least[:, 0] = 0.0
        starts: list[Counts] = []
        for stage in range(num_stages):
            before, sums, work, forward = (np.broadcast_to(cost, most_s.shape)[:, stage, None] for cost in costs)
            so_far = sums * self._summed_s + work * self._work_s + forward * self._forward_s
            earliest = np.searchsorted(self._work_s, (self._work_s - most_s[:, stage, None]).ravel()).reshape(least.shape)
            chosen, begun = _least_between(least + before * self._crossing_s - so_far, np.minimum(earliest, places), places)
            least = begun + so_far
            starts.append(chosen)
        cuts = [np.full(num_choices, len(places) - 1)]
        for chosen in reversed(starts):
            cuts.append(np.take_along_axis(chosen, cuts[-1][:, None], axis=1)[:, 0])
        return least[:, -1], np.array(cuts[::-1]).T


def _least_between(values: Floats, firsts: Counts, ends: Counts) -> tuple[Counts, Floats]:
    """Return where the least value between a first place and an end is, and that value; infinite between none: [row, place]."""
    num_rows, num_places = values.shape
    # The least of each 2^k places from one on.
    tables, chosen = [values], [np.broadcast_to(np.arange(num_places), values.shape)]
    length = 1
    while 2 * length <= num_places:
        later, at = (np.full_like(values, math.inf), np.zeros(values.shape, dtype=int))
        later[:, :-length], at[:, :-length] = tables[-1][:, length:], chosen[-1][:, length:]
        is_later = later < tables[-1]
        tables.append(np.where(is_later, later, tables[-1]))
        chosen.append(np.where(is_later, at, chosen[-1]))
        length *= 2
    lengths = ends - firsts
    level = np.log2(np.maximum(lengths, 1)).astype(int)
    all_values, all_chosen, rows = np.array(tables), np.array(chosen), np.arange(num_rows)[:, None]
    early = level, rows, firsts
    late = level, rows, np.maximum(ends - (1 << level), 0)
    is_late = all_values[late] < all_values[early]
    least = np.where(lengths > 0, np.where(is_late, all_values[late], all_values[early]), math.inf)
    return np.where(is_late, all_chosen[late], all_chosen[early]), least


def _sizes(num_workers: int, fewest: int, most: int) -> Counts:
    """Return all ways to give workers one device each or more: [choice, worker]."""
    choices: list[Sequence[int]] = [()]
    for worker in range(num_workers):
        left = num_workers - worker - 1
        choices = [(*choice, size) for choice in choices for size in range(1, most - sum(choice) - left + 1)]
    return np.array([choice for choice in choices if sum(choice) >= fewest], dtype=int).reshape(-1, num_workers)
