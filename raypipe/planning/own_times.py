"""Orders that are searched for by the times of the stages that a layout has."""

from __future__ import annotations

import itertools
from dataclasses import replace

from raypipe.planning.branches import stage_times
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.schedules.families import zero_bubble_auto
from raypipe.simulation.plan_cost import crossing_bytes

ORDERS = (zero_bubble_auto.SPEC.name,)


def with_own_times(evaluator: LayoutEvaluator, evaluation: Evaluation | None) -> Evaluation | None:
    """Return a layout with its order searched for by the times of its stages and messages, unless that is worse than by equal times.

    The search takes up to seconds: layouts are compared in the order for equal times, and only the best one gets its own.
    """
    if evaluation is None or evaluation.layout.order not in ORDERS:
        return evaluation
    problem, layout = evaluator.problem, evaluation.layout
    cut, recomputed = layout.cut(problem), layout.recomputed or ()
    times = tuple(
        stage_times(problem, group, layers, recomputed=stage in recomputed, split=True)
        for stage, (group, layers) in enumerate(zip(layout.workers, cut.stages, strict=True))
    )
    channels = [evaluator.estimator.channel(*groups) for groups in itertools.pairwise(layout.workers)]
    num_bytes = crossing_bytes(problem.profile, cut)
    hops_s = [
        channel.latency_s + channel.s_per_byte * problem.scale * num_bytes.get((stage, stage + 1), 0.0)
        for stage, channel in enumerate(channels)
    ]
    own = replace(layout, times=times, latency_s=max(hops_s, default=0.0))
    return better(evaluation, evaluator.simulate(own))
