r"""Lower bounds on the time of an update for a profile, a topology and a number of microbatches.

The bound is the largest of several, each of which holds for every synchronous schedule and every plan: any cut, any mapping, any
replication of a stage over devices that divide the rows, several copies of the weights, backwards split or not. Overheads, memory, and
the sharing of links between messages and sums can only add to it.

    work       all work divided among all devices. Where kinds of device differ layer by layer: the dual of that linear program, with
               each device priced by its power.
    copies     Either some layer lies on several devices, whose gradients must be summed (two devices over the best link do that
               soonest), or none does; then what `lower_bounds` proves for single copies holds, of which filling the pipeline is the
               larger part.
    layer      The same for each layer by itself: a single copy lets all microbatches pass through one device.
    border     Let devices C be divided from the others by slow links. A plan that does not copy every layer to both sides has all
               rows that never cross the border on one side, and carries the others across: a part x of all rows costs
               x M d / B of the links' time, (1 - x) of the work is left to one side alone, and x can be chosen.
               Copying all layers costs a sum over the border.

             C        B, both ways        others
        [work / S_C]  =================  [work / S_others]        d: bytes of the smallest tensor between layers
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from raypipe.planning.lower_bounds import Block, lower_bound
from raypipe.planning.problem import Floats, Group, Problem

_MOST_BORDERS = 64


@dataclass(frozen=True)
class PlanBound:
    """Least seconds of one update, whatever the plan.

    Attributes:
        work_s: All work on all devices.
        copies_s: With a sum of some layer's gradients, or without copies.
        layer_s: Through the worst layer.
        border_s: Over the worst set of slow links.
    """

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
    """Arrays and bounds of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_microbatches = problem.num_microbatches
        times = np.diff(problem.prefix_s.sum(axis=1), axis=1)
        self.alone = np.array([device.speed for device in problem.topology.devices])
        """Speeds while nobody else of the node computes."""
        self.device_s = times[np.array(problem.kind_of)]
        """Seconds of each layer for a microbatch at speed 1: [device, layer]."""
        # A sum of two devices over the best link: two steps of half the bytes each.
        off_diagonal = ~np.eye(problem.num_devices, dtype=bool)
        self.best_bandwidth = float(problem.bandwidth[off_diagonal].max(initial=0.0))
        self.best_latency_s = float(problem.latency_s[off_diagonal].min(initial=math.inf))
        self.layer_bytes = np.diff(problem.trained_prefix)

    def _work_s(self, devices: Group) -> float:
        """Return the least seconds of all work on some devices, by a dual solution.

        Its prices are y_l <= z_d x the seconds of layer l on device d, and z sums to 1. Devices that share too few cores count as that
        many of the best of them, layer by layer.
        """
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
        """Return the least seconds in which several devices sum so many bytes."""
        return math.inf if self.problem.num_devices == 1 else 2 * (self.best_latency_s + num_bytes / 2 / self.best_bandwidth)

    def copies_s(self) -> float:
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
        on_one_s = (self.device_s / self.alone[:, None]).min(axis=0) * self.num_microbatches
        return max(min(float(one_s), self._sum_s(float(num_bytes))) for one_s, num_bytes in zip(on_one_s, self.layer_bytes, strict=True))

    def border_s(self) -> float:
        return max(map(self._across_s, self._sides()), default=0.0)

    def _sides(self) -> Iterator[Group]:
        """Yield sets of devices that no link above some bandwidth leaves."""
        bandwidth = np.maximum(self.problem.bandwidth, self.problem.bandwidth.T)
        size = self.problem.num_devices
        finite = np.unique(bandwidth[np.isfinite(bandwidth)])
        thresholds = (
            finite[np.unique(np.linspace(0, len(finite) - 1, min(len(finite), _MOST_BORDERS)).astype(int))] if finite.size else finite
        )
        seen: set[Group] = {tuple(range(size))}
        for threshold in thresholds.tolist():
            linked = bandwidth > threshold
            left = np.ones(size, dtype=bool)
            while left.any():
                side = np.zeros(size, dtype=bool)
                side[int(left.argmax())] = True
                while (wider := side | linked[side].any(axis=0)).sum() > side.sum():
                    side = wider
                left &= ~side
                found = tuple(np.flatnonzero(side).tolist())
                if found not in seen:
                    seen.add(found)
                    yield found
            if len(seen) > _MOST_BORDERS:
                return

    def _across_s(self, side: Group) -> float:
        problem = self.problem
        if not self._connected():
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

    def _connected(self) -> bool:
        """Return whether the graph of the layers is connected."""
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(self.problem.num_layers))
        graph.add_edges_from((edge.producer, edge.consumer) for edge in self.problem.profile.edges())
        return nx.is_connected(graph)

    def _capacity(self, sources: NDArray[np.bool_], targets: NDArray[np.bool_]) -> float:
        """Return the bytes per second of all links from one side to the other."""
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
