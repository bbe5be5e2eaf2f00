"""Metrics of a run, which Ray exports at the metrics ports of the nodes, with `ray_` before their names.

Names follow the conventions of Prometheus: base units, `_total` for what only grows, `_ratio` for shares of 1. What is unknown has no
series, and never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from ray.util.metrics import Gauge

from raypipe.actors.execution.report import WindowReport
from raypipe.artifacts.trace import SpanKind
from raypipe.network.chunks import LinkUse
from raypipe.network.estimate import NetworkEstimate, NodePair
from raypipe.schedules.lower import DeviceProgram

_TAGS = ("run", "device", "stages")


class Total:
    """A sum that only grows, from 0.

    It is a gauge of Ray's: the counters of a process stay at the metrics port of its node when the process has ended (Ray 2.60), and begin
    only with their first event.
    """

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._gauge = Gauge(name, description=description, tag_keys=tag_keys)
        self._sums: dict[tuple[tuple[str, str], ...], float] = {}

    def set_default_tags(self, tags: dict[str, str]) -> None:
        """See `ray.util.metrics.Gauge`."""
        self._gauge.set_default_tags(tags)

    def add(self, amount: float, tags: Mapping[str, str] | None = None) -> None:
        """Add to the sum of these tags."""
        key = tuple(sorted((tags or {}).items()))
        self._sums[key] = self._sums.get(key, 0.0) + amount
        self._gauge.set(self._sums[key], dict(key))


class StageMetrics:
    """Seconds and bytes of one device over the run."""

    def __init__(self, *, run: str, device: str, stages: str) -> None:
        tags = {"run": run, "device": device, "stages": stages}
        self._busy = Total("raypipe_busy_seconds_total", "Seconds in which the device computed", _TAGS)
        self._wait = Total("raypipe_wait_seconds_total", "Seconds in which the device waited for others", _TAGS)
        self._data = Total("raypipe_data_wait_seconds_total", "Seconds in which the device waited for rows of the data", _TAGS)
        self._bubble = Gauge("raypipe_bubble_ratio", description="Share of the last window in which it did not compute", tag_keys=_TAGS)
        self._received = Total("raypipe_received_bytes_total", "Bytes of messages that arrived", _TAGS)
        self._memory = Gauge("raypipe_peak_memory_bytes", description="The most that the device held in the last window", tag_keys=_TAGS)
        for metric in (self._busy, self._wait, self._data, self._bubble, self._received, self._memory):
            metric.set_default_tags(tags)

    def record(self, report: WindowReport, program: DeviceProgram) -> None:
        """Add a window."""
        log = report.log
        busy = log.seconds(program, SpanKind.COMPUTE)
        wait = log.seconds(program, SpanKind.RECV) + log.seconds(program, SpanKind.COLLECTIVE)
        self._busy.add(busy)
        self._wait.add(wait)
        data = log.seconds(program, SpanKind.DATA)
        self._data.add(data)
        self._received.add(log.num_bytes(program, SpanKind.RECV))
        if log.ends_s:
            self._bubble.set(1 - (busy + data) / max(log.ends_s))
        if report.peak_memory_bytes:  # 0 is less than any device holds: it was lost in what the process held before
            self._memory.set(report.peak_memory_bytes)


class RunGauge(StrEnum):
    """Figures of the whole run that the driver sets."""

    LOSS = "loss"
    VALIDATION_LOSS = "validation_loss"
    GRADIENT_NORM = "gradient_norm"
    LEARNING_RATE = "learning_rate"
    SAMPLES_PER_SECOND = "samples_per_second"
    TOKENS_PER_SECOND = "tokens_per_second"
    UPDATE_SECONDS = "update_seconds"
    UPDATE = "update"
    PIPELINES = "pipelines"
    PREDICTED_UPDATE_SECONDS = "predicted_update_seconds"
    CHECKPOINT_TIMESTAMP_SECONDS = "checkpoint_timestamp_seconds"
    CHECKPOINT_SECONDS = "checkpoint_seconds"


class RunCounter(StrEnum):
    """Events of the whole run that the driver counts."""

    UPDATES = "updates"
    SAMPLES = "samples"
    TOKENS = "tokens"
    SWITCHES = "switches"
    PATTERN_CHANGES = "pattern_changes"
    FAILURES = "failures"
    RECOVERIES = "recoveries"


_GAUGES = {
    RunGauge.LOSS: "Training loss of the last update",
    RunGauge.VALIDATION_LOSS: "Loss of the last evaluation",
    RunGauge.GRADIENT_NORM: "Norm of the gradient over all stages at the last update, before it was clipped",
    RunGauge.LEARNING_RATE: "Learning rate of the last update",
    RunGauge.TOKENS_PER_SECOND: "Tokens per second over the last window; no series where the data has no tokens",
    RunGauge.SAMPLES_PER_SECOND: "Rows of the data per second over the last window",
    RunGauge.UPDATE_SECONDS: "Seconds per update over the last window",
    RunGauge.UPDATE: "Number of the last update; it goes back where a run goes on from a checkpoint",
    RunGauge.PIPELINES: "Pipelines that run at once",
    RunGauge.PREDICTED_UPDATE_SECONDS: "Seconds per update as predicted for the way that runs",
    RunGauge.CHECKPOINT_TIMESTAMP_SECONDS: "When the last checkpoint was complete, in seconds since 1970",
    RunGauge.CHECKPOINT_SECONDS: "Seconds that writing the last checkpoint took, beside the training",
}
_COUNTERS = {
    RunCounter.UPDATES: "Updates that this process has done",
    RunCounter.TOKENS: "Tokens that this process has trained on; 0 where the data has no tokens",
    RunCounter.SAMPLES: "Rows of the data that this process has trained on",
    RunCounter.SWITCHES: "Switches to another way to run",
    RunCounter.PATTERN_CHANGES: "Changes of the pattern of a sum",
    RunCounter.FAILURES: "Failures of devices, nodes and links",
    RunCounter.RECOVERIES: "Failures that the run has recovered from",
}


class RunMetrics:
    """Metrics of the whole run, set by the driver."""

    def __init__(self, *, run: str) -> None:
        self._gauges = {name: Gauge(f"raypipe_{name}", description=text, tag_keys=("run",)) for name, text in _GAUGES.items()}
        self._counters = {name: Total(f"raypipe_{name}_total", text, ("run",)) for name, text in _COUNTERS.items()}
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags({"run": run})
        for total in self._counters.values():
            total.add(0)

    def set(self, name: RunGauge, value: float | None) -> None:
        """Set a figure; what is unknown or not a number leaves the last one."""
        if value is not None and math.isfinite(value):
            self._gauges[name].set(value)

    def count(self, name: RunCounter, number: float = 1) -> None:
        """Count events."""
        self._counters[name].add(number)


class LinkMetrics:
    """Current estimates of the links between nodes, set by the driver."""

    def __init__(self, *, run: str) -> None:
        tags = ("run", "source", "target")
        self._bandwidth = Gauge("raypipe_link_bandwidth_bytes_per_second", description="What the link carries, as last seen", tag_keys=tags)
        self._age = Gauge("raypipe_link_age_seconds", description="Since the link was last seen", tag_keys=tags)
        self._changes = Gauge("raypipe_link_changes_total", description="Step changes of the link so far", tag_keys=tags)
        self._busy = Gauge(
            "raypipe_link_busy_ratio", description="Share of the last window in which something was on its way", tag_keys=tags
        )
        self._queued = Gauge(
            "raypipe_link_queued_bytes", description="The most that waited for the link's way out in the last window", tag_keys=tags
        )
        self._carried = Total("raypipe_link_bytes_total", "Bytes that went over the link, by traffic", (*tags, "traffic"))
        for metric in (self._bandwidth, self._age, self._changes, self._busy, self._queued, self._carried):
            metric.set_default_tags({"run": run})

    def record(self, network: NetworkEstimate, *, now_s: float) -> None:
        """Set the metrics of all links."""
        for pair, link in network.links.items():
            tags = dict(zip(("source", "target"), pair, strict=True))
            if link.bandwidth_bytes_per_s is not None:
                self._bandwidth.set(link.bandwidth_bytes_per_s, tags)
            self._age.set(network.age_s(pair, now_s=now_s), tags)
            self._changes.set(link.num_changes, tags)

    def record_uses(self, uses: Mapping[NodePair, LinkUse]) -> None:
        """Add what passed the links in a window."""
        for (source, target), use in uses.items():
            tags = {"source": source, "target": target}
            self._busy.set(use.busy_ratio, tags)
            self._queued.set(use.queued_bytes, tags)
            for carried, num_bytes in use.num_bytes.items():
                self._carried.add(num_bytes, tags | {"traffic": str(carried)})
