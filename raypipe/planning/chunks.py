"""Cuts for schedules with several stages, or several pipelines, on each worker.

There the sum over a worker's stages counts: a short stage compensates a long one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from raypipe.errors import ScheduleError
from raypipe.planning import branches
from raypipe.planning.estimator import Estimator
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Problem
from raypipe.schedule_registry import build, is_file, overlaps
from raypipe.schedules.families import branch_aware
from raypipe.schedules.ir import OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest

CHAIN_ORDERS = ("zb-v", "interleaved", "chimera", "chimera-doubling", "chimera-halving", "dualpipe", "dualpipe-v", "amdp-flush")
ONE_PIPELINE = ("zb-v", "interleaved", "dualpipe-v")
ORDERS = (branch_aware.NAME, *CHAIN_ORDERS)
# Schedules whose updates overlap; also those of one stage per worker, since their busiest worker alone counts.
ASYNCHRONOUS = ("async-1f1b", "pipedream-2bw", "pipedream", "async-interleaved", "amdp", "amdp-auto")

_NUM_CHUNKS = {"interleaved": (2, 3, 4), "async-interleaved": (1, 2, 3, 4)}
"""Numbers of stages per worker that are tried; other schedules have two, or one. Asynchronous interleaving with one stage per worker has
more microbatches in flight than `async-1f1b`, which hides messages that take longer than an Op."""


def layouts(evaluator: LayoutEvaluator, workers: tuple[Devices, ...], order: str) -> Iterator[Layout]:
    """Yield layouts of a schedule on these workers with balanced cuts; none where it cannot take the size."""
    if order == branch_aware.NAME:
        yield from branches.layouts(evaluator, workers)
        return
    problem = evaluator.problem
    num_updates = problem.updates_per_window if is_file(order) and overlaps(order) else 1
    for num_chunks in _NUM_CHUNKS.get(order, (2, 1)):
        done = False
        for num_pipelines in _num_pipelines(order, len(workers)):
            try:
                size = ScheduleRequest(
                    len(workers), problem.num_microbatches, num_updates, num_chunks=num_chunks, num_pipelines=num_pipelines
                )
                schedule = build(order, replace(size, update_scope=problem.update_scope, max_mean_staleness=problem.max_mean_staleness))
            except ScheduleError as error:
                evaluator.schedules.refusals.append(str(error))
                continue
            done = order not in _NUM_CHUNKS
            if schedule.num_stages <= problem.num_layers:
                yield Layout(balanced(evaluator.estimator, workers, schedule), workers, order, num_pipelines=num_pipelines)
        if done:
            return


def _num_pipelines(order: str, num_workers: int) -> tuple[int, ...]:
    # With fewer pipelines AMDP has fewer copies of the weights, to hold and to sum; with one it has none.
    if order not in {"amdp", "amdp-auto", "amdp-flush"}:
        return (0,)
    fewer = [number for number in (num_workers // 4, num_workers // 8, 2, 1) if 0 < number < num_workers // 2]
    return (0, *dict.fromkeys(fewer))


def balanced(estimator: Estimator, workers: tuple[Devices, ...], schedule: Schedule) -> tuple[int, ...]:
    """Return cuts whose busiest worker no move of one layer between neighboring stages improves."""
    problem = estimator.problem
    parts = stage_parts(schedule)
    cuts = _in_proportion(problem, workers, parts)
    loads = _loads(estimator, workers, parts, cuts)
    while True:
        moved = [(sorted(_loads(estimator, workers, parts, candidate), reverse=True), candidate) for candidate in _shifts(cuts)]
        if not moved or (best := min(moved))[0] >= sorted(loads, reverse=True):
            return cuts
        cuts = best[1]
        loads = _loads(estimator, workers, parts, cuts)


def stage_parts(schedule: Schedule) -> list[dict[int, float]]:
    """Return for each stage the part of the microbatches that each worker computes."""
    counts: list[dict[int, float]] = [{} for _ in range(schedule.num_stages)]
    for op, place in schedule.ops():
        if op.kind is OpKind.FORWARD:
            of_stage = counts[op.stage]
            of_stage[place.worker] = of_stage.get(place.worker, 0.0) + 1 / len(schedule.find(op._replace(part=0)))
    total = schedule.num_microbatches * schedule.num_updates
    return [{worker: count / total for worker, count in of_stage.items()} for of_stage in counts]


def _in_proportion(problem: Problem, workers: tuple[Devices, ...], parts: list[dict[int, float]]) -> tuple[int, ...]:
    # A worker's power is divided evenly among its stages.
    powers = [sum(problem.powers[device] for device in group) for group in workers]
    stages_of = [sum(part.get(worker, 0.0) for part in parts) for worker in range(len(workers))]
    wanted = np.cumsum([sum(powers[worker] / stages_of[worker] * share for worker, share in part.items()) for part in parts])
    done = problem.prefix_s.sum(axis=1).mean(axis=0)
    done = done / max(float(done[-1]), 1e-300)
    cuts = [0]
    for stage, mark in enumerate((wanted / wanted[-1]).tolist()[:-1]):
        least, most = cuts[-1] + 1, problem.num_layers - (len(parts) - 1 - stage)
        at = min(bisect_left(done.tolist(), mark), problem.num_layers)
        cuts.append(min(max(at if at == 0 or done[at] - mark < mark - done[at - 1] else at - 1, least), most))
    return (*cuts, problem.num_layers)


def _loads(estimator: Estimator, workers: tuple[Devices, ...], parts: list[dict[int, float]], cuts: tuple[int, ...]) -> list[float]:
    loads = [0.0] * len(workers)
    for stage, of_stage in enumerate(parts):
        for worker, part in of_stage.items():
            loads[worker] += part * sum(estimator.stage(workers[worker], cuts[stage], cuts[stage + 1])[:2])
    return loads


def _shifts(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at in range(1, len(cuts) - 1):
        for cut in (cuts[at] - 1, cuts[at] + 1):
            if cuts[at - 1] < cut < cuts[at + 1]:
                yield (*cuts[:at], cut, *cuts[at + 1 :])


def neighbors(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with one layer moved to a neighboring stage; none of stages that are not consecutive."""
    return (replace(layout, cuts=cuts) for cuts in _shifts(layout.cuts))
