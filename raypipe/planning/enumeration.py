"""All layouts of a small problem, with the devices of each worker in ascending order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import comb

from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem


def all_layouts(problem: Problem, order: str, *, most: int) -> Iterator[Layout]:
    """Yield all layouts of one stage a worker, with a row for each of its devices.

    Where all are more than `most`, yield those without idle devices; none where these are more, too.
    """
    for num_idle in (1, 0):  # Numbers of places where devices are idle.
        if count(problem, num_idle) <= most:
            yield from _layouts(problem, order, num_idle)
            return


def count(problem: Problem, num_idle: int) -> int:
    """Count the ways to cut layers and to place devices, those included that leave a worker without devices."""
    stages = range(1, min(problem.num_devices, problem.num_layers) + 1)
    return sum(comb(problem.num_layers - 1, num_stages - 1) * (num_stages + num_idle) ** problem.num_devices for num_stages in stages)


def _layouts(problem: Problem, order: str, num_idle: int) -> Iterator[Layout]:
    devices = range(problem.num_devices)
    for num_stages in range(1, min(problem.num_devices, problem.num_layers) + 1):
        for places in product(range(num_stages + num_idle), repeat=problem.num_devices):
            workers = tuple(tuple(device for device in devices if places[device] == worker) for worker in range(num_stages))
            if all(0 < len(group) <= problem.microbatch_size for group in workers):
                for inner in combinations(range(1, problem.num_layers), num_stages - 1):
                    yield Layout((0, *inner, problem.num_layers), workers, order)
