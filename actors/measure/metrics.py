"""Metrics of a run, which Ray exports at the metrics ports of the nodes."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from raypipe.actors.execution.report import WindowReport
from raypipe.artifacts.trace import SpanKind
from raypipe.network.chunks import LinkUse
from raypipe.network.estimate import NetworkEstimate, NodePair
from raypipe.schedules.lower import DeviceProgram

_TAGS = ("run", "device", "stages")


class StageMetrics:
    """Seconds and bytes of one device over the run; Ray exports them as `ray_raypipe_...`."""

    def __init__(self, *, run: str, device: str, stages: str) -> None:
        tags = {"run": run, "device": device, "stages": stages}
        self._busy = Counter("raypipe_busy_seconds", description="Seconds in which the device computed", tag_keys=_TAGS)
        self._wait = Counter("raypipe_wait_seconds", description="Seconds in which the device waited for others", tag_keys=_TAGS)
        self._bubble = Gauge("raypipe_bubble_ratio", description="Share of the last window in which it did not compute", tag_keys=_TAGS)
        self._received = Counter("raypipe_received_bytes", description="Bytes of messages that arrived", tag_keys=_TAGS)
        self._memory = Gauge("raypipe_peak_memory_bytes", description="The most that the device held in the last window", tag_keys=_TAGS)
        for metric in (self._busy, self._wait, self._bubble, self._received, self._memory):
            metric.set_default_tags(tags)

    def record(self, report: WindowReport, program: DeviceProgram) -> None:
        """Add a window."""
        log = report.log
        busy = log.seconds(program, SpanKind.COMPUTE)
        wait = log.seconds(program, SpanKind.RECV) + log.seconds(program, SpanKind.COLLECTIVE)
        # Counters refuse zero.
        for counter, amount in ((self._busy, busy), (self._wait, wait), (self._received, log.num_bytes(program, SpanKind.RECV))):
            if amount > 0:
                counter.inc(amount)
        if log.ends_s:
            self._bubble.set(1 - busy / max(log.ends_s))
        if report.peak_memory_bytes is not None:
            self._memory.set(report.peak_memory_bytes)


class RunMetrics:
    """Metrics of the whole run, set by the driver."""

    def __init__(self, *, run: str) -> None:
        self._gauges = {
            name: Gauge(f"raypipe_{name}", description=text, tag_keys=("run",))
            for name, text in (
                ("loss", "Training loss of the last update"),
                ("validation_loss", "Loss of the last evaluation"),
                ("tokens_per_s", "Tokens per second over the last window"),
                ("update_seconds", "Seconds per update over the last window"),
                ("updates", "Updates done"),
                ("pipelines", "Pipelines that run at once"),
                ("switches", "Switches to another way to run so far"),
                ("recoveries", "Failures that the run has recovered from"),
                ("pattern_changes", "Changes of the pattern of a sum so far"),
                ("predicted_update_seconds", "Seconds per update as predicted for the way that runs"),
            )
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run})

    def record(self, name: str, value: float) -> None:
        """Set one metric."""
        self._gauges[name].set(value)


class LinkMetrics:
    """Current estimates of the links between nodes, set by the driver."""

    def __init__(self, *, run: str) -> None:
        tags = ("run", "source", "target")
        self._bandwidth = Gauge("raypipe_link_bandwidth_bytes_per_s", description="What the link carries, as last seen", tag_keys=tags)
        self._age = Gauge("raypipe_link_age_seconds", description="Since the link was last seen", tag_keys=tags)
        self._changes = Gauge("raypipe_link_changes", description="Step changes of the link so far", tag_keys=tags)
        self._busy = Gauge(
            "raypipe_link_busy_ratio", description="Share of the last window in which something was on its way", tag_keys=tags
        )
        self._queued = Gauge(
            "raypipe_link_queued_bytes", description="The most that waited for the link's way out in the last window", tag_keys=tags
        )
        self._carried = Counter("raypipe_link_bytes", description="Bytes that went over the link, by traffic", tag_keys=(*tags, "traffic"))
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
                if num_bytes:  # counters refuse zero
                    self._carried.inc(num_bytes, tags | {"traffic": str(carried)})
