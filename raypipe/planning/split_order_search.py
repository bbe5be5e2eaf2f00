"""Search for layouts of many workers in known orders with split backwards.

Orders of many workers take too long to search for (`own_time_search`), but their least seconds can be estimated as quickly, with the way
back of the last microbatch: it is long where workers are many. Annealing by that balances the workers; layouts that it passes on its way
are simulated, and the best ones improved.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from raypipe.planning.evaluator import Evaluation, better
from raypipe.planning.layout import Layout
from raypipe.planning.own_time_search import WEIGHT_SHARE, OwnTimeSearch
from raypipe.planning.problem import Devices

ORDERS = ("zb-h2", "zb-h1")
"""That which holds more activations first."""
_SIMULATED = 12.0  # Times the simulations where each one needs an order of its own.


class _Hop(NamedTuple):
    # Seconds of a message each way, and until the first byte comes back.
    forth_s: float
    back_s: float
    latency_s: float


@dataclass
class SplitOrderSearch(OwnTimeSearch):
    """Search for one problem, as `OwnTimeSearch`, in `ORDERS`."""

    _annealing_share: ClassVar[float] = 0.4
    _num_annealed: ClassVar[int] = 2
    _num_steps: ClassVar[int] = 8_000
    _temperature: ClassVar[float] = 0.01
    _to_the_best: ClassVar[int] = 200

    def _simulating_effort(self, num_workers: int) -> float:
        return self.effort * _SIMULATED

    @property
    def _sizes(self) -> range:
        return range(2, self.evaluator.problem.num_layers + 1)

    def _least_s(self, layout: Layout) -> float:
        least_s = super()._least_s(layout)
        return least_s if least_s == math.inf else max(least_s, self._way_back_s(layout))

    def _way_back_s(self, layout: Layout) -> float:
        """Return about the seconds until the last input gradient has come to each worker, and its weights' gradients are summed."""
        estimator, num_microbatches = self.evaluator.estimator, self.evaluator.problem.num_microbatches
        heads_s = estimator.heads_s(layout)
        stages = [estimator.stage(group, *ends) for group, ends in zip(layout.workers, itertools.pairwise(layout.cuts), strict=True)]
        hops = [self._hop(*ends) for ends in zip(itertools.pairwise(layout.workers), layout.cuts[1:], strict=False)]
        # All activations over each hop, then the last one to the end of the pipeline.
        behind_s = [heads_s[-1] - head_s for head_s in heads_s]
        end_s = longest_s = 0.0
        for number, hop in enumerate(hops):
            departed_s = heads_s[number] + stages[number].forward_s
            end_s = max(end_s, departed_s + num_microbatches * hop.forth_s + behind_s[number + 1])
        for number in reversed(range(len(stages))):
            forward_s, backward_s, sum_s = stages[number]
            input_grad_s = (1 - WEIGHT_SHARE) * backward_s
            if number < len(hops):
                hop = hops[number]
                end_s = max(end_s + hop.latency_s + hop.back_s, heads_s[number] + forward_s + num_microbatches * hop.back_s)
            end_s = max(end_s + input_grad_s, heads_s[number] + num_microbatches * (forward_s + input_grad_s))
            longest_s = max(longest_s, end_s + backward_s - input_grad_s + sum_s)
        return longest_s

    def _hop(self, workers: tuple[Devices, Devices], cut: int) -> _Hop:
        one, other = workers
        num_bytes = float(self.evaluator.problem.crossing_bytes[cut])
        forth, back = self.evaluator.estimator.channel(one, other), self.evaluator.estimator.channel(other, one)
        return _Hop(num_bytes * forth.s_per_byte, num_bytes * back.s_per_byte, back.latency_s)

    def _simulated(self, layout: Layout) -> Evaluation | None:
        best: Evaluation | None = None
        for order in ORDERS:
            best = better(best, self.evaluator.simulate(replace(layout, order=order)))
            if best is not None and not best.missing_bytes and not best.layout.recomputed:
                break  # The next order only holds fewer activations.
        return best

    def _times(self, layout: Layout) -> object:
        return layout.cuts, layout.workers

    def _different(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """Return the layouts with the least estimates, and those at which annealing gained something."""
        fitting = (layout for layout in dict.fromkeys(layouts) if self.least_s(layout) < math.inf)
        best = heapq.nsmallest(count // 4, fitting, key=self._rank)
        return [*dict.fromkeys((*best, *sorted(self._milestones, key=self._rank)))][:count]
