"""Bandwidth and latency of all pairs of devices are those of their paths, however they are looked up."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, SharedLink
from raypipe.planning.problem import Problem


def cluster(seed: int, *, default: bool) -> ClusterTopology:
    """Nodes of one to three devices, a switch, links both ways or one way, and pairs without a link."""
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(5)]
    nodes = []
    for name in names:
        link = NodeLink(bandwidth_bytes_per_s=rng.choice((None, 1e9, 5e9)), latency_s=1e-6) if rng.random() < 0.7 else None
        nodes.append(Node(name=name, devices=tuple(Device(f"{name}/{at}", "gpu") for at in range(rng.randrange(1, 4))), link=link))
    links = []
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            if rng.random() < 0.6:
                ends = rng.sample((one, other), 2)
                limit = rng.choice((None, 1e8, 2e8))
                links.append(
                    Link(source=ends[0], target=ends[1], bandwidth_bytes_per_s=limit, latency_s=rng.random(), one_way=rng.random() < 0.5)
                )
    switch = Link(source=names[0], target="switch", bandwidth_bytes_per_s=1e9, latency_s=0.0)
    return ClusterTopology(
        name="pairs",
        nodes=(*nodes, Node(name="switch", devices=())),
        links=(*links, switch),
        default_link=NodeLink(bandwidth_bytes_per_s=1e7, latency_s=0.5) if default else None,
    )


def variants(topology: ClusterTopology) -> list[ClusterTopology]:
    """The same links alone, with one that names devices, and with a limit that several share."""
    devices = topology.nodes[0].devices[0].name, topology.nodes[1].devices[0].name
    named = Link(source=devices[0], target=devices[1], bandwidth_bytes_per_s=3e8, latency_s=0.1)
    shared = SharedLink(name="uplink", bandwidth_bytes_per_s=5e7, members=((topology.nodes[0].name, topology.nodes[1].name),))
    return [topology, replace(topology, links=(*topology.links, named)), replace(topology, shared_links=(shared,))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", range(3))
def test_pairs_are_as_fast_as_their_paths(seed: int, variant: int) -> None:
    problem = Problem(ModelProfile.uniform(4), variants(cluster(seed, default=seed % 2 == 0))[variant], 4, 1)
    for source in range(problem.num_devices):
        for target in range(problem.num_devices):
            path = problem.path(source, target)
            limits = (path.bandwidth_bytes_per_s if path.exists else 0.0, path.latency_s) if source != target else (math.inf, 0.0)
            assert (problem.bandwidth[source, target], problem.latency_s[source, target]) == limits
