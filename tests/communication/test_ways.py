"""Which transfers of a device take turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, Path, SharedLink
from raypipe.communication.ways import Wiring, entrances, ways


def path(port: str | None = None, **links: float) -> Path:
    return Path(1e-4, min(links.values(), default=float("inf")), tuple(links.items()), port)


def test_peers_behind_one_port_are_one_way() -> None:
    found = ways({1: path(ab=1.0, out=1.0), 2: path(ac=1.0, out=1.0), 3: path(switch=1.0)})
    assert found[1] == found[2] != found[3]


def test_peers_with_links_of_their_own_are_ways_of_their_own() -> None:
    assert len(set(ways({1: path(ab=1.0), 2: path(ac=0.1), 3: path(), 4: path()}).values())) == 4


def test_a_path_that_shares_links_with_two_others_joins_them() -> None:
    found = ways({1: path(x=1.0), 2: path(y=1.0), 3: path(z=1.0), 4: path(x=1.0, y=1.0)})
    assert found[1] == found[2] == found[4] != found[3]


def test_a_slow_receiver_does_not_hold_the_port() -> None:
    found = ways({1: path(out=1.0, in1=1.0), 2: path(out=1.0, in2=0.1), 3: path(out=1.0, in3=1.0)})
    assert found[1] == found[3] != found[2]


@pytest.mark.parametrize(("slow", "num_ways"), [(0.5, 2), (0.51, 1)])
def test_a_receiver_is_slow_that_needs_no_more_than_half(slow: float, num_ways: int) -> None:
    found = ways({1: path(out=1.0, in1=1.0), 2: path(out=1.0, in2=slow)})
    assert len(set(found.values())) == num_ways


def test_slow_receivers_together_leave_half_of_the_port() -> None:
    found = ways({peer: path(None, **{"out": 1.0, f"in{peer}": 1.0 if peer == 4 else 0.2}) for peer in range(5)})
    assert len(set(found.values())) == 3, "two of four, then those that take turns"


def test_receivers_that_a_port_can_serve_at_once_are_ways_of_their_own() -> None:
    found = ways({peer: path(None, **{"out": 10.0, f"in{peer}": 1.0}) for peer in range(10)})
    assert len(set(found.values())) == 10
    found = ways({peer: path(None, **{"out": 10.0, f"in{peer}": 1.0}) for peer in range(11)})
    assert len(set(found.values())) < 11


def test_devices_of_one_slow_node_take_turns() -> None:
    found = ways({1: path(out=1.0, in1=1.0), 2: path(out=1.0, in2=0.1), 3: path(out=1.0, in2=0.1)})
    assert found[2] == found[3] != found[1]


def test_a_port_is_as_quick_as_the_quickest_path() -> None:
    found = ways({1: path("port", ab=1.0), 2: path("port", ac=0.1), 3: path("port", ad=0.9)})
    assert found[1] == found[3] != found[2]


def test_nothing_is_known_of_a_port_without_limits() -> None:
    assert len(set(ways({1: path("port"), 2: path("port")}).values())) == 1


def test_senders_take_turns_where_they_share_the_port_of_the_receiver() -> None:
    paths = {1: path("port", into=1.0, out1=1.0), 2: path("port", into=1.0, out2=1.0), 3: path("port", into=1.0, out3=0.1)}
    found = entrances(paths)
    assert found.keys() == {1, 2}, "the slow one needs little of it"
    assert found[1] == found[2]


def test_senders_with_links_of_their_own_need_no_turns() -> None:
    assert entrances({1: path(ab=1.0), 2: path(cb=1.0), 3: path("port"), 4: path("port")}) == {}


def test_stated_links_are_wires_of_their_own_unless_they_share_a_bottleneck() -> None:
    links = tuple(Link(source="n0", target=f"n{target}", bandwidth_bytes_per_s=1e9, latency_s=0.0) for target in range(1, 5))
    nodes = tuple(Node(name=f"n{number}", devices=(Device(f"d{number}", "cpu"),)) for number in range(7))
    up = SharedLink(name="up", bandwidth_bytes_per_s=1e9, members=(("n0", "n3"), ("n0", "n4")))
    default = NodeLink(bandwidth_bytes_per_s=1e8, latency_s=1e-3)
    topology = ClusterTopology(name="wires", nodes=nodes, links=links, shared_links=(up,), default_link=default)
    wires = wiring_of(topology, range(7)).wires
    assert len({wires[0][1], wires[0][2], wires[0][3], wires[0][5]}) == 4
    assert wires[0][3] == wires[0][4]
    assert wires[0][5] == wires[0][6], "nobody said that these are apart"
    assert len(set(wires[5].values())) == 1
    parted = dataclasses.replace(topology, default_link=None)
    assert len(set(wiring_of(parted, (0, 1, 5)).wires[0].values())) == 2, "pairs without a link send each other nothing"


def wiring_of(topology: ClusterTopology, devices: Sequence[int]) -> Wiring:
    names = [topology.devices[device].name for device in devices]
    pairs = [(source, target) for source in range(len(names)) for target in range(len(names)) if source != target]
    return Wiring.between(pairs, len(names), lambda source, target: topology.reach(names[source], names[target]), {})
