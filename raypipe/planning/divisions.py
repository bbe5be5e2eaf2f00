"""Divisions of the rows of an update into microbatches."""

from __future__ import annotations

import math
from dataclasses import replace

from raypipe.errors import PlanError
from raypipe.planning.evaluator import LayoutEvaluator, OnEvaluated, ignore
from raypipe.planning.planners import AUTO
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve

_MOST_DIVISIONS = 8
_MICROBATCHES_PER_DEVICE = 16


def divided(batch_size: int, *, most_microbatches: int, most: int = _MOST_DIVISIONS) -> list[tuple[int, int]]:
    """Return even divisions (microbatches, rows of each) of an update, fewest microbatches first.

    With more than `most` divisions, neighbors are left out evenly.
    """
    small = [count for count in range(1, math.isqrt(batch_size) + 1) if batch_size % count == 0]
    counts = sorted({*small, *(batch_size // count for count in small)})
    divisions = [(count, batch_size // count) for count in counts if count <= most_microbatches]
    if len(divisions) <= most:
        return divisions
    return [divisions[round(at * (len(divisions) - 1) / (most - 1))] for at in range(most)]


def best_division(
    problem: Problem, *, name: str = "raypipe", schedule: str = AUTO, budget: SearchBudget | None = None, on_evaluated: OnEvaluated = ignore
) -> Problem:
    """Return the problem with the division of its rows that a quick search finds best.

    A row costs the same in microbatches of any size, besides the overheads per microbatch. Each division gets a fifth of the budget.

    Raises:
        PlanError: No division has a plan; the message is the last division's.
    """
    budget = budget or SearchBudget.usual(problem.num_devices)
    quick = replace(budget, num_estimates=max(budget.num_estimates // 5, 1), num_simulations=max(budget.num_simulations // 5, 4))
    best: tuple[tuple[float, float], Problem] | None = None
    failure: PlanError | None = None
    batch_size = problem.num_microbatches * problem.microbatch_size
    for num_microbatches, microbatch_size in divided(batch_size, most_microbatches=_MICROBATCHES_PER_DEVICE * problem.num_devices):
        candidate = replace(problem, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        try:
            evaluation = solve(LayoutEvaluator(candidate, on_evaluated=on_evaluated), name=name, schedule=schedule, budget=quick)
        except PlanError as error:
            failure = error
            continue
        if best is None or evaluation.rank < best[0]:
            best = (evaluation.rank, candidate)
    if best is None:
        assert failure is not None
        raise failure
    return best[1]
