"""The planners by name, and their simulated proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from raypipe.planning import baselines
from raypipe.planning.estimator import Estimator
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.layout import Layout
from raypipe.planning.partition import MOST_UNITS
from raypipe.planning.stopping import SearchStopped

AUTO = "auto"  # Instead of a schedule's name: the planner chooses.


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


def best_proposal(layouts: Callable[[Estimator], Iterator[Layout]], evaluator: LayoutEvaluator, schedule: str) -> Evaluation | None:
    """Return the best of what a planner proposes."""
    best: Evaluation | None = None
    try:
        for layout in layouts(evaluator.estimator):
            best = better(best, evaluator.simulate(layout if schedule == AUTO else replace(layout, order=schedule)))
    except SearchStopped:
        evaluator.stopped = True
        return evaluator.best_so_far
    return best


def proposals(
    evaluator: LayoutEvaluator, schedule: str, *, ahead_of: Evaluation | None = None, most: int | None = None
) -> Iterator[Evaluation]:
    """Yield each baseline's best proposal; with many devices, of the quick baselines alone.

    Proposals whose busiest stage or hop alone takes longer than the layout `ahead_of` are left out; of the others, the `most` with the best
    estimates are simulated.
    """
    few = evaluator.problem.num_devices <= MOST_UNITS
    for planner in PLANNERS:
        if planner.layouts is None or not (few or planner.quick):
            continue
        layouts = partial(_promising, planner.layouts, ahead_of, most)
        best: Evaluation | None = None
        for layout in layouts(evaluator.estimator):
            best = better(best, evaluator.simulate(layout if schedule == AUTO else replace(layout, order=schedule)))
        if best is not None:
            yield best


def _promising(
    layouts: Callable[[Estimator], Iterator[Layout]], ahead_of: Evaluation | None, most: int | None, estimator: Estimator
) -> Iterator[Layout]:
    ranked: list[tuple[float, int, Layout]] = []
    for layout in layouts(estimator):
        busy_s = estimator.problem.num_microbatches * max(estimator.busy_s(layout))
        if ahead_of is None or ahead_of.missing_bytes or busy_s < ahead_of.update_s:
            ranked.append((estimator.estimate_s(layout), len(ranked), layout))
    yield from (layout for _, _, layout in sorted(ranked)[:most])
