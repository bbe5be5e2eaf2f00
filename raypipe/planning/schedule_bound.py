"""Lower bounds on the time of an update of plans with some schedules: those of one run of layers a worker, and all that are bundled.

They are closer than those of all plans (`plan_bound`), which may place any layers anywhere, where ports are slow.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from raypipe.planning.plan_bound import Bounds
from raypipe.planning.problem import Problem
from raypipe.planning.run_bound import RunBound
from raypipe.planning.shape_bound import ShapeBound
from raypipe.planning.two_run_bound import TwoRunBound

_CLOSE = 1.005


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
        return RunBound(problem, own_s, ports.sums, self._bounds.capacities.of_members)

    @cached_property
    def one_run_s(self) -> float | None:
        """Least seconds of an update of any plan of one pipeline with one run of layers a worker."""
        return None if self._runs is None else self._runs.least_s(self.at_least_s)

    @cached_property
    def bundled_s(self) -> float | None:
        """Least seconds of an update of any plan with a bundled schedule; unknown for more than a few devices.

        Bundled schedules have one pipeline with one run a worker, with two, or with more; or several pipelines.
        """
        if self._runs is None or self.one_run_s is None:
            return None
        two_runs = TwoRunBound(self._runs)
        least_shares = np.zeros(self.problem.num_devices)
        for count in range(1, self.problem.num_devices + 1):
            shares = [worker.shares.min() for worker in self._runs.workers if len(worker.members) == count]
            least_shares[count - 1] = min(shares, default=0.0)
        others = ShapeBound(
            num_microbatches=self.problem.num_microbatches,
            least_shares=least_shares,
            own_s=self._runs.own_s.min(axis=0),
            crossing=self._runs.crossing,
            sums=self._runs.sums,
            rates=self._bounds.capacities.of_ports[0],
        )
        if not (others.is_small and two_runs.is_small(self.one_run_s)):
            return None

        def is_possible(seconds: float) -> bool:
            return others.is_possible(seconds) or two_runs.is_possible(seconds)

        low, high = self.at_least_s, self.one_run_s
        if is_possible(low):
            return low
        if not is_possible(high):
            return high
        while high > low * _CLOSE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if is_possible(middle) else (middle, high)
        return low
