"""Device orders independent of names, so that equal clusters get equal plans.

Colors refine by the colors of neighbors (Weisfeiler and Leman, 1968).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raypipe.planning.problem import Floats, Problem

_NUM_ROUNDS = 4
_NUM_DIGITS = 7  # Digits of a colour; further digits depend on the order in which sums are rounded.


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Return the problem with nodes and devices sorted by color, and the former number of each device."""
    of_device = colours(problem)
    members: list[list[int]] = [[] for _ in problem.topology.nodes]
    for device, position in enumerate(problem.node_of):
        members[position].append(device)
    for devices in members:
        devices.sort(key=lambda device: of_device[device])
    by_colour = sorted(members, key=lambda devices: [of_device[device] for device in devices])
    nodes = []
    for devices in by_colour:
        if devices:
            node = problem.topology.nodes[problem.node_of[devices[0]]]
            nodes.append(replace(node, devices=tuple(problem.topology.devices[device] for device in devices)))
    nodes += [node for node in problem.topology.nodes if not node.devices]  # Links may name them.
    renumbered = replace(problem, topology=replace(problem.topology, nodes=tuple(nodes)))
    return renumbered, tuple(device for devices in by_colour for device in devices)


def colours(problem: Problem) -> list[float]:
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
    return [float(colour) for colour in colors]


def _scaled(values: Floats) -> Floats:
    """Return values on a logarithmic scale from 0 to 1; infinite ones become 2."""
    logs = np.log1p(np.where(np.isfinite(values), values, 0.0))
    scaled = logs / max(float(logs.max(initial=0.0)), 1e-300)
    result: Floats = np.where(np.isfinite(values), scaled, 2.0)
    return result


def _rounded(values: Floats) -> Floats:
    result: Floats = np.round(values / max(float(np.abs(values).max()), 1e-300), _NUM_DIGITS)
    return result
