"""Where this machine cannot have several nodes, the tests here are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multinode.cluster import Cluster, cluster
from tests.multinode.driver import Driver, driver
from tests.multinode.network import why_not


@pytest.fixture(scope="session", autouse=True)
def several_nodes() -> None:
    """Skips where there can be no network of namespaces."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def machines() -> Iterator[Cluster]:
    """Four nodes on two islands that all tests share, since they take a while to start. Each module sets the rates that it wants.

    Tests that kill a node, or cut one off for longer than a moment, bring up nodes of their own.
    """
    with cluster(nodes=4, cpus_per_node=[2, 2, 2, 3], labels={3: {"zone": "far"}}, islands=[[0, 1], [2, 3]]) as made:
        yield made


@pytest.fixture(scope="session")
def commands(machines: Cluster) -> Iterator[Driver]:
    """Return what runs raypipe's commands on the shared nodes."""
    with driver(machines) as made:
        yield made
