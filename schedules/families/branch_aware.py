"""Branch-aware pipelines: branches of a model run side by side on the same devices and meet in a loss.

After Flexpipe (Zong et al., Tsinghua Science and Technology 2025, doi 10.26599/TST.2024.9010233), of which only the abstract is open: its
branches run in opposite directions, and a coordinator keeps their exchanges cheap. Each device holds a stage of every branch, and
no stage twice. Branches with more work pass over the devices several times, so that stages take equally long.

Where branches lie decides how long they wait for each other. With a loss for each microbatch, two equal branches best run in
opposite directions; with one loss over the whole update, in one direction with starts half the devices apart. Here A and B are
stages of both branches, whole backwards, D = 4:

    device 0   A0 B3        with a loss a microbatch       device 0   A0 B2        with one loss for all microbatches
    device 1   A1 B2                                       device 1   A1 B3
    device 2   A2 B1                                       device 2   A2 B0
    device 3   A3 B0                                       device 3   A3 B1

The bubble of two equal branches is then (D/2-1)(F+B), or (D/2-1)F with split backwards and a loss a microbatch. This is the least
for one stage of each branch a device: on some device both stages have D/2-1 stages or more before them, during whose forwards it
waits; and as many backwards behind its own that others wait for. A W may come last.

The loss is a stage of its own that takes no time, behind the last stages of all branches. With `coupled`, the microbatches of an
update are parts of one (`Op.part`), on all of which the loss works at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from raypipe.errors import ScheduleError
from raypipe.schedules.builders import synchronous_pipelines
from raypipe.schedules.ir import Schedule, StageGraph, UpdateScope
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.branches import BranchSearch, Found
from raypipe.schedules.search.dispatch import TimedPipelines
from raypipe.schedules.spec import ScheduleSpec

NAME = "branch-aware"

_NUM_SEARCHED = 3  # placements searched in full, of those that a rough search ranks
_MOST_PLACEMENTS = 64  # placements that are ranked


@dataclass(frozen=True)
class BranchShape:
    """Branches divided into stages; the last stage is the loss.

    Attributes:
        branches: The branch and the position in it of each stage but the last.
        work: The seconds of each stage over those of one of D stages of a branch of work 1.
    """

    graph: StageGraph
    branches: tuple[tuple[int, int], ...]
    work: tuple[float, ...]

    @classmethod
    def of(cls, num_devices: int, branches: tuple[float, ...]) -> BranchShape:
        """Divide each branch into as many stages a device as it has times the work of the smallest, rounded."""
        stages: list[tuple[int, int]] = []
        work: list[float] = []
        edges: list[tuple[int, int]] = []
        last: list[int] = []
        for branch, branch_work in enumerate(branches):
            num_passes = max(1, round(branch_work / min(branches)))
            for position in range(num_passes * num_devices):
                if position:
                    edges.append((len(stages) - 1, len(stages)))
                stages.append((branch, position))
                work.append(branch_work / num_passes)
            last.append(len(stages) - 1)
        edges += [(stage, len(stages)) for stage in last]
        return cls(StageGraph(len(stages) + 1, tuple(edges)), tuple(stages), (*work, 0.0))

    def placements(self, num_devices: int) -> Iterator[tuple[int, ...]]:
        """Yield the workers of all stages; the loss lies with the last stage of the first branch."""
        counts = [count for _, count in sorted(Counter(branch for branch, _ in self.branches).items())]
        for placed in turned(counts, num_devices):
            yield (*itertools.chain.from_iterable(placed), placed[0][-1])


def turned(counts: Sequence[int], num_devices: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the workers of as many stages of each branch, in one of two directions from one of several devices; the first stays."""
    starts = range(0, num_devices, max(1, num_devices // (2 * len(counts))))
    yielded: set[tuple[tuple[int, ...], ...]] = set()
    for directions in itertools.product((1, -1), repeat=len(counts) - 1):
        for first in itertools.product(starts, repeat=len(counts) - 1):
            turns = ((1, 0), *zip(directions, first, strict=True))
            placed = tuple(
                tuple((start + position if direction > 0 else start - 1 - position) % num_devices for position in range(count))
                for count, (direction, start) in zip(counts, turns, strict=True)
            )
            if placed not in yielded:
                yielded.add(placed)
                yield placed


def branch_aware(request: ScheduleRequest) -> Schedule:
    """Return the best order found on the best placement found."""
    request.require_one_chunk(NAME)
    request.require_one_pipeline(NAME)
    _check(request)
    workers, found = _searched(replace(request, num_updates=1, update_scope=None))
    single = replace(request, num_microbatches=1) if request.coupled else request
    shape = BranchShape.of(request.num_devices, request.branches)
    return synchronous_pipelines(NAME, single, pipelines=[workers], one_update=found.programs, graph=shape.graph)


def ordered(search: BranchSearch, *, num_updates: int = 1, update_scope: UpdateScope | None = None) -> Schedule:
    """Return the best order found for stages that are placed already.

    Raises:
        ScheduleError: No order keeps the limit on activations.
    """
    found = _best(search)
    if found is None:
        raise ScheduleError(f"branch-aware found no order in which a device holds activations of at most {search.max_held:g}")
    request = ScheduleRequest(search.line.num_workers, search.num_microbatches, num_updates, update_scope=update_scope)
    return synchronous_pipelines(NAME, request, pipelines=search.line.pipelines, one_update=found.programs, graph=search.line.graph)


@lru_cache(maxsize=64)
def _best(search: BranchSearch) -> Found | None:
    return search.best()


def _check(request: ScheduleRequest) -> None:
    if len(request.branches) < 2:
        raise ScheduleError(
            "branch-aware is for models with branches, and needs the relative work of two or more; use --branches 1,1, "
            "or plan a model whose layers name their branches"
        )
    if not all(0 < work < math.inf for work in request.branches):
        raise ScheduleError(f"branch-aware needs branches with work above 0, got {', '.join(f'{work:g}' for work in request.branches)}")
    if len(request.times) > 1:
        raise ScheduleError(f"branch-aware takes the times of one stage, which --branches scales, got those of {len(request.times)}")


def _default_limit(request: ScheduleRequest, shape: BranchShape) -> float:
    """Return D microbatches of a device's share."""
    return float(len(shape.branches)) if request.max_in_flight is None else request.max_in_flight


@lru_cache(maxsize=64)  # windows of different lengths repeat one order
def _searched(request: ScheduleRequest) -> tuple[tuple[int, ...], Found]:
    shape = BranchShape.of(request.num_devices, request.branches)
    limit = _default_limit(request, shape)
    searches = [
        _search(request, shape, workers, limit) for workers in itertools.islice(shape.placements(request.num_devices), _MOST_PLACEMENTS)
    ]
    ranked = sorted(searches, key=BranchSearch.rough_s)[:_NUM_SEARCHED]
    found = sorted(((drafts, search) for search in ranked if (drafts := search.drafts())), key=lambda each: each[0][0].rank)
    if not found:
        least = len(shape.branches) // request.num_devices
        raise ScheduleError(
            f"branch-aware holds at least {least} activations a device, one of each stage, max_in_flight allows {limit:g}; "
            f"use --max-in-flight {least}"
        )
    drafts, search = found[0]
    return search.line.pipelines[0], search.polished(drafts)


def _search(request: ScheduleRequest, shape: BranchShape, workers: tuple[int, ...], limit: float) -> BranchSearch:
    (times,) = request.times or (StageTimes(1.0, 1.0, 1.0),)
    work = stage_work(request)
    line = TimedPipelines(
        shape.graph,
        (workers,),
        tuple(StageTimes(times.forward_s * each, times.input_grad_s * each, times.weight_grad_s * each) for each in work),
        request.latency_s,
        splits=request.split,
        num_parts=request.num_microbatches if request.coupled else 1,
        whole_stages=frozenset([len(shape.branches)]) if request.coupled else frozenset(),
    )
    return BranchSearch(line, 1 if request.coupled else request.num_microbatches, limit)


def stage_work(request: ScheduleRequest) -> tuple[float, ...]:
    """Return the time of each stage for a whole microbatch of the schedule, over that of one of D stages of a branch of work 1."""
    _check(request)
    scale = request.num_microbatches if request.coupled else 1
    return tuple(work * scale for work in BranchShape.of(request.num_devices, request.branches).work)


def _peak_in_flight(request: ScheduleRequest, worker: int) -> int:
    return metrics(branch_aware(request)).peak_in_flight[worker]


SPEC = ScheduleSpec(
    name=NAME,
    build=branch_aware,
    title="branches side by side, placed and ordered by search",
    paper="after Zong et al., TST 2025, 10.26599/TST.2024.9010233",
    bubble="(D/2-1)(F+B) for 2 alike",
    memory="DV, or --max-in-flight",
    mismatch="0",
    delay="0",
    makespan_s=lambda request, times: None,
    peak_in_flight=_peak_in_flight,
    stage_work=stage_work,
)
