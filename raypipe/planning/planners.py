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
