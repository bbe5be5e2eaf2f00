"""The planners by name, and their simulated proposals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

from raypipe.planning import baselines
from raypipe.planning.estimator import Estimator
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better, ignore
from raypipe.planning.extrapolation import MOST_SIMULATED, ShortEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.partition import MOST_UNITS
from raypipe.schedule_registry import is_file, overlaps
from raypipe.stopping import SearchStopped

AUTO = "auto"  # Instead of a schedule's name: the planner chooses.
_FEW_PROPOSALS = 4  # Proposals of each baseline with which a search begins.
_NUM_DECIDED = 2
_LEAST_OF_ESTIMATE = 0.85  # Part of its estimate that an order with whole backwards takes at least.
_NEAR = 1.05  # Times the best layout up to which short simulations leave open which one is faster.


@dataclass(frozen=True)
class Planner:
    """Planner.

    Attributes:
        layouts: Yields proposals, of which the fastest that fits is chosen; `None` for raypipe's own search.
        quick: Whether proposals take little time for any number of devices.
    """

    name: str
    title: str
    layouts: Callable[[Estimator], Iterator[Layout]] | None
    quick: bool = False

    def proposed(self, evaluator: LayoutEvaluator, schedule: str) -> Iterator[Layout]:
        """Yield the proposals in their own order, or in the one that is asked for."""
        assert self.layouts is not None, "a planner that proposes"
        for layout in self.layouts(evaluator.estimator):
            yield layout if schedule == AUTO else replace(layout, order=schedule)


PLANNERS: tuple[Planner, ...] = (
    Planner("raypipe", "exact programs over several device orders, annealing, simulation; any schedule", None),
    Planner("spp", "SPP as reconstructed: minimum cuts, dynamic program, list order (Luo et al., INFOCOM 2022)", baselines.spp),
    Planner("data-parallel", "the whole model on every device", baselines.data_parallel, quick=True),
    Planner("ddp-overlap", "the whole model on the best of several sets of devices", baselines.overlapped_data_parallel, quick=True),
    Planner("node-pipeline", "one node a stage along a path of good links", baselines.node_pipeline, quick=True),
    Planner("gpipe-equal", "equally many layers a device, in the given order, GPipe", partial(baselines.equal_stages, "gpipe"), quick=True),
    Planner("1f1b-equal", "equally many layers a device, in the given order, 1F1B", partial(baselines.equal_stages, "1f1b"), quick=True),
    Planner("pipedream", "PipeDream's planner, with a flush (Narayanan et al., SOSP 2019)", baselines.pipedream),
    Planner("dapple", "DAPPLE's planner (Fan et al., PPoPP 2021)", baselines.dapple),
    Planner("metis", "for unequal devices, in the manner of Metis (Um et al., ATC 2024)", baselines.metis),
)


def quick_evaluator(evaluator: LayoutEvaluator, schedule: str) -> ShortEvaluator | None:
    """Return the evaluator by shorter updates; `None` where it saves little."""
    # Schedules that overlap or come from a file may exist for one number of microbatches alone.
    return None if schedule != AUTO and (overlaps(schedule) or is_file(schedule)) else ShortEvaluator.of(evaluator)


def best_proposal(planner: Planner, evaluator: LayoutEvaluator, schedule: str) -> Evaluation | None:
    """Return the plan of a planner: the best of what it proposes."""
    try:
        return _best(planner, evaluator, schedule)
    except SearchStopped:
        evaluator.stopped = True
        return evaluator.best_so_far


def starts(evaluator: LayoutEvaluator, schedule: str) -> Iterator[Layout]:
    """Yield of each baseline the best of the few proposals with the best estimates, to begin a search with."""
    for planner in _baselines(evaluator):
        layouts = sorted(planner.proposed(evaluator, schedule), key=evaluator.estimator.estimate_s)[:_FEW_PROPOSALS]
        best = reduce(better, map(evaluator.simulate, layouts), None)
        if best is not None:
            yield replace(best.layout, recomputed=None)


def best_of_all(evaluator: LayoutEvaluator, schedule: str, best: Evaluation | None) -> Evaluation | None:
    """Return the best of a layout and the plans of the baselines; with many devices, of the quick ones alone."""
    for planner in _baselines(evaluator):
        best = better(best, _best(planner, evaluator, schedule, ahead_of=best))
    return best


def _baselines(evaluator: LayoutEvaluator) -> Iterator[Planner]:
    few = evaluator.problem.num_devices <= MOST_UNITS
    return (planner for planner in PLANNERS if planner.layouts is not None and (few or planner.quick))


def _best(planner: Planner, evaluator: LayoutEvaluator, schedule: str, *, ahead_of: Evaluation | None = None) -> Evaluation | None:
    """Return the best proposal of a planner, unless it cannot be better than the layout `ahead_of`.

    Where simulations take long, short ones choose two proposals that are not clearly behind `ahead_of`. Those whose busiest stage or hop
    alone takes longer than `ahead_of` are left out before. Neither leaves out the plan of a planner that is better: so no plan is behind
    that of a baseline.
    """
    problem, estimator = evaluator.problem, evaluator.estimator
    layouts = list(planner.proposed(evaluator, schedule))
    if ahead_of is not None and not ahead_of.missing_bytes:
        layouts = [layout for layout in layouts if problem.num_microbatches * max(estimator.busy_s(layout)) < ahead_of.loss_s]
    large = problem.num_microbatches * problem.num_devices > MOST_SIMULATED
    if large and ahead_of is not None and not ahead_of.missing_bytes:
        layouts = [layout for layout in layouts if not _is_surely_behind(estimator, layout, ahead_of.loss_s)]
    extrapolates = isinstance(evaluator, ShortEvaluator)  # What it simulates is short already.
    quick = quick_evaluator(replace(evaluator, on_evaluated=ignore), schedule) if large and not extrapolates else None
    if quick is not None:
        judged = [(quick.simulate(layout), layout) for layout in layouts]
        ranked = sorted((evaluation.rank, at) for at, (evaluation, _) in enumerate(judged) if evaluation is not None)
        most_s = math.inf if ahead_of is None or ahead_of.missing_bytes else _NEAR * ahead_of.loss_s
        layouts = [layouts[at] for (_, update_s), at in ranked[:_NUM_DECIDED] if update_s < most_s]
    return reduce(better, map(evaluator.simulate, layouts), None)


def _is_surely_behind(estimator: Estimator, layout: Layout, update_s: float) -> bool:
    """Return whether estimates leave no doubt that an order with whole backwards takes longer."""
    whole = layout.order in {"1f1b", "gpipe"} and layout.has_estimate
    return whole and _LEAST_OF_ESTIMATE * estimator.estimate_s(layout) > update_s
