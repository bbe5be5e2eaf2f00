"""How many slots later updates stand, so that sums of gradients do not hold up what follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raypipe import stopping
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.schedule_registry import is_file, spec
from raypipe.schedules.ir import WeightRule
from raypipe.simulation.simulator import Timing

_SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NEARLY = 1.02  # Times the fastest update: each slot makes gradients later.
_NO_GAIN = 0.995
_LEAST_EXPOSED = 0.01  # Share of the time that devices wait for collectives.


def with_hidden_transfers(evaluator: LayoutEvaluator, evaluation: Evaluation | None, *, most_steps: int) -> Evaluation | None:
    """Return the layout with forwards ahead that hide its messages, and with updates as late as its sums take, unless that is worse."""
    return better(evaluation, with_late_updates(evaluator, with_forwards_ahead(evaluator, evaluation, most_steps=most_steps)))


def with_late_updates(evaluator: LayoutEvaluator, evaluation: Evaluation | None) -> Evaluation | None:
    """Return the layout whose updates stand as few slots later as make it nearly the fastest, within memory and limits on staleness.

    For orders whose weights change when they may (`live`). Where a rule fixes versions, updates are as late as it allows anyway.
    """
    if evaluation is None or is_file(evaluation.layout.order) or spec(evaluation.layout.order).weight_rule is not WeightRule.LIVE:
        return evaluation
    tried = {0: evaluation}

    def seconds(slots: int) -> float | None:
        later = evaluator.simulate(replace(evaluation.layout, late=slots))
        if later is None or later.missing_bytes > evaluation.missing_bytes:
            return None
        tried[slots] = later
        return later.timing.steady_update_s * later.more_updates

    chosen = evaluation
    with stopping.part():
        chosen = tried[fewest_slots(evaluation.timing, seconds, more_updates=evaluation.more_updates)]
    return chosen


def fewest_slots(timing: Timing, seconds: Callable[[int], float | None], *, more_updates: float = 1.0) -> int:
    """Return by how few slots later updates are nearly the fastest tried.

    Args:
        timing: The order as it is.
        seconds: Returns the seconds of an update with updates so many slots later, times the number of updates to the same loss if that
            counts, or `None` where that is refused.
        more_updates: Number of updates to the same loss of the order as it is.
    """
    exposed_s = sum(end_s - start_s for waits in timing.waits for message, _, start_s, end_s in waits if message < 0)
    if exposed_s <= _LEAST_EXPOSED * timing.makespan_s * len(timing.waits):
        return 0
    tried = {0: timing.steady_update_s * more_updates}
    without_gain = 0
    for slots in _SLOTS:
        found_s = seconds(slots)
        if found_s is None:
            break
        without_gain = 0 if found_s < _NO_GAIN * min(tried.values()) else without_gain + 1
        tried[slots] = found_s
        if without_gain == 2:
            break
    least_s = min(tried.values())
    return next(slots for slots, found_s in sorted(tried.items()) if found_s <= _NEARLY * least_s)
