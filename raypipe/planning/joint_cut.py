"""One cut of all branches, which levels the sums of the workers.

Branches that read each other both ways must be cut where they do: two stages cannot wait for each other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raypipe import stopping
from raypipe.planning.branch_placement import BranchPlacement, Layers, levels, work_s
from raypipe.planning.problem import Devices, Problem

_MOVE_WORK_S = 1e-6  # Of a move, for each worker.
_MOST_PAIRED = 64  # moves of single layers of which pairs are tried, too


@dataclass(frozen=True)
class JointCut:
    """Cuts of all branches that level the sums of the workers.

    Attributes:
        ends: For each branch, the end of each of its stages among its layers.
        slope: How much longer than the mean the last stage of a branch should be, and shorter the first. Where branches lie in opposite
            directions, short last stages shorten the wait for the first backward.
    """

    problem: Problem
    branches: tuple[Layers, ...]
    workers: tuple[Devices, ...]
    placement: BranchPlacement
    ends: tuple[tuple[int, ...], ...]
    slope: float = 0.0

    @classmethod
    def balanced(
        cls, problem: Problem, branches: Sequence[Layers], workers: tuple[Devices, ...], placement: BranchPlacement, *, slope: float = 0.0
    ) -> JointCut | None:
        """Return the cut that moves of single layers do not improve; `None` where each cut lets two stages wait for each other."""
        cut = cls(problem, tuple(branches), workers, placement, (), slope)
        first = next((each for each in (cut._even(), cut._at_levels()) if each is not None and each.order is not None), None)
        return None if first is None else first._improved()

    def _even(self) -> JointCut:
        return replace(self, ends=tuple(self._divided(branch, (len(layers),)) for branch, layers in enumerate(self.branches)))

    def _at_levels(self) -> JointCut | None:
        """Return a cut between all layers of a branch that change branch differently often; `None` where stages are too few."""
        of_layer = levels(self.problem, self.branches)
        ends: list[tuple[int, ...]] = []
        for branch, layers in enumerate(self.branches):
            forced = [at for at in range(1, len(layers)) if of_layer[layers[at - 1]] != of_layer[layers[at]]]
            if len(forced) >= len(self.placement.workers[branch]):
                return None
            ends.append(self._divided(branch, (*forced, len(layers))))
        return replace(self, ends=tuple(ends))

    def _divided(self, branch: int, ends: tuple[int, ...]) -> tuple[int, ...]:
        """Divide the longest stages of a branch until there are as many as placed."""
        seconds = [work_s(self.problem, (layer,)) for layer in self.branches[branch]]
        num_stages = len(self.placement.workers[branch])
        stages = [(end, first) for first, end in itertools.pairwise((0, *ends))]
        if len(ends) == 1:
            return _in_parts(seconds, _shares(num_stages, self.slope))
        while len(stages) < num_stages:
            end, first = max((each for each in stages if each[0] - each[1] > 1), key=lambda each: sum(seconds[each[1] : each[0]]))
            middle = first + _in_parts(seconds[first:end], _shares(2, 0.0))[0]
            stages.remove((end, first))
            stages += [(middle, first), (end, middle)]
        return tuple(sorted(end for end, _ in stages))

    @cached_property
    def stages(self) -> list[tuple[Layers, int]]:
        """The layers and the worker of each stage, branch by branch."""
        return [
            (layers[first:end], worker)
            for layers, ends, workers in zip(self.branches, self.ends, self.placement.workers, strict=True)
            for (first, end), worker in zip(itertools.pairwise((0, *ends)), workers, strict=True)
        ]

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The stages in topological order, those of few stages before them first; `None` where two wait for each other."""
        stage_of = {layer: stage for stage, (layers, _) in enumerate(self.stages) for layer in layers}
        edges = {(stage_of[producer], stage_of[consumer]) for producer, consumer in self.problem.edges}
        edges = {(source, target) for source, target in edges if source != target}
        left = [sum(target == stage for _, target in edges) for stage in range(len(self.stages))]
        depths = [0] * len(left)
        ready = [(0, stage) for stage, count in enumerate(left) if not count]
        ordered: list[int] = []
        while ready:
            _, stage = heapq.heappop(ready)
            ordered.append(stage)
            for source, target in edges:
                if source == stage:
                    left[target] -= 1
                    depths[target] = max(depths[target], depths[stage] + 1)
                    if not left[target]:
                        heapq.heappush(ready, (depths[target], target))
        return tuple(ordered) if len(ordered) == len(left) else None

    @cached_property
    def _seconds(self) -> list[list[float]]:
        """Seconds of each layer on each worker."""
        layer_s = self.problem.layer_s.sum(axis=1)
        fixed_s = layer_s * self.problem.fixed_share
        return [
            np.maximum.reduce([factor.seconds(layer_s[kind], fixed_s[kind]) for kind, factor in self.problem.factors(group)]).tolist()
            for group in self.workers
        ]

    def _improved(self) -> JointCut:
        """Return the cut that no move improves: the longest worker counts, then the next, then how far stages are from their shares."""
        best, loads = self, _Loads.of(self)
        while True:
            moves_left = list(best._moves())
            stopping.spend(_MOVE_WORK_S * len(moves_left) * len(self.workers))
            candidates = sorted((loads.rank_behind(moves), moves) for moves in moves_left)
            for rank, moves in candidates:
                if rank >= loads.rank_behind(()):
                    return best
                moved = best._moved(moves)
                if moved.order is not None:
                    best, loads = moved, _Loads.of(moved)
                    break
            else:
                return best

    def _moves(self) -> Iterator[tuple[_Move, ...]]:
        """Yield the moves of a layer of one branch, or of a layer each of two branches, to a neighboring stage."""
        singles = [
            _Move(branch, at, step)
            for branch, ends in enumerate(self.ends)
            for at, end in enumerate(ends[:-1])
            for step in (-1, 1)
            if (ends[at - 1] if at else 0) < end + step < ends[at + 1]
        ]
        yield from ((move,) for move in singles)
        if len(singles) <= _MOST_PAIRED:
            yield from ((one, other) for one, other in itertools.combinations(singles, 2) if one.branch != other.branch)

    def _moved(self, moves: tuple[_Move, ...]) -> JointCut:
        ends = [list(each) for each in self.ends]
        for branch, at, step in moves:
            ends[branch][at] += step
        moved = replace(self, ends=tuple(map(tuple, ends)))
        moved.__dict__["_seconds"] = self._seconds  # the same for all
        return moved


class _Move(NamedTuple):
    """The end of a stage moves by one layer."""

    branch: int
    at: int
    step: int


@dataclass(frozen=True)
class _Loads:
    """The seconds of a microbatch on each worker, and of each stage of each branch beyond its share."""

    cut: JointCut
    of_worker: tuple[float, ...]
    beyond: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, cut: JointCut) -> _Loads:
        of_worker = [0.0] * len(cut.workers)
        of_stage: list[float] = []
        for layers, worker in cut.stages:
            of_stage.append(sum(cut._seconds[worker][layer] for layer in layers))
            of_worker[worker] += of_stage[-1]
        beyond: list[tuple[float, ...]] = []
        for ends in cut.ends:
            own, of_stage = of_stage[: len(ends)], of_stage[len(ends) :]
            shares = _shares(len(ends), cut.slope)
            beyond.append(tuple(seconds - sum(own) * share for seconds, share in zip(own, shares, strict=True)))
        return cls(cut, tuple(of_worker), tuple(beyond))

    def rank_behind(self, moves: tuple[_Move, ...]) -> tuple[list[float], float]:
        """Return how good a cut is behind moves in different branches; less is better."""
        loads, squares = list(self.of_worker), sum(seconds**2 for of_branch in self.beyond for seconds in of_branch)
        for branch, at, step in moves:
            end = self.cut.ends[branch][at]
            layer = self.cut.branches[branch][end if step > 0 else end - 1]
            for stage, sign in ((at, step), (at + 1, -step)):
                worker = self.cut.placement.workers[branch][stage]
                change = sign * self.cut._seconds[worker][layer]
                loads[worker] += change
                squares += change * (2 * self.beyond[branch][stage] + change)
        return [float(f"{load:.6g}") for load in sorted(loads, reverse=True)], float(f"{squares:.6g}")


def _shares(num_stages: int, slope: float) -> list[float]:
    """Return the share of a branch that each of its stages should have."""
    return [(1 + slope * (2 * stage / max(num_stages - 1, 1) - 1)) / num_stages for stage in range(num_stages)]


def _in_parts(seconds: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """Return the ends of parts, at least one layer each, that take about these shares of the time."""
    done = list(itertools.accumulate(seconds, initial=0.0))
    ends: list[int] = []
    for part, share in enumerate(itertools.accumulate(shares[:-1]), start=1):
        least, most = (ends[-1] if ends else 0) + 1, len(seconds) - (len(shares) - part)
        mark = done[-1] * share
        ends.append(min(range(least, most + 1), key=lambda at: (abs(done[at] - mark), at)))
    return (*ends, len(seconds))
