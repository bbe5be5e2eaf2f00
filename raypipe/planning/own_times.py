"""Orders that are searched for by the times of the stages that a layout has."""

from __future__ import annotations

import itertools
from dataclasses import replace

from raypipe import stopping
from raypipe.planning.branches import stage_times
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.layout import Layout
from raypipe.schedules.families import zero_bubble_auto
from raypipe.simulation.plan_cost import crossing_bytes

ORDERS = (zero_bubble_auto.SPEC.name,)
_ROOMS = (None, 3, 2)
"""Activations that a worker may hold, over the number of workers: slow messages take more; `None` for all microbatches."""
_MOST_IN_EACH_ROOM = 128  # Microbatches of all workers: an order of more takes long to search for, and the first room that fits is enough.
_ORDER_WORK_S = 0.2e-3, 4e-6  # Of the search for an order, for each microbatch of each worker, and for each pair of these;
_MOST_ORDER_WORK_S = 2e-3  # but no more than so many for each one.


def with_own_times(evaluator: LayoutEvaluator, evaluation: Evaluation | None) -> Evaluation | None:
    """Return a layout with its order searched for by the present times of its stages and messages, unless the order that it has is better.

    The search takes a tenth of a second on eight devices, and seconds on many.
    """
    if evaluation is None or evaluation.layout.order not in ORDERS:
        return evaluation
    return better(evaluation, simulated(evaluator, evaluation.layout))


def simulated(evaluator: LayoutEvaluator, layout: Layout) -> Evaluation | None:
    """Return a layout of one stage for each worker in the best of the orders found for its own times."""
    own, num_microbatches = timed(evaluator, layout), evaluator.problem.num_microbatches
    size = num_microbatches * len(own.workers)
    best: Evaluation | None = None
    for held in dict.fromkeys(num_microbatches if room is None else min(room * len(own.workers), num_microbatches) for room in _ROOMS):
        if best is not None and not best.missing_bytes and size > _MOST_IN_EACH_ROOM:
            break
        stopping.spend(size * min(_ORDER_WORK_S[0] + _ORDER_WORK_S[1] * size, _MOST_ORDER_WORK_S))
        best = better(best, evaluator.simulate(replace(own, max_in_flight=held)))
    return best


def timed(evaluator: LayoutEvaluator, layout: Layout) -> Layout:
    """Return a layout of one stage for each worker with the times of its stages, messages and sums, by which its order is searched for."""
    problem, cut = evaluator.problem, layout.cut(evaluator.problem)
    recomputed = evaluator.estimator.recomputed(layout) if layout.has_estimate else layout.recomputed or ()
    times = tuple(
        stage_times(problem, group, layers, recomputed=stage in recomputed, split=True)
        for stage, (group, layers) in enumerate(zip(layout.workers, cut.stages, strict=True))
    )
    num_bytes = crossing_bytes(problem.profile, cut)
    hops_s: list[float] = []
    queues_s: list[float] = []
    for stage, (one, other) in enumerate(itertools.pairwise(layout.workers)):
        channels = evaluator.estimator.channel(one, other), evaluator.estimator.channel(other, one)
        scaled = problem.scale * num_bytes.get((stage, stage + 1), 0.0)
        hops_s.append(max(channel.latency_s + channel.s_per_byte * scaled for channel in channels))
        queues_s.append(max(channel.s_per_byte * scaled for channel in channels))
    sums_s: tuple[float, ...] = ()
    if layout.has_copies and layout.has_estimate:
        alone = [problem.layers_sum_s(group, *ends) for group, ends in zip(layout.workers, itertools.pairwise(layout.cuts), strict=True)]
        ends = zip(itertools.pairwise(layout.cuts), alone, times, strict=True)
        sums_s = tuple(
            problem.late_sums.late_of(first, end, sum_s, of_stage.weight_grad_s) if sum_s else 0.0 for (first, end), sum_s, of_stage in ends
        )
    return replace(layout, order=ORDERS[0], times=times, hops_s=tuple(hops_s), queues_s=tuple(queues_s), sums_s=sums_s, ahead=())
