"""Device orders whose neighbors are close in the network: consecutive devices become consecutive stages.

RDO (SPP, Luo et al., INFOCOM 2022, arXiv 2204.10562; reconstructed) orders both sides of the minimum cut (Stoer and Wagner, 1997)
alike and joins the ends with the best link. Cuts split single devices off unequal links, so other orders are tried, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import networkx as nx
import numpy as np

from raypipe.planning.problem import Floats, Problem

MOST_FOR_CUTS = 40  # With more devices, minimum cuts take minutes: groups of devices with similar links are cut as one.
_NUM_ROUNDS = 4
_NUM_DIGITS = 7  # Digits of a color; further digits depend on the order in which sums are rounded.


def orders(problem: Problem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and orders worth trying, most promising first; equal orders once."""
    seen: set[tuple[int, ...]] = set()
    weights = symmetric(problem.bandwidth)
    devices = range(problem.num_devices)
    by_power = tuple(sorted(devices, key=lambda device: -problem.powers[device]))
    for name, order in (
        ("rdo", recursive(problem)),
        ("tree", tree(weights)),
        ("given", tuple(devices)),
        ("nearest", nearest(weights)),
        ("power", by_power),
    ):
        for direction, devices_in_order in ((name, order), (f"{name} reversed", order[::-1])):
            if devices_in_order not in seen:
                seen.add(devices_in_order)
                yield direction, devices_in_order


def symmetric(bandwidth: Floats) -> Floats:
    """Average both directions, 0 if one is missing; replace infinity by a finite bandwidth, set the diagonal to 0."""
    both = np.where((bandwidth > 0) & (bandwidth.T > 0), (bandwidth + bandwidth.T) / 2, 0.0)
    limits = both[np.isfinite(both)]
    both = np.where(np.isfinite(both), both, (float(limits.max()) if limits.size else 1.0) * 1e3)
    np.fill_diagonal(both, 0.0)
    return both


def recursive(problem: Problem) -> tuple[int, ...]:
    """Return the RDO order; many devices are cut as groups of similarly linked ones."""
    weights = symmetric(problem.bandwidth)
    if problem.num_devices <= MOST_FOR_CUTS:
        return tuple(_cut_order(list(range(problem.num_devices)), weights))
    groups = alike(weights, most=MOST_FOR_CUTS)
    between = np.array([[weights[one[0], other[-1]] for other in groups] for one in groups])
    np.fill_diagonal(between, 0.0)
    return tuple(device for group in _cut_order(list(range(len(groups))), between) for device in groups[group])


def _cut_order(members: list[int], weights: Floats) -> list[int]:
    if len(members) <= 2:
        return members
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(members)
    for position, one in enumerate(members):
        graph.add_weighted_edges_from((one, other, float(weights[one, other])) for other in members[position + 1 :] if weights[one, other])
    side = set(nx.stoer_wagner(graph)[1][0]) if nx.is_connected(graph) else set(nx.node_connected_component(graph, members[0]))
    parts = [_cut_order([member for member in members if (member in side) is inside], weights) for inside in (True, False)]
    return _joined(parts[0], parts[1], weights)


def _joined(one: list[int], other: list[int], weights: Floats) -> list[int]:
    # The ends that meet have the best link; the side with the smallest number leads.
    if min(other) < min(one):
        one, other = other, one
    ways = [(left, right) for left in (one, one[::-1]) for right in (other, other[::-1])]
    left, right = max(ways, key=lambda way: float(weights[way[0][-1], way[1][0]]))
    return left + right


def tree(weights: Floats) -> tuple[int, ...]:
    """Join groups along the maximum spanning tree, ends with the best link facing each other."""
    return tuple(alike(weights, most=1)[0])


def _spanning_edges(weights: Floats) -> list[tuple[float, int, int]]:
    """Return (weight, device, device) by Prim's algorithm."""
    size = len(weights)
    best, nearest_to = weights[0].copy(), np.zeros(size, dtype=int)
    left = np.ones(size, dtype=bool)
    left[0] = False
    edges: list[tuple[float, int, int]] = []
    for _ in range(size - 1):
        device = int(np.where(left, best, -math.inf).argmax())
        edges.append((float(best[device]), int(nearest_to[device]), device))
        left[device] = False
        closer = left & (weights[device] > best)
        best[closer], nearest_to[closer] = weights[device][closer], device
    return edges


def nearest(weights: Floats) -> tuple[int, ...]:
    """Walk from the device with the weakest links, always over the best link to an unvisited one."""
    left = set(range(len(weights)))
    device = min(left, key=lambda one: (float(weights[one].sum()), one))
    order = [device]
    left.remove(device)
    while left:
        device = max(left, key=lambda other: (float(weights[order[-1], other]), -other))
        order.append(device)
        left.remove(device)
    return tuple(order)


def alike(weights: Floats, *, most: int) -> list[list[int]]:
    """Join devices by the strongest links into at most `most` groups, each in the order of `tree`."""
    edges = sorted(_spanning_edges(weights), key=lambda edge: -edge[0])
    group_of: dict[int, list[int]] = {device: [device] for device in range(len(weights))}
    count = len(weights)
    for _, one, other in edges:
        if count <= most:
            break
        joined = _joined(group_of[one], group_of[other], weights)
        for device in joined:
            group_of[device] = joined
        count -= 1
    return list({id(group): group for group in group_of.values()}.values())


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Return the problem with nodes and devices sorted by color, and the former number of each device.

    The order is independent of names and numbers: colors refine by those of neighbors (Weisfeiler and Leman, 1968).
    """
    of_device = device_colors(problem)
    members: list[list[int]] = [[] for _ in problem.topology.nodes]
    for device, position in enumerate(problem.node_of):
        members[position].append(device)
    for devices in members:
        devices.sort(key=lambda device: of_device[device])
    by_color = sorted(members, key=lambda devices: [of_device[device] for device in devices])
    nodes = []
    for devices in by_color:
        if devices:
            node = problem.topology.nodes[problem.node_of[devices[0]]]
            nodes.append(replace(node, devices=tuple(problem.topology.devices[device] for device in devices)))
    nodes += [node for node in problem.topology.nodes if not node.devices]  # Links may name them.
    renumbered = replace(problem, topology=replace(problem.topology, nodes=tuple(nodes)))
    numbers = tuple(device for devices in by_color for device in devices)
    chosen = np.ix_(numbers, numbers)
    renumbered.know_pairs(problem.bandwidth[chosen], problem.latency_s[chosen])
    return renumbered, numbers


def device_colors(problem: Problem) -> list[float]:
    """Return equal numbers for devices that differ in their names alone."""
    links = [_scaled(problem.bandwidth), _scaled(problem.latency_s)]
    same_node = np.equal.outer(problem.node_of, problem.node_of).astype(float)
    kernels = [links[0], links[0].T, links[1], links[1].T, same_node]
    memory = np.array([[memory] for memory in problem.memory_bytes])
    colors = _rounded(np.array(problem.powers) + np.sqrt(2.0) * _scaled(memory)[:, 0])
    for _ in range(_NUM_ROUNDS):
        mixed = colors.copy()
        for number, kernel in enumerate(kernels):
            # Different powers keep kernels, and the devices at their other ends, apart.
            mixed += np.sqrt(number + 2.0) * (kernel @ (1 + colors) ** (1 + number / 3)) / len(colors)
        colors = _rounded(mixed)
    return [float(color) for color in colors]


def _scaled(values: Floats) -> Floats:
    """Return values on a logarithmic scale from 0 to 1; infinite ones become 2."""
    logs = np.log1p(np.where(np.isfinite(values), values, 0.0))
    scaled = logs / max(float(logs.max(initial=0.0)), 1e-300)
    result: Floats = np.where(np.isfinite(values), scaled, 2.0)
    return result


def _rounded(values: Floats) -> Floats:
    result: Floats = np.round(values / max(float(np.abs(values).max()), 1e-300), _NUM_DIGITS)
    return result
