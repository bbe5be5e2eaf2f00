"""Measures the running cluster: nodes, devices, links, what links share, and clocks. See docs/probing.md.

One probe actor a device passes messages over the transports that training uses. All measurements are steps: flows that run at the same
time, one Ray call for each actor that takes part. Between nodes, the first device of each node measures; within a node, its devices.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.measure.links import (
    LEAST_PING_BYTES,
    SCOUT_BYTES,
    WARM_UP_BYTES,
    Facts,
    Flow,
    MeetOrder,
    Ping,
    ProbeActor,
    Readings,
    Stream,
    by_device,
    exchanges,
    round_trips,
)
from raypipe.artifacts.calibration import Calibration
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, Overheads
from raypipe.cluster.node_matching import NODE_LABEL, ClusterNode, nodes_called
from raypipe.cluster.session import session
from raypipe.cluster.slots import cluster_nodes
from raypipe.config import ClusterConfig, calibration_file
from raypipe.errors import PlanError, RaypipeError, RunError, TransportError, TransportTimeoutError
from raypipe.network.allowance import Allowance, Budget, divide
from raypipe.network.assemble import assemble
from raypipe.network.clocks import ClockOffset, from_reference, offset, with_drift
from raypipe.network.fit import LEAST_BYTES_PER_S, LinkFit, fit, measured_as_zero
from raypipe.network.rounds import Pair, Round, company, directed, fan_rounds, hypercube, tournament
from raypipe.network.sharing import Search, below_their_ends, fastest_of_nodes, in_company, rates

_MOST_ACTORS = 4
"""Of a node; its further devices are taken to be like the first."""
_MESSAGE_TIMEOUT_S = SCOUT_BYTES / LEAST_BYTES_PER_S
_CONNECT_TIMEOUT_S = 20.0
_PING_LASTS = 20
"""Times as long as it should, before a limit of its own ends a ping."""
_STREAMS_LAST = 4
"""Times as long as streams should take one after the other, before they have failed."""
_GRACE_S = 20.0
"""Beyond its own limits, until an actor must have answered a call."""
_CLOCK = Ping(seconds=0.01, most_bytes=LEAST_PING_BYTES)
_LEAST_STREAM_BYTES = 2 * WARM_UP_BYTES
_MOST_NAMED = 6
_FASTER_ALONE = 1.1
"""A link that reaches so many times its fitted bandwidth by itself was fitted in bad company."""

_MORE = "raise --budget-s or --budget-bytes"

Notice = Callable[[str], None]


@dataclass(frozen=True)
class ProbedNode:
    """A node, and what was found out about it.

    Attributes:
        name: in the topology: its label, else its address.
        facts: what its first device knows.
        num_devices: CPU slots.
        inside: of the links between its devices; `None` where there is one device.
        clock: how far its clock is ahead of the first node's.
    """

    name: str
    facts: Facts
    num_devices: int
    inside: LinkFit | None
    clock: ClockOffset


@dataclass(frozen=True)
class Probed:
    """What a probe gave.

    Attributes:
        topology: nodes, devices, links and shared links.
        nodes: in the topology's order.
        links: the fit of each directed pair of nodes that was measured, by the numbers of the nodes.
        allowance: what each measurement was allowed, and the rounds that were planned.
        num_steps: measurements that were made, of one or more flows at the same time.
        num_bytes: that were sent for it.
        seconds: that measuring took.
        notices: what could not be done, and why.
    """

    topology: ClusterTopology
    nodes: tuple[ProbedNode, ...]
    links: dict[Pair, LinkFit]
    allowance: Allowance
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
    """Measures a cluster.

    Args:
        cluster: which; a local one is started where there is none.
        budget: of seconds and bytes.
        devices_per_node: of each node, at most so many devices are described; `None`: all of them.
        use_gpu: whether the GPUs and the links between them are measured, and not the CPU slots.
        name: of the topology.
        notice: told how it goes.

    Raises:
        InputError: the budget is too small, or the calibration of this machine cannot be used.
        PlanError: the cluster has no node with a CPU, or two that cannot be told apart.
        RunError: a node cannot be reached, a link carries nothing, or something else failed; no actor stays.
    """
    # A file that cannot be used is known to be one before anything is started.
    calibration = Calibration.load(calibration_file()) if calibration_file().exists() else None
    num_devices = devices_per_node or os.cpu_count() or 1
    with session(cluster, num_devices=num_devices, cpus_per_device=1.0) as connected:
        # A local cluster has a place more than devices, for the driver.
        limit = num_devices if connected.local else devices_per_node
        nodes = _nodes(use_gpu=use_gpu)
        overheads = None
        if calibration is not None and not use_gpu:
            overheads = calibration.of("gloo" if len(nodes) > 1 else "shm").overheads
        with ActorCluster.of(nodes, limit=limit, cluster=cluster, notice=notice, use_gpu=use_gpu) as found:
            return Probe(found, budget or Budget(), name=name, overheads=overheads, notice=notice).run()


def _nodes(*, use_gpu: bool) -> list[ClusterNode]:
    """The living nodes that have a CPU, or a GPU, the head first.

    Raises:
        PlanError: there are none.
    """
    heads = {node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]}
    nodes = [node for node in cluster_nodes() if node.alive and (node.num_gpus if use_gpu else node.num_cpus) >= 1]
    if not nodes and use_gpu:
        raise PlanError("the cluster has no living node with a GPU that Ray knows of; see `ray status`, and nvidia-smi on the nodes")
    if not nodes:
        raise PlanError("the cluster has no living node with a CPU; start nodes with `ray start --num-cpus=N`, see `ray status`")
    return sorted(nodes, key=lambda node: (node.node_id not in heads, node.address, node.node_id))


def own_name(node: ClusterNode, nodes: Sequence[ClusterNode]) -> str:
    """What a node is called in topologies, by which it is found again: its label, else its address.

    Raises:
        PlanError: another node has both.
    """
    for name in filter(None, (node.label, node.address)):
        if nodes_called(name, nodes) == [node]:
            return name
    others = ", ".join(other.node_id[:8] for other in nodes if node.address == other.address)
    raise PlanError(
        f"node {node} has no name of its own: the nodes {others} are at its address; give each a label when it is started, "
        f"`ray start --labels={NODE_LABEL}=NAME`"
    )


@dataclass(frozen=True)
class ProbeDevice:
    """A device with a probe actor.

    Attributes:
        node: its number.
        name: in the topology.
        actor: its handle.
    """

    node: int
    name: str
    actor: Any


@dataclass
class ActorCluster:
    """The probe actors of a cluster, and the flows between them.

    Attributes:
        nodes: in order.
        names: of the nodes, in topologies.
        num_slots: devices of each: CPU slots, or GPUs.
        devices: those with an actor, by number.
        speakers: of each node, the number of its first device.
        start_timeout_s: until all actors must be there.
        use_gpu: whether devices are GPUs.
    """

    nodes: list[ClusterNode]
    names: list[str]
    num_slots: list[int]
    devices: list[ProbeDevice]
    speakers: list[int]
    start_timeout_s: float
    use_gpu: bool = False
    facts: dict[int, Facts] = field(default_factory=dict)
    num_steps: int = 0
    num_bytes: int = 0
    _store: tuple[str, int] = ("", 0)
    _met: set[Pair] = field(default_factory=set)

    @classmethod
    @contextmanager
    def of(
        cls, nodes: list[ClusterNode], *, limit: int | None, cluster: ClusterConfig, notice: Notice, use_gpu: bool = False
    ) -> Iterator[ActorCluster]:
        """Launches the actors, and ends them at the end of the block, however that comes."""
        slots = [min(int((node.num_gpus if use_gpu else node.num_cpus) + 1e-9), limit or 1 << 30) for node in nodes]
        found = cls(nodes, [own_name(node, nodes) for node in nodes], slots, [], [], cluster.start_timeout_s, use_gpu)
        try:
            for number in range(len(nodes)):
                found._launch(number)
            notice(f"starting {len(found.devices)} probe actors on {len(nodes)} nodes")
            found._start()
            yield found
        finally:
            for device in found.devices:
                ray.kill(device.actor, no_restart=True)

    def device_names(self, node: int) -> list[str]:
        """What the devices of a node are called."""
        return [f"{self.names[node]}/{number}" for number in range(self.num_slots[node])]

    def _launch(self, number: int) -> None:
        node = self.nodes[number]
        self.speakers.append(len(self.devices))
        for name in self.device_names(number)[:_MOST_ACTORS]:
            device = len(self.devices)
            # Without a CPU of its own: what others hold is measured as it is. A GPU must be its own.
            num_gpus = 1 if self.use_gpu else 0
            actor_class = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0, max_task_retries=0)(ProbeActor)
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            actor = actor_class.options(scheduling_strategy=strategy).remote(device, use_gpu=self.use_gpu)
            self.devices.append(ProbeDevice(number, name, actor))

    def _start(self) -> None:
        calls = {number: device.actor.facts.remote() for number, device in enumerate(self.devices)}
        remedy = "its node may be down, cut off or out of memory, or lack raypipe: see `ray status`, and install raypipe on every node"
        self.facts = self.gather(calls, "starting", timeout_s=self.start_timeout_s, remedy=remedy)
        host, timeout_s = self.facts[0].ip, _CONNECT_TIMEOUT_S
        port = self.gather({0: self.devices[0].actor.host_store.remote(host=host, timeout_s=timeout_s)}, "opening the store")[0]
        self._store = (host, port)

    # Listening

    def gather(
        self,
        calls: Mapping[int, Any],
        what: str,
        *,
        timeout_s: float = _CONNECT_TIMEOUT_S + _GRACE_S,
        remedy: str = "its node may be down or cut off: see `ray status`",
    ) -> dict[int, Any]:
        """The results of a call of each of some devices.

        Raises:
            RunError: one failed or died, or did not answer in time; names it.
        """
        device_of = {ref: device for device, ref in calls.items()}
        left, deadline = list(device_of), time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
            for ref in done:
                try:
                    results[device_of[ref]] = ray.get(ref)
                except RayError as error:
                    raise self._translated(error, device_of[ref], what) from error
            if left and not done:
                silent = ", ".join(self._text(device_of[ref]) for ref in left)
                raise RunError(f"{what}: no answer within {timeout_s:g} s from {silent}; {remedy}")
        return results

    def _text(self, device: int) -> str:
        found = self.devices[device]
        return f"device {found.name} (node {self.names[found.node]})"

    def _translated(self, error: RayError, device: int, what: str) -> RaypipeError:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RaypipeError):
            return cause
        if isinstance(error, RayActorError):
            died = "its process died" if isinstance(error, ActorDiedError) else "it cannot be reached"
            return RunError(f"{what}: {self._text(device)}: {died}; its node may be down or out of memory: see `ray status`")
        return RunError(f"{what}: {self._text(device)}: {type(cause).__name__}: {cause}")

    # Flows

    def between(self, source: int, target: int) -> Pair:
        """The devices that measure for two nodes."""
        return self.speakers[source], self.speakers[target]

    def meet(self, pairs: Collection[Pair]) -> None:
        """Connects directed pairs of devices that are not yet connected.

        Raises:
            RunError: two of them cannot reach each other; names them.
        """
        fresh = [pair for pair in pairs if pair not in self._met]
        orders: dict[int, list[MeetOrder]] = {}
        for source, target in fresh:
            ends = (self.devices[source], self.devices[target])
            order = MeetOrder(
                source=source,
                target=target,
                names=(ends[0].name, ends[1].name),
                shared=not self.use_gpu
                and ends[0].node == ends[1].node
                and self.facts[source].shares_memory
                and self.facts[target].shares_memory,
                store=self._store,
                prefix=f"probe/{source}-{target}",
                connect_timeout_s=_CONNECT_TIMEOUT_S,
                timeout_s=_MESSAGE_TIMEOUT_S,
            )
            for device in (source, target):
                orders.setdefault(device, []).append(order)
        calls = {device: self.devices[device].actor.meet.remote(own, host_ip=self.facts[device].ip) for device, own in orders.items()}
        try:
            self.gather(calls, "connecting")
        except TransportError as error:
            raise RunError(
                f"nodes {self._node_of(error.device)} and {self._node_of(error.peer)} cannot reach each other ({error}); see that the "
                "link is up, that no firewall is between them, and which interface GLOO_SOCKET_IFNAME names"
            ) from error
        self._met.update(fresh)

    def _node_of(self, device: str) -> str:
        return next((self.names[found.node] for found in self.devices if found.name == device), device)

    def step(self, flows: Sequence[Flow], *, limit_s: float | None = None) -> dict[Pair, tuple[Readings, Readings]]:
        """Runs flows at the same time; returns what source and target of each noted.

        Args:
            flows: pings, or streams.
            limit_s: more seconds than they may take; left out for pings, which end by limits of their own.

        Raises:
            RunError: a device failed, or a link carries nothing; names it.
        """
        self.meet([flow.ends for flow in flows])
        parts = by_device(flows)
        calls = {device: self.devices[device].actor.run.remote(own) for device, own in parts.items()}
        # A slow link is one whose messages come; each may take as long as a message may.
        slowest_s = max((flow.pattern.seconds for flow in flows if isinstance(flow.pattern, Ping)), default=0.0) * _PING_LASTS
        try:
            results = self.gather(calls, "measuring", timeout_s=2 * _MESSAGE_TIMEOUT_S + (limit_s or slowest_s) + _GRACE_S)
        except TransportTimeoutError as error:
            self._blame(error, flows)
        self.num_steps += 1
        noted = {(flow.ends, device): read for device, own in parts.items() for flow, read in zip(own, results[device], strict=True)}
        found = {flow.ends: (noted[flow.ends, flow.source], noted[flow.ends, flow.target]) for flow in flows}
        self.num_bytes += sum(source.num_bytes for source, _ in found.values())
        return found

    def _blame(self, error: TransportTimeoutError, flows: Sequence[Flow]) -> NoReturn:
        """Says which link it was that carried nothing.

        Raises:
            RunError: always.
        """
        ends = {error.device, error.peer}
        flow = next(flow for flow in flows if {self.devices[end].name for end in flow.ends} == ends)
        source, target = (self.devices[end] for end in flow.ends)
        if source.node == target.node:
            raise error
        link = f"{self.names[source.node]} -> {self.names[target.node]}"
        raise measured_as_zero(link, f"a message of it or its answer took more than {_MESSAGE_TIMEOUT_S:g} s") from error


class _BudgetSpent(Exception):  # noqa: N818  # no error: what was measured until then counts
    """There is no time, or there are no bytes, for another measurement."""


class Probe:
    """One probe of a cluster.

    Args:
        cluster: the actors.
        budget: of seconds and bytes.
        name: of the topology.
        overheads: of all devices, if they are known.
        notice: told how it goes.
    """

    def __init__(self, cluster: ActorCluster, budget: Budget, *, name: str, overheads: Overheads | None, notice: Notice) -> None:
        self.cluster = cluster
        self.budget = budget
        self.name = name
        self.overheads = overheads
        self.notice = notice
        self.notices: list[str] = []
        self.fits: dict[Pair, LinkFit] = {}
        self.clocks: dict[Pair, ClockOffset] = {}
        self.classes = [
            (node.num_cpus, node.num_gpus, node.accelerators, cluster.facts[speaker].num_cores)
            for node, speaker in zip(cluster.nodes, cluster.speakers, strict=True)
        ]
        self.inside = self._inside_pairs()
        self.allowance = divide(
            budget,
            self.classes,
            num_inside=sum(map(len, self.inside)),
            rounds_inside=max(map(len, self._inside_by_machine()), default=0),
            least_ping_bytes=LEAST_PING_BYTES,
            least_stream_bytes=_LEAST_STREAM_BYTES,
        )
        self.search = Search(self._together)
        self.usable = True  # until a flow fails
        self._began_s = time.monotonic()

    @property
    def num_nodes(self) -> int:
        """Of the cluster."""
        return len(self.cluster.nodes)

    @cached_property
    def _offsets_s(self) -> dict[int, float]:
        """By how much each node's clock is ahead of the first's, as seen in the tournament."""
        return {node: clock.offset_s for node, clock in from_reference(self.clocks, reference=0).items()}

    def _passed_s(self) -> float:
        return time.monotonic() - self._began_s

    def run(self) -> Probed:
        """Measures all there is."""
        rounds = self.allowance.rounds
        if self.num_nodes > 1:
            self.notice(f"{rounds.tournament} rounds for the links between {self.num_nodes} nodes")
            self._tournament()
        inside = self._measure_inside()
        if self.num_nodes > 2:
            self._look_for_sharing()
        clocks = self._clocks()
        if self.overheads is None:
            self._miss("what an Op and a message cost besides is not known: `raypipe calibrate` on this machine improves predictions")
        topology = assemble(
            name=self.name,
            nodes=[self._node(number, inside[number]) for number in range(self.num_nodes)],
            fits=self.fits,
            shared=self.search.found,
            classes=self.classes,
            overheads=self.overheads,
        )
        cluster = self.cluster
        nodes = tuple(
            ProbedNode(name, cluster.facts[cluster.speakers[number]], cluster.num_slots[number], inside[number], clocks[number])
            for number, name in enumerate(cluster.names)
        )
        return Probed(
            topology=topology,
            nodes=nodes,
            links=self.fits,
            allowance=self.allowance,
            num_steps=cluster.num_steps,
            num_bytes=cluster.num_bytes,
            seconds=self._passed_s(),
            notices=tuple(self.notices),
        )

    # Links between nodes

    def _ping(self, pairs: Round, pattern: Ping) -> dict[Pair, tuple[Readings, Readings]]:
        """What was noted of directed pairs of nodes that were measured at the same time."""
        of_devices = {self.cluster.between(*pair): pair for pair in pairs}
        noted = self.cluster.step([Flow(*ends, pattern) for ends in of_devices])
        return {of_devices[ends]: readings for ends, readings in noted.items()}

    def _link(self, pair: Pair) -> str:
        return " -> ".join(self.cluster.names[node] for node in pair)

    def _tournament(self) -> None:
        """Measures every pair, and again where there is time to spare: a machine that stands still for a moment makes its links slower."""
        pattern = Ping(self.allowance.ping_s, self.allowance.ping_bytes)
        num_rounds = 0
        for matching in [*tournament(self.classes)] * self.allowance.looks:
            for pairs in directed(matching):
                if self._passed_s() > self.budget.seconds:
                    if num_rounds >= self.allowance.rounds.tournament:
                        return
                    raise RunError(
                        f"after {self.budget.seconds:g} s only {num_rounds} of {self.allowance.rounds.tournament} rounds between the "
                        "nodes are done; raise --budget-s, or see what else the nodes are doing"
                    )
                for pair, (source, target) in self._ping(pairs, pattern).items():
                    self._keep_faster(pair, fit(round_trips(source), link=self._link(pair)))
                    seen = offset(exchanges(source, target))
                    self.clocks[pair] = min(seen, self.clocks.get(pair, seen), key=lambda clock: clock.residual_s)
                num_rounds += 1

    def _keep_faster(self, pair: Pair, link: LinkFit) -> None:
        """Whatever disturbs a measurement makes the link look slower."""
        self.fits[pair] = max(link, self.fits.get(pair, link), key=lambda one: one.bandwidth_bytes_per_s)

    def _together(self, pairs: Round) -> dict[Pair, float]:
        """Bytes per second of directed pairs of nodes at the same time.

        Raises:
            _BudgetSpent: there is no time for it, or no bytes are left.
        """
        bandwidths = {pair: link.bandwidth_bytes_per_s for pair, link in self.fits.items()}
        streams_s = self.allowance.streams_s(pairs, bandwidths)
        most_bytes = self.allowance.stream_bytes
        patterns = {pair: Stream.lasting(streams_s[pair], bytes_per_s=bandwidths[pair], most_bytes=most_bytes) for pair in pairs}
        num_bytes = sum(pattern.num_bytes for pattern in patterns.values())
        if not self.budget.for_search.allows(self._passed_s(), self.cluster.num_bytes + num_bytes):
            raise _BudgetSpent
        of_devices = {self.cluster.between(*pair): pair for pair in pairs}
        # Whatever they share carries at least what each of them does by itself.
        at_most_s = sum(patterns[pair].num_bytes / bandwidths[pair] for pair in pairs)
        flows = [Flow(*ends, patterns[pair]) for ends, pair in of_devices.items()]
        noted = self.cluster.step(flows, limit_s=_STREAMS_LAST * at_most_s)
        arrivals: dict[Pair, list[tuple[float, int]]] = {}
        for ends, (_, target) in noted.items():
            pair = of_devices[ends]
            ahead_s = self._offsets_s[pair[1]]
            arrivals[pair] = [(at_s - ahead_s, size) for at_s, size in zip(target.first_s, target.sizes_bytes, strict=True)]
        return rates(arrivals, warm_up_bytes=WARM_UP_BYTES)

    def _look_for_sharing(self) -> None:
        rounds = self.allowance.rounds
        fastest = max(link.bandwidth_bytes_per_s for link in self.fits.values())
        if not self.allowance.tells_sharing_of(fastest):
            self._miss(f"shared links were not looked for: the budget is too small; {_MORE}")
            self._measure_again()
            return
        self.notice(f"{rounds.company + rounds.fans} rounds for what links share")
        met = tournament(self.classes)
        try:
            self.search.run(company(met, self.num_nodes), fan_rounds(self.num_nodes))
        except _BudgetSpent:
            self._miss(f"not all shared links were looked for: the budget was spent{self._without_limits()}; {_MORE}")
        except RunError as error:
            # A flow that has failed is out of use, and nodes may still wait in it.
            self.usable = False
            self._miss(f"not all shared links were looked for: {error}{self._without_limits()}; probe again")
        self._measure_again()

    def _without_limits(self) -> str:
        if not self.search.forget_limits_of_nodes():
            return ""
        return "; limits of single nodes were left out, since some nodes would have theirs and others not"

    def _measure_again(self) -> None:
        """Measures links by themselves that were slowed by others in their rounds, those first that lost most.

        What there is no time for has the rate of its streams, if there were any.
        """
        pattern = Ping(self.allowance.ping_s, self.allowance.ping_bytes)
        slowed = self._slowed_by_company()
        while slowed and self.usable and self.budget.allows(self._passed_s(), self.cluster.num_bytes + pattern.most_bytes):
            pair = slowed.pop(0)
            ((source, _),) = self._ping((pair,), pattern).values()
            self._keep_faster(pair, fit(round_trips(source), link=self._link(pair)))
        for pair in slowed:
            rate = self.search.alone.get(pair, 0.0)
            if rate > self.fits[pair].bandwidth_bytes_per_s:
                self.fits[pair] = replace(self.fits[pair], bandwidth_bytes_per_s=rate)
        slowed = [pair for pair in slowed if pair not in self.search.alone]
        if slowed:
            named, left = ", ".join(map(self._link, slowed[:_MOST_NAMED])), len(slowed) - _MOST_NAMED
            more = f" and {left} more" if left > 0 else ""
            self._miss(f"links that were measured while others were may carry more than was seen: {named}{more}; {_MORE}")

    def _slowed_by_company(self) -> list[Pair]:
        """The pairs that others slowed, or that may have been slowed where the search has not come to them."""
        fitted = {pair: link.bandwidth_bytes_per_s for pair, link in self.fits.items()}
        rounds = [pairs for matching in tournament(self.classes) for pairs in directed(matching)]
        slowed = in_company(rounds, fitted, self.search.found)
        slowed |= {pair for pair, rate in self.search.alone.items() if rate > _FASTER_ALONE * fitted[pair]}
        with_others = {pair for pairs in rounds if len(pairs) > 1 for pair in pairs}
        slowed |= (below_their_ends(fitted) & with_others) - self.search.alone.keys()
        leaving, entering = fastest_of_nodes(fitted)
        return sorted(slowed, key=lambda pair: (fitted[pair] / min(leaving[pair[0]], entering[pair[1]]), pair))

    def _miss(self, text: str) -> None:
        self.notices.append(text)
        self.notice(text)

    # Within nodes, and clocks

    def _inside_pairs(self) -> list[list[Pair]]:
        """Of each node, the directed pairs of devices that are measured: neighbours, back and forth by turns."""
        found: list[list[Pair]] = []
        for node in range(self.num_nodes):
            own = [number for number, device in enumerate(self.cluster.devices) if device.node == node]
            pairs = [(own[place], own[place + 1]) for place in range(len(own) - 1)]
            found.append([pair[::-1] if place % 2 else pair for place, pair in enumerate(pairs)])
        return found

    def _inside_by_machine(self) -> list[list[tuple[int, Pair]]]:
        """Of each machine, the pairs with their nodes."""
        machines: dict[str, list[tuple[int, Pair]]] = {}
        for node, pairs in enumerate(self.inside):
            machines.setdefault(self.cluster.facts[self.cluster.speakers[node]].hostname, []).extend((node, pair) for pair in pairs)
        return list(machines.values())

    def _measure_inside(self) -> list[LinkFit | None]:
        """The links within each node; nodes of one machine one after the other, since they share its memory."""
        allowed = self.allowance
        pattern = Ping(allowed.ping_s / 4, allowed.ping_bytes)
        fits: dict[int, list[LinkFit]] = {}
        for at_once in zip_longest(*self._inside_by_machine()):
            measured = {pair: node for node, pair in filter(None, at_once)}
            for pair, (source, _) in self.cluster.step([Flow(pair[0], pair[1], pattern) for pair in measured]).items():
                link = " -> ".join(self.cluster.devices[end].name for end in pair)
                fits.setdefault(measured[pair], []).append(fit(round_trips(source), link=link))
        return [_typical(fits.get(node, ())) for node in range(self.num_nodes)]

    def _clocks(self) -> list[ClockOffset]:
        """How far each node's clock is ahead of the first's; a second look shows the drift."""
        earlier = from_reference(self.clocks, reference=0)
        later: dict[Pair, ClockOffset] = {}
        for matching in hypercube(self.num_nodes) if self.usable and self._passed_s() < self.budget.seconds else ():
            later |= {pair: offset(exchanges(*readings)) for pair, readings in self._ping(matching, _CLOCK).items()}
        seen = from_reference(later, reference=0)
        return [with_drift(earlier[node], seen[node]) if node in seen else earlier[node] for node in range(self.num_nodes)]

    # The topology

    def _node(self, number: int, inside: LinkFit | None) -> Node:
        cluster, facts = self.cluster, self.cluster.facts[self.cluster.speakers[number]]
        # Nodes of one machine have its memory together.
        on_machine = [other for other, speaker in enumerate(cluster.speakers) if cluster.facts[speaker].hostname == facts.hostname]
        each_bytes = facts.memory_bytes // sum(cluster.num_slots[other] for other in on_machine)
        link = NodeLink(latency_s=inside.latency_s, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s) if inside is not None else None
        names = cluster.device_names(number)
        if facts.gpu_kind:
            gpus = tuple(Device(name, facts.gpu_kind, facts.gpu_bytes) for name in names)
            return Node(name=cluster.names[number], devices=gpus, link=link)
        slots = tuple(Device(name, "cpu", each_bytes) for name in names)
        return Node(name=cluster.names[number], devices=slots, link=link, cores=facts.num_cores)


def _typical(fits: Sequence[LinkFit]) -> LinkFit | None:
    """One fit that stands for several."""
    if not fits:
        return None
    return LinkFit(
        latency_s=statistics.median(one.latency_s for one in fits),
        bandwidth_bytes_per_s=statistics.median(one.bandwidth_bytes_per_s for one in fits),
        residual=max(one.residual for one in fits),
        num_round_trips=sum(one.num_round_trips for one in fits),
        num_bytes=sum(one.num_bytes for one in fits),
    )
