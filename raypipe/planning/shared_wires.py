"""Sums of several stages that share wires with each other and with messages.

Stages whose copies stand on the same nodes sum over the same wires, such as that between two nodes or the port of one. A wire carries what
one sum passes over it after what another one does. Estimates of a layout take that from here; the simulator has it from flows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raypipe import stopping
from raypipe.communication.patterns import ring
from raypipe.planning.problem import Devices, Problem
from raypipe.simulation.pattern_choice import LEAST_GAIN, quickest, ring_time

_LOADS_WORK_S = 15e-6  # Of the loads of a group's sum, for each pair of members; times of patterns are known mostly.


class CopiedStage(NamedTuple):
    """A stage whose gradients are summed.

    Attributes:
        end_s: Second at which its last backward ends, on a clock of the caller's.
        backward_s: Seconds of that backward.
    """

    group: Devices
    first: int
    end: int
    end_s: float
    backward_s: float


class _Part(NamedTuple):
    # Seconds for which a bucket keeps a wire, and the time before which it cannot begin.
    ready_s: float
    seconds: float


@dataclass
class SharedWires:
    """Wires on which sums of several stages meet."""

    problem: Problem
    _loads: dict[tuple[Devices, int], Mapping[str, float]] = field(default_factory=dict, repr=False)

    def can_be_shared(self) -> bool:
        """Return whether devices of different workers may have wires in common."""
        return bool(self.problem.topology.shared_links) or any(len(node.devices) > 1 for node in self.problem.topology.nodes)

    def loads(self, group: Devices, num_bytes: float) -> Mapping[str, float]:
        """Return for each wire between nodes, and each shared link, the seconds per byte of a sum of so many bytes a member."""
        # Sums of about the same size have the same pattern.
        size = round(math.log2(max(num_bytes, 1.0)))
        if (group, size) not in self._loads:
            self._loads[group, size] = self._loads_per_byte(group, 2.0**size)
        return self._loads[group, size]

    def _loads_per_byte(self, group: Devices, num_bytes: float) -> Mapping[str, float]:
        problem = self.problem
        stopping.spend(_LOADS_WORK_S * len(group) ** 2)
        # As `sum_pattern`, but for the best pattern of the devices in ascending order, whatever that of the group: times of groups, too,
        # come from there, and are known.
        members = tuple(sorted(group))
        pattern, time = quickest(*problem.paths_of(members), num_bytes)
        if ring_time(*problem.paths_of(group)).seconds(num_bytes) <= LEAST_GAIN * time.seconds(num_bytes):
            members, pattern = group, ring(range(len(group)))
        nodes, path = problem.paths_of(members)
        shared = {link.name for link in problem.topology.shared_links}
        s_per_byte: Counter[str] = Counter()
        for of_phase in pattern.loads:
            for (source, target), part in of_phase.items():
                for name, bandwidth in path(source, target).resources:
                    # Within a node each pair of devices has a wire of its own.
                    if nodes[source] != nodes[target] or name in shared:
                        s_per_byte[name] += part / bandwidth  # type: ignore[assignment]
        return s_per_byte

    def busy_s(self, stages: Iterable[CopiedStage]) -> dict[str, float]:
        """Return the seconds for which the sums of an update keep each wire."""
        busy_s: Counter[str] = Counter()
        for stage in stages:
            num_bytes = self._num_bytes(stage)
            for name, s_per_byte in self.loads(stage.group, num_bytes).items():
                busy_s[name] += num_bytes * s_per_byte  # type: ignore[assignment]
        return dict(busy_s)

    def last_end_s(self, stages: Sequence[CopiedStage]) -> float:
        """Return the second before which a wire that several stages share has not carried all of their sums; minus infinity without one.

        A bucket is ready when the backward has passed its layers. From then on, the wire carries it and all that is ready later.
        """
        users: dict[str, list[CopiedStage]] = {}
        for stage in stages:
            for name in self.loads(stage.group, self._num_bytes(stage)):
                users.setdefault(name, []).append(stage)
        last_s = -math.inf
        for name, of_wire in users.items():
            if len(of_wire) < 2:
                continue
            left_s = 0.0
            for part in sorted((part for stage in of_wire for part in self._parts(stage, name)), reverse=True):
                left_s += part.seconds
                last_s = max(last_s, part.ready_s + left_s)
        return last_s

    def _parts(self, stage: CopiedStage, wire: str) -> Iterable[_Part]:
        num_bytes = self._num_bytes(stage)
        sum_s = num_bytes * self.loads(stage.group, num_bytes)[wire]
        for complete, share in self.problem.late_sums.buckets_of(stage.first, stage.end):
            yield _Part(stage.end_s - (1 - complete) * stage.backward_s, share * sum_s)

    def _num_bytes(self, stage: CopiedStage) -> float:
        return float(self.problem.summed_prefix[stage.end] - self.problem.summed_prefix[stage.first])
