from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.planning.device_order import MOST_FOR_CUTS, nearest, orders, recursive, symmetric, tree
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.solve import solve
from tests.planning.instances import islands, random_problem, shuffled


@pytest.mark.parametrize("seed", range(10))
def test_every_order_names_every_device_once(seed: int) -> None:
    problem = random_problem(seed, num_devices=1 + seed, num_layers=3, one_way=seed % 2 == 0)
    found = list(orders(problem))
    assert all(sorted(order) == list(range(problem.num_devices)) for _, order in found)
    assert len({order for _, order in found}) == len(found)


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4), (1, 5, 2), (3, 3, 3, 3)])
def test_the_recursive_order_keeps_islands_together(sizes: tuple[int, ...]) -> None:
    problem = shuffled(islands(sizes), seed=4)
    for order in (recursive(problem), tree(symmetric(problem.bandwidth)), nearest(symmetric(problem.bandwidth))):
        visited = [problem.node_of[device] for device in order]
        assert len(list(itertools.groupby(visited))) == len(sizes)


def test_many_equal_devices_are_ordered_node_by_node() -> None:
    problem = islands((8,) * 16)
    assert problem.num_devices > MOST_FOR_CUTS
    visited = [problem.node_of[device] for device in recursive(problem)]
    assert len(list(itertools.groupby(visited))) == 16


def test_the_best_link_joins_two_islands() -> None:
    nodes = tuple(
        Node(name=f"island{number}", devices=tuple(Device(f"d{number}-{at}", "cpu") for at in range(2)), link=NodeLink(latency_s=0.0))
        for number in range(2)
    )
    links = [
        {"source": f"d0-{one}", "target": f"d1-{other}", "bandwidth_bytes_per_s": 5.0 if (one, other) == (0, 1) else 1.0, "latency_s": 0.0}
        for one in range(2)
        for other in range(2)
    ]
    from raypipe.artifacts.topology import Link

    problem = islands((2, 2))
    topology = ClusterTopology(name="islands", nodes=nodes, links=tuple(Link(**link) for link in links))  # type: ignore[arg-type]
    assert recursive(replace(problem, topology=topology)) == (1, 0, 3, 2)


def test_no_sum_of_heavy_gradients_crosses_slow_links() -> None:
    problem = islands((3, 3), between=0.5, parameter_bytes=4000)
    found = solve(LayoutEvaluator(problem), name="spp").layout
    assert all(len({problem.node_of[device] for device in group}) == 1 for group in found.workers)
    crossings = [
        (problem.node_of[one[-1]], problem.node_of[other[0]])
        for one, other in itertools.pairwise(found.workers)
        if problem.node_of[one[-1]] != problem.node_of[other[0]]
    ]
    assert len(crossings) <= 1
