"""Lower bounds on the time of an update that hold for every synchronous schedule and every plan.

Overheads, memory, and the sharing of links between messages and sums can only add to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from raypipe.planning.lower_bounds import Block, lower_bound
from raypipe.planning.problem import Devices, Floats, Problem

_MOST_BORDERS = 64


@dataclass(frozen=True)
class PlanBound:
    """Least seconds of one update, whatever the plan."""

    work_s: float
    copies_s: float
    layer_s: float
    border_s: float

    @property
    def update_s(self) -> float:
        """Largest of the bounds."""
        return max(self.work_s, self.copies_s, self.layer_s, self.border_s)

    @property
    def binding(self) -> str:
        """Name of the largest bound."""
        return max(("work", "copies", "layer", "border"), key=lambda name: float(getattr(self, f"{name}_s")))


def plan_bound(problem: Problem) -> PlanBound:
    """Return the bound for one update of any plan."""
    bounds = _Bounds(problem)
    return PlanBound(bounds.work_s(), bounds.copies_s(), bounds.layer_s(), bounds.border_s())


class _Bounds:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_microbatches = problem.num_microbatches
        times = np.diff(problem.prefix_s.sum(axis=1), axis=1)
        self.alone = np.array([device.speed for device in problem.topology.devices])  # While nobody else of the node computes.
        self.device_s = times[np.array(problem.kind_of)]  # Of each layer for a microbatch at speed 1: [device, layer].
        # A sum of two devices over the best link: two steps of half the bytes each.
        off_diagonal = ~np.eye(problem.num_devices, dtype=bool)
        self.best_bandwidth = float(problem.bandwidth[off_diagonal].max(initial=0.0))
        self.best_latency_s = float(problem.latency_s[off_diagonal].min(initial=math.inf))
        self.layer_bytes = np.diff(problem.summed_prefix)

    def _work_s(self, devices: Devices) -> float:
        # The dual of sharing all work, layer by layer: prices y_l <= z_d x seconds of layer l on device d, where z, by power, sums to 1.
        # Devices that share too few cores count as the best ones, as many as there are cores, layer by layer.
        if not devices:
            return math.inf
        members: dict[int, list[int]] = {}
        for device in devices:
            members.setdefault(self.problem.node_of[device], []).append(device)
        rows: list[Floats] = []
        counts: list[float] = []
        for node, of_node in members.items():
            own_s = self.device_s[of_node] / self.alone[of_node, None]
            cores = self.problem.topology.nodes[node].cores
            if cores is None or cores >= len(of_node):
                rows += list(own_s)
                counts += [1.0] * len(of_node)
            else:
                rows.append(own_s.min(axis=0))
                counts.append(float(cores))
        times = np.array(rows)
        powers = 1 / np.maximum(times.sum(axis=1), 1e-300)
        prices = powers / (np.array(counts) * powers).sum()
        return float((prices[:, None] * times).min(axis=0).sum()) * self.num_microbatches

    def work_s(self) -> float:
        return self._work_s(tuple(range(self.problem.num_devices)))

    def _sum_s(self, num_bytes: float) -> float:
        return math.inf if not self.best_bandwidth else 2 * (self.best_latency_s + num_bytes / 2 / self.best_bandwidth)

    def copies_s(self) -> float:
        # Either two devices over the best link sum some layer's gradients, or no layer has copies and `lower_bounds` holds.
        problem = self.problem
        # Of each part of the work what the kind that is best at it takes.
        parts = np.diff(problem.prefix_s, axis=2).min(axis=0)
        sources: list[set[int]] = [set() for _ in range(problem.num_layers)]
        for producer, consumer in problem.edges:
            sources[consumer].add(producer)
        blocks = [
            Block(forward_s, input_grad_s, weight_grad_s, sources=tuple(sorted(feeding)))
            for (forward_s, input_grad_s, weight_grad_s), feeding in zip(parts.T.tolist(), sources, strict=True)
        ]
        single_s = lower_bound(blocks, num_microbatches=self.num_microbatches, speeds=tuple(self.alone.tolist())).update_s
        with_copies_s = max(self.work_s(), min(self._sum_s(float(num_bytes)) for num_bytes in self.layer_bytes))
        return float(min(single_s, with_copies_s))

    def layer_s(self) -> float:
        # All microbatches of a layer pass one device, or its gradients are summed.
        on_one_s = (self.device_s / self.alone[:, None]).min(axis=0) * self.num_microbatches
        return max(min(float(one_s), self._sum_s(float(num_bytes))) for one_s, num_bytes in zip(on_one_s, self.layer_bytes, strict=True))

    def border_s(self) -> float:
        return max(map(self._across_s, self._sides()), default=0.0)

    def _sides(self) -> Iterator[Devices]:
        # Sets of devices that no link above some bandwidth leaves.
        bandwidth = np.maximum(self.problem.bandwidth, self.problem.bandwidth.T)
        size = self.problem.num_devices
        finite = np.unique(bandwidth[np.isfinite(bandwidth)])
        thresholds = (
            finite[np.unique(np.linspace(0, len(finite) - 1, min(len(finite), _MOST_BORDERS)).astype(int))] if finite.size else finite
        )
        seen: set[Devices] = {tuple(range(size))}
        for threshold in thresholds.tolist():
            linked = bandwidth > threshold
            left = np.ones(size, dtype=bool)
            while left.any():
                side = np.zeros(size, dtype=bool)
                side[int(left.argmax())] = True
                while (wider := side | linked[side].any(axis=0)).sum() > side.sum():
                    side = wider
                left &= ~side
                devices = tuple(np.flatnonzero(side).tolist())
                if devices not in seen:
                    seen.add(devices)
                    yield devices
            if len(seen) > _MOST_BORDERS:
                return

    def _across_s(self, side: Devices) -> float:
        # A plan that does not copy all layers to both sides carries a part x of all rows over the border, in x M d / B seconds (d: bytes
        # of the smallest tensor between layers), and leaves (1 - x) of the work to one side alone; x can be chosen.
        problem = self.problem
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(problem.num_layers))
        graph.add_edges_from(problem.edges)
        if not nx.is_connected(graph):
            return 0.0  # Unconnected parts of the model may stay on either side.
        inside = np.zeros(problem.num_devices, dtype=bool)
        inside[list(side)] = True
        others = tuple(np.flatnonzero(~inside).tolist())
        capacity = min(self._capacity(inside, ~inside), self._capacity(~inside, inside))
        if capacity == math.inf:
            return 0.0
        # All layers on both sides: every sum crosses the border twice in its ring.
        best = float(np.maximum(problem.bandwidth, problem.bandwidth.T)[np.ix_(inside, ~inside)].max())
        copied_s = float(self.layer_bytes.max()) / best
        # Of a model with branches one tensor may cross alone.
        fewest_bytes = min((edge.bytes * problem.scale for edge in problem.profile.edges()), default=math.inf)
        carried_s = self.num_microbatches * fewest_bytes / capacity
        ways = [copied_s]
        for devices in (side, others):
            alone_s = self._work_s(devices)
            ways.append(alone_s if carried_s == math.inf else alone_s * carried_s / max(alone_s + carried_s, 1e-300))
        return min(ways)

    def _capacity(self, sources: NDArray[np.bool_], targets: NDArray[np.bool_]) -> float:
        wires: dict[str, float] = {}
        problem = self.problem
        blocks, num_pairs = np.unique(problem.block_of[np.ix_(sources, targets)], return_counts=True)
        for block, count in zip(blocks.tolist(), num_pairs.tolist(), strict=True):
            starts, ends = problem.blocks[block]
            one, other = starts[0], ends[-1]
            path = problem.path(one, other)
            if path.bandwidth_bytes_per_s == math.inf:
                return math.inf
            # Within a node each ordered pair has a wire of its own; two nodes share one.
            name, bandwidth = path.resources[0]
            wires[name] = bandwidth * (count if problem.node_of[one] == problem.node_of[other] else 1)
        return math.fsum(wires.values())
