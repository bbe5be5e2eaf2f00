"""What was measured stands in the topology, and what was not is taken from what is like it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, Overheads
from raypipe.errors import RunError
from raypipe.network.assemble import assemble
from raypipe.network.fit import LinkFit
from raypipe.network.rounds import Pair
from raypipe.network.sharing import Bottleneck


def node(number: int) -> Node:
    address = f"10.0.0.{number + 1}"
    return Node(name=address, devices=(Device(f"{address}/0", "cpu"),), link=NodeLink(latency_s=1e-5), cores=2)


def fitted(bandwidth: float, latency_s: float = 1e-4) -> LinkFit:
    return LinkFit(latency_s, bandwidth, 0.01, 10, 1000)


def all_fits(num_nodes: int, bandwidth: float = 1e8) -> dict[Pair, LinkFit]:
    return {pair: fitted(bandwidth) for pair in itertools.permutations(range(num_nodes), 2)}


def test_directions_that_are_alike_are_one_entry_and_others_two() -> None:
    fits = all_fits(3) | {(0, 1): fitted(1.02e8, 2e-4), (0, 2): fitted(5e7)}
    found = assemble(name="lab", nodes=[node(0), node(1), node(2)], fits=fits, overheads=Overheads(send_s=1e-5))
    assert len(found.links) == 4
    assert found.path("10.0.0.1/0", "10.0.0.2/0").bandwidth_bytes_per_s == pytest.approx(1.01e8)
    assert found.path("10.0.0.2/0", "10.0.0.1/0").latency_s == pytest.approx(1.5e-4)
    assert found.path("10.0.0.1/0", "10.0.0.3/0").bandwidth_bytes_per_s == 5e7
    assert found.path("10.0.0.3/0", "10.0.0.1/0").bandwidth_bytes_per_s == 1e8
    assert found.overheads == Overheads(send_s=1e-5)
    assert found.default_link is None


def test_the_topology_can_be_written_and_read(tmp_path: Path) -> None:
    found = assemble(
        name="lab", nodes=[node(0), node(1)], fits=all_fits(2), shared=[Bottleneck(frozenset({(0, 1), (1, 0)}), 1e8, crosses=False)]
    )
    found.save(tmp_path / "topology.yaml")
    assert ClusterTopology.load(tmp_path / "topology.yaml") == found


def test_shared_links_are_named_by_what_they_are() -> None:
    cut = frozenset({(0, 2), (1, 2), (0, 3), (1, 3)})
    leaving = frozenset({(0, 1), (0, 2), (0, 3)})
    entering = frozenset({(0, 1), (2, 1), (3, 1)})
    shared = [Bottleneck(leaving, 1e8, crosses=False), Bottleneck(cut, 1.5e8, crosses=True), Bottleneck(entering, 1.1e8, crosses=False)]
    found = assemble(name="lab", nodes=[node(number) for number in range(4)], fits=all_fits(4), shared=shared)
    by_name = {one.name: one for one in found.shared_links}
    assert by_name.keys() == {"shared-1", "10.0.0.1-egress", "10.0.0.2-ingress"}
    assert by_name["shared-1"].bandwidth_bytes_per_s == 1.5e8
    assert ("10.0.0.1", "10.0.0.3") in by_name["shared-1"].members
    assert found.path("10.0.0.2/0", "10.0.0.3/0").resources[1] == ("shared-1", 1.5e8)


def test_what_limits_nobody_is_left_out() -> None:
    shared = [Bottleneck(frozenset({(0, 1), (2, 1)}), 1.96e8, crosses=False), Bottleneck(frozenset({(0, 1)}), 1e7, crosses=False)]
    assert assemble(name="lab", nodes=[node(0), node(1), node(2)], fits=all_fits(3), shared=shared).shared_links == ()


def test_links_that_were_not_measured_are_like_those_of_their_class() -> None:
    nodes, classes = [node(number) for number in range(6)], ["fast"] * 3 + ["slow"] * 3
    measured = {
        (0, 1): fitted(1e9),
        (1, 0): fitted(1e9),
        (3, 4): fitted(1e8),
        (4, 3): fitted(1e8),
        (1, 3): fitted(1e8),
        (3, 1): fitted(1e8),
    }
    found = assemble(name="lab", nodes=nodes, fits=measured, classes=classes)
    assert found.path("10.0.0.2/0", "10.0.0.3/0").bandwidth_bytes_per_s == 1e9
    assert found.path("10.0.0.5/0", "10.0.0.6/0").bandwidth_bytes_per_s == 1e8
    assert found.default_link is not None
    assert found.default_link.bandwidth_bytes_per_s == 1e8
    assert not any({"10.0.0.5", "10.0.0.6"} == {link.source, link.target} for link in found.links), "the default link serves them"


def test_links_that_were_not_measured_have_the_latency_of_their_class_too() -> None:
    nodes, classes = [node(number) for number in range(6)], ["near"] * 3 + ["far"] * 3
    across = {pair: fitted(1e8, 5e-3) for pair in ((0, 3), (3, 0))}
    within = {pair: fitted(1e8, 1e-5) for pair in ((0, 1), (1, 0), (3, 4), (4, 3))}
    found = assemble(name="lab", nodes=nodes, fits=across | within, classes=classes)
    assert found.path("10.0.0.2/0", "10.0.0.6/0").latency_s == 5e-3
    assert found.path("10.0.0.6/0", "10.0.0.2/0").latency_s == 5e-3
    assert found.path("10.0.0.2/0", "10.0.0.3/0").latency_s == 1e-5
    assert not any({"10.0.0.2", "10.0.0.3"} == {link.source, link.target} for link in found.links), "the default link serves them"


def test_nodes_of_which_nothing_was_measured_are_an_error() -> None:
    with pytest.raises(RunError, match="no link between two nodes was measured"):
        assemble(name="lab", nodes=[node(0), node(1)], fits={}, classes=["a", "a"])


def test_one_node_needs_no_links() -> None:
    assert assemble(name="lab", nodes=[node(0)], fits={}).links == ()
