"""Workers of several devices for models with branches: replicas of stages that divide the rows of each microbatch.

Two kinds. Branches share all workers, each of a few devices; or each branch has devices of its own by its work, which are one worker
(as in DISTMM, Huang et al., NSDI 2024) or several with replicas inside. Workers are consecutive devices of an order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raypipe.planning.branch_placement import BranchPlacement, Layers, joined, levels, major_branches, placements, work_s
from raypipe.planning.problem import Devices, Problem

_MOST_COUNTS = 4  # numbers of workers that branches share
_MOST_OWN = 24  # groupings with devices of its own for each branch
_MOST_SHARED = 24  # placements on workers that branches share
_MOST_DEVICES = 32  # with more, replicas are found by the search over chains alone


class Grouping(NamedTuple):
    """Workers of which at least one has several devices, and a placement of branches on them."""

    workers: tuple[Devices, ...]
    placement: BranchPlacement


def groupings(problem: Problem, branches: Sequence[Layers], order: Devices) -> Iterator[Grouping]:
    """Yield groupings of devices in this order, and in the one that goes from node to node; devices that are alike count once."""
    if len(order) > _MOST_DEVICES:
        return
    seen: set[object] = set()
    for devices in dict.fromkeys((order, across_nodes(problem, order))):
        for grouping in itertools.chain(_own(problem, branches, devices), _shared(problem, branches, devices)):
            key = likeness(problem, grouping.workers), grouping.placement
            if key not in seen and _can_run(problem, grouping.workers):
                seen.add(key)
                yield grouping


def across_nodes(problem: Problem, order: Devices) -> Devices:
    """Return the first device of each node, then the second of each and so on."""
    met: dict[int, int] = {}
    places: list[tuple[int, int, int]] = []
    for device in order:
        node = problem.node_of[device]
        met[node] = met.get(node, -1) + 1
        places.append((met[node], list(met).index(node), device))
    return tuple(device for _, _, device in sorted(places))


def likeness(problem: Problem, workers: Sequence[Devices]) -> object:
    """Return what is equal for workers whose devices and links differ in their names alone."""
    flat = [device for group in workers for device in group]
    devices = tuple((problem.kind_of[device], problem.speeds[device], problem.memory_bytes[device]) for device in flat)
    links = tuple(matrix[flat][:, flat].tobytes() for matrix in (problem.bandwidth, problem.latency_s))
    first: dict[int, int] = {}
    nodes = tuple(first.setdefault(problem.node_of[device], len(first)) for device in flat)
    return tuple(map(len, workers)), devices, links, nodes


def _can_run(problem: Problem, workers: Sequence[Devices]) -> bool:
    """Return whether some worker has replicas, each with rows, and one may take the loss."""
    return (
        any(len(group) > 1 for group in workers)
        and all(problem.rows(group) is not None for group in workers)
        and any(map(problem.may_take_loss, workers))
    )


def _shared(problem: Problem, branches: Sequence[Layers], order: Devices) -> Iterator[Grouping]:
    """Yield workers of about equal power; the numbers of workers for which they are most equal."""
    powers = [problem.powers[device] for device in order]
    divided = [_divided(order, powers, [1.0] * count) for count in range(len(order) - 1, 1, -1)]

    def spread(workers: Sequence[Devices]) -> float:
        of_workers = [sum(problem.powers[device] for device in group) for group in workers]
        return max(of_workers) / min(of_workers)

    for workers in sorted(divided, key=spread)[:_MOST_COUNTS]:
        for placement in itertools.islice(placements(problem, branches, workers), _MOST_SHARED):
            yield Grouping(workers, placement)


def _own(problem: Problem, branches: Sequence[Layers], order: Devices) -> Iterator[Grouping]:
    """Yield devices for each branch by its work, as so many workers, half as many and so on; numbers that differ little first.

    Branches that read each other also have a stage between any two reads, of which a worker then has several.
    """
    major = major_branches(problem, branches, len(order))
    if not 1 < len(major) <= len(order):
        return
    powers = [problem.powers[device] for device in order]
    of_branches = _divided(order, powers, [work_s(problem, branches[branch]) for branch in major])
    halvings = [_halved(len(devices), most=len(branches[branch])) for branch, devices in zip(major, of_branches, strict=True)]
    chosen = sorted(
        itertools.product(*(enumerate(counts) for counts in halvings)),
        key=lambda each: max(level for level, _ in each) - min(level for level, _ in each),
    )
    of_layer = levels(problem, branches)
    num_stages = {branch: len({of_layer[layer] for layer in branches[branch]}) for branch in major}
    for each in chosen[:_MOST_OWN]:
        workers: list[Devices] = []
        of_major: dict[int, tuple[int, ...]] = {}
        several: dict[int, tuple[int, ...]] = {}
        for branch, devices, (_, count) in zip(major, of_branches, each, strict=True):
            parts = _divided(devices, [problem.powers[device] for device in devices], [1.0] * count)
            of_major[branch] = tuple(range(len(workers), len(workers) + count))
            several[branch] = tuple(worker for worker in of_major[branch] for _ in range(math.ceil(num_stages[branch] / count)))
            workers += parts
        for placed in (of_major, several) if several != of_major else (of_major,):
            yield Grouping(tuple(workers), BranchPlacement(tuple(joined(problem, branches, placed, workers))))


def _halved(number: int, *, most: int) -> list[int]:
    """Return a number and its halves, rounded up, down to 1; none above `most`."""
    found = [number]
    while found[-1] > 1:
        found.append(math.ceil(found[-1] / 2))
    return list(dict.fromkeys(min(count, most) for count in found))


def _divided(devices: Devices, powers: Sequence[float], work: Sequence[float]) -> tuple[Devices, ...]:
    """Divide devices into consecutive parts, of which the busiest has the least work for its power; then the sum of squares counts."""
    done = list(itertools.accumulate(powers, initial=0.0))
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}  # by the number of devices of the parts so far
    for left, of_part in zip(reversed(range(len(work))), work, strict=True):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(min(best) + 1, len(devices) - left + 1):
            options = []
            for first, (most, squares, ends) in best.items():
                if first < end:
                    load = of_part / (done[end] - done[first])
                    options.append((float(f"{max(most, load):.9g}"), float(f"{squares + load**2:.9g}"), (*ends, end)))
            longer[end] = min(options)
        best = longer
    _, _, ends = best[len(devices)]
    return tuple(devices[first:end] for first, end in itertools.pairwise((0, *ends)))
