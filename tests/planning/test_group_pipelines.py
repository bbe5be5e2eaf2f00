"""Pipelines of groups: what their stages are made of, and that changes only help."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.planning.estimator import Estimator
from raypipe.planning.group_pipelines import GroupPipelines
from raypipe.planning.layout import Layout
from raypipe.planning.levels import dealt
from raypipe.planning.problem import Problem
from tests.planning.instances import random_problem

MB = 1_000_000


def layouts(pipelines: GroupPipelines) -> Iterator[Layout]:
    return (layout for layout in map(pipelines.dealt, pipelines.workers()) if layout is not None)


@pytest.mark.parametrize("seed", range(6))
def test_every_pipeline_uses_a_device_once_and_fits_its_rows(seed: int) -> None:
    problem = random_problem(seed, num_devices=7, num_layers=6, one_way=True)
    for layout in layouts(GroupPipelines(Estimator(problem))):
        devices = [device for group in layout.workers for device in group]
        assert len(devices) == len(set(devices))
        assert len(layout.cuts) == len(layout.workers) + 1
        assert all(map(problem.rows, layout.workers))


def test_nodes_with_good_links_among_each_other_are_one_worker() -> None:
    nodes = tuple(Node(name=name, devices=(Device(name + "/0", "gpu"),)) for name in "abcdefgh")
    fast = tuple(Link(source=one, target=other, bandwidth_bytes_per_s=1e10, latency_s=0.0) for one, other in ("ae", "bf", "cg", "dh"))
    topology = ClusterTopology(name="pairs", nodes=nodes, links=fast, default_link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=1e8))
    problem = Problem(ModelProfile.uniform(8, microbatch_size=4), topology, 8, 4)
    groups = {group for layout in layouts(GroupPipelines(Estimator(problem))) for group in layout.workers if len(group) == 2}
    assert groups == {(0, 4), (1, 5), (2, 6), (3, 7)}


@pytest.mark.parametrize("seed", range(4))
def test_no_pipeline_takes_less_than_its_least(seed: int) -> None:
    estimator = Estimator(random_problem(seed, num_devices=8, num_layers=9, one_way=True))
    pipelines = GroupPipelines(estimator)
    assert all(pipelines.least_s(layout.workers) <= estimator.estimate_s(layout) * (1 + 1e-9) for layout in layouts(pipelines))


@pytest.mark.parametrize("seed", range(4))
def test_changes_only_make_estimates_better(seed: int) -> None:
    estimator = Estimator(random_problem(seed, num_devices=8, num_layers=9, one_way=True))
    pipelines = GroupPipelines(estimator)
    begin = max((layout for layout in layouts(pipelines) if 1 < layout.num_stages < 8), key=estimator.estimate_s)
    estimates = [estimator.estimate_s(layout) for layout in (begin, *pipelines.improved(begin, seconds=estimator.estimate_s, num_steps=80))]
    assert all(later < earlier for earlier, later in itertools.pairwise(estimates))
    assert len(estimates) > 1


def test_stages_are_dealt_within_memory() -> None:
    topology = ClusterTopology.uniform(3, bandwidth_bytes_per_s=1e9, devices_per_node=1, memory_bytes=50 * MB)
    profile = ModelProfile.uniform(9, forward_s=0.01, backward_s=0.02, output_bytes=MB, saved_bytes=6 * MB, parameter_bytes=MB // 2)
    problem = Problem(profile, topology, 8, profile.microbatch_size, recompute=False)
    estimator, workers = Estimator(problem), ((0,), (1,), (2,))
    layout = GroupPipelines(estimator).dealt(workers)
    assert dealt(estimator, workers) == (0, 3, 6, 9)
    assert layout is not None
    assert layout.sizes[0] < 3
    assert estimator.missing_bytes(layout) == 0
    assert GroupPipelines(Estimator(replace(problem, num_microbatches=64))).dealt(((0,),)) is None
