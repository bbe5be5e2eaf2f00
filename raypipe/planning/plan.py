"""From a profile and a topology to a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.errors import PlanError
from raypipe.planning.evaluator import Evaluation, OnEvaluated, ignore
from raypipe.planning.extrapolation import evaluator_of
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.planners import AUTO
from raypipe.planning.problem import Problem
from raypipe.planning.schedule_bound import ScheduleBound
from raypipe.planning.schedule_search import asynchronous_orders
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import best_division, solve
from raypipe.stopping import SearchStopped, Stop, searching


def plan(
    profile: ModelProfile | str | os.PathLike[str],
    topology: ClusterTopology | str | os.PathLike[str],
    num_microbatches: int = 16,
    *,
    microbatch_size: int | None = None,
    batch_size: int | None = None,
    planner: str = "raypipe",
    schedule: str = AUTO,
    max_staleness: int | None = None,
    max_mismatch: int | None = None,
    max_mean_staleness: float | None = None,
    optimizer: str | None = None,
    synchronous_share: float = 0.0,
    updates_per_window: int = 10,
    recompute: bool = True,
    effort: float = 1.0,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_evaluated: OnEvaluated = ignore,
) -> Plan:
    """Choose stages, replication, devices and schedule for a model on a cluster.

    Args:
        profile: Costs of the model's layers, or the path of their file.
        topology: Cluster, or the path of its file.
        num_microbatches: Number of microbatches of one update; with `batch_size` the planner chooses it.
        microbatch_size: Rows of a microbatch; the profile's by default.
        batch_size: Rows of one update, which the planner divides into microbatches.
        planner: Name of the planner, as `raypipe plan --help` lists them.
        schedule: Name of the schedule; `auto` to choose.
        max_staleness: Most updates between the weights of a forward and those that its gradient changes; `None` for no limit on a
            named schedule, and for synchronous schedules only where the schedule is chosen.
        max_mismatch: Most weight versions between the forward and the backward of a microbatch; `None` for no limit.
        max_mean_staleness: Limit on the staleness averaged over microbatches and stages; `None` for no limit.
        optimizer: Name of the optimizer for whose seconds to the same loss plans are compared: late gradients cost it updates, as
            measured (`raypipe.planning.staleness_cost`); `None` to compare seconds of an update.
        synchronous_share: Share of the run's updates, at its start, behind each of which the pipeline drains; counts with an `optimizer`.
        updates_per_window: Number of updates between two drains of the pipeline, for schedules whose updates overlap.
        recompute: Whether forwards may run again where memory is short.
        effort: Effort of the search, as a multiple of the usual one.
        time_limit_s: Seconds after which the best plan so far is returned; where none fits yet, the first that does.
        should_stop: Called often; once it returns True, the best plan so far is returned.
        on_evaluated: Called with every layout that is simulated.

    Raises:
        UnknownNameError: There is no such planner or schedule.
        PlanError: Nothing fits into memory, or the planner has no plan; `NoPlanYetError` where it was stopped too early.
        FormatError: A file cannot be read.
    """
    if batch_size is not None and microbatch_size is not None:
        raise PlanError("give either batch_size or microbatch_size: the planner divides a batch into microbatches")
    model = profile if isinstance(profile, ModelProfile) else ModelProfile.load(profile)
    problem = Problem(
        model,
        topology if isinstance(topology, ClusterTopology) else ClusterTopology.load(topology),
        num_microbatches if batch_size is None else 1,
        next(rows for rows in (batch_size, microbatch_size, model.microbatch_size) if rows is not None),
        recompute=recompute,
        max_staleness=max_staleness,
        max_mismatch=max_mismatch,
        max_mean_staleness=max_mean_staleness,
        optimizer=optimizer,
        synchronous_share=synchronous_share,
        updates_per_window=updates_per_window,
    )
    budget = SearchBudget.usual(problem, effort=effort)
    stop = Stop.after(time_limit_s, should_stop)
    known: Evaluation | None = None
    if batch_size is not None:
        with searching(stop):
            problem, known = best_division(problem, name=planner, schedule=schedule, budget=budget, on_evaluated=on_evaluated)
    return plan_problem(problem, name=planner, schedule=schedule, budget=budget, on_evaluated=on_evaluated, stop=stop, known=known)


def plan_problem(
    problem: Problem,
    *,
    name: str = "raypipe",
    schedule: str = AUTO,
    budget: SearchBudget | None = None,
    on_evaluated: OnEvaluated = ignore,
    stop: Stop | None = None,
    known: Evaluation | None = None,
) -> Plan:
    """Plan a problem, at least as well as the layout `known`; `stop` says when the search ends. Arguments and errors as for `plan`."""
    evaluator = evaluator_of(problem, on_evaluated=on_evaluated)
    stop = stop or Stop()
    with searching(stop):
        best = solve(evaluator, name=name, schedule=schedule, budget=budget, known=known)
    least_s, reason = bound(problem, schedule)
    least_one_run_s = least_bundled_s = None
    if not asynchronous_orders(problem, schedule):
        with suppress(SearchStopped), searching(stop):
            of_schedules = ScheduleBound(problem, least_s)
            least_one_run_s = of_schedules.one_run_s
            least_bundled_s = of_schedules.bundled_s
    return evaluator.plan(
        best,
        planner=name,
        lower_bound_s=least_s,
        lower_bound_reason=reason,
        lower_bound_one_run_s=least_one_run_s,
        lower_bound_bundled_s=least_bundled_s,
    )


def bound(problem: Problem, schedule: str) -> tuple[float, str]:
    """Return the seconds of an update that no plan beats, and why; where updates may overlap, their part of one long update."""
    count = problem.updates_per_window if asynchronous_orders(problem, schedule) else 1
    found = plan_bound(problem.of_length(problem.num_microbatches * count))
    return found.update_s / count, found.reason
