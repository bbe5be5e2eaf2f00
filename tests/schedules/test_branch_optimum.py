"""Orders of branches against an exact solver, on small random cases: unequal stages, latency, interactions, limits."""

from __future__ import annotations

import random

import pytest

from raypipe.schedules.ir import StageGraph
from raypipe.schedules.request import StageTimes
from raypipe.schedules.search.branches import BranchSearch
from raypipe.schedules.search.dispatch import TimedPipelines
from tests.marks import slow_unless
from tests.schedules.branch_optimum import Case, chains, optimum


def case_of(seed: int) -> Case:
    chance = random.Random(seed)
    num_branches, num_workers = chance.choice([(2, 2), (2, 3), (3, 2), (2, 3)])
    edges, last = chains([num_workers] * num_branches)
    num_stages = num_branches * num_workers
    if chance.random() < 0.5:  # the first two branches read each other behind their first stages
        edges += [(0, num_workers + 1), (num_workers, 1)]
    edges += [(stage, num_stages) for stage in last]
    # Stages must be listed behind those that feed them.
    workers = [stage % num_workers if chance.random() < 0.5 else num_workers - 1 - stage % num_workers for stage in range(num_stages)]
    for branch in range(num_branches):
        start, forwards = chance.randrange(num_workers), chance.random() < 0.5
        for position in range(num_workers):
            workers[branch * num_workers + position] = (start + (position if forwards else -position)) % num_workers
    rank = {stage: number for number, stage in enumerate(_topological(num_stages + 1, edges))}
    placed = [0] * (num_stages + 1)
    for stage, worker in enumerate([*workers, workers[-1]]):
        placed[rank[stage]] = worker
    seconds = [(chance.randint(1, 4), chance.randint(1, 4), chance.randint(1, 4)) for _ in range(num_stages)]
    seconds.insert(rank[num_stages], (0, 0, 0))
    return Case(
        edges=tuple(sorted((rank[source], rank[target]) for source, target in edges)),
        workers=tuple(placed),
        seconds=tuple(seconds),
        latency=chance.choice([0, 0, 1, 3]),
        num_microbatches=4,
        max_held=chance.choice([num_branches + 1, 2 * num_branches + 1, 4 * num_branches + 1]),
        splits=chance.random() < 0.5,
    )


def _topological(num_stages: int, edges: list[tuple[int, int]]) -> list[int]:
    order: list[int] = []
    while len(order) < num_stages:
        order.append(
            next(
                stage
                for stage in range(num_stages)
                if stage not in order and all(source in order for source, target in edges if target == stage)
            )
        )
    return order


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", slow_unless(range(3), range(20)))
def test_orders_are_within_five_percent_of_the_shortest(seed: int) -> None:
    case = case_of(seed)
    graph = StageGraph(len(case.workers), case.edges)
    line = TimedPipelines(
        graph, (case.workers,), tuple(StageTimes(*map(float, each)) for each in case.seconds), float(case.latency), splits=case.splits
    )
    search = BranchSearch(line, case.num_microbatches, case.max_held)
    drafts = search.drafts()
    assert drafts
    found = search.polished(drafts)
    assert found.held <= case.max_held
    shortest, bound = optimum(case, time_limit_s=5)
    assert found.makespan_s >= search.bound_s - 1e-9
    assert found.makespan_s >= bound - 1e-9
    assert found.makespan_s <= 1.05 * shortest
