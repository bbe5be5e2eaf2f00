"""Layouts of models with branches: where branches lie, a joint cut, and what their order is searched for.

After Flexpipe (Zong et al., Tsinghua Science and Technology 2025, doi 10.26599/TST.2024.9010233), of which only the abstract is open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from raypipe.planning.branch_groups import groupings
from raypipe.planning.branch_placement import Layers, divisions, placements, work_s
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.joint_cut import JointCut
from raypipe.planning.layout import BranchStages, Layout
from raypipe.planning.problem import Devices, Floats, Problem
from raypipe.schedules.families.branch_aware import NAME
from raypipe.schedules.ir import StageGraph
from raypipe.schedules.request import StageTimes
from raypipe.schedules.search.branches import BranchSearch
from raypipe.schedules.search.dispatch import TimedPipelines
from raypipe.simulation.plan_cost import crossing_bytes

_MOST_PLACEMENTS = 96  # placements that are compared for each division into branches
_NUM_SEARCHED = 4  # placements whose order is simulated
_NUM_SLOPED = 6  # placements that are cut in other ways, too
_SLOPES = (-0.45, -0.3, -0.15, 0.15)
_NUM_POLISHED = 1  # placements whose order is improved
_MOST_MOVED_OPS = 500_000
_MOST_PARTS = 2  # numbers of parts that are tried
_LEAST_UNITS = 2  # parts of microbatches per device, where the loss needs whole microbatches


def layouts(evaluator: LayoutEvaluator, workers: tuple[Devices, ...]) -> Iterator[Layout]:
    """Yield the most promising layouts on these workers; none for a model without branches."""
    problem = evaluator.problem
    yield from _of_cuts(
        evaluator,
        [
            cut
            for division in divisions(problem)
            for placement in itertools.islice(placements(problem, division, workers), _MOST_PLACEMENTS)
            if (cut := JointCut.balanced(problem, division, workers, placement)) is not None
        ],
    )


def replicated_layouts(evaluator: LayoutEvaluator, order: Devices) -> Iterator[Layout]:
    """Yield the most promising layouts with workers of several devices, which are next to each other in this order."""
    problem = evaluator.problem
    yield from _of_cuts(
        evaluator,
        [
            cut
            for division in divisions(problem)
            for workers, placement in groupings(problem, division, order)
            if (cut := JointCut.balanced(problem, division, workers, placement)) is not None
        ],
    )


def _of_cuts(evaluator: LayoutEvaluator, cuts: Sequence[JointCut]) -> Iterator[Layout]:
    drafts = _most_promising(evaluator, cuts, recompute=False)
    if not drafts and evaluator.problem.recompute:
        drafts = _most_promising(evaluator, cuts, recompute=True)
    yield from drafts
    evaluated = [
        (evaluation.rank, number) for number, layout in enumerate(drafts) if (evaluation := evaluator.simulate(layout)) is not None
    ]
    for _, number in sorted(evaluated)[:_NUM_POLISHED]:
        placed = drafts[number].branches
        assert placed is not None, "made for branches"
        search = replace(placed.search, most_moved_ops=_MOST_MOVED_OPS)
        yield replace(drafts[number], branches=replace(placed, search=search))


def _most_promising(evaluator: LayoutEvaluator, cuts: Sequence[JointCut], *, recompute: bool) -> list[Layout]:
    """Return the layouts with the fastest rough orders that fit into memory; the best placements also with sloping cuts."""
    ranked = sorted(_rough_layouts(evaluator, cuts, recompute=recompute), key=lambda each: each[0])
    best = list(dict.fromkeys((cut.branches, cut.workers, cut.placement) for _, cut, _ in ranked))[:_NUM_SLOPED]
    sloping = [JointCut.balanced(evaluator.problem, *each, slope=slope) for each in best for slope in _SLOPES]
    ranked += _rough_layouts(evaluator, [cut for cut in sloping if cut is not None], recompute=recompute)
    return [layout for _, _, layout in sorted(ranked, key=lambda each: each[0])[:_NUM_SEARCHED]]


def _rough_layouts(evaluator: LayoutEvaluator, cuts: Iterable[JointCut], *, recompute: bool) -> Iterator[tuple[float, JointCut, Layout]]:
    """Yield the rough seconds of an update with the longest sum of gradients, the cut and the layout of what fits into memory."""
    problem = evaluator.problem
    for cut in cuts:
        # What a forward that runs again keeps lasts until the weight gradient, which would have to follow at once.
        for num_parts, split in itertools.product(_numbers_of_parts(problem, cut), (False,) if recompute else (False, True)):
            layout = layout_of(evaluator, cut, num_parts=num_parts, split=split, recompute=recompute)
            if layout is not None and layout.branches is not None:
                rough_s = _rough_s(layout.branches.search) * problem.num_microbatches + _sum_s(cut)
                if rough_s < math.inf:
                    yield rough_s, cut, layout


def _sum_s(cut: JointCut) -> float:
    """Return the seconds in which the worker with the longest sum of gradients sums those of all its stages."""
    of_layer = _each(cut.problem.summed_prefix)
    summed = [0.0] * len(cut.workers)
    for layers, worker in cut.stages:
        summed[worker] += sum(of_layer[layer] for layer in layers)
    return max(float(cut.problem.sum_s(group, num_bytes)) for group, num_bytes in zip(cut.workers, summed, strict=True))


@lru_cache(maxsize=1024)  # devices that are alike ask the same again and again
def _rough_s(search: BranchSearch) -> float:
    return search.rough_s()


def _numbers_of_parts(problem: Problem, cut: JointCut) -> Iterator[int]:
    yield 1
    wanted = _LEAST_UNITS * len(cut.workers) / problem.num_microbatches
    if problem.profile.loss_couples_rows and wanted > 1:
        # Each device of a worker has whole rows of each part.
        rows = math.gcd(problem.microbatch_size, *(of_device for group in cut.workers for of_device in problem.rows(group) or ()))
        divisors = (parts for parts in range(2, rows + 1) if parts >= wanted and not rows % parts)
        yield from itertools.islice(divisors, _MOST_PARTS)


def layout_of(evaluator: LayoutEvaluator, cut: JointCut, *, num_parts: int, split: bool, recompute: bool = False) -> Layout | None:
    """Return the layout of a cut; `None` where a worker with the loss may not have it, or a link is missing."""
    assert cut.order is not None, "stages that wait for each other are refused before"
    used = sorted({worker for _, worker in cut.stages})
    number = {worker: position for position, worker in enumerate(used)}
    groups = tuple(cut.workers[worker] for worker in used)
    stages = tuple(tuple(sorted(cut.stages[stage][0])) for stage in cut.order)
    placed = tuple(number[cut.stages[stage][1]] for stage in cut.order)
    recomputed = tuple(stage for stage, layers in enumerate(stages) if work_s(evaluator.problem, layers)) if recompute else ()
    return placed_stages(evaluator, groups, stages, placed, num_parts=num_parts, split=split, recomputed=recomputed)


def placed_stages(
    evaluator: LayoutEvaluator,
    groups: tuple[Devices, ...],
    stages: tuple[Layers, ...],
    placed: Layers,
    *,
    num_parts: int,
    split: bool,
    recomputed: tuple[int, ...] = (),
) -> Layout | None:
    """Return the layout of stages, in topological order, on workers; `None` where a worker with the loss may not have it."""
    problem = evaluator.problem
    bare = Layout((), groups, NAME, recomputed=recomputed or None, branches=BranchStages(stages, _UNSEARCHED))
    graph = bare.cut(problem).graph
    edge_bytes = {ends: num_bytes * problem.scale for ends, num_bytes in crossing_bytes(problem.profile, bare.cut(problem)).items()}
    if any(not problem.may_take_loss(groups[placed[sink]]) for sink in graph.sinks):
        return None
    hops_s = _hops_s(evaluator, groups, placed, edge_bytes)
    if any(hop_s == math.inf for _, hop_s in hops_s):
        return None
    line = TimedPipelines(
        graph,
        (placed,),
        tuple(
            stage_times(problem, groups[worker], layers, recomputed=stage in recomputed, split=split)
            for stage, (layers, worker) in enumerate(zip(stages, placed, strict=True))
        ),
        splits=split,
        num_parts=num_parts,
        whole_stages=frozenset(graph.sinks) if num_parts > 1 else frozenset(),
        hops_s=hops_s,
    )
    saved = _each(problem.saved_prefix)
    kept = [sum(saved[layer] for layer in layers) for layers in stages]
    for stage in recomputed:
        kept[stage] = sum(num_bytes for (_, target), num_bytes in edge_bytes.items() if target == stage)
    search = BranchSearch(line, problem.num_microbatches, 1.0, _sizes(problem, groups, stages, placed, kept), most_moved_ops=0)
    return replace(bare, branches=BranchStages(stages, search))


_UNSEARCHED = BranchSearch(TimedPipelines(StageGraph.chain(1), ((0,),), (StageTimes(0.0, 0.0, 0.0),)), 1, 1.0)


def stage_times(problem: Problem, group: Devices, layers: Layers, *, recomputed: bool, split: bool) -> StageTimes:
    """Return the times of a stage on a worker, of its slowest device; `split` adds what a split backward takes longer."""
    chosen = list(layers)
    apart = np.array([[0.0], [float(split)], [0.0]])
    kinds: list[list[float]] = []
    for kind, factor in problem.factors(group):
        of_layers = problem.layer_s[kind][:, chosen] + apart * problem.split_s[kind][chosen]
        fixed = of_layers * problem.fixed_share[kind][chosen]
        kinds.append(factor.seconds(of_layers.sum(axis=1), fixed.sum(axis=1)).tolist())
    forward_s, input_grad_s, weight_grad_s = max(kinds, key=sum)
    overhead_s = problem.overheads_s
    again_s = forward_s if recomputed else 0.0
    return StageTimes(forward_s + overhead_s[0], again_s + input_grad_s + overhead_s[1], weight_grad_s)


def _hops_s(
    evaluator: LayoutEvaluator, groups: Sequence[Devices], placed: Sequence[int], edge_bytes: Mapping[tuple[int, int], float]
) -> tuple[tuple[tuple[int, int], float], ...]:
    """Return the seconds of a message between the stages of each edge, both ways."""
    hops: dict[tuple[int, int], float] = {}
    for (source, target), num_bytes in edge_bytes.items():
        if placed[source] != placed[target]:
            for ends in ((source, target), (target, source)):
                channel = evaluator.estimator.channel(*(groups[placed[end]] for end in ends))
                hops[ends] = channel.latency_s + channel.s_per_byte * num_bytes
    return tuple(hops.items())


def _sizes(
    problem: Problem, groups: Sequence[Devices], stages: Sequence[Layers], placed: Sequence[int], kept: Sequence[float]
) -> tuple[float, ...]:
    """Return the room that an activation of each stage, of so many bytes, takes, as a share of its worker's.

    A worker has room for what its memory holds, and for no more than as many microbatches of its stages as there are workers.
    """
    usual = 1 / (len(groups) * max(placed.count(worker) for worker in range(len(groups))))
    sizes: list[float] = []
    standing = _each(problem.standing_prefix)
    for worker, of_stage in zip(placed, kept, strict=True):
        own = [layer for other, held in zip(placed, stages, strict=True) for layer in held if other == worker]
        working = max((problem.profile.layers[layer].working_bytes or 0) * problem.scale for layer in own)
        rooms = [
            (limit - sum(standing[layer] for layer in own) - working * share) / share for share, limit in problem.demands(groups[worker])
        ]
        room = min(rooms)
        sizes.append(max(usual, of_stage / room if room > 0 else math.inf if of_stage else 0.0))
    return tuple(sizes)


def _each(prefix: Floats) -> list[float]:
    return [behind - before for before, behind in itertools.pairwise(prefix.tolist())]
