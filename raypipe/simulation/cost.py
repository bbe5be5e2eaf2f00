"""Seconds and bytes of Ops, messages and collectives.

Left out: contention for memory bandwidth, and kernel launches beyond what layers were measured with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from raypipe.artifacts.profile import factor_of_rows
from raypipe.artifacts.topology import Overheads, Path
from raypipe.communication.buckets import buckets
from raypipe.communication.patterns import Pattern
from raypipe.communication.policy import Communication
from raypipe.communication.shards import Loads, gather_loads, reduce_loads
from raypipe.errors import NoLinkError
from raypipe.schedules.collectives import Collective, CollectiveKind, SumRows
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Message
from raypipe.simulation.pattern_choice import SumTime, exchange_s, gather_time, reduce_time, sum_pattern, sum_time

_NORM_BYTES = 8


class LayerCost(NamedTuple):
    """What the buckets of a stage are made of: a layer's gradients, and its seconds of B and W.

    Attributes:
        untouched_bytes: Part of the gradients that replicas do not sum.
    """

    gradient_bytes: int
    untouched_bytes: int
    backward_s: float
    weight_grad_s: float


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage on one device, for one whole microbatch.

    Attributes:
        forward_s: Seconds of F and of R.
        weight_grad_s: Seconds of W; I takes the rest of the backward and `split_s`.
        fixed_share: Part of the seconds of F, B, I and W that does not depend on the number of rows.
        saved_bytes: Activations held from F to the end of B, or of I where the backward is split.
        weight_grad_saved_bytes: Part of `saved_bytes` that is held until the end of W.
        low_precision_bytes: Half-length copies of weights that one version computes with.
        kept_bytes: Part of `saved_bytes` that is held from F to R; `None` where there is no R.
        gradient_bytes: Gradients of the weights, held from the first backward of an update to its U.
        untouched_bytes: Part of the gradients that replicas do not sum: rows that no microbatch of an update looks up.
        late_bytes: Part of the last bucket that may be summed behind the rest, where a collective says so.
        late_table_bytes: Looked-up weights of the last bucket, whose gradients are held until such a sum has ended.
        shared_bytes: Part of the trained weights that other stages share; all of several owners step it.
        working_bytes: Bytes beyond `saved_bytes` while F, B, W or R runs.
        layers: The layers, in order; where left out, buckets are alike.
    """

    forward_s: float
    backward_s: float
    weight_grad_s: float
    update_s: float = 0.0
    saved_bytes: int = 0
    weight_grad_saved_bytes: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    low_precision_bytes: int = 0
    kept_bytes: int | None = None
    gradient_bytes: int = 0
    untouched_bytes: int = 0
    late_bytes: int = 0
    late_table_bytes: int = 0
    shared_bytes: int = 0
    working_bytes: int = 0
    input_grad_working_bytes: int = 0
    frozen_bytes: int = 0
    split_s: float = 0.0
    fixed_share: float = 0.0
    layers: tuple[LayerCost, ...] = ()

    @property
    def trained_bytes(self) -> int:
        """Bytes of the weights that are stepped."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes that the replicas of a stage sum."""
        return self.trained_bytes - self.untouched_bytes

    def _buckets(self, num_parts: int) -> tuple[tuple[int, ...], ...]:
        return buckets(tuple([layer.gradient_bytes for layer in self.layers]), num_parts)

    def bucket_bytes(self, part: int, num_parts: int) -> int:
        """Return the bytes that the replicas of a stage sum of one bucket, from 1."""
        if num_parts == 1 or not self.layers:
            return self.summed_bytes // num_parts
        members = self._buckets(num_parts)[part - 1]
        return sum(self.layers[at].gradient_bytes - self.layers[at].untouched_bytes for at in members)

    def ready(self, kind: OpKind, num_parts: int) -> list[float]:
        """Return at which share of a B or W each bucket is complete."""
        if not self.layers:
            return [part / num_parts for part in range(1, num_parts + 1)]
        seconds = [layer.weight_grad_s if kind is OpKind.WEIGHT_GRADIENT else layer.backward_s for layer in self.layers]
        members = self._buckets(num_parts)
        total_s = math.fsum(seconds)
        done_s = itertools.accumulate(math.fsum(seconds[at] for at in bucket) for bucket in members)
        return [min(share_s / total_s, 1.0) if total_s else 1.0 for share_s in done_s]


@dataclass(frozen=True)
class SharedCompute:
    """Devices that share cores: while more devices compute than there are cores, all slow down in proportion."""

    devices: tuple[int, ...]
    cores: int


class MergedSum(NamedTuple):
    """A sum of devices of which one stands for all.

    Attributes:
        late_s: Seconds from the end of the Op that completes the gradients to that of the sum, alone on its wires.
        lasts_s: Seconds of the whole sum, which may have begun before.
        wires: Wires that sums of others pass, too, and the seconds for which it keeps each.
    """

    late_s: float = 0.0
    lasts_s: float = 0.0
    wires: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of everything in lowered programs.

    Attributes:
        stages: Costs by (device, stage).
        edge_bytes: Bytes of a whole microbatch's tensors by edge (source, target), in either direction; 0 where left out.
        tied_bytes: Bytes of the weights that stages share, by tie; unknown where left out.
        weight_versions: Most versions that a device holds at once, averaged over its stages; 1 where left out.
        overlap_s: Returns the seconds of a slot whose Ops overlap, from the seconds of each.
        overheads: Seconds besides on each Op and message.
        communication: How transfers share links.
        path: Returns the path between two devices, by number; of infinite latency where they cannot communicate.
        nodes: Node of each device; where left out, each device has its own.
        patterns: Patterns of sums by members; of others, the one with which a run begins.
        merged: Returns the sum of the devices that one device stands for, from its number and the sum; `None` where each stands for itself.
        transfers_block: Whether a device does nothing else while a message passes that it sends or receives, and takes one in only once it
            waits for it. raypipe's own actors do not block; runtimes that send and receive in the stream of the computation do.
    """

    devices: tuple[str, ...]
    stages: Mapping[tuple[int, int], StageCost]
    edge_bytes: Mapping[tuple[int, int], int]
    path: Callable[[int, int], Path]
    shared_compute: tuple[SharedCompute, ...] = ()
    tied_bytes: Mapping[int, int] = field(default_factory=dict)
    weight_versions: Mapping[int, float] = field(default_factory=dict)
    overlap_s: Callable[[tuple[float, ...]], float] = sum
    overheads: Overheads = field(default_factory=Overheads)
    communication: Communication = field(default_factory=Communication)
    nodes: tuple[str, ...] = ()
    patterns: Mapping[tuple[int, ...], Pattern] = field(default_factory=dict)
    merged: Callable[[int, Collective], MergedSum] | None = None
    transfers_block: bool = False

    def link(self, source: int, target: int) -> Path:
        """Return the path that a transfer between two devices takes, or raise `NoLinkError` where there is none."""
        path = self.path(source, target)
        if not path.exists:
            raise NoLinkError(
                f"the plan sends from device {self.devices[source]!r} to device {self.devices[target]!r}, but the topology has no link "
                "between them; add a link or a route (`via`) to the topology, or plan for it anew"
            )
        return path

    def compute_s(self, device: int, ops: tuple[Op, ...], shares: tuple[float, ...] = ()) -> float:
        """Return the seconds of a slot alone on its cores; `shares` of the rows by Op, all by default."""
        parts = [self._op_s(device, op, share) for op, share in zip(ops, shares or (1.0,) * len(ops), strict=True)]
        times = tuple(op_s for op_s, _ in parts)
        slot_s = times[0] if len(times) == 1 else self.overlap_s(times)
        return slot_s + math.fsum(overhead_s for _, overhead_s in parts)

    def _op_s(self, device: int, op: Op, share: float) -> tuple[float, float]:
        # Seconds, and the overhead besides.
        stage, overheads = self.stages[device, op.stage], self.overheads
        factor = factor_of_rows(stage.fixed_share, share)
        match op.kind:
            case OpKind.FORWARD | OpKind.RECOMPUTE:
                return stage.forward_s * factor, overheads.forward_s
            case OpKind.BACKWARD:
                return stage.backward_s * factor, overheads.backward_s
            case OpKind.INPUT_GRADIENT:
                return (stage.backward_s - stage.weight_grad_s + stage.split_s) * factor, overheads.input_grad_s
            case OpKind.WEIGHT_GRADIENT:
                return stage.weight_grad_s * factor, overheads.weight_grad_s
            case OpKind.UPDATE:
                return stage.update_s, 0.0
            case _:
                return 0.0, 0.0

    def message_bytes(self, message: Message) -> int:
        """Return the bytes of a message."""
        edge = (min(message.source, message.target), max(message.source, message.target))
        # A part of a byte counts as one; less than a millionth is the rounding of shares.
        return math.ceil(self.edge_bytes.get(edge, 0) * (message.rows[1] - message.rows[0]) - 1e-6)

    def collective_bytes(self, collective: Collective) -> int:
        """Return the bytes that each member contributes."""
        if collective.kind.is_norm:
            return _NORM_BYTES
        if collective.kind is CollectiveKind.TIED:
            return self.tied_bytes.get(collective.stage, 0)
        stage = self.stages[collective.devices[0], collective.stage]
        if collective.rows is SumRows.LATE:
            return stage.late_bytes
        if collective.kind is CollectiveKind.GRADIENTS:
            whole = stage.bucket_bytes(collective.part, collective.num_parts)
            return whole - (stage.late_bytes if collective.rows is SumRows.DUE else 0)
        return stage.trained_bytes - (stage.shared_bytes if len(collective.owners) == len(collective.devices) else 0)

    def loads(self, collective: Collective) -> tuple[Loads, Loads]:
        """Return which part of a collective's bytes passes each hop as shares, and then as totals; hops by position of the members."""
        pattern, owners = self.pattern(collective), self.owners(collective)
        if not owners:
            return pattern.loads
        if collective.kind is CollectiveKind.WEIGHTS:
            return {}, gather_loads(pattern, owners)
        shares, totals = reduce_loads(pattern, owners)
        stage = self.stages[collective.devices[0], collective.stage]
        if stage.shared_bytes:  # all owners need the sums of these
            part = min(stage.shared_bytes / max(stage.summed_bytes, 1), 1.0)
            totals = {hop: totals.get(hop, 0.0) + part * pattern.loads[1].get(hop, 0.0) for hop in {**totals, **pattern.loads[1]}}
        return shares, totals

    def owners(self, collective: Collective) -> tuple[int, ...]:
        """Return the positions of a collective's owners among its members."""
        return tuple(map(collective.devices.index, collective.owners))

    def ready(self, device: int, op: Op, num_buckets: int) -> list[float]:
        """Return at which share of a B or W each bucket of its stage's gradients is complete."""
        return self.stages[device, op.stage].ready(op.kind, num_buckets)

    def takes_latency_alone(self, collective: Collective) -> bool:
        """Return whether a collective takes one latency: a norm, or a tie of unknown size."""
        is_unsized = collective.kind is CollectiveKind.TIED and not self.tied_bytes.get(collective.stage)
        return collective.kind.is_norm or is_unsized

    def pattern(self, collective: Collective) -> Pattern:
        """Return the pattern of a collective: that of its members in `patterns`, else the one with which a run begins."""
        members = collective.devices
        return self.patterns.get(members) or sum_pattern(self._nodes(members), self._path_of(members), self.collective_bytes(collective))

    def largest_sums(self, collectives: Iterable[Collective]) -> dict[tuple[int, ...], Collective]:
        """Return of each set of several members the largest of some collectives; none for norms alone."""
        largest: dict[tuple[int, ...], tuple[int, Collective]] = {}
        for collective in collectives:
            if len(collective.devices) > 1 and not self.takes_latency_alone(collective):
                num_bytes = self.collective_bytes(collective)
                if num_bytes > largest.get(collective.devices, (-1, collective))[0]:
                    largest[collective.devices] = num_bytes, collective
        return {members: collective for members, (_, collective) in largest.items()}

    def with_patterns(self, collectives: Iterable[Collective]) -> Cost:
        """Return the cost of a run with these collectives: all sums of the same members have the pattern of the largest one."""
        largest = self.largest_sums(collectives)
        patterns = {members: self.pattern(collective) for members, collective in largest.items() if members not in self.patterns}
        return replace(self, patterns={**self.patterns, **patterns}) if patterns else self

    def trees(self, collectives: Iterable[Collective]) -> dict[tuple[int, ...], Pattern]:
        """Return the trees of those sets of members of some collectives that cannot all communicate."""
        of_members = {collective.devices: collective for collective in collectives if len(collective.devices) > 1}
        patterns = {members: self.pattern(collective) for members, collective in of_members.items()}
        return {members: pattern for members, pattern in patterns.items() if not pattern.is_meshed}

    def collective_s(self, collective: Collective) -> float:
        """Return the seconds from the last member's start to the end, with the links to itself.

        A norm, or a tie of unknown size, takes one latency. Others take what their pattern does (`pattern_choice.sum_time`).
        """
        members = collective.devices
        if self.takes_latency_alone(collective):
            latency_s = exchange_s(len(members), self._path_of(members))
            if latency_s == math.inf:
                raise NoLinkError(
                    f"devices {', '.join(self.devices[member] for member in members)} exchange gradient norms, but the links of the "
                    "topology do not join them both ways; add links or routes (`via`), or plan for it anew"
                )
            return latency_s
        if len(members) == 1:
            return self.merged_sum(collective).late_s
        return self._sum_time(collective).seconds(self.collective_bytes(collective))

    def merged_sum(self, collective: Collective) -> MergedSum:
        """Return a collective of devices of which one stands for all."""
        if self.takes_latency_alone(collective):
            return MergedSum(self.collective_s(collective))
        return MergedSum() if self.merged is None else self.merged(collective.devices[0], collective)

    def sum_latency_s(self, collective: Collective) -> float:
        """Return the latencies on the longest way of a slice of a sum of several members, and how long shares wait for each other."""
        return self._sum_time(collective).late_s(self.collective_bytes(collective))

    def _sum_time(self, collective: Collective) -> SumTime:
        members, owners, pattern = collective.devices, self.owners(collective), self.pattern(collective)
        nodes, path = self._nodes(members), self._path_of(members)
        if not owners:
            return sum_time(pattern, nodes, path)
        return (gather_time if collective.kind is CollectiveKind.WEIGHTS else reduce_time)(pattern, owners, nodes, path)

    def node(self, device: int) -> Hashable:
        """Return what stands for the node of a device."""
        return self.nodes[device] if self.nodes else device

    def _nodes(self, devices: Sequence[int]) -> list[Hashable]:
        return [self.node(device) for device in devices]

    def _path_of(self, devices: Sequence[int]) -> Callable[[int, int], Path]:
        return lambda source, target: self.path(devices[source], devices[target])
