"""raypipe's own planner: local search for one stage per worker, then all other schedules on its best workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, zip_longest

from raypipe.planning import chunks
from raypipe.planning.device_order import canonical
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.extrapolation import ShortEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.partition import MOST_UNITS
from raypipe.planning.planners import AUTO, proposals
from raypipe.planning.problem import Problem
from raypipe.planning.search import LayoutSearch, SearchBudget
from raypipe.schedule_registry import is_file, overlaps
from raypipe.schedules.families import branch_aware

# Schedules of one stage per worker that `auto` tries besides those that the local search chooses from.
ONE_STAGE_ORDERS = ("gpipe", "zb-h1", "zb-h2")
_MARGIN = 1.02
_NUM_BRANCHED = 4  # Most workers on which branches are placed, each in many ways.
_SLACK = 1.25  # Most times that schedules with a split backward are faster than estimated.


def searched(evaluator: LayoutEvaluator, schedule: str, budget: SearchBudget) -> Evaluation | None:
    """Return the best layout of raypipe's own search, which never is slower than a baseline.

    Devices are numbered independently of their names, so that equal clusters get equal plans.
    """
    sorted_problem, numbers = canonical(evaluator.problem)
    sorted_evaluator = LayoutEvaluator(sorted_problem, evaluator.schedules, evaluator.on_evaluated)
    few = sorted_problem.num_devices <= MOST_UNITS
    # Schedules that overlap or come from a file may exist for one number of microbatches alone.
    short = None if schedule != AUTO and (overlaps(schedule) or is_file(schedule)) else ShortEvaluator.of(sorted_evaluator)
    searching = short or sorted_evaluator
    # Other schedules hold more or fewer activations: which forwards run again is left open.
    begin = [replace(evaluation.layout, recomputed=None) for evaluation in proposals(searching, schedule)] if few else []
    whole = (lambda evaluation: evaluation) if short is None else partial(short.decided, evaluator=sorted_evaluator)
    best_sorted = _searched(searching, schedule, budget, begin, whole)
    best = None if best_sorted is None else evaluator.simulate(best_sorted.layout.renumbered(numbers))
    for evaluation in proposals(evaluator, schedule):
        best = better(best, evaluation)
    return best


def _searched(
    evaluator: LayoutEvaluator,
    schedule: str,
    budget: SearchBudget,
    begin: list[Layout],
    whole: Callable[[Evaluation | None], Evaluation | None],
) -> Evaluation | None:
    overlapping = asynchronous_orders(evaluator.problem, schedule)
    several = [order for order in chunks.ORDERS if schedule in {AUTO, order}]
    single = ("1f1b", "list") if several or overlapping else (schedule,)
    search = LayoutSearch(evaluator, single, budget, begin)
    best = search.run()
    if not several and not overlapping:
        return whole(best)
    tops = search.best_layouts(max(budget.num_simulations // 30, 1))
    others: Evaluation | None = None
    if schedule == AUTO:
        # With few simulations, only the order that is fastest if memory allows it.
        for order in ONE_STAGE_ORDERS[-max(budget.num_simulations // 10, 1) :]:
            best_of_order: Evaluation | None = None
            for top in search.best_layouts(max(budget.num_simulations // 8, 1)):
                best_of_order = better(best_of_order, evaluator.simulate(replace(top, order=order, max_in_flight=None)))
            if best_of_order is not None:
                others = better(others, search.improved([best_of_order], budget.num_simulations // 4 - 1, slack=_SLACK))
    one_each = (tuple((device,) for group in top.workers for device in group) for top in tops)
    workers = list(dict.fromkeys([*one_each, *(top.workers for top in tops)]))
    # Orders in which several workers take the loss may have no replicas there.
    flushed_workers = workers if evaluator.problem.profile.loss_couples_rows else [top.workers for top in tops]
    on_chains = [order for order in several if order != branch_aware.NAME]
    flushed = (layout for order in on_chains for group in flushed_workers for layout in chunks.layouts(evaluator, group, order))
    candidates = list(islice(flushed, max(budget.num_simulations // 3, 1)))
    if branch_aware.NAME in several:
        branched = workers[: max(min(budget.num_simulations // 30, _NUM_BRANCHED), 1)]
        candidates += [layout for group in branched for layout in chunks.layouts(evaluator, group, branch_aware.NAME)]
    # Without a flush a long pipeline has no bubble, so that devices need not be replicas for its sake: all workers are tried.
    rows = [chain.from_iterable(map(partial(chunks.layouts, evaluator, order=order), workers)) for order in overlapping]
    # In turns, so that each order is tried on the best workers even where not all are.
    in_turns = (layout for turn in zip_longest(*rows) for layout in turn if layout is not None)
    for layout in chain(candidates, islice(in_turns, max(budget.num_simulations // 3, 1))):
        others = better(others, climbed(evaluator, evaluator.simulate(layout), most_steps=budget.num_simulations // 30))
    best, others = whole(best), whole(others)
    if schedule != AUTO or best is None or others is None:
        return others if schedule != AUTO else best or others
    # Split backwards and several stages per worker cost more than predicted: they must be ahead by more than the error of predictions.
    return others if (others.missing_bytes, others.update_s * _MARGIN) < best.rank else best


def asynchronous_orders(problem: Problem, schedule: str) -> tuple[str, ...]:
    """Return the schedules whose updates overlap that may be chosen."""
    if schedule == AUTO:
        return chunks.ASYNCHRONOUS if problem.staleness.allow_delay else ()
    return (schedule,) if overlaps(schedule) else ()


def climbed(
    evaluator: LayoutEvaluator,
    evaluation: Evaluation | None,
    *,
    most_steps: int,
    neighbors: Callable[[Layout], Iterator[Layout]] = chunks.neighbors,
) -> Evaluation | None:
    """Apply the best of the neighboring changes as long as the simulator finds it better."""
    for _ in range(most_steps):
        if evaluation is None:
            return None
        # Which forwards run again is left open: other stages may lack memory after a change.
        simulated = [evaluator.simulate(layout) for layout in neighbors(replace(evaluation.layout, recomputed=None))]
        best = evaluation
        for candidate in simulated:
            best = better(best, candidate) or best
        if best is evaluation:
            return evaluation
        evaluation = best
    return evaluation
