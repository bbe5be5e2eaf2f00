"""Follows what the links between a run's nodes carry while it trains: see docs/probing.md."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import RayError

from raypipe.actors.measure.flows import LEAST_PING_BYTES, Flow, FlowConnection, Ping, Readings, round_trips
from raypipe.actors.measure.metrics import LinkMetrics
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.cluster.checks import on_gpus
from raypipe.cluster.stage_actors import StageActors
from raypipe.cluster.window import WindowResult
from raypipe.errors import PlanError, RunError
from raypipe.network.chunks import chunk_transfers, is_other_latency, link_uses, with_other_latency
from raypipe.network.estimate import NetworkEstimate, NodePair
from raypipe.network.fit import fit
from raypipe.network.transfers import transfers
from raypipe.schedules.lower import DeviceProgram

_LOG = logging.getLogger("raypipe.cluster.link_monitor")

IDLE_S = 60.0  # since a link's last transfer, before it is due for a probe
_BETWEEN_S = 20.0  # between two probes
_RETRY_S = 600.0  # after a failed probe of a link
_MOST_DOUBTED = 4  # links that are probed between two windows because their latency may have changed
_PATTERN = Ping(seconds=0.05, most_bytes=16 * LEAST_PING_BYTES)
_ANSWER_S = 1.0
_CONNECT_S = 5.0
_MESSAGE_S = 2.0  # a link that takes longer is not worth a window's wait


class LinkWatch:
    """Estimates of the links between node addresses, by the driver's clock."""

    def __init__(self, *, run: str, nodes: Sequence[str], now_s: float) -> None:
        self.nodes = tuple(nodes)
        self.estimate = NetworkEstimate(nodes, at_s=now_s)
        self._metrics = LinkMetrics(run=run) if self.estimate.links else None
        self._probed_at_s = now_s
        self._tried_at_s: dict[NodePair, float] = {}
        self._doubted: list[NodePair] = []
        self._doubted_at_s: dict[NodePair, float] = {}
        self._num_failed: dict[NodePair, int] = {}

    def seed(self, topology: ClusterTopology, devices: Sequence[str], *, now_s: float) -> None:
        """Start from the links of a topology, unless it lacks one of the devices and so describes another cluster."""
        names: dict[str, str] = {}
        for node, device in zip(self.nodes, devices, strict=True):
            try:
                names[node] = topology.node_of(device).name
            except PlanError:
                return
        self.estimate.seed(topology, names=names, at_s=now_s)

    def observe(
        self,
        trace: Trace,
        programs: Sequence[DeviceProgram],
        nodes: Sequence[str],
        *,
        began_s: float,
        now_s: float,
        queued_bytes: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        """Learn from a window that began at `began_s`; `nodes` are those of its devices, `queued_bytes` as `WindowResult` has them."""
        if self._metrics is None:
            return
        self._doubted = with_other_latency(trace, nodes, self.estimate)
        if trace.by_link:
            seen = chunk_transfers(trace, nodes, self.estimate, began_s=began_s)
        else:
            seen = transfers(trace, programs, nodes, self.estimate, began_s=began_s)
        for source, target in self.estimate.observe(seen):
            bandwidth = self.estimate.links[source, target].bandwidth_bytes_per_s
            self._doubted = list(dict.fromkeys([*self._doubted, (source, target)]))
            _LOG.info("the link %s -> %s has changed; it now carries %.3g bytes/s", source, target, bandwidth)
        self._metrics.record(self.estimate, now_s=now_s)
        self._metrics.record_uses(link_uses(trace, nodes, queued_bytes))

    def due(self, *, now_s: float) -> NodePair | None:
        """Return a link that is due for a probe, if the last probe was long enough ago."""
        if now_s - self._probed_at_s < _BETWEEN_S:
            return None
        idle = self.estimate.idle(now_s=now_s, older_than_s=IDLE_S)
        pair = next((pair for pair in idle if not self._has_just_failed(pair, now_s=now_s)), None)
        if pair is not None:
            self._probed_at_s = now_s
        return pair

    def doubted(self, *, now_s: float) -> list[NodePair]:
        """Return the links whose latency may have changed in the last window, and which were not probed for that just before."""
        rested = (pair for pair in self._doubted if now_s - self._doubted_at_s.get(pair, -_BETWEEN_S) >= _BETWEEN_S)
        pairs = [pair for pair in rested if not self._has_just_failed(pair, now_s=now_s)][:_MOST_DOUBTED]
        self._doubted_at_s |= dict.fromkeys(pairs, now_s)
        return pairs

    def _has_just_failed(self, pair: NodePair, *, now_s: float) -> bool:
        return now_s - self._tried_at_s.get(pair, -_RETRY_S) < _RETRY_S

    def devices(self, pair: NodePair) -> tuple[int, int]:
        """Return the devices that probe a link: after each failure others, as those may be dead."""
        sources, targets = ([device for device, node in enumerate(self.nodes) if node == end] for end in pair)
        turn = self._num_failed.get(pair, 0)
        return sources[turn % len(sources)], targets[turn // len(sources) % len(targets)]

    def probed(self, pair: NodePair, readings: Readings, *, now_s: float) -> None:
        """Learn from the readings of a probe's source."""
        try:
            link = fit(round_trips(readings), link=" -> ".join(pair))
        except RunError as error:
            self.failed(pair, error, now_s=now_s)
            return
        before_s = self.estimate.links[pair].latency_s
        if pair in self._doubted:
            if not is_other_latency(link.latency_s - before_s):
                return  # the chunks of a window tell more of its rate
            _LOG.info("the latency of the link %s -> %s has changed from %.3g s to %.3g s", *pair, before_s, link.latency_s)
        self.estimate.links[pair].set(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s, at_s=now_s)

    def failed(self, pair: NodePair, problem: object, *, now_s: float) -> None:
        """Record a failed probe."""
        self._tried_at_s[pair] = now_s
        self._num_failed[pair] = self._num_failed.get(pair, 0) + 1
        _LOG.warning("the link %s -> %s could not be probed: %s", *pair, problem)


class LinkMonitor:
    """Watches a run's links between windows, and probes unused ones."""

    def __init__(self, actors: StageActors) -> None:
        self._actors = actors
        self._watch = LinkWatch(run=actors.run, nodes=[member.slot.node.address for member in actors.launched], now_s=time.time())
        self.estimate = self._watch.estimate
        self._num_probes = 0
        self._prefix = f"{actors.run}/link "

    def seed(self, topology: ClusterTopology, devices: Sequence[str] = ()) -> None:
        """Start from a topology's links; `devices` are its names of the launched devices, if others."""
        self._watch.seed(topology, devices or [member.slot.name for member in self._actors.launched], now_s=time.time())

    def after_window(self, result: WindowResult) -> None:
        """Learn from a window; of CPU devices, probe a link."""
        if not self.estimate.links:
            return
        nodes = [member.slot.node.address for member in self._actors.members]
        for (source, target), trip_s in result.round_trips_s.items():
            if nodes[source] != nodes[target]:
                self.estimate.suppose_latency((nodes[source], nodes[target]), trip_s / 2)
        self._watch.observe(
            result.trace, result.programs, nodes, began_s=min(result.began_s), now_s=time.time(), queued_bytes=result.queued_bytes
        )
        if on_gpus(self._actors.infos):
            return  # probes go over TCP, and messages over NCCL, which may be many times as fast
        for pair in self._watch.doubted(now_s=time.time()):
            self.probe(*pair)
        if (due := self._watch.due(now_s=time.time())) is not None:
            self.probe(*due)

    def probe(self, source_node: str, target_node: str) -> None:
        """Measure the link between two node addresses, in a tenth of a second; never fail the run."""
        pair, actors = (source_node, target_node), self._actors
        source, target = self._watch.devices(pair)
        if dead := actors.dead((source, target), timeout_s=_ANSWER_S):  # the other end would wait for it, and the run for that end
            problem = f"{' and '.join(actors.launched[number].slot.name for number in dead)} does not answer"
            self._watch.failed(pair, problem, now_s=time.time())
            return
        self._num_probes += 1
        connection = FlowConnection(
            source=source,
            target=target,
            names=(actors.launched[source].slot.name, actors.launched[target].slot.name),
            shared=False,
            store=actors.store,
            prefix=f"{self._prefix}{source}-{target}, probe {self._num_probes}",
            connect_timeout_s=_CONNECT_S,
            timeout_s=_MESSAGE_S,
        )
        flow = Flow(source, target, _PATTERN)
        refs = [
            actors.launched[number].handle.probe_link.remote(connection, flow, host_ip=actors.launched_infos[number].ip)
            for number in (source, target)
        ]
        found: list[Readings] = []
        for ref in refs:  # each, since Ray prints errors that nobody has asked for
            try:
                found.append(ray.get(ref, timeout=_CONNECT_S + 10 * _MESSAGE_S))
            except RayError as error:  # what is wrong will show where the run needs the link
                problem = str(error).strip().splitlines()[-1]
        # Also what an end that came too late to an earlier probe has left: otherwise a month of them would stay in the driver's memory.
        actors.drop_from_store(self._prefix)
        if len(found) < len(refs):
            self._watch.failed(pair, problem, now_s=time.time())
        else:
            self._watch.probed(pair, found[0], now_s=time.time())
