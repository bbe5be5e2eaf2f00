"""Pipelines over nodes: exact cuts, paths over good links."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.planning.baselines import node_pipeline
from raypipe.planning.estimator import Estimator
from raypipe.planning.levels import dealt, node_pipelines, paths
from raypipe.planning.problem import Problem
from tests.planning.instances import random_problem


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("hops", [True, False])
def test_no_other_cuts_make_the_busiest_worker_or_hop_less_busy(seed: int, hops: bool) -> None:
    problem = random_problem(seed, num_devices=4, num_layers=7, one_way=True)
    estimator, workers = Estimator(problem), ((2,), (0, 3), (1,))

    def busiest_s(cuts: tuple[int, ...]) -> float:
        stages = [sum(estimator.stage(group, *ends)[:2]) for group, ends in zip(workers, itertools.pairwise(cuts), strict=True)]
        for (one, other), cut in zip(itertools.pairwise(workers), cuts[1:], strict=False):
            s_per_byte = max(estimator.channel(*ends).s_per_byte for ends in ((one, other), (other, one)))
            stages.append(float(problem.crossing_bytes[cut]) * s_per_byte if hops else 0.0)
        return max(stages)

    found = dealt(estimator, workers, hops=hops)
    assert found is not None
    every = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), 2)]
    assert busiest_s(found) == pytest.approx(min(map(busiest_s, every)))


def test_there_are_no_cuts_of_fewer_layers_than_workers() -> None:
    assert dealt(Estimator(random_problem(1, num_devices=4, num_layers=3)), ((0,), (1,), (2,), (3,))) is None


def test_a_path_goes_over_good_links_and_grows_at_both_ends() -> None:
    weights = np.where(np.eye(5), 0.0, 1.0)
    for one, other in ((0, 3), (3, 1), (1, 4), (4, 2)):
        weights[one, other] = weights[other, one] = 9.0
    assert paths(weights)[0] in {(0, 3, 1, 4, 2), (2, 4, 1, 3, 0)}


def test_a_stage_is_a_node_and_its_neighbor_is_reached_quickly() -> None:
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", "gpu"), Device(f"{name}/1", "gpu"))) for name in "abcd")
    fast = tuple(Link(source=one, target=other, bandwidth_bytes_per_s=1e9, latency_s=0.0) for one, other in ("ac", "cb", "bd"))
    topology = ClusterTopology(name="path", nodes=nodes, links=fast, default_link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=1e6))
    estimator = Estimator(Problem(ModelProfile.uniform(8, microbatch_size=4), topology, 8, 4))
    layouts = list(node_pipeline(estimator))
    assert layouts[0].workers in {((0, 1), (4, 5), (2, 3), (6, 7)), ((6, 7), (2, 3), (4, 5), (0, 1))}
    assert layouts[0].cuts == (0, 2, 4, 6, 8)
    assert {layout.order for layout in layouts} == {"1f1b", "zb-h2"}
    assert any(len(layout.workers) == 8 for layout in node_pipelines(estimator, orders=("1f1b",)))
