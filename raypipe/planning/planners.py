"""The planners by name, and `make`: from a problem to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise, zip_longest

from raypipe.artifacts.plan import Plan
from raypipe.errors import PlanError, UnknownNameError
from raypipe.planning import baselines, chunks
from raypipe.planning.canonical import canonical
from raypipe.planning.estimator import Estimator
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, OnEvaluated, better, ignore
from raypipe.planning.extrapolation import ShortEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.partition import MOST_UNITS
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Group, Problem
from raypipe.planning.search import Budget, Search
from raypipe.schedule_registry import is_file, overlaps, spec
from raypipe.units import size

AUTO = "auto"
ONE_STAGE_ORDERS = ("gpipe", "zb-h1", "zb-h2")
"""Orders of one stage a worker, among which `auto` chooses besides those of several."""
_MOST_DIVISIONS = 8
_MICROBATCHES_A_DEVICE = 16
_MARGIN = 1.02
_SLACK = 1.25
"""By how much orders that split the backward may be faster than estimated."""


@dataclass(frozen=True)
class Planner:
    """A planner.

    Attributes:
        name: as the command line knows it.
        title: what it is, in a few words.
        layouts: the layouts that it proposes, of which the fastest that fits is taken; `None` for the search.
        quick: whether that takes little time for any number of devices.
    """

    name: str
    title: str
    layouts: Callable[[Estimator], Iterator[Layout]] | None
    quick: bool = False


PLANNERS: tuple[Planner, ...] = (
    Planner("raypipe", "exact programs over several device orders, annealing, simulation; any schedule", None),
    Planner("spp", "SPP as reconstructed: minimum cuts, dynamic program, list order (Luo et al., INFOCOM 2022)", baselines.spp),
    Planner("data-parallel", "the whole model on every device", baselines.data_parallel, quick=True),
    Planner("gpipe-equal", "equally many layers a device, in the given order, GPipe", partial(baselines.equal_stages, "gpipe"), quick=True),
    Planner("1f1b-equal", "equally many layers a device, in the given order, 1F1B", partial(baselines.equal_stages, "1f1b"), quick=True),
    Planner("pipedream", "PipeDream's planner, with a flush (Narayanan et al., SOSP 2019)", baselines.pipedream),
    Planner("dapple", "DAPPLE's planner (Fan et al., PPoPP 2021)", baselines.dapple),
    Planner("metis", "for unequal devices, in the manner of Metis (Um et al., ATC 2024)", baselines.metis),
)


def planner(name: str) -> Planner:
    """The planner of that name.

    Raises:
        UnknownNameError: lists the names there are.
    """
    for found in PLANNERS:
        if found.name == name:
            return found
    raise UnknownNameError("planner", name, [known.name for known in PLANNERS])


def make(
    problem: Problem, *, name: str = "raypipe", schedule: str = AUTO, budget: Budget | None = None, on_evaluated: OnEvaluated = ignore
) -> Plan:
    """The best plan that a planner finds, simulated.

    Args:
        problem: what is planned.
        name: of the planner.
        schedule: the order of Ops; `auto` to choose. Planners other than raypipe's bring their own order for `auto`.
        budget: how hard raypipe's own searches.
        on_evaluated: Called with every layout that is simulated.

    Raises:
        UnknownNameError: no planner or schedule is called so.
        PlanError: nothing fits into memory, or the planner has nothing for this problem.
    """
    evaluator = LayoutEvaluator(problem, on_evaluated=on_evaluated)
    found = solve(evaluator, name=name, schedule=schedule, budget=budget)
    return evaluator.plan(found, planner=name, lower_bound_s=bound_s(problem, schedule))


def bound_s(problem: Problem, schedule: str) -> float:
    """Seconds that no plan beats; where updates may overlap, a part of what their microbatches take as one long update."""
    if not asynchronous_orders(problem, schedule):
        return plan_bound(problem).update_s
    count = problem.updates_per_window
    return plan_bound(replace(problem, num_microbatches=problem.num_microbatches * count)).update_s / count


def asynchronous_orders(problem: Problem, schedule: str) -> tuple[str, ...]:
    """The orders whose updates overlap that may be chosen."""
    if schedule == AUTO:
        return chunks.ASYNCHRONOUS if problem.staleness.allow_delay else ()
    return (schedule,) if overlaps(schedule) else ()


def divided(batch_size: int, *, most_microbatches: int, most: int = _MOST_DIVISIONS) -> list[tuple[int, int]]:
    """Ways to divide the rows of an update into equal microbatches: (microbatches, rows of each), the fewest microbatches first.

    Args:
        batch_size: rows of an update.
        most_microbatches: beyond so many, a bubble is small and each costs something besides.
        most: of several near to each other some are left out, so that no more than these remain.
    """
    small = [count for count in range(1, math.isqrt(batch_size) + 1) if batch_size % count == 0]
    counts = sorted({*small, *(batch_size // count for count in small)})
    ways = [(count, batch_size // count) for count in counts if count <= most_microbatches]
    if len(ways) <= most:
        return ways
    return [ways[round(at * (len(ways) - 1) / (most - 1))] for at in range(most)]


def best_division(
    problem: Problem, *, name: str = "raypipe", schedule: str = AUTO, budget: Budget | None = None, on_evaluated: OnEvaluated = ignore
) -> Problem:
    """The problem with its rows divided into as many microbatches as a quick search finds best.

    Rows are taken to cost alike in microbatches of any size, besides the topology's overheads for each.

    Args:
        problem: its microbatches times their rows are the rows of an update.
        name: of the planner.
        schedule: as of `make`.
        budget: of the whole search; a fifth of it is spent on each way to divide.
        on_evaluated: Called with every layout that is simulated.

    Raises:
        PlanError: none of them has a plan; says what is wrong with the last.
    """
    budget = budget or Budget.usual(problem.num_devices)
    quick = replace(budget, num_estimates=max(budget.num_estimates // 5, 1), num_simulations=max(budget.num_simulations // 5, 4))
    best: tuple[tuple[float, float], Problem] | None = None
    failure: PlanError | None = None
    batch_size = problem.num_microbatches * problem.microbatch_size
    for num_microbatches, microbatch_size in divided(batch_size, most_microbatches=_MICROBATCHES_A_DEVICE * problem.num_devices):
        candidate = replace(problem, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        try:
            found = solve(LayoutEvaluator(candidate, on_evaluated=on_evaluated), name=name, schedule=schedule, budget=quick)
        except PlanError as error:
            failure = error
            continue
        if best is None or found.rank < best[0]:
            best = (found.rank, candidate)
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def solve(evaluator: LayoutEvaluator, *, name: str = "raypipe", schedule: str = AUTO, budget: Budget | None = None) -> Evaluation:
    """The layout of that plan; arguments and errors as of `make`."""
    chosen = planner(name)
    if schedule != AUTO:
        spec(schedule)
    problem = evaluator.problem
    check_possible(problem)
    if chosen.layouts is None:
        found = _canonically_searched(evaluator, schedule, budget or Budget.usual(problem.num_devices))
    else:
        found = _best_of(chosen.layouts, evaluator, schedule)
    if found is None and evaluator.schedules.too_stale:
        limits = problem.staleness
        raise PlanError(
            f"every plan with schedule {schedule!r} is staler than allowed ({limits}); use more microbatches, or allow "
            f"{limits.nearest(evaluator.schedules.too_stale)}"
        )
    if found is None:
        raise PlanError(
            f"planner {name!r} has no plan with schedule {schedule!r} for {problem.num_layers} layers, {problem.num_devices} devices and "
            f"{problem.num_microbatches} microbatches of {problem.microbatch_size} rows; try another schedule, or more layers or rows"
            + (f" (the first that was tried: {evaluator.schedules.refusals[0]})" if evaluator.schedules.refusals else "")
        )
    if found.missing_bytes:
        raise PlanError(
            f"the best plan of planner {name!r} lacks {size(round(found.missing_bytes))} of memory on its fullest device ({found.layout}); "
            "use smaller or more microbatches, more devices, or another planner"
        )
    return found


def _best_of(layouts: Callable[[Estimator], Iterator[Layout]], evaluator: LayoutEvaluator, schedule: str) -> Evaluation | None:
    """The best of what a planner proposes."""
    found: Evaluation | None = None
    for layout in layouts(evaluator.estimator):
        found = better(found, evaluator.simulate(layout if schedule == AUTO else replace(layout, order=schedule)))
    return found


def _canonically_searched(evaluator: LayoutEvaluator, schedule: str, budget: Budget) -> Evaluation | None:
    """The search on devices in an order that does not depend on their names, so that equal clusters get equal plans.

    It begins with what the other planners propose, too. What they propose for devices in the order that they are listed in has its say
    in the end, so that none of them is ever ahead.
    """
    sorted_problem, numbers = canonical(evaluator.problem)
    sorted_evaluator = LayoutEvaluator(sorted_problem, evaluator.schedules, evaluator.on_evaluated)
    few = sorted_problem.num_devices <= MOST_UNITS
    # Of one length alone may be what overlaps or comes from a file.
    short = None if schedule != AUTO and (overlaps(schedule) or is_file(schedule)) else ShortEvaluator.of(sorted_evaluator)
    searching = short or sorted_evaluator
    # Other orders hold more or fewer activations, so that which forwards are run again is found anew.
    begin = [replace(evaluation.layout, recomputed=None) for evaluation in _proposed(searching, schedule)] if few else []
    whole = (lambda evaluation: evaluation) if short is None else partial(short.decided, evaluator=sorted_evaluator)
    found = _searched(searching, schedule, budget, begin, whole)
    best = None if found is None else evaluator.simulate(found.layout.renumbered(numbers))
    for evaluation in _proposed(evaluator, schedule):
        best = better(best, evaluation)
    return best


def _proposed(evaluator: LayoutEvaluator, schedule: str) -> Iterator[Evaluation]:
    """The best of each other planner; beyond the devices that the exact programs take one by one, of the quick planners alone."""
    few = evaluator.problem.num_devices <= MOST_UNITS
    for other in PLANNERS:
        if other.layouts is not None and (few or other.quick) and (found := _best_of(other.layouts, evaluator, schedule)) is not None:
            yield found


def _searched(
    evaluator: LayoutEvaluator, schedule: str, budget: Budget, begin: list[Layout], whole: Callable[[Evaluation | None], Evaluation | None]
) -> Evaluation | None:
    """The search over orders of one stage a worker, then every other order on the workers of what it found.

    Args:
        evaluator: by which it searches.
        schedule: as of `make`.
        budget: how hard.
        begin: layouts to begin with.
        whole: makes of what is evaluation best what is decided by.
    """
    overlapping = asynchronous_orders(evaluator.problem, schedule)
    several = [order for order in chunks.ORDERS if schedule in {AUTO, order}]
    single = ("1f1b", "list") if several or overlapping else (schedule,)
    search = Search(evaluator, single, budget, begin)
    best = search.run()
    if not several and not overlapping:
        return whole(best)
    tops = search.best_layouts(max(budget.num_simulations // 30, 1))
    others: Evaluation | None = None
    if schedule == AUTO:
        # Where there are few simulations, the order that is fastest if memory allows it.
        for order in ONE_STAGE_ORDERS[-max(budget.num_simulations // 10, 1) :]:
            found: Evaluation | None = None
            for top in search.best_layouts(max(budget.num_simulations // 8, 1)):
                found = better(found, evaluator.simulate(replace(top, order=order, max_in_flight=None)))
            if found is not None:
                others = better(others, search.improved([found], budget.num_simulations // 4 - 1, slack=_SLACK))
    flushed = (layout for order in several for top in tops for layout in chunks.layouts(evaluator, top.workers, order))
    candidates = list(islice(flushed, max(budget.num_simulations // 3, 1)))
    # Without a flush a long pipeline has no bubble, so that devices need not be replicas for its sake.
    workers = list(dict.fromkeys([*(_one_each(top.workers) for top in tops), *(top.workers for top in tops)]))
    rows = [chain.from_iterable(map(partial(chunks.layouts, evaluator, order=order), workers)) for order in overlapping]
    # In turns, so that each order is tried on the best workers where not all can be.
    in_turns = (layout for turn in zip_longest(*rows) for layout in turn if layout is not None)
    for layout in chain(candidates, islice(in_turns, max(budget.num_simulations // 3, 1))):
        others = better(others, climbed(evaluator, evaluator.simulate(layout), most_steps=budget.num_simulations // 30))
    best, others = whole(best), whole(others)
    if schedule != AUTO or best is None or others is None:
        return others if schedule != AUTO else best or others
    # What divides backwards or stages costs more than it says here: it must be ahead by more than predictions are wrong.
    return others if (others.missing_bytes, others.update_s * _MARGIN) < best.rank else best


def _one_each(workers: tuple[Group, ...]) -> tuple[Group, ...]:
    """The devices of some workers as a worker each, in the same order."""
    return tuple((device,) for group in workers for device in group)


def climbed(
    evaluator: LayoutEvaluator,
    evaluation: Evaluation | None,
    *,
    most_steps: int,
    neighbours: Callable[[Layout], Iterator[Layout]] = chunks.neighbours,
) -> Evaluation | None:
    """Takes the best change as long as the simulator finds it better.

    Args:
        evaluator: simulates.
        evaluation: from where.
        most_steps: changes.
        neighbours: a layout with one thing changed; by default one layer moved to another stage.
    """
    for _ in range(most_steps):
        if evaluation is None:
            return None
        # Which forwards are run again is found anew: other stages may lack memory then.
        tried = [evaluator.simulate(layout) for layout in neighbours(replace(evaluation.layout, recomputed=None))]
        best = evaluation
        for candidate in tried:
            best = better(best, candidate) or best
        if best is evaluation:
            return evaluation
        evaluation = best
    return evaluation


def check_possible(problem: Problem) -> None:
    """Refuses a model without work on some kind of device, and one whose layers cannot lie on the devices, whatever the plan.

    Raises:
        PlanError: names the layer that fits nowhere, or says how much all of them need and how much there is.
    """
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
    # What layers share is there once where they are one stage.
    shared = (sorted(problem.profile.layers[layer].shared_bytes for layer in tie)[:-1] for tie in problem.profile.ties())
    needed = float(problem.standing_prefix[-1]) - sum(map(sum, shared)) * (1 + problem.state_bytes_per_parameter_byte)
    total = math.fsum(problem.memory_bytes)
    if needed > total:
        raise PlanError(
            f"weights, gradients and optimizer state of {problem.profile.name!r} need {size(round(needed))}, all devices of "
            f"{problem.topology.name!r} together have {size(round(total))}, {size(round(needed - total))} too little; add devices"
        )
