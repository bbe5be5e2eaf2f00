"""Evaluation of long updates by two short ones: once the pipeline is full, each further microbatch takes as long.

Only the best layouts are simulated as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import ScheduleCache

_GAIN = 2  # Least factor by which two short updates must be shorter than the long one.
# Least microbatches per device by which the two short updates differ; the shorter one has twice as many, enough to fill any schedule.
_FULL = 2
_MOST_KEPT = 4


def short_lengths(num_microbatches: int, num_devices: int) -> tuple[int, int] | None:
    """Return the microbatches of two short updates that stand for a long one; `None` where that saves little.

    Schedules need multiples of their stages, so divisors of the long update up to twice the devices divide the short ones.
    """
    divisors = (number for number in range(1, 2 * num_devices + 1) if num_microbatches % number == 0)
    period = math.lcm(*divisors)
    unit = period * math.ceil(_FULL * num_devices / period)
    fewer = num_microbatches % unit + 2 * unit
    more = fewer + unit
    return (fewer, more) if _GAIN * (fewer + more) <= num_microbatches else None


@dataclass
class ShortEvaluator(LayoutEvaluator):
    """Evaluates layouts by updates of two `lengths` in microbatches, and keeps the `best` of each schedule."""

    lengths: tuple[int, int] = (1, 2)
    best: dict[str, list[Evaluation]] = field(default_factory=dict, repr=False)
    _parts: tuple[LayoutEvaluator, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check = self.schedules.check
        self._parts = tuple(
            LayoutEvaluator(replace(self.problem, num_microbatches=length), ScheduleCache(check)) for length in self.lengths
        )

    @classmethod
    def of(cls, evaluator: LayoutEvaluator) -> ShortEvaluator | None:
        """Return one for the same problem; `None` where it saves little or staleness is limited."""
        problem = evaluator.problem
        lengths = short_lengths(problem.num_microbatches, problem.num_devices)
        if lengths is None or problem.staleness:
            return None
        schedules = ScheduleCache(evaluator.schedules.check, refusals=evaluator.schedules.refusals)
        return cls(problem, schedules, evaluator.on_evaluated, poll=evaluator.poll, lengths=lengths)

    def simulate_exactly(self, layout: Layout) -> Evaluation | None:
        """Extrapolate a layout from two short updates; see `LayoutEvaluator`."""
        fewer, more = (part.simulate_exactly(layout) for part in self._parts)
        if fewer is None or more is None:
            refusals = self.schedules.refusals
            refusals += [text for part in self._parts for text in part.schedules.refusals[:1] if text not in refusals]
            return None
        times = (self.problem.num_microbatches - self.lengths[1]) / (self.lengths[1] - self.lengths[0])

        def on_the_line(short: float, long: float) -> float:
            return long + times * (long - short)

        missing_bytes = self.missing_bytes(
            layout, lambda: list(map(on_the_line, fewer.timing.peak_memory_bytes, more.timing.peak_memory_bytes))
        )
        evaluation = replace(more, missing_bytes=missing_bytes, extrapolated_s=on_the_line(fewer.update_s, more.update_s))
        of_order = self.best.setdefault(layout.order, [])
        if all(kept.layout != layout for kept in of_order):
            of_order.append(evaluation)
            of_order.sort(key=lambda one: one.rank)
            del of_order[_MOST_KEPT:]
        return self.note(evaluation)

    def decided(self, extrapolated: Evaluation | None, evaluator: LayoutEvaluator) -> Evaluation | None:
        """Return the best of a layout and those kept of its schedule, simulated as whole updates."""
        if extrapolated is None:
            return None
        best: Evaluation | None = None
        alike = (kept.layout for kept in (extrapolated, *self.best[extrapolated.layout.order]))
        for layout in dict.fromkeys(replace(layout, recomputed=None) for layout in alike):
            best = better(best, evaluator.simulate(layout))
        return best
