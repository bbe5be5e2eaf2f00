"""What a run knows of the links between its nodes while it trains: see `raypipe.network.estimate` and docs/probing.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raypipe.actors.measure.links import LEAST_PING_BYTES, Ping, Readings, round_trips
from raypipe.actors.measure.metrics import LinkMetrics
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.errors import PlanError, RunError
from raypipe.network.estimate import NetworkEstimate, NodePair
from raypipe.network.fit import fit
from raypipe.network.transfers import transfers
from raypipe.schedules.lower import DeviceProgram

_LOG = logging.getLogger("raypipe.cluster.link_monitor")

IDLE_S = 60.0
"""A link that was not seen for so long is probed."""
_BETWEEN_S = 20.0
"""From one such probe to the next, at least."""
_RETRY_S = 600.0
"""Until a link that could not be probed is tried again."""
PATTERN = Ping(seconds=0.05, most_bytes=16 * LEAST_PING_BYTES)
"""What a link between two windows is probed with."""


class NetworkWatch:
    """The links between the nodes of a run.

    Args:
        run: the run's name.
        nodes: the address of each device's node.
        now_s: the time, by the driver's clock.
    """

    def __init__(self, *, run: str, nodes: Sequence[str], now_s: float) -> None:
        self.nodes = tuple(nodes)
        self.estimate = NetworkEstimate(nodes, at_s=now_s)
        self._metrics = LinkMetrics(run=run) if self.estimate.links else None
        self._probed_at_s = now_s
        self._tried_at_s: dict[NodePair, float] = {}
        self._num_failed: dict[NodePair, int] = {}

    def seed(self, topology: ClusterTopology, devices: Sequence[str], *, now_s: float) -> None:
        """Begins with what a topology says of the links, if it has the run's devices.

        Args:
            topology: of the plan.
            devices: the names of the run's devices.
            now_s: the time, by the driver's clock.
        """
        names: dict[str, str] = {}
        for node, device in zip(self.nodes, devices, strict=True):
            try:
                names[node] = topology.node_of(device).name
            except PlanError:
                return  # it describes some other cluster
        self.estimate.seed(topology, names=names, at_s=now_s)

    def observe(self, trace: Trace, programs: Sequence[DeviceProgram], nodes: Sequence[str], *, began_s: float, now_s: float) -> None:
        """Learn from a window of these programs on devices of these nodes; it began at `began_s` by the driver's clock."""
        if self._metrics is None:
            return
        for source, target in self.estimate.observe(transfers(trace, programs, nodes, self.estimate, began_s=began_s)):
            bandwidth = self.estimate.links[source, target].bandwidth_bytes_per_s
            _LOG.info("the link %s -> %s has changed; it now carries %.3g bytes/s", source, target, bandwidth)
        self._metrics.record(self.estimate, now_s=now_s)

    def due(self, *, now_s: float) -> NodePair | None:
        """The link that wants a probe most; `None` where none does, or it is too early for another one."""
        if now_s - self._probed_at_s < _BETWEEN_S:
            return None
        idle = self.estimate.idle(now_s=now_s, older_than_s=IDLE_S)
        pair = next((pair for pair in idle if now_s - self._tried_at_s.get(pair, -_RETRY_S) >= _RETRY_S), None)
        if pair is not None:
            self._probed_at_s = now_s
        return pair

    def devices(self, pair: NodePair) -> tuple[int, int]:
        """The devices that probe a link: the first of each node, and others by turns where that failed, for they may be gone."""
        sources, targets = ([device for device, node in enumerate(self.nodes) if node == end] for end in pair)
        turn = self._num_failed.get(pair, 0)
        return sources[turn % len(sources)], targets[turn // len(sources) % len(targets)]

    def probed(self, pair: NodePair, readings: Readings, *, now_s: float) -> None:
        """Takes what the source of a probe noted."""
        try:
            found = fit(round_trips(readings), link=" -> ".join(pair))
        except RunError as error:
            self.failed(pair, error, now_s=now_s)
            return
        self.estimate.links[pair].set(bandwidth_bytes_per_s=found.bandwidth_bytes_per_s, latency_s=found.latency_s, at_s=now_s)

    def failed(self, pair: NodePair, problem: object, *, now_s: float) -> None:
        """Notes that a link could not be probed."""
        self._tried_at_s[pair] = now_s
        self._num_failed[pair] = self._num_failed.get(pair, 0) + 1
        _LOG.warning("the link %s -> %s could not be probed: %s", *pair, problem)
