"""Sums of gradients behind weight gradients: stages that are divided, and whose last weight gradients stand last (`passes.divide_stages`).

Sums of gradients between copies wait for a stage's last weight gradient, and nothing is left to compute meanwhile but the rest of one
backward. Where networks are slow, they hold up all devices. With the weight gradients of several microbatches at the end, part by part of a
stage, the sums of one part hide behind the weight gradients of the parts before it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from raypipe import stopping
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import Evaluation
from raypipe.planning.layout import Layout
from raypipe.planning.own_time_search import OwnTimeSearch
from raypipe.planning.problem import Problem

_WAYS = (("list", 0.5), ("list", 1.0), ("1f1b", 1.0), ("zb-h1", 0.5), ("zb-h2", 1.0))
"""Orders of one stage on each worker, and the part of the microbatches, of at most `_MOST_LATE`, whose weight gradients stand last."""
ORDERS = tuple(dict.fromkeys(order for order, _ in _WAYS))
_NUM_PARTS = 4
_MOST_PARTS = 16
_MOST_LATE = 32  # Microbatches to begin with: more rarely help, and hold their activations.
_NUM_TRIED = 2  # Ways to divide a layout that are tried on all, once all were tried on the first ones.
_NUM_FIRST = 4
_MOST_STEPS = 6
_NUM_AHEAD = 8  # Best layouts that are also tried with forwards ahead, of a usual number of microbatches.
_AHEAD_ORDER = "zb-h2"  # Tried besides the order of a layout: it hides messages with fewer forwards ahead than others.
_SLACK = 1.1  # Of estimates.
_LEAST_GAIN = 1.01  # Of twice as many parts.


@dataclass(frozen=True)
class Division:
    """How a layout's stages are divided.

    Attributes:
        order: Order that is divided.
        num_parts: Parts of each stage with copies, of which one with fewer layers has as many as layers.
        late: Microbatches whose weight gradients stand last.
    """

    order: str
    num_parts: int
    late: int

    def of(self, problem: Problem, layout: Layout) -> Layout:
        """Return the divided layout of one that has copies and one stage on each worker."""
        weight_s = problem.prefix_s[:, 2].mean(axis=0)
        counts: list[int] = []
        cuts: list[int] = []
        for group, (first, end) in zip(layout.workers, itertools.pairwise(layout.cuts), strict=True):
            counts.append(min(self.num_parts, end - first) if len(group) > 1 else 1)
            cuts += _equal_parts(weight_s[first : end + 1].tolist(), first, counts[-1])
        return Layout((*cuts, layout.cuts[-1]), layout.workers, self.order, divided=tuple(counts), late_weight_grads=self.late)

    def neighbors(self, num_microbatches: int) -> Iterator[Division]:
        """Yield other divisions of the same order."""
        for num_parts in (self.num_parts // 2, self.num_parts * 2):
            if 1 <= num_parts <= _MOST_PARTS:
                yield replace(self, num_parts=num_parts)
        for late in (self.late // 2, (self.late + num_microbatches + 1) // 2, min(self.late * 2, num_microbatches)):
            if late != self.late:
                yield replace(self, late=late)


def _equal_parts(seconds: list[float], first: int, count: int) -> list[int]:
    """Return the first layer of each of so many parts of a stage; `seconds` are those before each layer, and before the end."""
    # The least largest part (`balance.balanced_sizes`) takes longer to find, and updates were no shorter by it.
    size = len(seconds) - 1
    cuts = [0]
    for part in range(1, count):
        mark = seconds[0] + (seconds[-1] - seconds[0]) * part / count
        at = bisect_left(seconds, mark)
        cuts.append(min(max(at, cuts[-1] + 1), size - (count - part)))
    return [first + cut for cut in cuts]


@dataclass
class HiddenSumSearch(OwnTimeSearch):
    """Search for layouts with divided stages, for one problem.

    Attributes:
        limit_s: Seconds of an update that layouts must come near to be simulated.
        orders: Orders that are divided.
    """

    limit_s: float = math.inf
    orders: tuple[str, ...] = ORDERS
    _gains: dict[Division, int] = field(default_factory=dict, repr=False)
    _num_divided: int = field(default=0, repr=False)

    def best(self, begin: list[Layout]) -> Evaluation | None:
        """Return the best divided layout near some layouts of one stage for each worker; `None` where none of them has copies."""
        evaluated: list[Evaluation] = []
        self.run((layout for layout in begin if layout.has_copies and layout.has_estimate), evaluated)
        if not evaluated:
            return None
        best = climbed = self._climbed(evaluated[0])
        num_tried = round(_NUM_AHEAD * self._simulating_effort(len(climbed.layout.workers)))
        with stopping.part():
            for top in (climbed, *evaluated[1:])[:num_tried]:
                for order in sorted({top.layout.order, _AHEAD_ORDER}.intersection(self.orders)):
                    known = self.evaluator.simulate(replace(top.layout, order=order, recomputed=None))
                    hidden = with_forwards_ahead(self.evaluator, known, most_steps=_MOST_STEPS)
                    best = min((best, *filter(None, [hidden])), key=_rank)
        return best if best is climbed else self._climbed(best)

    def near(self, layout: Layout) -> Evaluation | None:
        """Return the best division of one layout, of each order with forwards ahead; `None` where it has no copies, or is divided."""
        if layout.divided or not layout.has_copies or not layout.has_estimate:
            return None
        of_orders: dict[str, Evaluation] = {}
        for division in self._divisions():
            evaluation = self.evaluator.simulate(division.of(self.evaluator.problem, layout))
            if evaluation is not None:
                of_orders[division.order] = min(of_orders.get(division.order, evaluation), evaluation, key=_rank)
        best: Evaluation | None = None
        with stopping.part():
            for evaluation in sorted(of_orders.values(), key=_rank):
                # First forwards ahead: while messages hold up all, no division seems better than none.
                hidden = with_forwards_ahead(self.evaluator, evaluation, most_steps=_MOST_STEPS) or evaluation
                best = min(filter(None, (best, self._climbed(hidden))), key=_rank)
        return best

    def _climbed(self, best: Evaluation) -> Evaluation:
        """Return the best division of the same order and workers, found step by step."""
        problem = self.evaluator.problem
        with stopping.part():
            for _ in range(_MOST_STEPS):
                divisions = division_of(best.layout).neighbors(problem.num_microbatches)
                layouts = [replace(division.of(problem, whole(best.layout)), ahead=best.layout.ahead) for division in divisions]
                found = min((best, *filter(None, map(self.evaluator.simulate, layouts))), key=_rank)
                if found is best:
                    break
                best = found
        return best

    @property
    def _sizes(self) -> range:
        return range(1, self.evaluator.problem.num_layers + 1)

    def _least_s(self, layout: Layout) -> float:
        return super()._least_s(layout) if layout.has_copies else math.inf

    def _behind_s(self, sum_s: float, weight_grads_s: float) -> float:
        # All weight gradients last, part by part: the sum begins behind those of one part, and lasts at least as long as that of the last.
        return max(sum_s / _NUM_PARTS, sum_s - weight_grads_s * (1 - 1 / _NUM_PARTS))

    def _simulated(self, layout: Layout) -> Evaluation | None:
        problem = self.evaluator.problem
        if self.least_s(layout) >= self.limit_s * _SLACK:
            return None
        tried = {division: self.evaluator.simulate(division.of(problem, layout)) for division in self._divisions()}
        found = {division: evaluation for division, evaluation in tried.items() if evaluation is not None}
        if not found:
            return None
        division = min(found, key=lambda each: found[each].rank)
        self._num_divided += 1
        self._gains[division] = self._gains.get(division, 0) + 1
        return found[division]

    def _divisions(self) -> list[Division]:
        num_microbatches = self.evaluator.problem.num_microbatches
        most = min(num_microbatches, _MOST_LATE)
        divisions = list(
            dict.fromkeys(Division(order, _NUM_PARTS, math.ceil(share * most)) for order, share in _WAYS if order in self.orders)
        )
        if self._num_divided < _NUM_FIRST:
            return divisions
        return sorted(divisions, key=lambda division: -self._gains.get(division, 0))[:_NUM_TRIED]

    def _plain(self, layout: Layout) -> Layout:
        return super()._plain(whole(layout))


def whole(layout: Layout) -> Layout:
    """Return a layout in the same order with one stage for each worker, which has one run of layers."""
    assert layout.worker_cuts is not None, "each worker has one stage, which may be divided"
    return Layout(layout.worker_cuts, layout.workers, layout.order)


def _rank(evaluation: Evaluation) -> tuple[float, float]:
    """Sort key: twice as many parts must gain something, since each Op takes time of its host that few topologies state."""
    return evaluation.missing_bytes, evaluation.loss_s * _LEAST_GAIN ** max(evaluation.layout.divided).bit_length()


def division_of(layout: Layout) -> Division:
    """Return how a layout's stages are divided."""
    return Division(layout.order, max(layout.divided), layout.late_weight_grads)
