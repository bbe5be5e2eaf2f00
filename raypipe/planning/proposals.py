"""Simulated proposals of the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from raypipe.planning.estimator import Estimator
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.layout import Layout
from raypipe.planning.partition import MOST_UNITS
from raypipe.planning.planners import AUTO, PLANNERS


def best_proposal(layouts: Callable[[Estimator], Iterator[Layout]], evaluator: LayoutEvaluator, schedule: str) -> Evaluation | None:
    """Return the best of what a planner proposes."""
    best: Evaluation | None = None
    for layout in layouts(evaluator.estimator):
        best = better(best, evaluator.simulate(layout if schedule == AUTO else replace(layout, order=schedule)))
    return best


def proposals(evaluator: LayoutEvaluator, schedule: str) -> Iterator[Evaluation]:
    """Yield each baseline's best proposal; with many devices, of the quick baselines alone."""
    few = evaluator.problem.num_devices <= MOST_UNITS
    for planner in PLANNERS:
        if planner.layouts is not None and (few or planner.quick):
            best = best_proposal(planner.layouts, evaluator, schedule)
            if best is not None:
                yield best
