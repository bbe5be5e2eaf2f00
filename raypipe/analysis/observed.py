"""What windows show of the time that layers and devices take, against what was expected of them.

The first window that counts says how long the layers really take: what differs there is put down to the layers of each stage,
which keep that factor wherever they lie. What changes later is the devices' doing: another program on a node, a GPU that throttles.
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

_WINDOWS = 3
"""Of the last so many windows the median counts: one may have been disturbed."""

DeviceStage = tuple[str, int]
"""A device by name, and a stage that it computes; -1 for slots in which it computes several."""


def factors(measured: Trace, expected: Trace) -> dict[DeviceStage, float]:
    """Return how many times as long as expected each device took for each of its stages.

    The median Op of each kind counts.

    Args:
        measured: A measured window.
        expected: Simulation of the same programs, with as many updates or fewer.
    """
    found: dict[DeviceStage, list[float]] = defaultdict(lambda: [0.0, 0.0])
    wanted = _medians(expected)
    for (place, kinds), (seconds, count) in _medians(measured).items():
        if (place, kinds) in wanted and wanted[place, kinds][0] > 0:
            found[place][0] += seconds * count
            found[place][1] += wanted[place, kinds][0] * count
    return {place: took_s / wanted_s for place, (took_s, wanted_s) in found.items() if took_s > 0}


def _medians(trace: Trace) -> dict[tuple[DeviceStage, tuple[OpKind, ...]], tuple[float, int]]:
    seconds: dict[tuple[DeviceStage, tuple[OpKind, ...]], list[float]] = defaultdict(list)
    for span in trace.spans:
        ops = span.ops
        if ops and not any(op.kind.per_update for op in ops):
            place = (trace.devices[span.device], ops[0].stage if len(ops) == 1 else -1)
            seconds[place, tuple(op.kind for op in ops)].append(span.end_s - span.start_s)
    return {key: (statistics.median(values), len(values)) for key, values in seconds.items()}


def of_layers(profile: ModelProfile, by_stage: Mapping[int, float], stages: Sequence[Sequence[int]]) -> ModelProfile:
    """Return the profile with the times of the layers of each stage scaled.

    Args:
        profile: Times to scale.
        by_stage: Factor of each stage; stages without one keep their times.
        stages: Layers of each stage.
    """
    of_layer = {layer: by_stage[stage] for stage, layers in enumerate(stages) for layer in layers if stage in by_stage}

    def scaled(times: LayerTimes, layer: int) -> LayerTimes:
        return LayerTimes(**{name: value * of_layer.get(layer, 1.0) for name, value in asdict(times).items()})

    layers = tuple(replace(layer, **asdict(scaled(layer.times, number))) for number, layer in enumerate(profile.layers))
    kinds = {kind: tuple(scaled(times, number) for number, times in enumerate(of_kind)) for kind, of_kind in profile.device_kinds.items()}
    return replace(profile, layers=layers, device_kinds=kinds)


class ObservedSpeeds:
    """Times of layers and speeds of devices as a run shows them.

    Args:
        profile: Profile that the run was planned with.

    Attributes:
        profile: Profile, scaled once a window has been observed.
        settled: Whether a window has been observed.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.settled = False
        # Of a device that is left out nothing new is seen: what was seen last stays.
        self._slowness: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOWS))

    def observe(self, measured: Trace, expected: Trace, stages: Sequence[Sequence[int]]) -> None:
        """Learn from a window.

        Args:
            measured: The measured window.
            expected: Its simulation with this profile and the assumed speeds.
            stages: Layers of each stage.
        """
        found = factors(measured, expected)
        if not self.settled:
            by_stage: dict[int, list[float]] = defaultdict(list)
            for (_, stage), factor in found.items():
                by_stage[stage].append(factor)
            self.profile = of_layers(self.profile, {stage: statistics.fmean(several) for stage, several in by_stage.items()}, stages)
            self.settled = True
            return
        by_device: dict[str, list[float]] = defaultdict(list)
        for (device, _), factor in found.items():
            by_device[device].append(factor)
        for device, several in by_device.items():
            self._slowness[device].append(math.exp(statistics.fmean(map(math.log, several))))

    def topology(self, topology: ClusterTopology) -> ClusterTopology:
        """Return a topology with assumed speeds corrected by the observed ones."""
        nodes = tuple(
            replace(node, devices=tuple(replace(device, speed=device.speed / self._factor(device.name)) for device in node.devices))
            for node in topology.nodes
        )
        return replace(topology, nodes=nodes)

    def _factor(self, device: str) -> float:
        seen = self._slowness.get(device)
        return statistics.median(seen) if seen else 1.0
