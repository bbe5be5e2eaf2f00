"""A topology is read as it was written, finds the most specific link, and is refused where it cannot be true."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path as FilePath
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts import codec
from raypipe.artifacts.syntax import yaml_text, yaml_tree
from raypipe.artifacts.topology import FORMAT, ClusterTopology, Device, Link, Node, NodeLink, Overheads, Path, SharedLink, node_ports
from raypipe.errors import FormatError, NoLinkError, PlanError
from tests.strategies import SHOWN

CONFIGS = FilePath(__file__).parents[2] / "cluster_configs"

LAB = """
format: raypipe.topology/1
name: lab
nodes:
- name: a
  devices: [{name: a0, kind: h200, memory_bytes: 150000000000, speed: 2}, {name: a1, kind: h200}]
  link: {bandwidth_bytes_per_s: 4e11, latency_s: 5e-6}
- name: b
  cores: 2
  devices: [{name: b0, kind: cpu}, {name: b1, kind: cpu}, {name: b2, kind: cpu}]
- name: c
  devices: [{name: c0, kind: cpu}, {name: c1, kind: cpu}]
links:
- {from: a, to: b, bandwidth_bytes_per_s: 1e9, latency_s: 50e-6}
- {from: a0, to: b, bandwidth_bytes_per_s: 2e9, latency_s: 40e-6, one_way: true}
- {from: a0, to: b0, bandwidth_bytes_per_s: 3e9, latency_s: 30e-6, one_way: true}
- {from: b0, to: b1, latency_s: 1e-6}
shared_links:
- {name: pcie, bandwidth_bytes_per_s: 2.5e9, members: [[a0, b], [a, b1]]}
- {name: bus, bandwidth_bytes_per_s: 1e10, members: [[a, a]]}
"""


def read(text: str) -> ClusterTopology:
    return codec.from_yaml(ClusterTopology, text, path="lab.yaml", format_name=FORMAT)


def lab_with_default() -> ClusterTopology:
    return dataclasses.replace(read(LAB), default_link=NodeLink(bandwidth_bytes_per_s=1e8, latency_s=1e-3))


positive = st.floats(0, 1e300, exclude_min=True)
speeds = st.none() | positive
latencies = st.floats(0, 1e6)
node_links = st.builds(NodeLink, bandwidth_bytes_per_s=speeds, latency_s=latencies)
labels = st.text("ab0123e_.:/-", min_size=1, max_size=4)


@st.composite
def topologies(draw: st.DrawFn) -> ClusterTopology:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = iter(draw(st.lists(labels, min_size=len(sizes) + sum(sizes), max_size=len(sizes) + sum(sizes), unique=True)))
    device = {"kind": labels, "memory_bytes": st.none() | st.integers(1, 2**40), "speed": positive}
    nodes = tuple(
        Node(
            name=next(names),
            devices=tuple(draw(st.builds(Device, st.just(next(names)), **device)) for _ in range(size)),
            link=draw(st.none() | node_links),
            cores=draw(st.none() | st.integers(1, 8)),
        )
        for size in sizes
    )
    ends = [node.name for node in nodes] + [device.name for node in nodes for device in node.devices]
    pairs = draw(st.lists(st.tuples(st.sampled_from(ends), st.sampled_from(ends)).filter(lambda pair: pair[0] != pair[1]), max_size=5))
    pairs = list({frozenset(pair): pair for pair in pairs}.values())
    return ClusterTopology(
        name=draw(SHOWN),
        nodes=nodes,
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=draw(speeds), latency_s=draw(latencies), one_way=draw(st.booleans()))
            for a, b in pairs
        ),
        shared_links=tuple(
            SharedLink(name=name, bandwidth_bytes_per_s=draw(positive), members=tuple(pairs))
            for name in draw(st.lists(labels, max_size=2, unique=True))
        ),
        default_link=draw(st.none() | node_links),
    )


@given(topologies())
def test_a_topology_is_read_as_it_was_written(topology: ClusterTopology) -> None:
    again = read(codec.to_yaml(topology, format_name=FORMAT))
    assert again == topology
    assert again.digest == topology.digest


@given(topologies())
def test_every_pair_has_a_path_or_an_error_that_names_both_ends(topology: ClusterTopology) -> None:
    for source in topology.devices:
        for target in topology.devices:
            try:
                path = topology.path(source.name, target.name)
            except PlanError as error:
                assert topology.default_link is None
                assert repr(source.name) in str(error)  # noqa: PT017  # raised for some pairs only
                assert repr(target.name) in str(error)  # noqa: PT017
            else:
                assert path.bandwidth_bytes_per_s == min([bandwidth for _, bandwidth in path.resources], default=math.inf)
                assert len({name for name, _ in path.resources}) == len(path.resources)
                assert topology.path(source.name, target.name) is path


def test_a_topology_survives_a_file(tmp_path: FilePath) -> None:
    topology = lab_with_default()
    topology.save(tmp_path / "lab.yaml")
    assert ClusterTopology.load(tmp_path / "lab.yaml") == topology
    assert codec.read_format(tmp_path / "lab.yaml") == FORMAT
    assert yaml.safe_load((tmp_path / "lab.yaml").read_text())["nodes"][1]["cores"] == 2


def test_a_topology_survives_pickle_without_its_caches_and_can_be_a_key() -> None:
    topology = lab_with_default()
    path = topology.path("a0", "c1")
    again = pickle.loads(pickle.dumps(topology))
    assert {topology: 1}[again] == 1
    assert again.path("a0", "c1") == path
    assert set(topology.__getstate__()) == {"name", "nodes", "links", "shared_links", "default_link", "overheads"}


def test_devices_are_counted_in_the_order_of_the_file_and_found_by_name() -> None:
    topology = read(LAB)
    assert [device.name for device in topology.devices] == ["a0", "a1", "b0", "b1", "b2", "c0", "c1"]
    assert topology.num_devices == 7
    assert topology.device("a0") == Device("a0", "h200", 150_000_000_000, 2.0)
    assert topology.device("b2") == Device("b2", "cpu", None, 1.0)
    assert topology.node_of("b2").name == "b"
    assert (topology.node_of("b2").cores, topology.node_of("a0").cores) == (2, None)


@pytest.mark.parametrize("name", ["a", "a00", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    topology = read(LAB)
    for ask in (topology.device, topology.node_of, lambda name: topology.path("a0", name), lambda name: topology.path(name, name)):
        with pytest.raises(PlanError, match=f"topology 'lab' has no device called '{name}'"):
            ask(name)


def test_a_device_reaches_itself_at_no_cost() -> None:
    assert read(LAB).path("c0", "c0") == Path(0.0, math.inf, ())


def test_each_ordered_pair_of_a_node_has_its_own_link() -> None:
    topology = read(LAB)
    assert topology.path("a0", "a1") == Path(5e-6, 1e10, (("a0->a1", 4e11), ("bus", 1e10)))
    assert topology.path("a1", "a0") == Path(5e-6, 1e10, (("a1->a0", 4e11), ("bus", 1e10)))


def test_a_link_between_nodes_is_one_wire_each_way_for_all_pairs_across() -> None:
    topology = read(LAB)
    assert topology.path("a1", "b0") == topology.path("a1", "b2") == Path(50e-6, 1e9, (("a->b", 1e9),))
    assert topology.path("b0", "a1") == topology.path("b2", "a0") == Path(50e-6, 1e9, (("b->a", 1e9),))


def test_the_most_specific_link_counts() -> None:
    topology = read(LAB)
    assert topology.path("a0", "b0") == Path(30e-6, 2.5e9, (("a0->b0", 3e9), ("pcie", 2.5e9)))
    assert topology.path("a0", "b2") == Path(40e-6, 2e9, (("a0->b", 2e9), ("pcie", 2.5e9)))
    assert topology.path("b0", "a0") == Path(50e-6, 1e9, (("b->a", 1e9),))


def test_the_link_of_the_source_comes_before_the_link_of_the_target() -> None:
    links = tuple(Link(source=a, target=b, latency_s=s, one_way=True) for a, b, s in [("a", "c1", 2.0), ("a1", "c", 1.0)])
    topology = dataclasses.replace(read(LAB), links=links)
    assert topology.path("a1", "c1").latency_s == 1.0
    assert topology.path("a0", "c1").latency_s == 2.0


def test_a_link_between_a_device_and_its_own_node_serves_its_neighbors() -> None:
    topology = dataclasses.replace(read(LAB), links=(Link(source="a0", target="a", bandwidth_bytes_per_s=7.0, latency_s=1.0),))
    assert topology.path("a0", "a1").resources == (("a0->a", 7.0), ("bus", 1e10))
    assert topology.path("a1", "a0").resources == (("a->a0", 7.0), ("bus", 1e10))


def test_a_shared_link_counts_once_however_many_members_match() -> None:
    assert read(LAB).path("a0", "b1").resources == (("a0->b", 2e9), ("pcie", 2.5e9))
    assert read(LAB).path("a1", "b1").resources == (("a->b", 1e9), ("pcie", 2.5e9))


def test_a_link_without_bandwidth_has_no_limit() -> None:
    assert read(LAB).path("b0", "b1") == Path(1e-6, math.inf, ())


def test_the_default_link_joins_what_nothing_else_does() -> None:
    topology = lab_with_default()
    assert topology.path("a0", "c1") == topology.path("a1", "c0") == Path(1e-3, 1e8, (("a->c", 1e8),), "the port of a")
    assert topology.path("b0", "b2") == Path(1e-3, 1e8, (("b0->b2", 1e8),))
    assert topology.path("a1", "b2").latency_s == 50e-6


@pytest.mark.parametrize(("source", "target"), [("a0", "c1"), ("c0", "c1")])
def test_a_pair_that_nothing_joins_is_an_error_with_a_remedy(source: str, target: str) -> None:
    message = f"no link from device '{source}' .* to device '{target}' .*; add one between the devices or their nodes, a route"
    with pytest.raises(NoLinkError, match=message):
        read(LAB).path(source, target)


def test_uniform_devices_each_have_their_own_link_without_limit() -> None:
    topology = ClusterTopology.uniform(3, latency_s=0.5)
    assert [device.name for device in topology.devices] == ["device0", "device1", "device2"]
    assert topology.path("device0", "device2") == topology.path("device2", "device1") == Path(0.5, math.inf, ())
    limited = ClusterTopology.uniform(3, bandwidth_bytes_per_s=8.0)
    assert limited.path("device0", "device2").resources == (("device0->device2", 8.0),)
    assert read(codec.to_yaml(topology, format_name=FORMAT)) == topology


def test_uniform_nodes_share_one_wire_each_way() -> None:
    topology = ClusterTopology.uniform(5, devices_per_node=2, bandwidth_bytes_per_s=8.0, kind="h200", memory_bytes=9)
    assert [len(node.devices) for node in topology.nodes] == [2, 2, 1]
    assert topology.path("device0", "device1").resources == (("device0->device1", 8.0),)
    assert topology.path("device0", "device2").resources == topology.path("device1", "device3").resources == (("node0->node1", 8.0),)
    assert topology.devices[4] == Device("device4", "h200", 9)


def test_a_thousand_devices_take_no_work_for_pairs_that_nobody_asks_for() -> None:
    topology = ClusterTopology.uniform(1024, devices_per_node=8, bandwidth_bytes_per_s=1e9)
    assert topology.path("device0", "device1023").resources == (("node0->node127", 1e9),)
    assert len(topology._paths) == 1


LINK_A_B = {"from": "a", "to": "b", "latency_s": 1}


@pytest.mark.parametrize(
    ("steps", "to", "where", "problem"),
    [
        (["nodes"], [], "nodes", "the cluster has no devices"),
        (["nodes"], [{"name": "a", "devices": []}], "nodes", "the cluster has no devices"),
        (["nodes", 1, "name"], "a", "nodes[1].name", "a node or device before it is called 'a' too"),
        (["nodes", 1, "name"], "a0", "nodes[1].name", "a node or device before it is called 'a0' too"),
        (["nodes", 1, "devices", 2, "name"], "a1", "nodes[1].devices[2].name", "a node or device before it is called 'a1' too"),
        (["nodes", 1, "devices", 2, "name"], "b->c", "nodes[1].devices[2].name", "expected letters, digits and the characters"),
        (["nodes", 1, "name"], "", "nodes[1].name", "expected letters, digits and the characters"),
        (["nodes", 1, "name"], 3, "nodes[1].name", "expected text (quote it where it looks like something else), got 3"),
        (["nodes", 1, "core"], 2, "nodes[1].core", "unknown key; did you mean 'cores'?"),
        (["nodes", 1, "cores"], 0, "nodes[1].cores", "expected a number > 0, got 0"),
        (["nodes", 1, "devices", 0, "speed"], 0, "nodes[1].devices[0].speed", "expected a number > 0, got 0"),
        (["nodes", 1, "devices", 0, "memory_bytes"], 0, "nodes[1].devices[0].memory_bytes", "expected a number > 0, got 0"),
        (["nodes", 1, "devices", 0, "memory_bytes"], 8e9, "nodes[1].devices[0].memory_bytes", "expected a whole number, got 8000000000.0"),
        (
            ["nodes", 0, "link", "bandwidth_bytes_per_s"],
            0,
            "nodes[0].link.bandwidth_bytes_per_s",
            "expected a number > 0, got 0; leave",
        ),
        (["nodes", 0, "link", "latency_s"], -1, "nodes[0].link.latency_s", "expected a number >= 0, got -1"),
        (["nodes", 0, "link"], {}, "nodes[0].link.latency_s", "this key is missing"),
        (
            ["links", 0, "bandwidth_bytes_per_s"],
            0,
            "links[0].bandwidth_bytes_per_s",
            "expected a number > 0, got 0; leave the key out",
        ),
        (["links", 0, "from"], "a2", "links[0].from", "no node or device is called 'a2'; did you mean 'a"),
        (["links", 0, "to"], "zzz", "links[0].to", "no node or device is called 'zzz'"),
        (["links", 0, "to"], "a", "links[0].to", "the link joins 'a' with itself"),
        (["links", 3], LINK_A_B, "links[3]", "links[0] already leads from 'a' to 'b'; keep one of them, or mark both one_way"),
        (["links", 3], {**LINK_A_B, "from": "b", "to": "a", "one_way": True}, "links[3]", "links[0] already leads from 'b' to 'a'"),
        (
            ["links", 3, "source"],
            "a",
            "links[3].source",
            "unknown key; the keys here are from, to, bandwidth_bytes_per_s, latency_s, one_way",
        ),
        (["shared_links", 1, "name"], "pcie", "shared_links[1].name", "a shared link before it is called 'pcie' too"),
        (["shared_links", 0, "bandwidth_bytes_per_s"], 0, "shared_links[0].bandwidth_bytes_per_s", "expected a number > 0, got 0"),
        (["shared_links", 0, "members", 1, 0], "d", "shared_links[0].members[1][0]", "no node or device is called 'd'"),
        (["shared_links", 0, "members", 0], ["a0", "a0"], "shared_links[0].members[0]", "'a0' is paired with itself"),
        (["shared_links", 0, "members", 0], ["a0"], "shared_links[0].members[0][1]", "this key is missing"),
        (["default_link"], {"latency_s": "1ms"}, "default_link.latency_s", "expected a number, got '1ms'"),
    ],
)
def test_a_topology_that_cannot_be_true_is_refused(steps: list[str | int], to: object, where: str, problem: str) -> None:
    tree: Any = yaml_tree(LAB, path="lab.yaml")
    here = tree
    for step in steps[:-1]:
        here = here[step]
    here[steps[-1]] = to
    with pytest.raises(FormatError) as caught:
        read(yaml_text(tree))
    assert (caught.value.path, caught.value.where) == ("lab.yaml", where)
    assert caught.value.problem.startswith(problem)


def test_a_node_may_have_no_devices() -> None:
    topology = ClusterTopology(name="x", nodes=(Node(name="head", devices=()), Node(name="a", devices=(Device("a0", "cpu"),))))
    assert topology.num_devices == 1


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_the_cluster_files_that_come_along_join_all_their_devices_and_are_listed(file: FilePath) -> None:
    topology = ClusterTopology.load(file)
    assert topology.name == file.stem
    for source in topology.devices:
        for target in topology.devices:
            assert topology.path(source.name, target.name).latency_s > 0 or source is target
    assert f"`{file.name}`" in (CONFIGS / "README.md").read_text()


def test_the_laptop_has_four_devices_on_two_cores() -> None:
    topology = ClusterTopology.load(CONFIGS / "laptop.yaml")
    assert (topology.num_devices, topology.nodes[0].cores) == (4, 2)
    assert topology.path("cpu0", "cpu1") == Path(100e-6, 3e9, (("cpu0->cpu1", 3e9),))


def test_overheads_go_through_the_file_and_cannot_be_negative(tmp_path: FilePath) -> None:
    found = dataclasses.replace(ClusterTopology.uniform(2), overheads=Overheads(forward_s=1e-4, send_s=2e-5))
    found.save(tmp_path / "lab.yaml")
    assert ClusterTopology.load(tmp_path / "lab.yaml") == found
    with pytest.raises(FormatError, match="recv_s"):
        Overheads(recv_s=-1.0)


ROUTED = """
format: raypipe.topology/1
name: routed
nodes:
- {name: a, devices: [{name: a0, kind: cpu}, {name: a1, kind: cpu}]}
- {name: switch, devices: []}
- {name: b, devices: [{name: b0, kind: cpu}]}
- {name: c, devices: [{name: c0, kind: cpu}]}
links:
- {from: a, to: switch, bandwidth_bytes_per_s: 4e9, latency_s: 1e-5}
- {from: switch, to: b, bandwidth_bytes_per_s: 3e9, latency_s: 2e-5}
- {from: b, to: c, bandwidth_bytes_per_s: 2e9, latency_s: 4e-5}
- {from: a, to: b, via: [switch], latency_s: 0}
- {from: c, to: a0, via: [b, switch], bandwidth_bytes_per_s: 1e9, latency_s: 1e-6}
shared_links:
- {name: up, bandwidth_bytes_per_s: 5e9, members: [[a, switch], [b, switch]]}
- {name: down, bandwidth_bytes_per_s: 2.5e9, members: [[switch, a]]}
"""


def test_a_route_takes_the_latencies_and_shares_the_wires_of_the_links_that_it_passes() -> None:
    topology = read(ROUTED)
    there = topology.path("a1", "b0")
    assert there.latency_s == pytest.approx(3e-5)
    assert there.bandwidth_bytes_per_s == 3e9
    assert dict(there.resources) == {"a->switch": 4e9, "switch->b": 3e9, "up": 5e9}
    back = topology.path("b0", "a1")
    assert dict(back.resources) == {"b->switch": 3e9, "switch->a": 4e9, "up": 5e9, "down": 2.5e9}


def test_a_route_may_pass_several_nodes_and_be_slower_than_they_are() -> None:
    topology = read(ROUTED)
    for path, wires in (
        (topology.path("c0", "a0"), {"c->a0": 1e9, "c->b": 2e9, "b->switch": 3e9, "switch->a": 4e9, "up": 5e9, "down": 2.5e9}),
        (topology.path("a0", "c0"), {"a0->c": 1e9, "a->switch": 4e9, "switch->b": 3e9, "b->c": 2e9, "up": 5e9}),
    ):
        assert path.latency_s == pytest.approx(7.1e-5)
        assert path.bandwidth_bytes_per_s == 1e9
        assert dict(path.resources) == wires
    assert not topology.reach("a1", "c0").exists


def test_what_a_route_passes_twice_carries_everything_twice() -> None:
    topology = read(ROUTED.replace("[b, switch]]}", "[b, switch], [switch, b]]}"))
    assert dict(topology.path("a0", "b0").resources)["up"] == 2.5e9


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        (("via: [switch], latency", "via: [c], latency"), "links[3].via", "between which there is no link of its own"),
        (("via: [switch], latency", "via: [swich], latency"), "links[3].via[0]", "did you mean 'switch'"),
        (("via: [switch], latency", "via: [b], latency"), "links[3].via", "passes 'b' twice"),
        (("via: [switch], latency", "via: [], latency"), "links[3].via", ""),
        (("latency_s: 2e-5}", "latency_s: 2e-5, one_way: true}"), "links[3].via", "from 'b' to 'switch'"),
    ],
)
def test_a_route_over_links_that_do_not_exist_is_refused(change: tuple[str, str], where: str, problem: str) -> None:
    with pytest.raises(FormatError) as refused:
        read(ROUTED.replace(*change))
    assert refused.value.where == where
    assert problem in refused.value.problem


def test_a_topology_with_routes_is_read_as_it_was_written() -> None:
    topology = read(ROUTED)
    assert read(codec.to_yaml(topology, format_name=FORMAT)) == topology


def test_without_a_link_between_two_nodes_all_other_pairs_are_as_they_were() -> None:
    nodes = tuple(Node(name=name, devices=(Device(f"{name}0", "cpu"), Device(f"{name}1", "cpu"))) for name in "abc")
    default = NodeLink(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    links = (Link(source="a", target="c", latency_s=2e-4), Link(source="b0", target="a0", latency_s=3e-4, one_way=True))
    whole = ClusterTopology(name="lab", nodes=nodes, links=links, default_link=default)
    cut = whole.without_link("a", "b")
    for source in whole.devices:
        for target in whole.devices:
            ends = {whole.node_of(source.name).name, whole.node_of(target.name).name}
            path = cut.reach(source.name, target.name)
            if ends == {"a", "b"}:
                assert not path.exists
            else:
                assert path.latency_s == whole.path(source.name, target.name).latency_s
                assert path.bandwidth_bytes_per_s == whole.path(source.name, target.name).bandwidth_bytes_per_s


def test_a_route_over_a_lost_link_is_lost_with_it() -> None:
    nodes = tuple(Node(name=name, devices=(Device(f"{name}0", "cpu"),)) for name in "abc")
    links = (
        Link(source="a", target="b", latency_s=1e-4),
        Link(source="b", target="c", latency_s=1e-4),
        Link(source="a", target="c", latency_s=0.0, via=("b",)),
    )
    cut = ClusterTopology(name="line", nodes=nodes, links=links).without_link("c", "b")
    assert [(link.source, link.target) for link in cut.links] == [("a", "b")]


def test_a_node_has_a_port_for_what_leaves_it_and_one_for_what_comes() -> None:
    ports = {port.name: port for port in node_ports({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 4.0, "b": 5.0, "c": 6.0})}
    assert {name: port.bandwidth_bytes_per_s for name, port in ports.items()} == {
        **{"a/out": 1.0, "b/out": 2.0, "c/out": 3.0},
        **{"a/in": 4.0, "b/in": 5.0, "c/in": 6.0},
    }
    assert ports["b/out"].members == (("b", "a"), ("b", "c"))
    assert ports["b/in"].members == (("a", "b"), ("c", "b"))
    assert [port.bandwidth_bytes_per_s for port in node_ports({"a": 1.0, "b": 2.0})] == [1.0, 1.0, 2.0, 2.0]
