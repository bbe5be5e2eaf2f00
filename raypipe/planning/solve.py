"""The best layout of a problem, and the best division of the rows of an update into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from raypipe.errors import NoLinkError, NoPlanYetError, PlanError, UnknownNameError
from raypipe.planning.collection import young_garbage_alone
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, OnEvaluated, better, ignore
from raypipe.planning.extrapolation import evaluator_of
from raypipe.planning.lack import lack_words
from raypipe.planning.layer_order import canonical
from raypipe.planning.planners import AUTO, PLANNERS, Planner, best_proposal
from raypipe.planning.problem import Problem
from raypipe.planning.schedule_search import searched
from raypipe.planning.search import SearchBudget
from raypipe.schedule_registry import spec
from raypipe.units import size

_MOST_DIVISIONS = 8
_MICROBATCHES_PER_DEVICE = 16


def solve(
    evaluator: LayoutEvaluator,
    *,
    name: str = "raypipe",
    schedule: str = AUTO,
    budget: SearchBudget | None = None,
    known: Evaluation | None = None,
) -> Evaluation:
    """Return the best layout that a planner finds, or the one that is known where that is better.

    Raises:
        NoPlanYetError: The search was stopped before it had a plan that fits.
        UnknownNameError: There is no such planner or schedule.
        PlanError: Nothing fits into memory, or the planner has no plan; `NoLinkError` where its plans use pairs without a link.
    """
    by_name = {planner.name: planner for planner in PLANNERS}
    if name not in by_name:
        raise UnknownNameError("planner", name, list(by_name))
    if schedule != AUTO:
        spec(schedule)
    problem = evaluator.problem
    _check_possible(problem)
    with young_garbage_alone():
        best = _best_on_any_list(partial(_best, by_name[name], schedule, budget or SearchBudget.usual(problem)), evaluator)
    best = better(known, best)
    if evaluator.stopped and (best is None or best.missing_bytes):
        raise NoPlanYetError("planning was stopped before it found a plan that fits; allow it more time")
    if best is None and evaluator.schedules.too_stale:
        limits = problem.staleness
        raise PlanError(
            f"every plan with schedule {schedule!r} is staler than allowed ({limits}); use more microbatches, or allow "
            f"{limits.nearest(evaluator.schedules.too_stale)}"
        )
    if best is None and evaluator.schedules.unlinked:
        raise NoLinkError(f"planner {name!r} has no plan that does without the links that are missing: {evaluator.schedules.unlinked}")
    if best is None:
        raise PlanError(
            f"planner {name!r} has no plan with schedule {schedule!r} for {problem.num_layers} layers, {problem.num_devices} devices and "
            f"{problem.num_microbatches} microbatches of {problem.microbatch_size} rows; try another schedule, or more layers or rows"
            + (f" (one that was tried: {evaluator.schedules.refusals[0]})" if evaluator.schedules.refusals else "")
        )
    if best.missing_bytes:
        raise PlanError(
            f"the best plan of planner {name!r} lacks {lack_words(evaluator, best)}; more devices, or another planner, may fit, too. "
            f"The plan: {best.layout}"
        )
    return best


def _best(planner: Planner, schedule: str, budget: SearchBudget, evaluator: LayoutEvaluator) -> Evaluation | None:
    return searched(evaluator, schedule, budget) if planner.layouts is None else best_proposal(planner, evaluator, schedule)


def _best_on_any_list(search: Callable[[LayoutEvaluator], Evaluation | None], evaluator: LayoutEvaluator) -> Evaluation | None:
    """Search with the layers in canonical order, so that how the list interleaves branches does not matter."""
    in_order, layers = canonical(evaluator.problem)
    if in_order is evaluator.problem:
        return search(evaluator)
    on_list = evaluator_of(in_order, evaluator.schedules, on_evaluated=evaluator.on_evaluated)
    best = search(on_list)
    evaluator.stopped = on_list.stopped
    if best is not None:
        best = evaluator.simulate_at_last(best.layout.relisted(layers))
    # The list says in which order a stage computes its layers, and so how much memory it needs for a while.
    return better(best, search(evaluator)) if best is None or best.missing_bytes else best


def _check_possible(problem: Problem) -> None:
    """Refuse work that takes no time, a layer that fits nowhere, and layers that need more memory than there is."""
    for kind, whole in zip(problem.kinds, problem.prefix_s[:, :, -1], strict=True):
        if not whole.any():
            where = f" on devices of kind {kind!r}" if kind else ""
            raise PlanError(f"the layers of {problem.profile.name!r} take no time{where}; measure them with `raypipe profile`")
    largest = max(problem.memory_bytes)
    if largest == math.inf:
        return
    saved_per_row = [layer.saved_bytes / problem.profile.microbatch_size for layer in problem.profile.layers]
    standing = pairwise(problem.standing_prefix.tolist())
    for layer, (before, behind), of_row in zip(problem.profile.layers, standing, saved_per_row, strict=True):
        # At least one row of one microbatch.
        needed = behind - before + of_row
        if needed > largest:
            raise PlanError(
                f"layer {layer.name!r} needs {size(round(needed))} for weights, gradients, optimizer state and one row; the largest device "
                f"of {problem.topology.name!r} has {size(round(largest))}, {size(round(needed - largest))} too little; "
                "divide the layer or use larger devices"
            )
    # Tied weights are held once where their layers are in one stage.
    shared = (sorted(problem.profile.layers[layer].shared_bytes for layer in tie)[:-1] for tie in problem.profile.ties())
    needed = float(problem.standing_prefix[-1]) - sum(map(sum, shared)) * (1 + problem.most_state_bytes_per_parameter_byte)
    total = math.fsum(problem.memory_bytes)
    if needed > total:
        raise PlanError(
            f"weights, gradients and optimizer state of {problem.profile.name!r} need {size(round(needed))}, all devices of "
            f"{problem.topology.name!r} together have {size(round(total))}, {size(round(needed - total))} too little; add devices"
        )


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
    problem: Problem,
    *,
    name: str = "raypipe",
    schedule: str = AUTO,
    budget: SearchBudget | None = None,
    on_evaluated: OnEvaluated = ignore,
) -> tuple[Problem, Evaluation]:
    """Return the problem with the division of its rows that a quick search finds best, and the layout that it finds.

    A row costs the same in microbatches of any size, besides the fixed part of each layer's time and the overheads of each microbatch.

    Raises:
        PlanError: No division has a plan; the message is the last division's. Or the loss couples the rows of a microbatch.
    """
    if problem.profile.loss_couples_rows:
        raise PlanError(
            f"the loss of {problem.profile.name!r} couples the rows of a microbatch: another division of an update into microbatches "
            "trains another loss; give the number of microbatches and microbatch_size instead of batch_size"
        )
    budget = budget or SearchBudget.usual(problem)
    quick = replace(budget, num_estimates=max(budget.num_estimates // 5, 1), num_simulations=max(budget.num_simulations // 5, 4))
    best: tuple[Problem, Evaluation] | None = None
    failure: PlanError | None = None
    batch_size = problem.num_microbatches * problem.microbatch_size
    for num_microbatches, microbatch_size in divided(batch_size, most_microbatches=_MICROBATCHES_PER_DEVICE * problem.num_devices):
        candidate = replace(problem, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        try:
            evaluation = solve(evaluator_of(candidate, on_evaluated=on_evaluated), name=name, schedule=schedule, budget=quick)
        except PlanError as error:
            failure = error
            continue
        if best is None or evaluation.rank < best[1].rank:
            best = (candidate, evaluation)
    if best is None:
        assert failure is not None
        raise failure
    return best
