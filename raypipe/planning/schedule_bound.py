"""Lower bounds on the time of an update of plans with some schedules: those of one run of layers a worker, and all that are bundled.

They are closer than those of all plans (`plan_bound`), which may place any layers anywhere, where ports are slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from raypipe.planning.plan_bound import Bounds
from raypipe.planning.problem import Problem
from raypipe.planning.run_bound import RunBound
from raypipe.planning.shape_bound import ShapeBound
from raypipe.planning.two_run_bound import TwoRunBound

_CLOSE = 1.01


class ScheduleBound:
    """Bounds of plans for a problem, at least those of all plans: `at_least_s`.

    There are none for layers that are no chain, for devices that share cores, for one device, and for many, unless most can change places.
    """

    def __init__(self, problem: Problem, at_least_s: float) -> None:
        self.problem = problem
        self.at_least_s = at_least_s
        self._bounds = Bounds(problem)

    @cached_property
    def _runs(self) -> RunBound | None:
        ports, problem = self._bounds.ports, self.problem
        if ports is None or not ports.is_chain:
            return None
        own_s = np.diff(problem.prefix_s, axis=2)[np.array(problem.kind_of)] / self._bounds.alone[:, None, None]
        return RunBound(problem, own_s, ports.sums, self._bounds.capacities)

    @cached_property
    def one_run_s(self) -> float | None:
        """Least seconds of an update of any plan of one pipeline with one run of layers a worker."""
        return None if self._runs is None else self._runs.least_s(self.at_least_s)

    @cached_property
    def bundled_s(self) -> float | None:
        """Least seconds of an update of any plan with a bundled schedule whose updates do not overlap.

        Its workers have one run of layers in one pipeline, or two, or more; or there are several pipelines. Unknown for more than eight
        devices or a hundred layers, where a port has no limit or no link, and often for many layers on unlike devices.
        """
        if self._runs is None or self.one_run_s is None or not self.at_least_s:
            return self.one_run_s
        others = ShapeBound(
            num_microbatches=self.problem.num_microbatches,
            least_shares=np.array([self._runs.least_share(count + 1) for count in range(self.problem.num_devices)]),
            own_s=self._runs.own_s.min(axis=0),
            crossing=self._runs.crossing,
            sums=self._runs.sums,
            rates=self._bounds.capacities.of_ports[0],
        )
        if not others.is_small:
            return None
        of_others_s = _least_s(others.is_possible, self.at_least_s, self.one_run_s)
        two_runs = TwoRunBound(self._runs)
        if of_others_s > self.at_least_s and not two_runs.is_small(of_others_s):
            return None
        return _least_s(two_runs.is_possible, self.at_least_s, of_others_s)


def _least_s(is_possible: Callable[[float], bool], low: float, high: float) -> float:
    """Return seconds within which something is impossible, between two, as many as there are but for a hundredth."""
    if low == high or not is_possible(high):
        return high
    if is_possible(low):
        return low
    while high > low * _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low
