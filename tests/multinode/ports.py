"""Four nodes with one port each, through which passes all that leaves and all that enters them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, node_ports
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.network import Network

PORT = 25e6
"""Bytes per second that leave a node, and that enter it."""
GOODPUT = 0.992
"""Of a wire's bytes, those that are not headers of Ethernet, IP and TCP, with packets of 9,000 bytes."""


@contextmanager
def nodes_with_ports(*, cpus_per_node: int) -> Iterator[Cluster]:
    """Yields a Ray cluster of such nodes."""
    with cluster(nodes=4, cpus_per_node=cpus_per_node) as machines:
        for node in range(4):
            set_port(machines, node, PORT)
        yield machines


def set_port(machines: Network, node: int, bytes_per_s: float) -> None:
    others = [other for other in range(4) if other != node]
    machines.share([(node, other) for other in others], bytes_per_s)
    machines.share([(other, node) for other in others], bytes_per_s)


def topology(fallen: Mapping[int, float] | None = None) -> ClusterTopology:
    """What `raypipe probe` would find of the ports, some of them at a part of their rate."""
    names = [f"node{number}" for number in range(4)]
    shared = node_ports({name: PORT * GOODPUT * (fallen or {}).get(number, 1.0) for number, name in enumerate(names)})
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names)
    return ClusterTopology(name="ports", nodes=nodes, shared_links=shared, default_link=NodeLink(latency_s=1e-4))
