"""Search for layouts in the order that is searched for by their own times (`own_times`).

Such an order comes close to its least: a worker begins when the first activation has come to it, works without a gap and sums its
gradients, while weight gradients fill what would be idle behind the last forwards. So layouts are annealed by this estimate, and the
best ones are simulated and improved. Layouts whose stages, messages and sums take equally long get one order, and one of them is
simulated for all.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from raypipe import stopping
from raypipe.planning import own_times
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.moves import Moves
from raypipe.planning.problem import Problem

ORDER = own_times.ORDERS[0]
_MOST_MICROBATCHES = 512  # Of all workers: an order of more takes long to search for.
_USUAL_MICROBATCHES = 128  # Of all workers: with more, fewer layouts are tried.
_NUM_SIMULATED = 12
_NUM_IMPROVED = 24  # Layouts that are simulated around the best ones.
_MILESTONE = 0.995  # Least part of the seconds of the layout kept before, for another one that annealing passes to be kept.
_POOL = 4
_SLACK = 1.03
_STAGE_WORK_S = 30e-6
WEIGHT_SHARE = 0.5  # About the part of a backward that computes the gradients of weights.


def most_workers(problem: Problem) -> int:
    """Return the workers up to which orders are searched for."""
    return _MOST_MICROBATCHES // problem.num_microbatches


@dataclass
class OwnTimeSearch:
    """Search for one problem.

    Attributes:
        evaluator: Judge of layouts.
        effort: Factor of the numbers of layouts that are tried.
    """

    evaluator: LayoutEvaluator
    effort: float = 1.0
    _annealing_share: ClassVar[float] = 1 / 3
    _num_annealed: ClassVar[int] = 24
    """Layouts from which annealing starts."""
    _num_steps: ClassVar[int] = 3_000
    """Of annealing, from each of them."""
    _temperature: ClassVar[float] = 0.05
    _to_the_best: ClassVar[int] = 0
    """Steps after which annealing goes on from the best layout; 0 for never."""
    _least: dict[Layout, float] = field(default_factory=dict, repr=False)
    _milestones: list[Layout] = field(default_factory=list, repr=False)
    """Layouts at which annealing had gained something."""

    def run(self, begin: Iterable[Layout], evaluated: list[Evaluation]) -> None:
        """Add simulated layouts, the best first, to those that were evaluated; of `begin`, those of one stage for each worker count."""
        starts = dict.fromkeys(self._plain(layout) for layout in begin if layout.has_estimate and layout.num_stages in self._sizes)
        moves = Moves(self.evaluator.estimator, (ORDER,), self.least_s)
        rng = random.Random(3)
        effort = self._simulating_effort(max((start.num_stages for start in starts), default=1))
        with stopping.part(share=self._annealing_share):
            for start in heapq.nsmallest(self._num_annealed, starts, key=self._rank):
                self._anneal(start, moves, rng, round(self._num_steps * self.effort))
        tried: set[object] = set()
        with stopping.part(share=1 / 2):
            for layout in self._different([*starts, *self._least], max(round(_NUM_SIMULATED * effort), 2)):
                self._simulate(layout, tried, evaluated)
        with stopping.part():
            self._improve(moves, rng, tried, evaluated, round(_NUM_IMPROVED * effort))

    def least_s(self, layout: Layout) -> float:
        """Return about the least seconds of any order of one stage for each worker; infinite where memory is short."""
        least_s = self._least.get(layout)
        if least_s is None:
            least_s = self._least[layout] = self._least_s(layout)
        return least_s

    def _least_s(self, layout: Layout) -> float:
        estimator, problem = self.evaluator.estimator, self.evaluator.problem
        stopping.spend(_STAGE_WORK_S * layout.num_stages)
        if estimator.missing_bytes(layout) > 0:
            return math.inf
        again, num_microbatches = estimator.recomputed(layout), problem.num_microbatches
        longest_s, heads_s = 0.0, estimator.heads_s(layout)
        links: dict[str, tuple[float, float]] = {}  # When each link begins, and its seconds for each microbatch.
        for stage, (group, head_s) in enumerate(zip(layout.workers, heads_s, strict=True)):
            forward_s, backward_s, sum_s = estimator.stage(group, layout.cuts[stage], layout.cuts[stage + 1])
            weight_grads_s = num_microbatches * WEIGHT_SHARE * backward_s
            backward_s += forward_s if stage in again else 0.0  # not times a truth value: it may be infinite
            longest_s = max(longest_s, head_s + num_microbatches * (forward_s + backward_s) + self._behind_s(sum_s, weight_grads_s))
            if stage + 1 == layout.num_stages:
                break
            num_bytes, behind = float(problem.crossing_bytes[layout.cuts[stage + 1]]), layout.workers[stage + 1]
            for channel in (estimator.channel(group, behind), estimator.channel(behind, group)):
                for link, s_per_byte in channel.loads:
                    begins_s, busy_s = links.get(link, (head_s + forward_s, 0.0))
                    links[link] = (begins_s, busy_s + num_bytes * s_per_byte)
        return max([longest_s, *(begins_s + num_microbatches * busy_s for begins_s, busy_s in links.values())])

    def _simulating_effort(self, num_workers: int) -> float:
        return self.effort * min(_USUAL_MICROBATCHES / (self.evaluator.problem.num_microbatches * num_workers), 1.0)

    @property
    def _sizes(self) -> range:
        """Numbers of workers of the layouts with which it begins."""
        return range(2, most_workers(self.evaluator.problem) + 1)

    def _behind_s(self, sum_s: float, weight_grads_s: float) -> float:
        """Return about the seconds of a stage's sum behind its last weight gradient."""
        return sum_s

    def _simulated(self, layout: Layout) -> Evaluation | None:
        return own_times.simulated(self.evaluator, layout)

    def _rank(self, layout: Layout) -> tuple[float, str]:
        return self.least_s(layout), str(layout)

    def _times(self, layout: Layout) -> object:
        own = own_times.timed(self.evaluator, layout)
        return own.cuts, tuple(map(len, own.workers)), own.times, own.hops_s, own.queues_s, own.sums_s

    def _plain(self, layout: Layout) -> Layout:
        return Layout(layout.cuts, layout.workers, ORDER)

    def _different(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """Return the layouts with the least estimates that differ in their times."""
        chosen: dict[object, Layout] = {}
        for layout in sorted(dict.fromkeys(layouts), key=self._rank):
            if self.least_s(layout) == math.inf or len(chosen) == count:
                break
            chosen.setdefault(self._times(layout), layout)
        return list(chosen.values())

    def _anneal(self, start: Layout, moves: Moves, rng: random.Random, num_steps: int) -> None:
        current, current_s = best, best_s = start, self.least_s(start)
        kept_s = math.inf
        for step in range(num_steps):
            if best_s < _MILESTONE * kept_s:
                self._milestones.append(best)
                kept_s = best_s
            if self._to_the_best and step % self._to_the_best == self._to_the_best - 1:
                current, current_s = best, best_s
            changed = moves.changed(current, rng)
            if changed is None:
                continue
            changed_s = self.least_s(changed)
            if changed_s <= current_s * (1 + self._temperature * (1 - step / num_steps) ** 2 * rng.expovariate(1.0)):
                current, current_s = changed, changed_s
                if current_s < best_s:
                    best, best_s = current, current_s

    def _simulate(self, layout: Layout, tried: set[object], evaluated: list[Evaluation]) -> None:
        tried.add(self._times(layout))
        if (evaluation := self._simulated(layout)) is not None:
            evaluated.append(evaluation)
            evaluated.sort(key=lambda each: each.rank)

    def _improve(self, moves: Moves, rng: random.Random, tried: set[object], evaluated: list[Evaluation], num_simulations: int) -> None:
        for _ in range(40 * num_simulations):
            if num_simulations <= 0 or not evaluated:
                break
            pool = evaluated[:_POOL]
            near = pool[min(int(rng.expovariate(1.0)), len(pool) - 1)].layout
            changed = moves.changed(self._plain(near), rng)
            if changed is None or self.least_s(changed) >= pool[-1].update_s * _SLACK or self._times(changed) in tried:
                continue
            num_simulations -= 1
            self._simulate(changed, tried, evaluated)
