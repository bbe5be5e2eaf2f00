"""Evaluation of long updates by two short ones: once the pipeline is full, each further microbatch takes as long.

On many devices, the devices of a worker count as one, too. Only the best layouts are simulated as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, OnEvaluated, better, ignore
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import ScheduleCache
from raypipe.planning.merged import MergedEvaluator, can_merge
from raypipe.planning.problem import Problem

_MOST_WHOLE = 1_024  # Microbatches x devices up to which the devices of a worker are simulated one by one.
_GAIN = 2  # Least factor by which two short updates must be shorter than the long one.
_GAIN_OF_MERGED = 1.5  # The same on many devices, where each simulation takes long.
# Least microbatches per device by which the two short updates differ; the shorter one has twice as many, enough to fill any schedule.
_FULL = 2
_LEAST_UNIT = 8  # The same, however few the devices: times of few devices repeat after more microbatches than they are.
_MOST_KEPT = 4
MOST_EXACT = 32_768  # Microbatches x devices up to which the last layouts are simulated as whole updates, device by device.
MOST_SIMULATED = 4_096  # Microbatches x devices up to which many layouts are simulated as whole updates in the end.


def short_lengths(num_microbatches: int, num_devices: int, *, gain: float = _GAIN, late: int = 0) -> tuple[int, int] | None:
    """Return the microbatches of two short updates that stand for a long one; `None` where that saves little.

    Schedules need multiples of their stages, so divisors of the long update up to twice the devices divide the short ones.

    Args:
        num_microbatches: Of the long update.
        num_devices: Devices of the pipeline, with one stage each.
        gain: The least factor by which the short ones together are shorter.
        late: Microbatches whose weight gradients stand last; the short updates are longer by about as many.
    """
    divisors = (number for number in range(1, 2 * num_devices + 1) if num_microbatches % number == 0)
    period = math.lcm(*divisors)
    unit = period * math.ceil(max(_FULL * num_devices, _LEAST_UNIT) / period)
    fewer = num_microbatches % unit + (2 + math.ceil(late / unit)) * unit
    more = fewer + unit
    return (fewer, more) if gain * (fewer + more) <= num_microbatches else None


def evaluator_of(problem: Problem, schedules: ScheduleCache | None = None, *, on_evaluated: OnEvaluated = ignore) -> LayoutEvaluator:
    """Return the evaluator whose word is final: by whole updates on all devices, unless that takes many seconds."""
    whole = LayoutEvaluator(problem, schedules or ScheduleCache(), on_evaluated)
    if problem.num_microbatches * min(problem.num_devices, problem.num_layers * problem.microbatch_size) <= MOST_EXACT:
        return whole
    return ShortEvaluator.of(whole) or whole


@dataclass
class ShortEvaluator(LayoutEvaluator):
    """Evaluates layouts by updates of two `lengths` in microbatches, and keeps the `best` of each order, with divided stages and without.

    With `merges`, devices of a worker count as one.
    """

    merges: bool = False
    best: dict[tuple[str, bool], list[Evaluation]] = field(default_factory=dict, repr=False)
    _parts: dict[int, LayoutEvaluator] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, evaluator: LayoutEvaluator) -> ShortEvaluator | None:
        """Return one for the same problem; `None` where it saves little or staleness is limited."""
        problem = evaluator.problem
        merges = problem.num_microbatches * problem.num_devices > _MOST_WHOLE and can_merge(problem)
        saves = merges or short_lengths(problem.num_microbatches, problem.num_devices) is not None
        if not saves or problem.staleness:
            return None
        return cls(problem, evaluator.schedules, evaluator.on_evaluated, merges=merges)

    def lengths(self, layout: Layout) -> tuple[int, int] | None:
        """Return the microbatches of the two updates that stand for the whole one; `None` where it is simulated."""
        gain = _GAIN_OF_MERGED if self.merges else _GAIN
        return short_lengths(self.problem.num_microbatches, len(layout.workers), gain=gain, late=layout.late_weight_grads)

    def simulate_exactly(self, layout: Layout) -> Evaluation | None:
        """Extrapolate a layout from two short updates; see `LayoutEvaluator`."""
        evaluation = self._extrapolated(layout, self.lengths(layout))
        if evaluation is None:
            return None
        alike = self.best.setdefault(_group(layout), [])
        if all(kept.layout != layout for kept in alike):
            alike.append(evaluation)
            alike.sort(key=lambda one: one.rank)
            del alike[_MOST_KEPT:]
        return self.note(evaluation)

    def _extrapolated(self, layout: Layout, lengths: tuple[int, int] | None) -> Evaluation | None:
        num_microbatches = self.problem.num_microbatches
        if lengths is None:
            return self._part(num_microbatches, layout)
        fewer, more = (self._part(length, layout) for length in lengths)
        if fewer is None or more is None:
            return None
        times = (num_microbatches - lengths[1]) / (lengths[1] - lengths[0])

        def on_the_line(short: float, long: float) -> float:
            return long + times * (long - short)

        lacking_bytes = self.lacking_bytes(
            layout, lambda: list(map(on_the_line, fewer.timing.peak_memory_bytes, more.timing.peak_memory_bytes))
        )
        evaluation = replace(more, lacking_bytes=lacking_bytes, extrapolated_s=on_the_line(fewer.update_s, more.update_s))
        # Of a longer update, more microbatches are on time: the delays of all of them together are on a line, too.
        delays = on_the_line(fewer.mean_delay * lengths[0], more.mean_delay * lengths[1])
        return self.charged(evaluation, lambda: delays / num_microbatches)

    def _part(self, num_microbatches: int, layout: Layout) -> Evaluation | None:
        part = self._parts.get(num_microbatches)
        if part is None:
            make = MergedEvaluator if self.merges else LayoutEvaluator
            whole = num_microbatches == self.problem.num_microbatches
            schedules = self.schedules if whole else ScheduleCache(self.schedules.check)
            part = make(self.problem if whole else self.problem.of_length(num_microbatches), schedules, counts=False)
            self._parts[num_microbatches] = part
        evaluation = part.simulate_exactly(layout)
        if part.schedules is not self.schedules:
            refusals = self.schedules.refusals
            refusals += [text for text in part.schedules.refusals[:1] if text not in refusals]
            self.schedules.unlinked = part.schedules.unlinked or self.schedules.unlinked
        return evaluation

    def decided(self, extrapolated: Evaluation | None, evaluator: LayoutEvaluator) -> Evaluation | None:
        """Return the best of a layout and those kept that are like it, simulated as whole updates."""
        if extrapolated is None:
            return None
        best: Evaluation | None = None
        large = self.problem.num_microbatches * self.problem.num_devices > MOST_SIMULATED
        kept = self.best[_group(extrapolated.layout)][: 1 if large else None]
        alike = (one.layout for one in (extrapolated, *kept))
        for layout in dict.fromkeys(replace(layout, recomputed=None) for layout in alike):
            best = better(best, evaluator.simulate(layout))
        return best


def _group(layout: Layout) -> tuple[str, bool]:
    return layout.order, bool(layout.divided)
