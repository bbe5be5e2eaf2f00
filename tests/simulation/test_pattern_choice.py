"""Which pattern of a sum is chosen on which links."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, node_ports
from raypipe.communication.paths import LinkPath, PathOf
from raypipe.communication.patterns import MOST_MESHED, Pattern, direct, exchange, ring, tree
from raypipe.communication.policy import CHUNK_S
from raypipe.simulation.packing import packed
from raypipe.simulation.pattern_choice import (
    best_pattern,
    candidates,
    exchange_s,
    joining,
    ring_time,
    sum_pattern,
    sum_time,
)

RATE = 25e6
BYTES = 4_000_000
LATENCY_S = 1e-4


def cluster(
    num_nodes: int, *, devices: int = 1, slow: dict[tuple[int, int], float] | None = None, ports: dict[int, float] | None = None
) -> ClusterTopology:
    """Nodes with one port each; `slow` has the rates of single wires, `ports` those of ports."""
    names = [f"n{number}" for number in range(num_nodes)]
    shared = node_ports({name: (ports or {}).get(number, RATE) for number, name in enumerate(names)})
    local = NodeLink(bandwidth_bytes_per_s=100 * RATE, latency_s=LATENCY_S / 10)
    return ClusterTopology(
        name="ports",
        nodes=tuple(Node(name=name, devices=tuple(Device(f"{name}/{at}", "cpu") for at in range(devices)), link=local) for name in names),
        links=tuple(
            Link(source=names[a], target=names[b], bandwidth_bytes_per_s=rate, latency_s=LATENCY_S, one_way=True)
            for (a, b), rate in (slow or {}).items()
        ),
        shared_links=tuple(shared),
        default_link=NodeLink(latency_s=LATENCY_S),
    )


def unlike(num_nodes: int, seed: int) -> tuple[ClusterTopology, dict[tuple[int, int], float]]:
    """Nodes of one device, each pair with a link of its own each way between a tenth and ten times `RATE`; and these rates."""
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(num_nodes)]
    rate = {pair: RATE * 10 ** rng.uniform(-1, 1) for pair in itertools.permutations(range(num_nodes), 2)}
    links = tuple(
        Link(source=names[a], target=names[b], bandwidth_bytes_per_s=rate[a, b], latency_s=LATENCY_S, one_way=True) for a, b in rate
    )
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names)
    return ClusterTopology(name="unlike", nodes=nodes, links=links), rate


def members_of(topology: ClusterTopology, devices: Sequence[str]) -> tuple[list[str], PathOf]:
    return [topology.node_of(device).name for device in devices], lambda source, target: topology.path(devices[source], devices[target])


def chosen(topology: ClusterTopology, devices: Sequence[str] | None = None, num_bytes: float = BYTES) -> Pattern:
    return sum_pattern(*members_of(topology, devices or [device.name for device in topology.devices]), num_bytes)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8])
def test_on_equal_ports_it_is_the_ring_of_the_members(num_nodes: int) -> None:
    assert chosen(cluster(num_nodes)) == ring(range(num_nodes))


def test_where_several_members_share_a_node_it_has_two_levels() -> None:
    assert chosen(cluster(2, devices=2)) == Pattern(((0, 1), (2, 3)))
    assert chosen(cluster(2, devices=2), ["n0/0", "n1/0", "n0/1", "n1/1"]) == Pattern(((0, 2), (1, 3)))


def test_a_ring_goes_round_a_slow_wire() -> None:
    slow = cluster(4, slow={(1, 2): RATE / 10})
    order = [group[0] for group in chosen(slow).groups]
    assert (1, 2) not in zip(order, order[1:] + order[:1], strict=True)
    assert not chosen(slow).direct


def test_a_tree_needs_no_bad_link() -> None:
    # Good links along 2 - 0 - 3 - 1 alone: each circle, and each direct exchange, passes a bad one.
    good = {frozenset(ends) for ends in ((2, 0), (0, 3), (3, 1))}
    topology = ClusterTopology.uniform(4, bandwidth_bytes_per_s=RATE / 50, latency_s=LATENCY_S, devices_per_node=1)
    names = [node.name for node in topology.nodes]
    links = tuple(
        Link(source=names[one], target=names[other], bandwidth_bytes_per_s=RATE, latency_s=LATENCY_S) for one, other in map(sorted, good)
    )
    topology = replace(topology, links=links)
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    pattern = chosen(topology)
    assert set(map(frozenset, pattern.edges)) == good
    # Each link carries each slice once each way, as a share or as a total, and the two in the middle send over both links at once.
    assert sum_time(pattern, nodes, path).s_per_byte == pytest.approx(1.0 / RATE)
    assert sum_time(ring(range(4)), nodes, path).s_per_byte == pytest.approx(2 * 0.75 / (RATE / 50))
    assert pattern.is_meshed
    assert exchange(4, pattern) == direct(range(4)), "small numbers go to all at once"


def test_a_sum_of_few_bytes_is_exchanged_directly() -> None:
    assert chosen(cluster(4), num_bytes=4000) == direct(range(4))


def test_a_little_quicker_is_no_reason_to_leave_the_usual_ring() -> None:
    slightly = cluster(4, slow={(1, 2): 0.97 * RATE})
    assert chosen(slightly) == ring(range(4))
    assert best_pattern(*members_of(slightly, [device.name for device in slightly.devices]), BYTES) != ring(range(4))


def test_seconds_are_those_of_the_busiest_link_and_of_the_longest_way() -> None:
    topology = cluster(4)
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    around = sum_time(ring(range(4)), nodes, path)
    assert around.s_per_byte == pytest.approx(2 * 3 / 4 / RATE)
    assert around.latency_s == pytest.approx(6 * LATENCY_S)
    exchanged = sum_time(direct(range(4)), nodes, path)
    assert exchanged.s_per_byte == pytest.approx(around.s_per_byte)
    assert exchanged.latency_s == pytest.approx(2 * LATENCY_S)


def test_a_member_sends_to_one_after_the_other_by_a_port_and_to_all_at_once_over_stated_links() -> None:
    topology = ClusterTopology.uniform(4, bandwidth_bytes_per_s=RATE, devices_per_node=1)
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    assert sum_time(direct(range(4)), nodes, path).s_per_byte == pytest.approx(2 * 3 / 4 / RATE)
    names = [node.name for node in topology.nodes]
    stated = replace(
        topology,
        links=tuple(Link(source=a, target=b, bandwidth_bytes_per_s=RATE, latency_s=0.0) for a, b in itertools.combinations(names, 2)),
    )
    nodes, path = members_of(stated, [device.name for device in stated.devices])
    assert sum_time(direct(range(4)), nodes, path).s_per_byte == pytest.approx(2 / 4 / RATE)
    assert chosen(stated) == direct(range(4))
    assert sum_time(ring(range(4)), nodes, path).s_per_byte == pytest.approx(2 * 3 / 4 / RATE)


def test_what_goes_to_a_slow_node_does_not_wait_for_what_stays_within_the_node() -> None:
    behind = cluster(3, devices=2, ports={1: RATE / 10})
    slow = NodeLink(bandwidth_bytes_per_s=RATE / 100, latency_s=LATENCY_S)
    within = replace(behind, nodes=(replace(behind.nodes[0], link=slow), *behind.nodes[1:]))
    nodes, path = members_of(within, ["n0/0", "n0/1", "n1/0", "n2/0"])
    assert sum_time(direct(range(4)), nodes, path).s_per_byte == pytest.approx(2 / 4 / (RATE / 100))


def test_shares_along_a_tree_wait_three_chunks_a_link_at_most() -> None:
    topology = ClusterTopology.uniform(4, bandwidth_bytes_per_s=RATE, devices_per_node=1)
    names = [node.name for node in topology.nodes]
    stated = replace(
        topology, links=tuple(Link(source=a, target=b, bandwidth_bytes_per_s=RATE, latency_s=0.0) for a, b in itertools.pairwise(names))
    )
    nodes, path = members_of(stated, [device.name for device in stated.devices])
    along = sum_time(tree(itertools.pairwise(range(4)), is_meshed=True), nodes, path)
    assert along.s_per_byte == pytest.approx(1.0 / RATE)
    assert along.late_s(1e9) == pytest.approx(9 * CHUNK_S)
    assert along.waiting_s_per_byte > 0
    assert along.late_s(1e5) == pytest.approx(1e5 * along.waiting_s_per_byte)


@pytest.mark.parametrize("slow", [{}, {(0, 1): RATE / 10}, {(0, 1): RATE / 10, (1, 0): RATE / 10, (2, 3): RATE / 2}])
@pytest.mark.parametrize("devices", [1, 2])
def test_none_of_the_candidates_is_quicker(slow: dict[tuple[int, int], float], devices: int) -> None:
    topology = cluster(4, devices=devices, slow=slow)
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    best_s = sum_time(best_pattern(nodes, path, BYTES), nodes, path).seconds(BYTES)
    assert all(sum_time(pattern, nodes, path).seconds(BYTES) >= 0.999 * best_s for pattern in candidates(nodes, path))


def test_a_member_behind_a_slow_port_is_a_leaf_of_a_tree() -> None:
    topology = cluster(4, ports={1: RATE / 10})
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    pattern = chosen(topology)
    assert pattern == joining(4, path)
    assert len(pattern.neighbors[1]) == 1
    # It sends and takes all numbers once, as shares or totals, while its neighbor sends to others, too; in a ring three quarters twice.
    assert sum_time(pattern, nodes, path).s_per_byte == pytest.approx(1 / (RATE / 10))
    assert sum_time(ring(range(4)), nodes, path).s_per_byte == pytest.approx(1.5 / (RATE / 10))


def test_among_equal_links_those_of_members_that_send_little_make_the_tree() -> None:
    # One link is ten times as quick as all others: the two at its ends take one more member each, whatever their numbers.
    topology = ClusterTopology.uniform(4, bandwidth_bytes_per_s=RATE, latency_s=LATENCY_S, devices_per_node=1)
    names = [node.name for node in topology.nodes]
    quick = Link(source=names[0], target=names[1], bandwidth_bytes_per_s=10 * RATE, latency_s=LATENCY_S)
    topology = replace(topology, links=(quick,))
    for order in itertools.permutations(device.name for device in topology.devices):
        nodes, path = members_of(topology, order)
        pattern = joining(4, path)
        assert pattern is not None
        assert sorted(map(len, pattern.neighbors)) == [1, 1, 2, 2]
        # Three quarters as shares and a quarter as totals over the quick link, the rest over the other.
        assert sum_time(pattern, nodes, path).s_per_byte == pytest.approx(1.0 / RATE)


def test_small_numbers_of_many_members_go_around_the_ring() -> None:
    count = MOST_MESHED + 1
    topology = cluster(count)
    _, path = members_of(topology, [device.name for device in topology.devices])
    assert exchange_s(count, path) == pytest.approx((count - 1) * LATENCY_S)
    assert exchange_s(MOST_MESHED, path) == LATENCY_S


def test_a_large_group_has_its_ring() -> None:
    count = MOST_MESHED + 1
    topology = cluster(count, slow={(0, 1): RATE / 10})
    assert chosen(topology) == ring(range(count))
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    assert sum_time(ring(range(count)), nodes, path).latency_s == pytest.approx(2 * (count - 1) * LATENCY_S)


@pytest.mark.parametrize("num_members", [2, 3, 4, 7])
def test_the_time_of_a_ring_is_that_of_its_pattern(num_members: int) -> None:
    rng = random.Random(num_members)
    slow = {(a, b): RATE * rng.uniform(0.1, 1.0) for a, b in itertools.combinations(range(num_members), 2)}
    topology = cluster(num_members, slow=slow, ports={0: RATE / 3})
    members = [device.name for device in topology.devices]
    nodes = [name.split("/")[0] for name in members]

    def path(source: int, target: int) -> LinkPath:
        return topology.path(members[source], members[target])

    found, expected = ring_time(nodes, path), sum_time(ring(range(num_members)), nodes, path)
    assert found.latency_s == pytest.approx(expected.latency_s)
    assert found.s_per_byte == pytest.approx(expected.s_per_byte)


def test_slices_go_along_trees_of_their_own_so_long_that_all_links_work() -> None:
    """Of four nodes with links of their own two pairs have a tenth: four paths along the other links, and a little over the bad ones."""
    names = [f"n{number}" for number in range(4)]
    bad = {(0, 1), (2, 3)}
    topology = ClusterTopology(
        name="unlike",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names),
        links=tuple(
            Link(source=names[a], target=names[b], bandwidth_bytes_per_s=RATE / (10 if (a, b) in bad else 1), latency_s=LATENCY_S)
            for a, b in itertools.combinations(range(4), 2)
        ),
    )
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    pattern = chosen(topology)
    assert len(pattern.trees) > 3
    # Three hops of each slice, both ways, over four links and two tenths of one.
    assert sum_time(pattern, nodes, path).s_per_byte == pytest.approx(3 / 4.2 / RATE, rel=0.01)
    one = joining(4, path)
    assert one is not None
    assert sum_time(one, nodes, path).s_per_byte == pytest.approx(1 / RATE)


@pytest.mark.parametrize("seed", range(6))
def test_several_trees_are_near_what_links_can_carry(seed: int) -> None:
    """All that leaves and enters a member passes its links: each member sends and takes all numbers once at least."""
    topology, rate = unlike(6, seed)
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    pattern = chosen(topology, num_bytes=1e9)
    found_s = sum_time(pattern, nodes, path).s_per_byte
    sides = [side for size in (1, 2, 3) for side in itertools.combinations(range(6), size)]
    across_s = max(
        1 / sum(rate[pair] for pair in rate if (pair[0] in side) == outwards and (pair[1] in side) != outwards)
        for side in sides
        for outwards in (True, False)
    )
    assert across_s <= found_s * (1 + 1e-9)
    assert found_s < 0.7 * sum_time(ring(range(6)), nodes, path).s_per_byte
    one = joining(6, path)
    assert one is not None
    assert found_s < 0.7 * sum_time(one, nodes, path).s_per_byte


@pytest.mark.parametrize("seed", range(6))
def test_trees_are_packed_unless_they_take_longer_than_asked(seed: int) -> None:
    topology, rate = unlike(random.Random(seed).randint(3, 8), seed)
    _, path = members_of(topology, [device.name for device in topology.devices])
    pattern = packed(len(topology.nodes), path)
    assert pattern is not None
    shares, totals = pattern.loads
    seconds = max((shares.get(hop, 0.0) + totals.get(hop, 0.0)) / rate[hop] for hop in {**shares, **totals})
    assert packed(len(topology.nodes), path, seconds * 1.01) == pattern
    assert packed(len(topology.nodes), path, seconds * 0.99) is None


@pytest.mark.parametrize("seed", range(4))
def test_the_root_of_a_packed_tree_is_in_its_middle(seed: int) -> None:
    topology, _ = unlike(7, seed)
    trees = chosen(topology, num_bytes=1e9).trees
    assert len(trees) > 1
    for each in trees:
        assert each.root == min(nx.center(nx.Graph(list(each.edges))))


def test_links_without_a_limit_that_join_all_need_no_packing() -> None:
    names = [f"n{number}" for number in range(3)]
    topology = ClusterTopology(
        name="unlimited",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names),
        links=(
            Link(source="n0", target="n1", latency_s=LATENCY_S),
            Link(source="n1", target="n2", latency_s=LATENCY_S),
            Link(source="n0", target="n2", bandwidth_bytes_per_s=RATE, latency_s=LATENCY_S),
        ),
    )
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    assert chosen(topology) == joining(3, path)
    assert sum_time(chosen(topology), nodes, path).s_per_byte == 0


def test_a_stated_wire_is_not_behind_the_port_of_its_node() -> None:
    """One node has a slow wire of its own to n1; n2 and n3 are behind its port."""
    names = [f"n{number}" for number in range(4)]
    topology = ClusterTopology(
        name="both",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names),
        links=(Link(source="n0", target="n1", bandwidth_bytes_per_s=RATE / 10, latency_s=LATENCY_S),),
        default_link=NodeLink(bandwidth_bytes_per_s=RATE, latency_s=LATENCY_S),
    )
    nodes, path = members_of(topology, [device.name for device in topology.devices])
    star = tree(((0, 1), (0, 2), (0, 3)))
    assert sum_time(star, nodes, path).s_per_byte == pytest.approx(10 / RATE)
