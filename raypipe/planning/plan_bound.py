"""Lower bounds on the time of an update that hold for every synchronous schedule and every plan.

Overheads, memory, and the sharing of links between messages and sums can only add to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np

from raypipe.planning.capacities import Capacities
from raypipe.planning.lower_bounds import Block, lower_bound, ramp_s
from raypipe.planning.port_bound import PortBound
from raypipe.planning.problem import Devices, Floats, Problem

_MOST_BORDERS = 64
_MOST_SHOWN = 4
_MOST_PORTS = 64  # Most devices of which each one's port counts; of more, the links are many.


@dataclass(frozen=True)
class PlanBound:
    """Least seconds of one update, whatever the plan.

    Attributes:
        work_s: All work, shared by all devices.
        copies_s: Copies of some layer are summed, or none has copies and devices wait for the pipeline to fill.
        layer_s: The layer that takes longest, on one device or on copies that are summed.
        border_s: What crosses a border between devices.
        ports_s: What each device contributes passes the links between it and all others.
        layer: Name of the layer of `layer_s`.
        side: Names of the devices behind the border of `border_s`; empty without a border.
    """

    work_s: float
    copies_s: float
    layer_s: float
    border_s: float
    ports_s: float = 0.0
    layer: str = ""
    side: tuple[str, ...] = ()

    @property
    def update_s(self) -> float:
        """Largest of the bounds."""
        return max(self.work_s, self.copies_s, self.layer_s, self.border_s, self.ports_s)

    @property
    def binding(self) -> str:
        """Name of the largest bound."""
        return max(("work", "ports", "copies", "layer", "border"), key=lambda name: float(getattr(self, f"{name}_s")))

    @property
    def reason(self) -> str:
        """What no plan can avoid, in words."""
        match self.binding:
            case "work":
                return "all devices compute all the time"
            case "copies":
                return "copies of some layer sum their gradients, or no layer has copies and the pipeline must fill"
            case "ports":
                return "activations, or sums of gradients, pass the links of each device that computes, or fewer devices do all work"
            case "layer":
                return f"all microbatches of layer {self.layer} pass one device, or several, which sum its gradients after their work"
            case _:
                shown = ", ".join(self.side[:_MOST_SHOWN]) + (f" and {len(self.side) - _MOST_SHOWN} more" * (len(self.side) > _MOST_SHOWN))
                return f"activations or sums of gradients cross the border between {shown} and the other devices, or one side does all work"


def plan_bound(problem: Problem) -> PlanBound:
    """Return the bound for one update of any plan."""
    bounds = Bounds(problem)
    layer_s, layer = bounds.layer_s()
    border_s, side = bounds.border_s()
    return PlanBound(
        work_s=bounds.work_s(),
        copies_s=bounds.copies_s(),
        layer_s=layer_s,
        border_s=border_s,
        ports_s=bounds.ports_s(),
        layer=problem.profile.layers[layer].name,
        side=tuple(problem.names[device] for device in side),
    )


def _sizes(num_devices: int) -> Iterator[int]:
    """Yield the largest of each range of numbers of members: 2, 3 and so on at first, then ever wider ranges."""
    size = 2
    while size < num_devices:
        yield size
        size = max(size + 1, size * 5 // 4)
    if num_devices > 1:
        yield num_devices


class Bounds:
    """The bounds of one problem."""

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
        self.capacities = Capacities(problem)
        self._copied: dict[tuple[float, bytes], float] = {}

    @cached_property
    def ports(self) -> PortBound | None:
        """What passes the ports of devices; `None` for many devices, for shared cores, and where parts of the model are unconnected."""
        problem = self.problem
        shares = any(node.cores is not None and node.cores < len(node.devices) for node in problem.topology.nodes)
        if not 1 < problem.num_devices <= _MOST_PORTS or shares or not self._is_connected:
            return None
        own_s = self.device_s / self.alone[:, None] * self.num_microbatches
        powers = 1 / np.maximum(own_s.sum(axis=1), 1e-300)
        powers /= powers.sum()
        row_s = float(self._parts[:2].sum()) / self.alone.max() / problem.microbatch_size
        return PortBound(problem, (powers[:, None] * own_s).min(axis=0), powers, np.minimum(*self.capacities.of_ports), row_s)

    @cached_property
    def _parts(self) -> Floats:
        # Of each part of the work, F, I and W, what the kind that is best at it takes at speed 1: [part, layer].
        parts: Floats = np.diff(self.problem.prefix_s, axis=2).min(axis=0)
        return parts

    @cached_property
    def _is_connected(self) -> bool:
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(self.problem.num_layers))
        graph.add_edges_from(self.problem.edges)
        return bool(nx.is_connected(graph))

    def ports_s(self) -> float:
        """Return the bound by the ports of all devices."""
        return 0.0 if self.ports is None else self.ports.least_s()

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
        """Return the bound by all work on all devices."""
        return self._work_s(tuple(range(self.problem.num_devices)))

    def _copied_s(self, layer: int) -> float:
        """Return the least seconds of an update in which several devices sum the gradients of a layer.

        Each member m computes a part x_m of the layer's work, and the parts add up to 1. Every one of its gradients has left its device, in
        a share or in a total, since all members need them; no share or total leaves before the last of them is complete. So
        T >= x_m w / s_m + latency + G / r_m, with the rate r_m at which numbers of one sum leave m. For T, n members do at most
        sum of s_m (T - latency - G / r_m) of the work; the bound is the least T for which that is w, over all n >= 2.
        """
        num_devices, num_bytes = self.problem.num_devices, float(self.layer_bytes[layer])
        own_s = self.device_s[:, layer] / self.alone * self.num_microbatches
        key = (num_bytes, own_s.tobytes())
        if key in self._copied:
            return self._copied[key]
        speeds = np.sort(1 / np.maximum(own_s, 1e-300))[::-1].tolist()
        best_s = math.inf
        # More members are faster, but have more links: numbers of members between two sizes have the links of the larger one.
        for most in _sizes(num_devices):
            rates = self.capacities.of_sum(most)
            late_s = np.where(rates > 0, self.best_latency_s + num_bytes / np.maximum(rates, 1e-300), math.inf)
            starts = np.sort(late_s if num_bytes else np.zeros(num_devices))
            best_s = min(best_s, ramp_s(1.0, starts[:most].tolist(), speeds[:most]))
        self._copied[key] = best_s
        return best_s

    def copies_s(self) -> float:
        """Return the bound by cases: some layer has copies, whose gradients are summed, or no layer has, and `lower_bounds` holds."""
        problem = self.problem
        sources: list[set[int]] = [set() for _ in range(problem.num_layers)]
        for producer, consumer in problem.edges:
            sources[consumer].add(producer)
        blocks = [
            Block(forward_s, input_grad_s, weight_grad_s, sources=tuple(sorted(feeding)))
            for (forward_s, input_grad_s, weight_grad_s), feeding in zip(self._parts.T.tolist(), sources, strict=True)
        ]
        single_s = lower_bound(blocks, num_microbatches=self.num_microbatches, speeds=tuple(self.alone.tolist())).update_s
        if self.ports is not None:
            single_s = max(single_s, self.ports.least_s(copies=False))
        with_copies_s = max(self.work_s(), min(map(self._copied_s, range(problem.num_layers))))
        return float(min(single_s, with_copies_s))

    def layer_s(self) -> tuple[float, int]:
        """Return the bound by single layers, and the layer: all its microbatches pass one device, or its gradients are summed."""
        on_one_s = (self.device_s / self.alone[:, None]).min(axis=0) * self.num_microbatches
        bounds = [min(float(one_s), self._copied_s(layer)) for layer, one_s in enumerate(on_one_s)]
        layer = max(range(len(bounds)), key=bounds.__getitem__)
        return bounds[layer], layer

    def border_s(self) -> tuple[float, Devices]:
        """Return the bound by borders between devices, and the smaller side of the border."""
        bounds = {side: self._across_s(side) for side in self._sides()}
        side = max(bounds, key=bounds.__getitem__, default=())
        others = tuple(sorted(set(range(self.problem.num_devices)) - set(side)))
        return bounds.get(side, 0.0), min(side, others, key=len)

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
        """Return the least seconds of an update, given what crosses the border of a set of devices.

        Either all layers have copies on both sides. Each slice of their sums crosses the border both ways, as a share towards its owner or
        as a total away from it: T >= G / B for all gradients G, and B, the capacity of all wires across in the slower direction. That
        takes memory for all weights on either side. Or some layer is on one side alone. Rows that have any work on the other side then
        cross the border, forth as an activation and back as its gradient: of a part x of the rows, in x M d / B seconds (d: bytes of the
        smallest tensor between layers), while the others leave (1 - x) of the work to one side; x can be chosen.
        """
        problem = self.problem
        if not self._is_connected:
            return 0.0  # Unconnected parts of the model may stay on either side.
        inside = np.zeros(problem.num_devices, dtype=bool)
        inside[list(side)] = True
        others = tuple(np.flatnonzero(~inside).tolist())
        capacity = min(self.capacities.between(inside, ~inside), self.capacities.between(~inside, inside))
        if capacity == math.inf:
            return 0.0
        memory = np.array(problem.memory_bytes)
        has_room = min(memory[inside].sum(), memory[~inside].sum()) >= self.least_bytes
        copied_s = math.inf if not has_room else _quotient(float(self.layer_bytes.sum()), capacity)
        # Of a model with branches one tensor may cross alone.
        fewest_bytes = min((edge.bytes * problem.scale for edge in problem.profile.edges()), default=math.inf)
        carried_s = self.num_microbatches * _quotient(fewest_bytes, capacity)
        ways = [copied_s]
        for devices in (side, others):
            alone_s = self._work_s(devices)
            ways.append(alone_s if carried_s == math.inf else alone_s * carried_s / max(alone_s + carried_s, 1e-300))
        return min(ways)

    @cached_property
    def least_bytes(self) -> float:
        """Least memory of all layers' weights, gradients and optimizer state; tied weights may be held once."""
        problem = self.problem
        shared = (sorted(problem.profile.layers[layer].shared_bytes for layer in tie)[:-1] for tie in problem.profile.ties())
        return float(problem.standing_prefix[-1]) - sum(map(sum, shared)) * (1 + problem.most_state_bytes_per_parameter_byte)


def _quotient(num_bytes: float, capacity: float) -> float:
    """Return the seconds of some bytes; infinite over no wires."""
    return num_bytes / capacity if capacity else math.inf
