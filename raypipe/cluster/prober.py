"""Measures the running cluster, over the transports that training uses: see docs/probing.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from raypipe.actors.actor_info import ActorInfo
from raypipe.actors.cores import num_usable
from raypipe.actors.measure.flows import LEAST_PING_BYTES, WARM_UP_BYTES, Flow, Ping, exchanges, round_trips
from raypipe.artifacts.calibration import Calibration
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, Overheads
from raypipe.cluster.discovery import cluster_nodes
from raypipe.cluster.node_links import NodeLinks, Notice, Spending
from raypipe.cluster.probe_actors import ProbeActors
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import PlanError
from raypipe.network.assemble import assemble
from raypipe.network.clocks import ClockOffset, from_reference, offset, with_drift
from raypipe.network.fit import LinkFit, fit
from raypipe.network.probe_budget import Budget, MeasurementBudget, divide
from raypipe.network.rounds import Pair, hypercube, tournament

_CLOCK_PING = Ping(seconds=0.01, most_bytes=LEAST_PING_BYTES)
_LEAST_STREAM_BYTES = 2 * WARM_UP_BYTES


@dataclass(frozen=True)
class ProbedNode:
    """A node, a typical link inside, and its clock against the first node's, `None` where no links lead there."""

    name: str
    info: ActorInfo
    num_devices: int
    inside: LinkFit | None
    clock: ClockOffset | None


@dataclass(frozen=True)
class Probed:
    """Result of a probe.

    Attributes:
        links: Links of measured pairs of nodes.
        missing: Pairs of nodes, lower number first, that do not reach each other.
        notices: What could not be measured.
    """

    topology: ClusterTopology
    nodes: tuple[ProbedNode, ...]
    links: dict[Pair, LinkFit]
    missing: tuple[Pair, ...]
    measurements: MeasurementBudget
    num_steps: int
    num_bytes: int
    seconds: float
    notices: tuple[str, ...]


def probe(
    cluster: ClusterConfig,
    *,
    budget: Budget | None = None,
    devices_per_node: int | None = None,
    use_gpu: bool = False,
    name: str = "probed",
    notice: Notice = lambda _: None,
) -> Probed:
    """Measure a cluster; its topology describes at most `devices_per_node` devices of a node, by default all.

    Raises:
        InputError: The budget is too small, or the calibration of this machine cannot be used.
        PlanError: No node has a CPU (or GPU), or two nodes cannot be told apart.
        RunError: A node cannot be reached, or a measurement failed.
    """
    # Before anything is started: the file may be unusable.
    calibration = Calibration.load(calibration_file()) if calibration_file().exists() else None
    num_devices = devices_per_node or num_usable()
    with session(cluster, num_devices=num_devices, cpus_per_device=1.0) as connected:
        # A local cluster has one slot more, for the driver.
        limit = num_devices if connected.local else devices_per_node
        nodes = [node for node in cluster_nodes() if node.alive and (node.num_gpus if use_gpu else node.num_cpus) >= 1]
        if not nodes and use_gpu:
            raise PlanError("the cluster has no living node with a GPU that Ray knows of; see `ray status`, and nvidia-smi on the nodes")
        if not nodes:
            raise PlanError("the cluster has no living node with a CPU; start nodes with `ray start --num-cpus=N`, see `ray status`")
        overheads = None
        if calibration is not None and not use_gpu:
            overheads = calibration.of("gloo" if len(nodes) > 1 else "shm").overheads
        with ProbeActors.launched(nodes, limit=limit, start_timeout_s=cluster.start_timeout_s, use_gpu=use_gpu, notice=notice) as actors:
            classes = [(node.num_cpus, node.num_gpus, node.accelerators, actors.node_info(i).num_cores) for i, node in enumerate(nodes)]
            return Probe(actors, classes, budget or Budget(), notice=notice).run(name, overheads)


class Probe:
    """One probe of a cluster. Links between nodes of equal classes are assumed to be alike where unmeasured."""

    def __init__(self, actors: ProbeActors, classes: Sequence[tuple[object, ...]], budget: Budget, *, notice: Notice) -> None:
        self.actors = actors
        self.classes = classes
        # Before the seconds are counted: pairs that do not reach each other take as long as a device waits for another one.
        self.missing = sorted(actors.unreachable([pair for matching in tournament(classes) for pair in matching]))
        self.spending = Spending(actors, budget, notice)
        for pair in self.missing:
            self.spending.missed(
                f"{' and '.join(actors.names[node] for node in pair)} do not reach each other: the topology has no link for them"
            )
        # Neighbors within each node, in alternating directions.
        neighbors = [pairwise(actors.devices(node)) for node in range(actors.num_nodes)]
        self.inside = [[pair[::-1] if place % 2 else pair for place, pair in enumerate(of_node)] for of_node in neighbors]
        self.measurements = divide(
            budget,
            classes,
            num_inside=sum(map(len, self.inside)),
            rounds_inside=max(map(len, self._inside_by_machine()), default=0),
            least_ping_bytes=LEAST_PING_BYTES,
            least_stream_bytes=_LEAST_STREAM_BYTES,
        )
        self.links = NodeLinks(actors, self.spending, self.measurements, classes, missing=self.missing)

    def run(self, name: str, overheads: Overheads | None) -> Probed:
        """Measure everything, and describe it as a topology."""
        actors, links, spending = self.actors, self.links, self.spending
        if actors.num_nodes > 1:
            links.measure()
        inside = self._measure_inside()
        if actors.num_nodes > 2:
            links.look_for_sharing()
        clocks = self._clocks()
        if overheads is None:
            spending.missed("the overhead of an Op and a message is not known: `raypipe calibrate` on this machine improves predictions")
        topology = assemble(
            name=name,
            nodes=[self._topology_node(node, inside[node]) for node in range(actors.num_nodes)],
            fits=links.fits,
            shared=links.search.bottlenecks,
            classes=self.classes,
            missing=self.missing,
            overheads=overheads,
        )
        return Probed(
            topology=topology,
            nodes=tuple(
                ProbedNode(actors.names[node], actors.node_info(node), len(actors.slots[node]), inside[node], clocks[node])
                for node in range(actors.num_nodes)
            ),
            links=links.fits,
            missing=tuple(self.missing),
            measurements=self.measurements,
            num_steps=actors.num_steps,
            num_bytes=actors.num_bytes,
            seconds=spending.seconds,
            notices=tuple(spending.notices),
        )

    def _inside_by_machine(self) -> list[list[tuple[int, Pair]]]:
        machines: dict[str, list[tuple[int, Pair]]] = {}
        for node, pairs in enumerate(self.inside):
            machines.setdefault(self.actors.node_info(node).hostname, []).extend((node, pair) for pair in pairs)
        return list(machines.values())

    def _measure_inside(self) -> list[LinkFit | None]:
        # Nodes of one machine take turns, since they share its memory.
        pattern = Ping(self.measurements.ping_s / 4, self.measurements.ping_bytes)
        fits: dict[int, list[LinkFit]] = {}
        for at_once in zip_longest(*self._inside_by_machine()):
            node_of = {pair: node for node, pair in filter(None, at_once)}
            for pair, (source, _) in self.actors.run([Flow(pair[0], pair[1], pattern) for pair in node_of]).items():
                link = " -> ".join(self.actors.members[end].slot.name for end in pair)
                fits.setdefault(node_of[pair], []).append(fit(round_trips(source), link=link))
        typical = {
            node: LinkFit(
                latency_s=statistics.median(one.latency_s for one in of_node),
                bandwidth_bytes_per_s=statistics.median(one.bandwidth_bytes_per_s for one in of_node),
                residual=max(one.residual for one in of_node),
                num_round_trips=sum(one.num_round_trips for one in of_node),
                num_bytes=sum(one.num_bytes for one in of_node),
            )
            for node, of_node in fits.items()
        }
        return [typical.get(node) for node in range(self.actors.num_nodes)]

    def _clocks(self) -> list[ClockOffset | None]:
        # A second measurement shows the drift.
        earlier = from_reference(self.links.clocks, reference=0)
        pairs: dict[Pair, ClockOffset] = {}
        if self.links.usable and self.spending.seconds < self.spending.budget.seconds:
            for matching in self.links.linked(hypercube(self.actors.num_nodes)):
                pairs |= {pair: offset(exchanges(*readings)) for pair, readings in self.links.ping(matching, _CLOCK_PING).items()}
        later = from_reference(pairs, reference=0)
        return [
            with_drift(earlier[node], later[node]) if node in earlier and node in later else earlier.get(node)
            for node in range(self.actors.num_nodes)
        ]

    def _topology_node(self, node: int, inside: LinkFit | None) -> Node:
        actors, info = self.actors, self.actors.node_info(node)
        link = NodeLink(latency_s=inside.latency_s, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s) if inside is not None else None
        names = [slot.name for slot in actors.slots[node]]
        if info.gpu_kind:
            gpus = tuple(Device(name, info.gpu_kind, info.gpu_bytes) for name in names)
            return Node(name=actors.names[node], devices=gpus, link=link)
        # All nodes of a machine share its memory.
        num_slots = sum(len(slots) for other, slots in enumerate(actors.slots) if actors.node_info(other).hostname == info.hostname)
        slots = tuple(Device(name, "cpu", info.memory_bytes // num_slots) for name in names)
        return Node(name=actors.names[node], devices=slots, link=link, cores=info.num_cores)
