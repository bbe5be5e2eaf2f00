"""The probe actors of a cluster, which are connected in pairs and run flows at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.actor_info import ActorInfo
from raypipe.actors.measure.flows import SCOUT_BYTES, Flow, FlowConnection, Ping, Readings, by_device
from raypipe.actors.probe_actor import ProbeActor
from raypipe.cluster.actor_group import STARTING, ActorGroup, Member
from raypipe.cluster.slots import ClusterNode, DeviceSlot, unique_name
from raypipe.errors import RunError, TransportError, TransportTimeoutError
from raypipe.network.fit import LEAST_BYTES_PER_S, measured_as_zero
from raypipe.network.rounds import Pair

_MOST_ACTORS = 4  # of a node; its other devices are assumed to be like the first
_MESSAGE_TIMEOUT_S = SCOUT_BYTES / LEAST_BYTES_PER_S
_CONNECT_TIMEOUT_S = 20.0
_PING_FACTOR = 20  # a ping may take this many times its planned time before its own limit ends it
_GRACE_S = 20.0  # to answer a call, beyond the call's own limits

FlowReadings = dict[Pair, tuple[Readings, Readings]]
"""Readings of source and target, by devices or nodes."""


class ProbeActors(ActorGroup):
    """The probe actors of a cluster: up to four a node, of which the first measures the links to other nodes."""

    def __init__(
        self, slots: Sequence[Sequence[DeviceSlot]], names: Sequence[str], handles: Sequence[Any], *, use_gpu: bool = False
    ) -> None:
        self.slots = slots  # of all devices that the topology describes, by node
        self.names = names
        self.num_nodes = len(names)
        self.use_gpu = use_gpu
        # Of each device that has an actor.
        self.node_of = [node for node, of_node in enumerate(slots) for _ in of_node[:_MOST_ACTORS]]
        super().__init__([Member(*pair) for pair in zip(handles, _with_actors(slots), strict=True)])
        self.infos: dict[int, ActorInfo] = {}
        self.num_steps = 0  # measurements, each of one or more flows
        self.num_bytes = 0
        self._connected: set[Pair] = set()

    @classmethod
    @contextmanager
    def launched(
        cls, nodes: Sequence[ClusterNode], *, limit: int | None, start_timeout_s: float, use_gpu: bool, notice: Callable[[str], None]
    ) -> Iterator[ProbeActors]:
        """Launch actors on nodes, and end them with the block; at most `limit` devices of a node are described."""
        names = [unique_name(node, nodes) for node in nodes]
        needs, num_gpus = ({"GPU": 1.0}, 1.0) if use_gpu else ({"CPU": 1.0}, 0.0)
        counts = [min(node.room(needs), limit or node.room(needs)) for node in nodes]
        slots = [node.slots(count, name=name, num_gpus=num_gpus) for node, count, name in zip(nodes, counts, names, strict=True)]
        # They reserve no CPU, so that runs may go on beside them.
        actor_class = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(ProbeActor)
        handles = [
            actor_class.options(
                num_gpus=slot.num_gpus, scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node.node_id, soft=False)
            ).remote(device, use_gpu=use_gpu)
            for device, slot in enumerate(_with_actors(slots))
        ]
        actors = cls(slots, names, handles, use_gpu=use_gpu)
        try:
            notice(f"starting {len(handles)} probe actors on {len(nodes)} nodes")
            actors.infos = actors.ask(STARTING, lambda _, actor: actor.info.remote(), timeout_s=start_timeout_s)
            actors.open_store()
            yield actors
        finally:
            for handle in handles:
                ray.kill(handle, no_restart=True)
            actors.close_store()

    def devices(self, node: int) -> list[int]:
        """Return a node's devices with actors."""
        return [device for device, of_device in enumerate(self.node_of) if of_device == node]

    def node_info(self, node: int) -> ActorInfo:
        """Return the report of a node's first device."""
        return self.infos[self.node_of.index(node)]

    def link_text(self, nodes: Pair) -> str:
        """Return `SOURCE -> TARGET` for messages."""
        return " -> ".join(self.names[node] for node in nodes)

    def run_between_nodes(self, patterns: dict[Pair, Any], *, limit_s: float | None = None) -> FlowReadings:
        """Run a flow for each directed pair of nodes; see `run`."""
        nodes_of = {(self.node_of.index(source), self.node_of.index(target)): (source, target) for source, target in patterns}
        readings = self.run([Flow(*ends, patterns[nodes]) for ends, nodes in nodes_of.items()], limit_s=limit_s)
        return {nodes_of[ends]: of_flow for ends, of_flow in readings.items()}

    def run(self, flows: Sequence[Flow], *, limit_s: float | None = None) -> FlowReadings:
        """Run flows between devices at the same time. Streams may take at most `limit_s`; pings have limits of their own."""
        self._connect([flow.ends for flow in flows])
        parts = by_device(flows)
        # Each message of a slow link may take as long as a message may; such a link is slow, not broken.
        slowest_s = max((flow.pattern.seconds for flow in flows if isinstance(flow.pattern, Ping)), default=0.0) * _PING_FACTOR
        timeout_s = 2 * _MESSAGE_TIMEOUT_S + (limit_s or slowest_s) + _GRACE_S
        try:
            results = self.ask("measuring", lambda device, actor: actor.run.remote(parts[device]), devices=parts, timeout_s=timeout_s)
        except TransportTimeoutError as error:
            ends = {error.device, error.peer}
            flow = next(flow for flow in flows if {self.members[end].slot.name for end in flow.ends} == ends)
            nodes = (self.node_of[flow.source], self.node_of[flow.target])
            if nodes[0] == nodes[1]:
                raise
            problem = f"a message or its answer took more than {_MESSAGE_TIMEOUT_S:g} s"
            raise measured_as_zero(self.link_text(nodes), problem) from error
        self.num_steps += 1
        noted = {(flow.ends, device): of_flow for device, own in parts.items() for flow, of_flow in zip(own, results[device], strict=True)}
        readings = {flow.ends: (noted[flow.ends, flow.source], noted[flow.ends, flow.target]) for flow in flows}
        self.num_bytes += sum(source.num_bytes for source, _ in readings.values())
        return readings

    def unreachable(self, pairs: Collection[Pair]) -> set[Pair]:
        """Connect these pairs of nodes both ways, all at the same time; return those, lower number first, that do not reach each other.

        What fails is tried once more: a busy node may have been late.
        """
        missing = self._unreached(pairs, attempt=1)
        return self._unreached(missing, attempt=2) if missing else missing

    def _unreached(self, pairs: Collection[Pair], *, attempt: int) -> set[Pair]:
        nodes_of = {tuple(map(self.node_of.index, ends)): pair for pair in pairs for ends in (pair, pair[::-1])}
        connections = self._connections([(source, target) for source, target in nodes_of], attempt=attempt)
        found = self.ask(
            "connecting",
            lambda device, actor: actor.reach.remote(connections[device], host_ip=self.infos[device].ip),
            devices=connections,
            timeout_s=_CONNECT_TIMEOUT_S + _GRACE_S,
        )
        missing = {nodes_of[ends] for of_device in found.values() for ends in of_device}
        self._connected.update((source, target) for (source, target), pair in nodes_of.items() if pair not in missing)
        return missing

    def _connections(self, pairs: Collection[Pair], *, attempt: int = 1) -> dict[int, list[FlowConnection]]:
        # Of each device.
        connections: dict[int, list[FlowConnection]] = {}
        for pair in pairs:
            connection = self._connection(*pair, attempt=attempt)
            for device in pair:
                connections.setdefault(device, []).append(connection)
        return connections

    def _connect(self, pairs: Collection[Pair]) -> None:
        fresh = [pair for pair in pairs if pair not in self._connected]
        connections = self._connections(fresh)
        try:
            self.ask(
                "connecting",
                lambda device, actor: actor.connect.remote(connections[device], host_ip=self.infos[device].ip),
                devices=connections,
                timeout_s=_CONNECT_TIMEOUT_S + _GRACE_S,
            )
        except TransportError as error:
            raise RunError(
                f"nodes {self._node_name(error.device)} and {self._node_name(error.peer)} cannot reach each other ({error}); check that "
                "the link is up, that no firewall is between them, and which interface GLOO_SOCKET_IFNAME names"
            ) from error
        self._connected.update(fresh)

    def _connection(self, source: int, target: int, *, attempt: int) -> FlowConnection:
        is_local = not self.use_gpu and self.node_of[source] == self.node_of[target]
        return FlowConnection(
            source=source,
            target=target,
            names=(self.members[source].slot.name, self.members[target].slot.name),
            shared=is_local and self.infos[source].shares_memory and self.infos[target].shares_memory,
            store=self.store,
            prefix=f"probe/{source}-{target}/{attempt}",
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            timeout_s=_MESSAGE_TIMEOUT_S,
        )

    def _node_name(self, device: str) -> str:
        return next((self.names[self.node_of[number]] for number, one in enumerate(self.members) if one.slot.name == device), device)


def _with_actors(slots: Sequence[Sequence[DeviceSlot]]) -> list[DeviceSlot]:
    return [slot for of_node in slots for slot in of_node[:_MOST_ACTORS]]
