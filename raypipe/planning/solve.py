"""The best layout that a planner finds for a problem."""

from __future__ import annotations

from raypipe.errors import PlanError
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.feasibility import check_possible
from raypipe.planning.planners import AUTO, find_planner
from raypipe.planning.proposals import best_proposal
from raypipe.planning.schedule_search import searched
from raypipe.planning.search import SearchBudget
from raypipe.schedule_registry import spec
from raypipe.units import size


def solve(evaluator: LayoutEvaluator, *, name: str = "raypipe", schedule: str = AUTO, budget: SearchBudget | None = None) -> Evaluation:
    """Return the best layout that a planner finds.

    Raises:
        UnknownNameError: There is no such planner or schedule.
        PlanError: Nothing fits into memory, or the planner has no plan.
    """
    planner = find_planner(name)
    if schedule != AUTO:
        spec(schedule)
    problem = evaluator.problem
    check_possible(problem)
    if planner.layouts is None:
        best = searched(evaluator, schedule, budget or SearchBudget.usual(problem.num_devices))
    else:
        best = best_proposal(planner.layouts, evaluator, schedule)
    if best is None and evaluator.schedules.too_stale:
        limits = problem.staleness
        raise PlanError(
            f"every plan with schedule {schedule!r} is staler than allowed ({limits}); use more microbatches, or allow "
            f"{limits.nearest(evaluator.schedules.too_stale)}"
        )
    if best is None:
        raise PlanError(
            f"planner {name!r} has no plan with schedule {schedule!r} for {problem.num_layers} layers, {problem.num_devices} devices and "
            f"{problem.num_microbatches} microbatches of {problem.microbatch_size} rows; try another schedule, or more layers or rows"
            + (f" (the first that was tried: {evaluator.schedules.refusals[0]})" if evaluator.schedules.refusals else "")
        )
    if best.missing_bytes:
        raise PlanError(
            f"the best plan of planner {name!r} lacks {size(round(best.missing_bytes))} of memory on its fullest device ({best.layout}); "
            "use smaller or more microbatches, more devices, or another planner"
        )
    return best
