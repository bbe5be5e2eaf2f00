"""Pipelines of equal groups of nodes or of parts of nodes, for any number of devices.

A stage is a part of a node, a node, or several nodes with good links among each other: fewer stages fill sooner, more have smaller sums.
A path visits groups over links that are good enough for the stages of its length, and the most powerful groups among those: so weak nodes
and weak links are left out together. Layers are dealt exactly, within memory. Then groups change places, by the estimate.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.levels import dealt, nodes_of
from raypipe.planning.problem import Devices, Floats

_LENGTHS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 100)
_SLACKS = (0.3, 0.7, 1.5, math.inf)
"""Bandwidths that are good enough, as multiples of what carries the median tensor in the time of a stage."""
_NUM_STARTS = 2
_SURE = 0.5  # Part of the changes that begin at the busiest worker.


@dataclass(frozen=True)
class GroupPipelines:
    """Pipelines of groups for one problem, with memory as in the order `order`."""

    estimator: Estimator
    order: str = "1f1b"

    @cached_property
    def _nodes(self) -> list[Devices]:
        return nodes_of(self.estimator.problem)

    def workers(self) -> list[tuple[Devices, ...]]:
        """Return the workers of pipelines of all sizes of groups and of all lengths, soonest first if work were in proportion to power."""
        return sorted(dict.fromkeys(self._all_workers()), key=self._even_s)

    def least_s(self, workers: Sequence[Devices]) -> float:
        """Return the seconds of an update if all devices of the workers shared its work perfectly, and nothing else took time."""
        problem = self.estimator.problem
        return problem.num_microbatches * self._whole_s / math.fsum(problem.powers[device] for group in workers for device in group)

    def _even_s(self, workers: Sequence[Devices]) -> float:
        return self.least_s(workers) * (1 + (len(workers) - 1) / self.estimator.problem.num_microbatches)  # The ramp of 1F1B.

    @cached_property
    def _whole_s(self) -> float:
        """Seconds of a microbatch of the whole model on a device of power 1."""
        return float(self.estimator.problem.prefix_s[:, :, -1].sum(axis=1).max())

    def _all_workers(self) -> Iterator[tuple[Devices, ...]]:
        problem = self.estimator.problem
        for parts, groups in self._groupings():
            weights, powers = self._weights(groups), np.array([math.fsum(problem.powers[device] for device in group) for group in groups])
            longest = min(len(groups), max(problem.num_layers // parts, 1))
            for length in sorted({min(length, longest) for length in (*_LENGTHS, problem.num_layers)}):
                for path in self._paths(weights, powers, length):
                    yield tuple(worker for group in path for worker in _divided(groups[group], parts))

    def dealt(self, workers: tuple[Devices, ...], *, order: str | None = None, times_held: int = 1) -> Layout | None:
        """Return the pipeline over workers whose busiest worker or hop is least busy, within memory for so many times the activations."""
        order, num_microbatches = order or self.order, self.estimator.problem.num_microbatches
        alike = Layout(tuple(range(len(workers) + 1)), workers, order)
        held = [min(times_held * alike.in_flight(stage, num_microbatches), num_microbatches) for stage in range(len(workers))]
        cuts = dealt(self.estimator, workers, held=held)
        return None if cuts is None else Layout(cuts, workers, order)

    def _groupings(self) -> Iterator[tuple[int, list[Devices]]]:
        """Yield numbers of workers in each group, and groups: nodes that are divided, nodes, or several nodes that are one worker."""
        nodes, most = self._nodes, self.estimator.problem.microbatch_size
        largest = max(map(len, nodes))
        for parts in range(largest, 0, -1):
            divisible = [devices for devices in nodes if len(devices) >= parts and math.ceil(len(devices) / parts) <= most]
            if divisible and largest % parts == 0:
                yield parts, divisible
        size = 2
        while size * largest <= most and size <= len(nodes):
            yield 1, [tuple(device for node in group for device in nodes[node]) for group in self._cliques(size)]
            size *= 2

    def _cliques(self, size: int) -> list[list[int]]:
        """Divide nodes into groups of which all links are good; the most powerful nodes begin."""
        weights = self._node_weights
        left = np.ones(len(weights), dtype=bool)
        power = np.array([math.fsum(self.estimator.problem.powers[device] for device in devices) for devices in self._nodes])
        groups = []
        while left.sum() >= size:
            members = [int(np.where(left, power, -1.0).argmax())]
            left[members[0]] = False
            worst = weights[members[0]].copy()
            while len(members) < size:
                node = int(np.where(left, worst, -1.0).argmax())
                members.append(node)
                left[node] = False
                worst = np.minimum(worst, weights[node])
            groups.append(members)
        return groups

    @cached_property
    def _node_weights(self) -> Floats:
        return self._weights(self._nodes)

    def _weights(self, groups: Sequence[Devices]) -> Floats:
        """Return the bandwidth from group to group in the slower direction, of the slowest of the pairs that exchange most rows."""
        bandwidth = self.estimator.problem.bandwidth
        length = max(map(len, groups))
        columns = [[group[at * len(group) // length] for group in groups] for at in range(length)]
        weights = np.full((len(groups), len(groups)), math.inf)
        for column in columns:
            there = bandwidth[np.ix_(column, column)]
            weights = np.minimum(weights, np.minimum(there, there.T))
        np.fill_diagonal(weights, 0.0)
        return weights

    def _paths(self, weights: Floats, powers: Floats, length: int) -> Iterator[tuple[int, ...]]:
        problem = self.estimator.problem
        strongest = np.sort(powers)[::-1][:length].sum()
        stage_s = self._whole_s / max(float(strongest), 1e-300)
        wanted = float(np.median(problem.crossing_bytes[1:-1])) / stage_s if problem.num_layers > 1 else 0.0
        for slack in _SLACKS if length > 1 else _SLACKS[:1]:
            for start in np.argsort(-powers, kind="stable")[:_NUM_STARTS].tolist():
                path = _path(np.minimum(weights, wanted * slack) if slack < math.inf else weights, powers, start, length)
                if path is not None:
                    yield path
                    yield path[::-1]

    def improved(self, layout: Layout, *, seconds: Callable[[Layout], float], num_steps: int) -> Iterator[Layout]:
        """Yield pipelines that take ever fewer `seconds`, whose workers changed places with others or with idle devices."""
        rng = random.Random(0)
        best_s = seconds(layout)
        for _ in range(num_steps):
            workers = self._changed(layout, rng)
            changed = None if workers is None else self.dealt(workers)
            if changed is not None and (changed_s := seconds(changed)) < best_s:
                layout, best_s = changed, changed_s
                yield layout

    def _changed(self, layout: Layout, rng: random.Random) -> tuple[Devices, ...] | None:
        workers = list(layout.workers)
        busy_s = self.estimator.busy_s(layout)
        at = busy_s.index(max(busy_s)) if rng.random() < _SURE else rng.randrange(len(workers))
        other = rng.randrange(len(workers))
        change = rng.randrange(5)
        if change == 0:
            workers[at], workers[other] = workers[other], workers[at]
        elif change == 1:
            workers.insert(other, workers.pop(at))
        elif change == 2:
            first, last = sorted((at, other))
            workers[first : last + 1] = workers[first : last + 1][::-1]
        elif change == 3 and len(workers) > 1:
            workers.pop(at)
        else:
            used = {device for group in workers for device in group}
            idle = [devices for devices in self._nodes if not used & set(devices)]
            if not idle:
                return None
            size = len(workers[at])
            group = tuple(device for node in rng.sample(idle, len(idle)) for device in node)[:size]
            if len(group) < size:
                return None
            if change == 4 and len(workers) < self.estimator.problem.num_layers and rng.random() < _SURE:
                workers.insert(at, group)
            else:
                workers[at] = group
        changed = tuple(workers)
        return None if changed == layout.workers else changed


def _divided(devices: Devices, parts: int) -> Iterator[Devices]:
    """Yield the devices of each worker of a group."""
    borders = [len(devices) * part // parts for part in range(parts + 1)]
    for first, end in itertools.pairwise(borders):
        yield devices[first:end]


def _path(weights: Floats, powers: Floats, start: int, length: int) -> tuple[int, ...] | None:
    """Return a path that grows at both ends over the best links, and to the most powerful group among those that are equally good."""
    path, left = [start], np.ones(len(weights), dtype=bool)
    left[start] = False
    while len(path) < length:
        there = np.where(left, weights[path[-1]], 0.0)
        back = np.where(left, weights[path[0]], 0.0)
        best = max(float(there.max()), float(back.max()))
        if best == 0.0:
            return None  # No link leads to those that are left.
        at_end = np.where(there >= best, powers, -1.0)
        at_start = np.where(back >= best, powers, -1.0)
        if float(at_end.max()) >= float(at_start.max()):
            path.append(int(at_end.argmax()))
            left[path[-1]] = False
        else:
            path.insert(0, int(at_start.argmax()))
            left[path[0]] = False
    return tuple(path)
