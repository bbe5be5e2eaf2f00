"""Random problems for the planner's tests; equal seeds give equal problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, node_ports
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.simulation.plan_cost import STATE_BYTES_PER_PARAMETER_BYTE

NUM_ROWS = 12
MB = 1_000_000
"""So large that the parts of a tensor are whole bytes, or as good as that."""


def with_fixed_shares(problem: Problem, seed: int) -> Problem:
    """The same layers, of whose time a part up to nine tenths does not depend on the number of rows; microbatches of two thirds of it."""
    rng = random.Random(seed)
    layers = tuple(replace(layer, fixed_share=rng.choice((0.0, 0.2, 0.9))) for layer in problem.profile.layers)
    return replace(problem, profile=replace(problem.profile, layers=layers), microbatch_size=problem.microbatch_size * 2 // 3)


def random_problem(
    seed: int,
    *,
    num_devices: int,
    num_layers: int,
    num_microbatches: int = 8,
    memory_bytes: int | None = None,
    one_way: bool = False,
    speeds: tuple[float, ...] = (1.0, 1.0, 0.5),
    missing: float = 0.0,
    room: float | None = None,
) -> Problem:
    """A chain of unequal layers, and a node for each device, linked with bandwidths of 1, 10 or 25 MB/s.

    A part `missing` of the pairs has no link, as far as all devices stay joined. Each device has `room` for that part of what the model
    keeps, but at least for the largest layer.
    """
    rng = random.Random(seed)
    layers = []
    for index in range(num_layers):
        forward_s = rng.uniform(0.5, 2.0)
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                weight_grad_s=forward_s,
                output_bytes=rng.choice((1, 4, 10)) * MB,
                saved_bytes=3 * MB,
                parameter_bytes=rng.choice((1, 20, 100)) * MB,
            )
        )
    if room is not None:
        kept = [(1 + STATE_BYTES_PER_PARAMETER_BYTE) * layer.parameter_bytes for layer in layers]
        memory_bytes = round(max(room * sum(kept), *kept) + 2 * num_microbatches * 3 * MB)
    nodes = tuple(
        Node(name=f"node{number}", devices=(Device(f"device{number}", "cpu", memory_bytes, rng.choice(speeds)),))
        for number in range(num_devices)
    )
    pairs = itertools.permutations(range(num_devices), 2) if one_way else itertools.combinations(range(num_devices), 2)
    links = tuple(
        Link(
            source=f"node{one}",
            target=f"node{other}",
            bandwidth_bytes_per_s=rng.choice((1.0, 10.0, 25.0)) * MB,
            latency_s=0.01,
            one_way=one_way,
        )
        for one, other in pairs
    )
    links = _joining(links, num_devices, missing, rng)
    profile = ModelProfile(name="random", microbatch_size=NUM_ROWS, layers=tuple(layers))
    return Problem(profile, ClusterTopology(name="random", nodes=nodes, links=links), num_microbatches, NUM_ROWS)


def _joining(links: tuple[Link, ...], num_devices: int, missing: float, rng: random.Random) -> tuple[Link, ...]:
    """Leave out pairs as long as the others join all nodes."""
    kept: dict[frozenset[str], list[Link]] = {}
    for link in links:
        kept.setdefault(frozenset((link.source, link.target)), []).append(link)
    for pair in rng.sample(list(kept), round(missing * len(kept))):
        graph: nx.Graph[str] = nx.Graph()
        graph.add_edges_from((min(other), max(other)) for other in kept if other != pair)
        if len(graph) == num_devices and nx.is_connected(graph):
            del kept[pair]
    return tuple(link for of_pair in kept.values() for link in of_pair)


def slow_sums(*, num_layers: int = 2, num_devices: int = 2, num_microbatches: int = 4, message_s: float = 0.0) -> Problem:
    """Layers that take 0.2 s forth and 0.4 s back, with sums of two copies that take 0.6 s each."""
    bandwidth = 1e9
    profile = ModelProfile.uniform(
        num_layers,
        forward_s=0.2,
        backward_s=0.4,
        weight_grad_s=0.2,
        output_bytes=round(message_s * bandwidth),
        parameter_bytes=round(0.6 * bandwidth),
        microbatch_size=4,
    )
    topology = ClusterTopology.uniform(num_devices, latency_s=0.0, bandwidth_bytes_per_s=bandwidth, devices_per_node=1)
    return Problem(profile, topology, num_microbatches, 4)


def behind_ports(*, num_nodes: int = 5, output_bytes: int = 16_000_000, parameter_bytes: int = 20_000_000) -> Problem:
    """Ten layers on nodes of one device, each behind a port of 1 GB/s either way."""
    names = [f"node{number}" for number in range(num_nodes)]
    ports = node_ports(dict.fromkeys(names, 1e9))
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", "gpu"),)) for name in names)
    topology = ClusterTopology(name="ports", nodes=nodes, default_link=NodeLink(latency_s=5e-5), shared_links=ports)
    profile = ModelProfile.uniform(
        10, forward_s=0.004, backward_s=0.008, output_bytes=output_bytes, parameter_bytes=parameter_bytes, microbatch_size=4
    )
    return Problem(profile, topology, 12, 4)


def islands(
    sizes: tuple[int, ...], *, within: float = 100.0, between: float = 1.0, parameter_bytes: int = 1000, num_layers: int = 8
) -> Problem:
    """Nodes of several devices with fast links inside and slow ones between them."""
    profile = ModelProfile.uniform(num_layers, output_bytes=10, saved_bytes=10, parameter_bytes=parameter_bytes, microbatch_size=NUM_ROWS)
    nodes = tuple(
        Node(
            name=f"island{number}",
            devices=tuple(Device(f"device{number}-{position}", "cpu") for position in range(size)),
            link=NodeLink(bandwidth_bytes_per_s=within, latency_s=0.001),
        )
        for number, size in enumerate(sizes)
    )
    topology = ClusterTopology(name="islands", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=between, latency_s=0.001))
    return Problem(profile, topology, 8, NUM_ROWS)


def contiguous_plans(order: tuple[int, ...], num_layers: int) -> Iterator[Layout]:
    """Every plan whose stages have consecutive layers on consecutive devices of the order; devices at both ends may be idle."""
    for start in range(len(order)):
        for stop in range(start + 1, len(order) + 1):
            yield from divided(order[start:stop], num_layers)


def divided(devices: tuple[int, ...], num_layers: int) -> Iterator[Layout]:
    """Every plan with all of these devices in this order."""
    for num_stages in range(1, min(len(devices), num_layers) + 1):
        for borders in itertools.combinations(range(1, len(devices)), num_stages - 1):
            ends = (0, *borders, len(devices))
            workers = tuple(devices[first:end] for first, end in itertools.pairwise(ends))
            for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
                yield Layout((0, *cuts, num_layers), workers)


def all_plans(num_devices: int, num_layers: int) -> Iterator[Layout]:
    """Every plan with consecutive layers, any devices in any order, some of them idle."""
    for used in range(1, num_devices + 1):
        for devices in itertools.permutations(range(num_devices), used):
            yield from divided(devices, num_layers)


def shuffled(problem: Problem, *, seed: int) -> Problem:
    """The same cluster with nodes and devices listed in another order."""
    rng = random.Random(seed)
    nodes = [replace(node, devices=tuple(rng.sample(node.devices, len(node.devices)))) for node in problem.topology.nodes]
    rng.shuffle(nodes)
    return replace(problem, topology=replace(problem.topology, nodes=tuple(nodes)))
