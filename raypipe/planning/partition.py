"""PRM: the best cut, replication and mapping onto ordered devices, by dynamic programming over suffixes.

    layers   a ......... b ......... L        the first stage of a suffix has the layers a..b-1 on the devices i..j-1 of the order,
    devices  i ... j ... l ......... V        the next one begins at layer b and has the devices j..l-1

`least_bottleneck` is SPP's program (Luo et al., INFOCOM 2022, arXiv 2204.10562; reconstructed). `least_sum` limits that bottleneck,
which gives the best plans for any number of microbatches (as Alpa, Zheng et al., OSDI 2022, arXiv 2201.12023, section 5.2).

Suffixes, because activations in flight are counted from the end. Exact while every device may begin a worker; devices at both ends
may stay idle. Time: O(V^2 L^2 + V^3 L) for each limit, times the number of stages where memory is limited. Of many layers, cuts are
chosen among some positions.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe import stopping
from raypipe.planning.estimator import Estimator, RunBytes
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Floats

MOST_UNITS = 32  # Most devices for which the dynamic program is exact; with more, runs of devices count as one unit.
MOST_POSITIONS = 41  # Most positions for which it is; of more layers, some positions may be cut.
_ENTRY_WORK_S = 5e-9  # Of an entry of a program's table.
_WORK_OF_RUN = 250_000  # Times as long as one entry of a program takes a run of units: sums, messages and memory.
_Seconds = tuple[Floats, Floats]  # Of a microbatch, and of an update.


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
    most_positions: int = MOST_POSITIONS
    _rooms: dict[tuple[int, bool], NDArray[np.float32]] = field(default_factory=dict, repr=False)

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
    def positions(self) -> NDArray[np.int_]:
        """Positions where layers may be cut: all, or of each of as many even parts of the work the one that the fewest bytes cross."""
        problem = self.estimator.problem
        if problem.num_layers < self.most_positions:
            return np.arange(problem.num_layers + 1)
        done = problem.prefix_s.sum(axis=1).mean(axis=0)
        inner = np.arange(1, problem.num_layers)
        part = np.minimum(done[inner] / max(float(done[-1]), 1e-300) * (self.most_positions - 2), self.most_positions - 3).astype(int)
        order = np.lexsort((inner, problem.crossing_bytes[inner], part))
        _, first = np.unique(part[order], return_index=True)
        return np.array([0, *sorted(inner[order[first]].tolist()), problem.num_layers])

    @property
    def work_of_tables(self) -> int:
        """Work of the tables that all programs share, in the unit of `work`."""
        return _WORK_OF_RUN * self.num_units**2

    @cached_property
    def work(self) -> int:
        """Number of entries of the table that one program fills, all stages included."""
        levels = min(self.num_units, len(self.positions) - 1) if self.limited else 1
        return levels * self.num_units**2 * len(self.positions) ** 2 // 2

    def _empty(self, *shape: int) -> Floats:
        return np.full((self.num_units + 1, self.num_units + 1, *shape), math.inf)

    @cached_property
    def _stages(self) -> tuple[_Seconds, _Seconds | None]:
        # By [i, j, first layer, end], an update with its sums; the same with forwards that run twice, where memory may demand it.
        problem, size = self.estimator.problem, len(self.positions)
        chosen = np.ix_(self.positions, self.positions)
        summed = problem.summed_prefix[self.positions]
        summed_bytes = summed[None, :] - summed[:, None]
        late_sums = problem.late_sums.at(self.positions)
        stages = self._empty(size, size), self._empty(size, size)
        again = (self._empty(size, size), self._empty(size, size)) if self.limited and problem.recompute else None
        for i in range(self.num_units):
            for j in range(i + 1, self.num_units + 1):
                stopping.spend(_ENTRY_WORK_S * size**2)
                group = self.group(i, j)
                seconds = self.estimator.runs_s(group)
                if seconds is None:
                    break
                if not problem.can_sum(group):
                    continue
                forward_s, backward_s = seconds[0][chosen], seconds[1][chosen]
                microbatch_s = forward_s + backward_s
                update_s = problem.num_microbatches * microbatch_s
                if len(group) > 1:
                    sum_s = np.asarray(problem.sum_s(group, summed_bytes))
                    update_s += late_sums.late_s(sum_s, backward_s)
                stages[0][i, j], stages[1][i, j] = microbatch_s, update_s
                if again is not None:
                    again[0][i, j], again[1][i, j] = microbatch_s + forward_s, update_s + problem.num_microbatches * forward_s
        return stages, again

    @cached_property
    def _channels(self) -> _Seconds:
        # From a run i..j-1 to the runs j..l-1, by [i, j, l, position of the cut].
        problem = self.estimator.problem
        crossing_bytes = problem.crossing_bytes[self.positions]
        shape = (self.num_units + 1, len(self.positions))
        microbatch_s, update_s = self._empty(*shape), self._empty(*shape)
        possible = self._possible
        for i, j in itertools.combinations(range(self.num_units), 2):
            if not possible[i, j]:
                continue
            for end in range(j + 1, self.num_units + 1):
                if not possible[j, end]:
                    continue
                there = self.estimator.channel(self.group(i, j), self.group(j, end))
                back = self.estimator.channel(self.group(j, end), self.group(i, j))
                if not (there.exists and back.exists):
                    continue
                both = there.s_per_byte + back.s_per_byte
                microbatch_s[i, j, end] = both * crossing_bytes + there.latency_s + back.latency_s
                busiest = both if self.half_duplex else max(there.s_per_byte, back.s_per_byte)
                update_s[i, j, end] = problem.num_microbatches * busiest * crossing_bytes
        return microbatch_s, update_s

    @cached_property
    def _possible(self) -> NDArray[np.bool_]:
        """Whether the units i..j-1 can be one worker."""
        return np.asarray(np.isfinite(self._stages[0][0]).any(axis=(2, 3)))

    @cached_property
    def limited(self) -> bool:
        """Whether memory may be short."""
        problem = self.estimator.problem
        everything = problem.standing_prefix[-1] + problem.saved_prefix[-1] * (problem.num_microbatches - 1) + problem.working_peaks.max()
        return any(problem.memory_bytes[device] < everything for device in self.order)

    @cached_property
    def _run_bytes(self) -> RunBytes:
        chosen = np.ix_(self.positions, self.positions)
        return RunBytes(*(num_bytes[chosen] for num_bytes in self.estimator.run_bytes))

    def _most_in_flight(self, i: int, *, recomputed: bool) -> NDArray[np.float32]:
        """Return the most activations in flight that fit on the units i..j-1, by [j - i - 1, first layer, end]."""
        if (i, recomputed) not in self._rooms:
            size = len(self.positions)
            most = np.zeros((self.num_units - i, size, size), dtype=np.float32)
            for j in np.flatnonzero(self._possible[i]).tolist():
                group = self.group(i, j)
                demands = self.estimator.problem.demands(group)
                most[j - i - 1] = self._run_bytes.most_in_flight(demands, recomputed=recomputed, copied=len(group) > 1)
            self._rooms[i, recomputed] = most
        return self._rooms[i, recomputed]

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
        stages, again = self._stages
        return _Costs(choose(*stages), None if again is None else choose(*again), choose(*self._channels))

    def _solve(
        self,
        costs: _Costs,
        schedule: str,
        join: Callable[[Floats, Floats], Floats],
        *,
        by_level: bool,
    ) -> list[Bottleneck]:
        """Return the best plan; of each number of stages if `by_level`. best[i, j, a]: layers a.. whose first stage is on units i..j-1."""
        num_units, size = self.num_units, len(self.positions)
        stages, again, channels = costs
        rows, starts_at = np.ogrid[:num_units, :size]
        plans: list[Bottleneck] = []
        levels: list[_Level] = []
        for level in range(min(num_units, size - 1) if by_level else 1):
            now = _Level(num_units, size)
            behind = (levels[-1] if levels else None) if by_level else now
            held = Layout(tuple(range(level + 2)), (), schedule).in_flight(0, self.estimator.problem.num_microbatches)
            for i in reversed(range(num_units)):
                stopping.spend(_ENTRY_WORK_S * (num_units - i) * size**2)
                count = num_units - i  # Runs that begin here; the one with all other units has nothing behind it.
                rest = np.full((count, size), math.inf)
                following = np.zeros((count, size), dtype=np.int32)
                if behind is not None and count > 1:
                    ways = join(channels[i, i + 1 : -1], behind.best[i + 1 : -1])
                    following[:-1] = ways.argmin(axis=1)
                    rest[:-1] = ways.min(axis=1)
                # Behind the last layer comes nothing, at the first level at least.
                rest[:, -1] = 0.0 if level == 0 else math.inf
                values = join(stages[i, i + 1 :], rest[:, None, :])
                if by_level and self.limited:
                    values = np.where(held <= self._most_in_flight(i, recomputed=False), values, math.inf)
                    if again is not None:
                        twice = join(again[i, i + 1 :], rest[:, None, :])
                        values = np.where(held <= self._most_in_flight(i, recomputed=True), np.minimum(values, twice), values)
                cut = values.argmin(axis=2)
                now.best[i, i + 1 :] = values[rows[:count], starts_at, cut]
                now.cut[i, i + 1 :] = cut
                now.following[i, i + 1 :] = following[rows[:count], cut]
            levels.append(now)
            starts = now.best[:, :, 0].reshape(-1)
            at = int(starts.argmin())
            if math.isfinite(starts[at]):
                i, j = divmod(at, num_units + 1)
                plans.append(Bottleneck(float(starts[at]), self._layout(levels, i, j, schedule, by_level=by_level)))
        return plans

    def _layout(self, levels: Sequence[_Level], i: int, j: int, schedule: str, *, by_level: bool) -> Layout:
        level, at, last = len(levels) - 1, 0, len(self.positions) - 1
        cuts, workers = [0], []
        while True:
            workers.append(self.group(i, j))
            of_level = levels[level]
            end, following = int(of_level.cut[i, j, at]), int(of_level.following[i, j, at])
            cuts.append(int(self.positions[end]))
            if end == last:
                return Layout(tuple(cuts), tuple(workers), schedule)
            i, j, at = j, following, end
            level -= by_level


class _Costs(NamedTuple):
    """Stages by [i, j, first layer, end], also with forwards that run twice; channels by [i, j, end of the next run, cut]."""

    stages: Floats
    again: Floats | None
    channels: Floats


class _Level:
    """By [i, j, first layer]."""

    def __init__(self, num_units: int, size: int) -> None:
        shape = (num_units + 1, num_units + 1, size)
        self.best = np.full(shape, math.inf)
        self.cut = np.zeros(shape, dtype=np.int32)
        self.following = np.zeros(shape, dtype=np.int32)
