"""The planning problem: a model, a cluster and the size of an update, as arrays.

Position l is the cut before layer l. Seconds and bytes are those of one whole microbatch of `microbatch_size` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from raypipe import stopping
from raypipe.artifacts.profile import LayerTimes, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Overheads, Path
from raypipe.communication.buckets import MOST_BUCKETS
from raypipe.communication.patterns import MOST_MESHED
from raypipe.errors import PlanError
from raypipe.planning.late_sums import LateSums
from raypipe.planning.row_shares import Factors, divided_rows, fixed_rows
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.staleness import StalenessLimits
from raypipe.simulation.pattern_choice import LEAST_GAIN, SumTime, ring_time, sum_times
from raypipe.simulation.plan_cost import GRADIENT_BYTES_PER_PARAMETER_BYTE, STATE_BYTES_PER_PARAMETER_BYTE, layer_state_bytes

Floats = npt.NDArray[np.float64]

Devices = tuple[int, ...]  # Devices of one worker, in the order of their rows and of the ring that sums their gradients.

_OF_PAIRS = {"_pairs", "plain_links", "block_of", "joined", "_all_joined"}
"""What is known of pairs of devices, however many microbatches there are."""
_MOST_OPS = 20_000_000
_RING_WORK_S = 60e-6  # Of the time of a ring, for each member.
_PATTERNS_WORK_S, _PACKING_WORK_S = 60e-6, 4e-3  # Of the times of all patterns, for each pair of members, and of packing trees.


def _summed_before(of_layers: Floats) -> Floats:
    """Return the sums before each position: [..., position] of [..., layer]."""
    return np.concatenate((np.zeros((*of_layers.shape[:-1], 1)), np.cumsum(of_layers, axis=-1)), axis=-1)


@dataclass(frozen=True)
class Problem:
    """Model to be planned on a cluster; staleness limits as in `plan`.

    Attributes:
        num_microbatches: Number of microbatches of one update.
        state_bytes_per_parameter_byte: Gradients and optimizer state.
        updates_per_window: Number of updates between two drains, where updates overlap.
        update_scope: What updates wait for; `None` for each schedule's default.
        optimizer: Optimizer for whose seconds to the same loss plans are compared (`staleness_cost`); `None` for seconds of an update.
        synchronous_share: Share of the run's updates, at its start, behind each of which the pipeline drains.

    Raises:
        PlanError: A count is below 1 or too large to plan, a limit below 0, or a share not from 0 to 1.
    """

    profile: ModelProfile
    topology: ClusterTopology
    num_microbatches: int
    microbatch_size: int
    state_bytes_per_parameter_byte: float = STATE_BYTES_PER_PARAMETER_BYTE
    recompute: bool = True
    max_staleness: int | None = None
    max_mismatch: int | None = None
    max_mean_staleness: float | None = None
    updates_per_window: int = 10
    update_scope: UpdateScope | None = None
    optimizer: str | None = None
    synchronous_share: float = 0.0
    _rows: dict[Devices, tuple[int, ...] | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sum_times: dict[Devices | bytes, tuple[SumTime, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _demands: dict[Devices, tuple[tuple[float, float], ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "microbatch_size", "updates_per_window"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (num_ops := 2 * self.num_devices * self.num_microbatches) > _MOST_OPS:
            raise PlanError(
                f"{self.num_microbatches} microbatches on {self.num_devices} devices are {num_ops} forwards and backwards an update, too "
                f"many to plan; the limit is {_MOST_OPS}. Use fewer and larger microbatches"
            )
        if not 0 <= self.synchronous_share <= 1:
            raise PlanError(f"synchronous_share must be from 0 to 1, got {self.synchronous_share}")
        for name in ("max_staleness", "max_mismatch", "max_mean_staleness"):
            if not (getattr(self, name) or 0) >= 0:
                raise PlanError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def staleness(self) -> StalenessLimits:
        """Limits on the staleness of schedules."""
        return StalenessLimits(self.max_staleness, self.max_mismatch, self.max_mean_staleness)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.profile.num_layers

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the devices."""
        return tuple(device.name for device in self.topology.devices)

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return len(self.names)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Number of each device's node."""
        return tuple(number for number, node in enumerate(self.topology.nodes) for _ in node.devices)

    @cached_property
    def nodes_of(self) -> npt.NDArray[np.int_]:
        """`node_of` as an array."""
        return np.array(self.node_of)

    @cached_property
    def overheads_s(self) -> tuple[float, float]:
        """Overhead of every forward and every backward, with the messages that it receives and sends."""
        overheads = self.topology.overheads or Overheads()
        messages_s = overheads.send_s + overheads.recv_s
        return overheads.forward_s + messages_s, overheads.backward_s + messages_s

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a layer and one that reads its output."""
        return tuple((edge.producer, edge.consumer) for edge in self.profile.edges())

    # Layers

    @property
    def scale(self) -> float:
        """Rows of a microbatch over rows of the profiled one."""
        return self.microbatch_size / self.profile.microbatch_size

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Profiled kinds of device in the cluster; "" stands for all others."""
        measured = sorted({device.kind for device in self.topology.devices} & self.profile.device_kinds.keys())
        others = any(device.kind not in self.profile.device_kinds for device in self.topology.devices)
        return (*measured, *([""] if others else []))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Number in `kinds` of each device's kind."""
        number = {kind: position for position, kind in enumerate(self.kinds)}
        return tuple(number.get(device.kind, number.get("", 0)) for device in self.topology.devices)

    @cached_property
    def layer_s(self) -> Floats:
        """Seconds of each layer at speed 1: [kind, (F, I, W), layer]."""
        parts = (
            lambda times: times.forward_s,
            lambda times: times.backward_s - times.weight_grad_s,
            lambda times: times.weight_grad_s,
        )
        return np.stack([self._by_layer(part) for part in parts], axis=1)

    @cached_property
    def split_s(self) -> Floats:
        """Seconds that I and W of each layer take beyond B, at speed 1: [kind, layer]."""
        return self._by_layer(lambda times: times.split_s or 0.0)

    @cached_property
    def fixed_share(self) -> Floats:
        """Part of each layer's seconds that does not depend on the number of rows: [kind, layer]."""
        return self._by_layer(lambda times: times.fixed_share or 0.0)

    def _by_layer(self, value: Callable[[LayerTimes], float]) -> Floats:
        return np.array([list(map(value, self.profile.on_rows(kind, self.scale))) for kind in self.kinds])

    @cached_property
    def prefix_s(self) -> Floats:
        """Seconds of all layers before each position at speed 1: [kind, (F, I, W), position]."""
        return _summed_before(self.layer_s)

    @cached_property
    def fixed_prefix_s(self) -> Floats:
        """The part of `prefix_s` that does not depend on the number of rows."""
        return _summed_before(self.layer_s * self.fixed_share[:, None])

    @cached_property
    def trained_prefix(self) -> Floats:
        """Trained bytes before each position."""
        return np.concatenate(([0.0], np.cumsum([float(layer.trained_bytes) for layer in self.profile.layers])))

    @cached_property
    def summed_prefix(self) -> Floats:
        """Bytes of gradients that replicas of a stage sum for an update, before each position."""
        num_profiled = self.num_microbatches * self.scale
        untouched = [float(layer.untouched_bytes(num_profiled)) for layer in self.profile.layers]
        return self.trained_prefix - np.concatenate(([0.0], np.cumsum(untouched)))

    @cached_property
    def late_sums(self) -> LateSums:
        """Buckets of the gradients of all runs of layers, by the times of the first kind of device."""
        backward_s = self.prefix_s[0, 1:].sum(axis=0)
        return LateSums.of(trained_bytes=self.trained_prefix, summed_bytes=self.summed_prefix, backward_s=backward_s)

    @cached_property
    def standing_prefix(self) -> Floats:
        """Bytes of weights, low-precision copies, gradients and optimizer state before each position."""
        of_optimizer = self.state_bytes_per_parameter_byte - GRADIENT_BYTES_PER_PARAMETER_BYTE
        besides = np.cumsum([
            layer_state_bytes(layer, of_optimizer) + (layer.low_precision_bytes or 0) + (layer.frozen_bytes or 0)
            for layer in self.profile.layers
        ])
        return self.trained_prefix * (1 + GRADIENT_BYTES_PER_PARAMETER_BYTE) + np.concatenate(([0.0], besides))

    @cached_property
    def most_state_bytes_per_parameter_byte(self) -> float:
        """Gradients and optimizer state of any layer, as measured, for each byte of its trained weights; at least as assumed."""
        measured = [
            GRADIENT_BYTES_PER_PARAMETER_BYTE + layer.state_bytes / layer.trained_bytes
            for layer in self.profile.layers
            if layer.state_bytes is not None and layer.trained_bytes
        ]
        return max([self.state_bytes_per_parameter_byte, *measured])

    @cached_property
    def saved_prefix(self) -> Floats:
        """Bytes that all layers before each position save."""
        return np.concatenate(([0.0], np.cumsum([layer.saved_bytes * self.scale for layer in self.profile.layers])))

    @cached_property
    def working_peaks(self) -> Floats:
        """Each layer's working bytes, and those that all layers up to it save."""
        working: Floats = np.array([(layer.working_bytes or 0) * self.scale for layer in self.profile.layers])
        return working + self.saved_prefix[1:]

    @cached_property
    def crossing_bytes(self) -> Floats:
        """Bytes that cross each position: outputs of earlier layers that later ones read, each once."""
        last_use: dict[int, tuple[int, int]] = {}
        for producer, consumer, num_bytes in self.profile.edges():
            last, most = last_use.get(producer, (consumer, 0))
            last_use[producer] = (max(last, consumer), max(most, num_bytes))
        crossing = np.zeros(self.num_layers + 1)
        for producer, (last, num_bytes) in last_use.items():
            crossing[producer + 1 : last + 1] += num_bytes * self.scale
        return crossing

    # Devices

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each device while all devices of its node compute, which may share too few cores."""
        speeds: list[float] = []
        for node in self.topology.nodes:
            part = 1.0 if node.cores is None or not node.devices else min(1.0, node.cores / len(node.devices))
            speeds += [device.speed * part for device in node.devices]
        return tuple(speeds)

    @cached_property
    def powers(self) -> tuple[float, ...]:
        """Relative speed of each device on the whole model."""
        whole_s = self.prefix_s[:, :, -1].sum(axis=1)
        most = float(whole_s.max())
        return tuple(
            speed / float(whole_s[kind]) * most if whole_s[kind] else speed for speed, kind in zip(self.speeds, self.kind_of, strict=True)
        )

    @cached_property
    def memory_bytes(self) -> tuple[float, ...]:
        """Memory of each device; infinite without a limit."""
        return tuple(math.inf if device.memory_bytes is None else float(device.memory_bytes) for device in self.topology.devices)

    def path(self, source: int, target: int) -> Path:
        """Return the path of a transfer between two devices, `NO_PATH` where no link serves them."""
        return self.topology.reach(self.names[source], self.names[target])

    @cached_property
    def bandwidth(self) -> Floats:
        """Bytes per second of each ordered pair; infinite on the diagonal and where nothing limits, 0 without a link."""
        return self._pairs[0]

    @cached_property
    def latency_s(self) -> Floats:
        """Seconds until the first byte of each ordered pair; 0 on the diagonal, infinite without a link."""
        return self._pairs[1]

    @cached_property
    def joined(self) -> npt.NDArray[np.bool_]:
        """Whether two devices can communicate both ways, as neighbors of a pipeline must; true on the diagonal."""
        there: npt.NDArray[np.bool_] = np.isfinite(self.latency_s)
        return there & there.T

    @cached_property
    def block_of(self) -> npt.NDArray[np.int32]:
        """Number in `blocks` of each ordered pair of devices; -1 on the diagonal."""
        units = self._units
        counted = np.ones((len(units), len(units)), dtype=bool)
        np.fill_diagonal(counted, [len(unit) > 1 for unit in units])
        numbers = counted.cumsum(dtype=np.int32).reshape(counted.shape) - 1
        unit_of = np.empty(self.num_devices, dtype=np.intp)
        for number, unit in enumerate(units):
            unit_of[list(unit)] = number
        of_pairs: npt.NDArray[np.int32] = numbers[np.ix_(unit_of, unit_of)]
        np.fill_diagonal(of_pairs, -1)
        return of_pairs

    def of_length(self, num_microbatches: int) -> Problem:
        """Return the same problem with another number of microbatches, which knows the pairs of devices as this one does."""
        problem = replace(self, num_microbatches=num_microbatches)
        vars(problem).update({name: value for name, value in vars(self).items() if name in _OF_PAIRS})
        return problem

    def know_pairs(self, bandwidth: Floats, latency_s: Floats) -> None:
        """Take bandwidth and latency from one who knows them: to look up a million paths takes seconds."""
        vars(self)["_pairs"] = bandwidth, latency_s

    @cached_property
    def _pairs(self) -> tuple[Floats, Floats]:
        of_nodes = self._pairs_of_nodes()
        if of_nodes is not None:
            return of_nodes
        bandwidth = np.full((self.num_devices, self.num_devices), math.inf)
        latency_s = np.zeros((self.num_devices, self.num_devices))
        for sources, targets in self.blocks:
            path = self.path(sources[0], targets[-1])
            # Of a million pairs, indices of arrays would take longer than the paths.
            block = (sources[0], targets[0]) if len(sources) == len(targets) == 1 else np.ix_(sources, targets)
            bandwidth[block] = path.bandwidth_bytes_per_s if path.exists else 0.0
            latency_s[block] = path.latency_s
        np.fill_diagonal(bandwidth, math.inf)
        np.fill_diagonal(latency_s, 0.0)
        return bandwidth, latency_s

    @cached_property
    def has_plain_links(self) -> bool:
        """Whether each pair of nodes has a wire of its own: no link has a route, names devices or shares a limit with others."""
        nodes = {node.name for node in self.topology.nodes}
        plain = all(link.via is None and link.source in nodes and link.target in nodes for link in self.topology.links)
        return plain and not self.topology.shared_links

    @cached_property
    def plain_links(self) -> tuple[npt.NDArray[np.int_], npt.NDArray[np.int_], Floats, Floats]:
        """Of each direction of each of plain links: the numbers of its nodes, bytes per second (infinite without a limit), and latency."""
        links, numbers = self.topology.links, {node.name: number for number, node in enumerate(self.topology.nodes)}
        sources = np.fromiter((numbers[link.source] for link in links), int, len(links))
        targets = np.fromiter((numbers[link.target] for link in links), int, len(links))
        rates = np.fromiter((link.bandwidth_bytes_per_s or math.inf for link in links), float, len(links))
        latencies_s = np.fromiter((link.latency_s for link in links), float, len(links))
        back = np.flatnonzero(np.fromiter((not link.one_way for link in links), bool, len(links)))
        ends = np.append(sources, targets[back]), np.append(targets, sources[back])
        return *ends, np.append(rates, rates[back]), np.append(latencies_s, latencies_s[back])

    def _pairs_of_nodes(self) -> tuple[Floats, Floats] | None:
        """Return `_pairs` of nodes with plain links, from these; `None` where links have routes, name devices or share limits."""
        topology = self.topology
        if not self.has_plain_links:
            return None
        numbers = {node.name: number for number, node in enumerate(topology.nodes)}
        default = topology.default_link
        limits = (0.0, math.inf) if default is None else (default.bandwidth_bytes_per_s or math.inf, default.latency_s)
        bandwidth, latency_s = (np.full((len(numbers), len(numbers)), value) for value in limits)
        for number, node in enumerate(topology.nodes):
            if (link := node.link or default) is not None:
                bandwidth[number, number], latency_s[number, number] = link.bandwidth_bytes_per_s or math.inf, link.latency_s
        sources, targets, rates, latencies_s = self.plain_links
        bandwidth[sources, targets] = rates
        latency_s[sources, targets] = latencies_s
        of_devices = np.ix_(self.nodes_of, self.nodes_of)
        bandwidth, latency_s = bandwidth[of_devices], latency_s[of_devices]
        np.fill_diagonal(bandwidth, math.inf)
        np.fill_diagonal(latency_s, 0.0)
        return bandwidth, latency_s

    @cached_property
    def blocks(self) -> list[tuple[Devices, Devices]]:
        """Sets of ordered pairs of devices with equal paths: one per pair of nodes unless links name devices."""
        return [(one, other) for one in self._units for other in self._units if one is not other or len(one) > 1]

    @cached_property
    def _units(self) -> list[Devices]:
        # Devices that have equal paths to all others.
        named = {name for link in self.topology.links for name in (link.source, link.target)}
        named |= {name for shared in self.topology.shared_links for pair in shared.members for name in pair}
        if not named.isdisjoint(self.names):
            return [(device,) for device in range(self.num_devices)]
        members: list[list[int]] = [[] for _ in self.topology.nodes]
        for device, node in enumerate(self.node_of):
            members[node].append(device)
        return [tuple(devices) for devices in members if devices]

    # Workers

    def rows(self, group: Sequence[int]) -> tuple[int, ...] | None:
        """Return the whole rows, at least one, of each of a worker's devices; `None` where there are too few.

        Each row goes to the device that would be done with it first, so that the slowest is as fast as possible on the whole model.
        """
        key = tuple(group)
        if key not in self._rows:
            powers = [self.powers[device] for device in key]
            self._rows[key] = divided_rows(self.microbatch_size, powers, fixed_rows=self._fixed_rows)
        return self._rows[key]

    def may_take_loss(self, group: Sequence[int]) -> bool:
        """Return whether a worker of these devices may have the last layer, behind which the loss is taken."""
        return len(group) == 1 or not self.profile.loss_couples_rows

    def with_rows(self, rows: Mapping[Devices, tuple[int, ...]]) -> Problem:
        """Fix the rows of some workers' devices, whatever their power."""
        problem = replace(self)
        problem._rows.update(rows)
        return problem

    @cached_property
    def _fixed_rows(self) -> float:
        """The rows that take as long as what does not depend on their number, on the whole model."""
        whole_s = float(self.prefix_s[:, :, -1].sum())
        return fixed_rows(self.microbatch_size, float(self.fixed_prefix_s[:, :, -1].sum()) / whole_s) if whole_s else 0.0

    def factors(self, group: Devices) -> list[tuple[int, Factors]]:
        """Return the pairs (kind, factors) of those of a worker's devices that may be its slowest; infinite where rows are too few."""
        rows = self.rows(group)
        if rows is None:
            return [(0, Factors(math.inf, 0.0))]
        slowest: dict[int, list[Factors]] = {}
        different = {(self.kind_of[device], self.speeds[device], of_device) for device, of_device in zip(group, rows, strict=True)}
        pairs = ((kind, Factors.of(of_device / self.microbatch_size, speed)) for kind, speed, of_device in different)
        for kind, factors in sorted(pairs, reverse=True):
            # The part that depends on the rows shrinks from one to the next: only a larger fixed part can make a later one the slowest.
            if kind not in slowest or (self._fixed_rows and factors.of_fixed > slowest[kind][-1].of_fixed):
                slowest.setdefault(kind, []).append(factors)
        return [(kind, factors) for kind, of_kind in sorted(slowest.items()) for factors in of_kind]

    def device_s(self, device: int, row_ratio: float) -> float:
        """Return the seconds of a device for the whole model, on a part of the rows of a microbatch."""
        kind = self.kind_of[device]
        whole_s, fixed_s = (float(prefix[kind, :, -1].sum()) for prefix in (self.prefix_s, self.fixed_prefix_s))
        return Factors.of(row_ratio, self.speeds[device]).seconds(whole_s, fixed_s)

    def demands(self, group: Devices) -> tuple[tuple[float, float], ...]:
        """Return the different pairs (share of a microbatch, bytes of memory) of a worker's devices."""
        demands = self._demands.get(group)
        if demands is None:
            rows = self.rows(group) or (math.inf,) * len(group)
            pairs = {(of_device / self.microbatch_size, self.memory_bytes[device]) for device, of_device in zip(group, rows, strict=True)}
            demands = self._demands[group] = tuple(sorted(pairs))
        return demands

    def can_sum(self, group: Devices) -> bool:
        """Return whether links join a worker's devices, so that they can sum gradients."""
        return len(group) == 1 or self._times_of(group)[0].latency_s < math.inf

    def sum_s(self, group: Sequence[int], num_bytes: float | Floats) -> float | Floats:
        """Return the seconds in which a worker's devices sum gradients, as `Cost.collective_s` does; infinite without links."""
        if len(group) == 1:
            return num_bytes * 0.0
        usual_s, *others_s = (
            # Of several buckets the last one alone has none behind it that passes while its shares wait.
            time.latency_s + num_bytes * time.s_per_byte + np.minimum(num_bytes / MOST_BUCKETS * time.waiting_s_per_byte, time.waiting_s)
            for time in self._times_of(tuple(group))
        )
        best_s = usual_s
        for seconds in others_s:
            best_s = np.minimum(best_s, seconds)
        return np.where(usual_s > LEAST_GAIN * best_s, best_s, usual_s)

    def layers_sum_s(self, group: Devices, first: int, end: int) -> float:
        """Return the seconds in which a worker's devices sum the gradients of the layers first..end-1 alone."""
        return float(self.sum_s(group, float(self.summed_prefix[end] - self.summed_prefix[first])))

    @cached_property
    def _all_joined(self) -> bool:
        return bool(self.joined.all())

    def _times_of(self, group: Devices) -> tuple[SumTime, ...]:
        times = self._sum_times.get(group)
        if times is None:
            members = list(group)
            if not self._all_joined and not self.joined[np.ix_(members, members)].all():
                times = self._sum_times[group] = sum_times(*self.paths_of(group))
                return times
            stopping.spend(_RING_WORK_S * len(group))
            times = (ring_time(*self.paths_of(group)),)
            if 2 < len(group) <= MOST_MESHED:
                # In another order only the ring in that order differs, and groups whose pairs have equal paths have equal times.
                members = sorted(group)
                alike = self.block_of[np.ix_(members, members)].tobytes()
                if alike not in self._sum_times:
                    stopping.spend(_PACKING_WORK_S + _PATTERNS_WORK_S * len(group) ** 2)
                    self._sum_times[alike] = sum_times(*self.paths_of(tuple(members)))
                times += self._sum_times[alike]
            self._sum_times[group] = times
        return times

    def paths_of(self, group: Devices) -> tuple[list[int], Callable[[int, int], Path]]:
        """Return the node of each device, and what returns the path between two, both by position in the group."""
        return [self.node_of[device] for device in group], lambda source, target: self.path(group[source], group[target])
