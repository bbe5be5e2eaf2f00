"""Corrections of profile and speeds from measured windows.

Deviations in the first window are attributed to the layers, which keep the factor wherever they are; later changes to the devices.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from raypipe.artifacts.profile import LayerTimes, ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.schedules.ir import OpKind

_WINDOWS = 3  # the median of the last windows counts: one may have been disturbed

DeviceStage = tuple[str, int]
"""A device and its stage; -1 for slots with several Ops."""


def factors(measured: Trace, expected: Trace) -> dict[DeviceStage, float]:
    """Return measured over expected time of each device and stage, by the median Op of each kind.

    `expected` simulates the same programs, for as many updates or fewer.
    """
    sums: dict[DeviceStage, list[float]] = defaultdict(lambda: [0.0, 0.0])
    medians = _medians(expected)
    for (place, kinds), (seconds, count) in _medians(measured).items():
        if (place, kinds) in medians and medians[place, kinds][0] > 0:
            sums[place][0] += seconds * count
            sums[place][1] += medians[place, kinds][0] * count
    return {place: measured_s / expected_s for place, (measured_s, expected_s) in sums.items() if measured_s > 0}


def _medians(trace: Trace) -> dict[tuple[DeviceStage, tuple[OpKind, ...]], tuple[float, int]]:
    seconds: dict[tuple[DeviceStage, tuple[OpKind, ...]], list[float]] = defaultdict(list)
    for span in trace.spans:
        ops = span.ops
        if ops and not any(op.kind.per_update for op in ops):
            place = (trace.devices[span.device], ops[0].stage if len(ops) == 1 else -1)
            seconds[place, tuple(op.kind for op in ops)].append(span.end_s - span.start_s)
    return {key: (statistics.median(values), len(values)) for key, values in seconds.items()}


def _scaled(profile: ModelProfile, by_stage: Mapping[int, float], stages: Sequence[Sequence[int]]) -> ModelProfile:
    of_layer = {layer: by_stage[stage] for stage, layers in enumerate(stages) for layer in layers if stage in by_stage}

    def scaled(times: LayerTimes, layer: int) -> LayerTimes:
        return LayerTimes(**{name: value * of_layer.get(layer, 1.0) for name, value in asdict(times).items()})

    layers = tuple(replace(layer, **asdict(scaled(layer.times, number))) for number, layer in enumerate(profile.layers))
    kinds = {kind: tuple(scaled(times, number) for number, times in enumerate(of_kind)) for kind, of_kind in profile.device_kinds.items()}
    return replace(profile, layers=layers, device_kinds=kinds)


class ObservedSpeeds:
    """The profile, scaled by the first window (then `settled`), and the speeds of devices as later windows show them."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.settled = False
        # A device that is left out keeps what was last seen.
        self._slowness: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOWS))

    def observe(self, measured: Trace, expected: Trace, stages: Sequence[Sequence[int]]) -> None:
        """Learn from a window; `expected` simulates it with this profile and the assumed speeds, `stages` lists layers."""
        by_stage: dict[int, list[float]] = defaultdict(list)
        by_device: dict[str, list[float]] = defaultdict(list)
        for (device, stage), factor in factors(measured, expected).items():
            by_stage[stage].append(factor)
            by_device[device].append(factor)
        if not self.settled:
            self.profile = _scaled(self.profile, {stage: statistics.fmean(several) for stage, several in by_stage.items()}, stages)
            self.settled = True
            return
        for device, several in by_device.items():
            self._slowness[device].append(math.exp(statistics.fmean(map(math.log, several))))

    def topology(self, topology: ClusterTopology) -> ClusterTopology:
        """Return a topology with speeds corrected by observation."""
        nodes = tuple(
            replace(node, devices=tuple(replace(device, speed=device.speed / self._factor(device.name)) for device in node.devices))
            for node in topology.nodes
        )
        return replace(topology, nodes=nodes)

    def _factor(self, device: str) -> float:
        seen = self._slowness.get(device)
        return statistics.median(seen) if seen else 1.0
