"""Corrections of profile and speeds from measured windows.

Deviations in the first window are attributed to the layers, which keep the factor wherever they are. Later changes are attributed to
the device as far as all its stages share them, else to the layers of a stage.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.schedules.ir import OpKind

_WINDOWS = 3  # the median of the last windows counts: one may have been disturbed
_LEAST_SHARE = 0.05  # of a device's work; stages with less tell nothing
_SIGNIFICANT = 1.15  # factor of a change; stages of a device that differ by it show one of their layers, not of the device

DeviceStage = tuple[str, int]
"""A device and its stage; -1 for slots with several Ops."""


def factors(measured: Trace, expected: Trace) -> dict[DeviceStage, float]:
    """Return measured over expected time of each device and stage, by the median Op of each kind.

    `expected` simulates the same programs, for as many updates or fewer.
    """
    return {place: measured_s / expected_s for place, (measured_s, expected_s) in _sums(measured, expected).items()}


def _sums(measured: Trace, expected: Trace) -> dict[DeviceStage, tuple[float, float]]:
    sums: dict[DeviceStage, list[float]] = defaultdict(lambda: [0.0, 0.0])
    medians = _medians(expected)
    for (place, kinds), (seconds, count) in _medians(measured).items():
        if (place, kinds) in medians and medians[place, kinds][0] > 0:
            sums[place][0] += seconds * count
            sums[place][1] += medians[place, kinds][0] * count
    return {place: (measured_s, expected_s) for place, (measured_s, expected_s) in sums.items() if measured_s > 0}


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

    layers = tuple(replace(layer, **asdict(layer.times.scaled(of_layer.get(number, 1.0)))) for number, layer in enumerate(profile.layers))
    kinds = {
        kind: tuple(times.scaled(of_layer.get(number, 1.0)) for number, times in enumerate(of_kind))
        for kind, of_kind in profile.device_kinds.items()
    }
    return replace(profile, layers=layers, device_kinds=kinds)


class ObservedSpeeds:
    """The profile, scaled by the first window (then `is_scaled`), and what later windows show of devices and layers.

    Attributes:
        first: The profile as scaled by the first window, against which later windows are compared.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.first = profile
        self.is_scaled = False
        # A device that is left out keeps what was last seen.
        self._of_devices: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOWS))
        # One window is enough: what disturbs a machine slows all stages of a device.
        self._of_layers: dict[int, float] = {}

    @property
    def profile(self) -> ModelProfile:
        """The profile now, with the layers that have changed."""
        changed = {layer: factor for layer, factor in self._of_layers.items() if _is_significant(factor)}
        return _scaled(self.first, changed, [(layer,) for layer in range(self.first.num_layers)]) if changed else self.first

    def observe(self, measured: Trace, expected: Trace, stages: Sequence[Sequence[int]]) -> None:
        """Learn from a window; `expected` simulates it with the `first` profile and the assumed speeds, `stages` lists layers."""
        by_stage: dict[int, list[float]] = defaultdict(list)
        by_device: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        for (device, stage), (measured_s, expected_s) in _sums(measured, expected).items():
            by_stage[stage].append(measured_s / expected_s)
            by_device[device][stage] = (measured_s, expected_s)
        if not self.is_scaled:
            self.first = _scaled(self.first, {stage: statistics.fmean(several) for stage, several in by_stage.items()}, stages)
            self.is_scaled = True
            return
        of_stages: dict[int, list[float]] = defaultdict(list)
        for device, sums in by_device.items():
            shared = _shared_factor(list(sums.values()))
            self._of_devices[device].append(shared)
            whole_s = sum(expected_s for _, expected_s in sums.values())
            for stage, (measured_s, expected_s) in sums.items():
                if expected_s >= _LEAST_SHARE * whole_s:
                    of_stages[stage].append(measured_s / expected_s / shared)
        for stage, layers in enumerate(stages):
            for layer in layers if of_stages[stage] else ():
                self._of_layers[layer] = statistics.median(of_stages[stage])

    def topology(self, topology: ClusterTopology) -> ClusterTopology:
        """Return a topology with speeds corrected by observation."""
        nodes = tuple(
            replace(node, devices=tuple(replace(device, speed=device.speed / self._factor(device.name)) for device in node.devices))
            for node in topology.nodes
        )
        return replace(topology, nodes=nodes)

    def _factor(self, device: str) -> float:
        seen = self._of_devices.get(device)
        return statistics.median(seen) if seen else 1.0


def _shared_factor(stages: Sequence[tuple[float, float]]) -> float:
    """Return by how much a device is slower, by measured and expected seconds of its stages.

    The mean; if they differ, the least, or 1 where the least is no change: a stage with a few slower layers slows a little, too.
    """
    whole_s = sum(expected_s for _, expected_s in stages)
    # Next to nothing measures badly.
    counted = [measured_s / expected_s for measured_s, expected_s in stages if expected_s >= _LEAST_SHARE * whole_s]
    if max(counted) <= _SIGNIFICANT * min(counted):
        return math.exp(statistics.fmean(map(math.log, counted)))
    least = min(counted, key=lambda factor: abs(math.log(factor)))
    return least if _is_significant(least) else 1.0


def _is_significant(factor: float) -> bool:
    return not 1 / _SIGNIFICANT <= factor <= _SIGNIFICANT
