"""PRM: the best cut, replication and mapping onto ordered devices, by dynamic programming over suffixes.

    layers   a ......... b ......... L        the first stage of a suffix has the layers a..b-1 on the devices i..j-1 of the order,
    devices  i ... j ... l ......... V        the next one begins at layer b and has the devices j..l-1

`least_bottleneck` is SPP's program (Luo et al., INFOCOM 2022, arXiv 2204.10562; reconstructed). `least_sum` limits that bottleneck,
which gives the best plans for any number of microbatches (as Alpa, Zheng et al., OSDI 2022, arXiv 2201.12023, section 5.2).

Suffixes, because activations in flight are counted from the end. Exact while every device may begin a worker; devices at both ends
may stay idle. Time: O(V^2 L^2 + V^3 L) for each limit, times the number of stages where memory is limited.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Floats

MOST_UNITS = 32  # Most devices for which the dynamic program is exact; with more, runs of devices count as one unit.
Run = tuple[int, int]  # Units i..j-1.
_Seconds = tuple[Floats, Floats]  # Of a microbatch, and of an update.
Stages = NDArray[np.int_]  # For each first layer, the largest end of a stage.


@dataclass(frozen=True)
class Bottleneck:
    """Contiguous plan with the objective of `Partition.least_bottleneck` or `least_sum`."""

    value_s: float
    layout: Layout


@dataclass
class Partition:
    """Dynamic programs over contiguous plans on devices in one order.

    Attributes:
        half_duplex: Whether both directions of a channel take turns, as in the paper's model.
    """

    estimator: Estimator
    order: tuple[int, ...]
    half_duplex: bool = False
    most_units: int = MOST_UNITS
    _fitting: dict[tuple[int, int, int, bool], Stages] = field(default_factory=dict, repr=False)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Positions in the order where a worker may begin or end.

        While there are too many, the two neighboring runs with the best link (then the shortest) become one. The last device stays alone
        where no worker of several devices may take the loss.
        """
        most = len(self.order) - (not self.estimator.problem.may_take_loss(self.order))
        bandwidth = self.estimator.problem.bandwidth
        ends = {position: position + 1 for position in range(len(self.order))}  # Of each run, by its start.
        starts = {end: start for start, end in ends.items()}

        def candidate(start: int) -> tuple[float, int, int, int]:
            middle = ends[start]
            weight = float(bandwidth[self.order[middle - 1], self.order[middle]])
            return (-weight, ends[middle] - start, start, ends[middle])

        queue = [candidate(start) for start in ends if ends[start] < most]
        heapq.heapify(queue)
        while len(ends) > self.most_units:
            _, _, start, end = heapq.heappop(queue)
            if start not in ends or ends.get(ends[start]) != end:
                continue  # One of the two has grown since.
            del starts[ends[start]]
            del ends[ends[start]]
            ends[start], starts[end] = end, start
            if end < most:
                heapq.heappush(queue, candidate(start))
            if start:
                heapq.heappush(queue, candidate(starts[start]))
        return (*sorted(ends), len(self.order))

    @property
    def num_units(self) -> int:
        """Number of runs of devices that count as one."""
        return len(self.borders) - 1

    def group(self, i: int, j: int) -> Devices:
        """Return the devices of the units i..j-1."""
        return self.order[self.borders[i] : self.borders[j]]

    @cached_property
    def _stages(self) -> tuple[dict[Run, _Seconds], dict[Run, _Seconds] | None]:
        # By [first layer, end], an update with its sums; the same with forwards that run twice, where memory may demand it.
        problem = self.estimator.problem
        summed_bytes = problem.summed_prefix[None, :] - problem.summed_prefix[:, None]
        stages: dict[Run, _Seconds] = {}
        again: dict[Run, _Seconds] | None = {} if self.limited and problem.recompute else None
        for i in range(self.num_units):
            for j in range(i + 1, self.num_units + 1):
                group = self.group(i, j)
                seconds = self.estimator.runs_s(group)
                if seconds is None:
                    break
                forward_s, backward_s = seconds
                microbatch_s = forward_s + backward_s
                update_s = problem.num_microbatches * microbatch_s
                if not problem.can_sum(group):
                    continue
                if len(group) > 1:
                    update_s += problem.late_sums.late_s(np.asarray(problem.sum_s(group, summed_bytes)), backward_s)
                stages[i, j] = (microbatch_s, update_s)
                if again is not None:
                    again[i, j] = (microbatch_s + forward_s, update_s + problem.num_microbatches * forward_s)
        return stages, again

    @cached_property
    def _channels(self) -> dict[Run, _Seconds]:
        # From a run i..j-1 to the runs j..l-1, by [l, position of the cut].
        problem = self.estimator.problem
        channels = {}
        stages, _ = self._stages
        for i, j in stages:
            microbatch_s = np.full((self.num_units + 1, problem.num_layers + 1), math.inf)
            update_s = microbatch_s.copy()
            for end in range(j + 1, self.num_units + 1):
                if (j, end) not in stages:
                    continue
                there = self.estimator.channel(self.group(i, j), self.group(j, end))
                back = self.estimator.channel(self.group(j, end), self.group(i, j))
                if not (there.exists and back.exists):
                    continue
                both = there.s_per_byte + back.s_per_byte
                microbatch_s[end] = both * problem.crossing_bytes + there.latency_s + back.latency_s
                busiest = both if self.half_duplex else max(there.s_per_byte, back.s_per_byte)
                update_s[end] = problem.num_microbatches * busiest * problem.crossing_bytes
            channels[i, j] = (microbatch_s, update_s)
        return channels

    @cached_property
    def limited(self) -> bool:
        """Whether memory may be short."""
        problem = self.estimator.problem
        everything = problem.standing_prefix[-1] + problem.saved_prefix[-1] * (problem.num_microbatches - 1) + problem.working_peaks.max()
        return any(problem.memory_bytes[device] < everything for device in self.order)

    @cached_property
    def _working(self) -> Floats:
        """Most bytes that a microbatch needs at any time, by [first layer, end]."""
        peaks, saved = self.estimator.problem.working_peaks, self.estimator.problem.saved_prefix
        needed = np.zeros((len(saved), len(saved)))
        for first in range(len(peaks)):
            needed[first, first + 1 :] = np.maximum.accumulate(peaks[first:]) - saved[first]
        return needed

    def _fits(self, i: int, j: int, held: int, *, recomputed: bool) -> Stages:
        """Return for each first layer the largest end that fits on the units i..j-1 with `held` activations in flight."""
        ends = self._fitting.get((i, j, held, recomputed))
        if ends is None:
            problem = self.estimator.problem
            group = self.group(i, j)
            standing = -np.subtract.outer(problem.standing_prefix, problem.standing_prefix)
            saved = -np.subtract.outer(problem.saved_prefix, problem.saved_prefix)
            kept = np.minimum(problem.crossing_bytes[:, None], saved) if recomputed else saved
            needed = kept * (held - 1) + np.maximum(saved, self._working)
            fits = np.ones_like(standing, dtype=bool)
            for share, limit in problem.demands(group):
                fits &= standing + needed * share <= limit
            # What is longer needs more.
            ends = self._fitting[i, j, held, recomputed] = fits.sum(axis=1) - 1
        return ends

    def least_bottleneck(self, schedule: str = "1f1b") -> list[Bottleneck]:
        """Return for each number of stages the plan whose busiest stage or channel works least in an update."""
        return self._solve(self._updates, schedule, np.maximum, by_level=True)

    def least_sum(self, limit_s: float, schedule: str = "1f1b") -> list[Bottleneck]:
        """Return the shortest paths of a microbatch while no stage or channel works longer than `limit_s` in an update.

        One plan where memory does not matter, else one for each number of stages.
        """
        costs = self._costs(lambda own_s, update_s: np.where(update_s <= limit_s, own_s, math.inf))
        return self._solve(costs, schedule, np.add, by_level=self.limited)

    def least_limit_s(self, schedule: str = "1f1b") -> float:
        """Return the least workload of the busiest stage or channel; infinite where no plan fits."""
        bottlenecks = self._solve(self._updates, schedule, np.maximum, by_level=self.limited)
        return min((bottleneck.value_s for bottleneck in bottlenecks), default=math.inf)

    @cached_property
    def _updates(self) -> _Costs:
        return self._costs(lambda _, update_s: update_s)

    def _costs(self, choose: Callable[[Floats, Floats], Floats]) -> _Costs:
        def chosen(table: dict[Run, _Seconds]) -> dict[Run, Floats]:
            return {run: choose(*seconds) for run, seconds in table.items()}

        stages, again = self._stages
        return _Costs(chosen(stages), None if again is None else chosen(again), chosen(self._channels))

    def _solve(
        self,
        costs: _Costs,
        schedule: str,
        join: Callable[[Floats, Floats], Floats],
        *,
        by_level: bool,
    ) -> list[Bottleneck]:
        """Return the best plan; of each number of stages if `by_level`. best[i, j, a]: layers a.. whose first stage is on units i..j-1."""
        problem = self.estimator.problem
        num_layers, num_units = problem.num_layers, self.num_units
        stages, again, channels = costs
        runs = sorted(stages, reverse=True)
        layers = np.arange(num_layers + 1)
        plans: list[Bottleneck] = []
        levels: list[_Level] = []
        for level in range(min(num_units, num_layers) if by_level else 1):
            now = _Level(num_units, num_layers)
            behind = (levels[-1] if levels else None) if by_level else now
            held = Layout(tuple(range(level + 2)), (), schedule).in_flight(0, problem.num_microbatches)
            for i, j in runs:
                rest = np.full(num_layers + 1, math.inf)
                following = np.zeros(num_layers + 1, dtype=np.int32)
                if behind is not None and j < num_units:
                    ways = join(channels[i, j], behind.best[j])
                    following = ways.argmin(axis=0).astype(np.int32)
                    rest = ways[following, layers]
                # Behind the last layer comes nothing, at the first level at least.
                rest[num_layers] = 0.0 if level == 0 else math.inf
                values = join(stages[i, j], rest[None, :])
                if by_level and self.limited:
                    values = np.where(layers <= self._fits(i, j, held, recomputed=False)[:, None], values, math.inf)
                    if again is not None:
                        twice = join(again[i, j], rest[None, :])
                        fits = layers <= self._fits(i, j, held, recomputed=True)[:, None]
                        values = np.where(fits, np.minimum(values, twice), values)
                cut = values.argmin(axis=1)
                now.best[i, j] = values[layers, cut]
                now.cut[i, j] = cut
                now.following[i, j] = following[cut]
            levels.append(now)
            starts = now.best[:, :, 0].reshape(-1)
            at = int(starts.argmin())
            if math.isfinite(starts[at]):
                i, j = divmod(at, num_units + 1)
                plans.append(Bottleneck(float(starts[at]), self._layout(levels, i, j, schedule, by_level=by_level)))
        return plans

    def _layout(self, levels: Sequence[_Level], i: int, j: int, schedule: str, *, by_level: bool) -> Layout:
        level, layer = len(levels) - 1, 0
        cuts, workers = [0], []
        while True:
            workers.append(self.group(i, j))
            at = levels[level]
            end, following = int(at.cut[i, j, layer]), int(at.following[i, j, layer])
            cuts.append(end)
            if end == self.estimator.problem.num_layers:
                return Layout(tuple(cuts), tuple(workers), schedule)
            i, j, layer = j, following, end
            level -= by_level


class _Costs(NamedTuple):
    """Stages by [first layer, end], also with forwards that run twice; channels by [end of the next run, position of the cut]."""

    stages: dict[Run, Floats]
    again: dict[Run, Floats] | None
    channels: dict[Run, Floats]


class _Level:
    """By [i, j, first layer]."""

    def __init__(self, num_units: int, num_layers: int) -> None:
        shape = (num_units + 1, num_units + 1, num_layers + 1)
        self.best = np.full(shape, math.inf)
        self.cut = np.zeros(shape, dtype=np.int32)
        self.following = np.zeros(shape, dtype=np.int32)
