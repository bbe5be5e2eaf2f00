"""Pipelines over nodes: for more devices than the dynamic program takes one by one, nodes are the units.

A path visits nodes over good links both ways. Each node on it is one worker, or several with equally many devices, and the layers are
dealt exactly: no division makes the busiest worker or hop less busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from raypipe import stopping
from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Floats, Problem

_MOST_STARTS = 64
_MOST_PATHS = 3
_DEAL_WORK_S = 5e-9  # For each run of layers.
_LENGTHS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
"""Parts of the nodes that pipelines are tried with: each further one costs ramp and messages."""


def node_pipelines(estimator: Estimator, *, orders: Sequence[str], divide: bool = True) -> Iterator[Layout]:
    """Yield pipelines along paths of nodes, longest first; with `divide` also of several workers a node."""
    problem = estimator.problem
    nodes = nodes_of(problem)
    seen: set[tuple[Devices, ...]] = set()
    for path in paths(_weights(problem, nodes)):
        for part, each in itertools.product(_LENGTHS, _workers_per_node(nodes) if divide else (1,)):
            count = min(max(round(part * len(path)), 1), problem.num_layers // each)
            workers = tuple(group for node in path[:count] for group in _divided(nodes[node], each, problem.microbatch_size))
            if not workers or workers in seen:
                continue
            seen.add(workers)
            cuts = dealt(estimator, workers)
            if cuts is not None:
                yield from (Layout(cuts, workers, order) for order in orders)


def nodes_of(problem: Problem) -> list[Devices]:
    """Return the devices of each node that has some."""
    members: list[list[int]] = [[] for _ in problem.topology.nodes]
    for device, node in enumerate(problem.node_of):
        members[node].append(device)
    return [tuple(devices) for devices in members if devices]


def _workers_per_node(nodes: Sequence[Devices]) -> list[int]:
    """Return the numbers of workers that all nodes can be divided into, fewest first."""
    least = min(map(len, nodes))
    return [count for count in range(1, least + 1) if all(len(devices) % count == 0 for devices in nodes)]


def _divided(devices: Devices, count: int, most: int) -> Iterator[Devices]:
    """Yield the devices of each of `count` workers of a node, at most one for each row of a microbatch."""
    size = len(devices) // count
    for first in range(0, count * size, size):
        yield devices[first : first + min(size, most)]


def _weights(problem: Problem, nodes: Sequence[Devices]) -> Floats:
    """Return the bandwidth between nodes: of the slower direction, since activations go one way and gradients the other."""
    first = [devices[0] for devices in nodes]
    last = [devices[-1] for devices in nodes]
    there = problem.bandwidth[np.ix_(last, first)]
    weights = np.minimum(there, there.T)
    np.fill_diagonal(weights, 0.0)
    return weights


def paths(weights: Floats) -> list[tuple[int, ...]]:
    """Return the best of the paths that always go on over the best link to a node that is left, from different nodes."""
    size = len(weights)
    starts = range(0, size, max(size // _MOST_STARTS, 1))
    found = {_nearest(weights, start) for start in starts}
    return sorted(found, key=lambda path: (-len(path), _slowness(weights, path), path))[:_MOST_PATHS]


def _nearest(weights: Floats, start: int) -> tuple[int, ...]:
    path, left = [start], np.ones(len(weights), dtype=bool)
    left[start] = False

    def best_from(node: int) -> tuple[float, int]:
        there = np.where(left, weights[node], -1.0)
        best = int(there.argmax())
        return float(there[best]), best

    at_end = at_start = best_from(start)
    while left.any():
        # Both ends grow, so that the last nodes are not those with bad links alone.
        weight, node = at_end if at_end[0] >= at_start[0] else at_start
        if weight == 0.0:
            break  # No link leads to those that are left.
        path.insert(len(path) if at_end[0] >= at_start[0] else 0, node)
        left[node] = False
        at_end, at_start = (best_from(end) if node in {end, best[1]} else best for end, best in ((path[-1], at_end), (path[0], at_start)))
    return tuple(path)


def _slowness(weights: Floats, path: Sequence[int]) -> float:
    return float(sum(1 / max(weights[one, other], 1e-300) for one, other in itertools.pairwise(path)))


def dealt(
    estimator: Estimator, workers: Sequence[Devices], *, hops: bool = True, held: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Return the cuts whose busiest worker, or hop, is least busy, a stage for each worker in order; `None` where there are none.

    With `held`, the activations of each stage in flight, stages fit into memory, if need be by forwards that run twice.
    """
    problem = estimator.problem
    best = np.full(problem.num_layers + 1, np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    before: Devices | None = None
    for stage, group in enumerate(workers):
        if hops and before is not None:
            ways = (estimator.channel(before, group), estimator.channel(group, before))
            if not all(way.exists for way in ways):
                return None
            best = np.maximum(best, problem.crossing_bytes * max(way.s_per_byte for way in ways))
        seconds_s = estimator.busy_runs_s(group, None if held is None else held[stage])
        if seconds_s is None:
            return None
        stopping.spend(_DEAL_WORK_S * problem.num_layers**2)
        reached = np.maximum(best[:, None], seconds_s)
        choices.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
        before = group
    if not np.isfinite(best[-1]):
        return None
    cuts = [problem.num_layers]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts))
