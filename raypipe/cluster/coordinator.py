"""The driver's side of a run: starts the stage actors, gives them windows, gathers what they report, and ends them.

    Launched --> Connected --> Running(window) --> Connected --> ... --> Closed
        |            |             |                  |
        |            |             |              Moving --> Connected
        |            |             |                  |
        +------------+-------------+------------------+--> Failed --> Closed

States are classes with the data that hold in them. Only the coordinator has actor handles.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raypipe.actors.actor import ActorInfo, BatchFunction, BuildOrder, ConnectOrder, Identity, LayerSize, ModelFunction, Status, remedy_of
from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.measure.layers import USUAL_EFFORT, Effort, LayerMeasurement
from raypipe.actors.measure.links import Flow, MeetOrder
from raypipe.actors.stage.gradient_flow import EdgeSpecs, LayerOutput, edge_specs
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Source, Trace
from raypipe.cluster.link_monitor import PATTERN, NetworkWatch
from raypipe.cluster.slots import Slot, launch
from raypipe.config import ClusterConfig, OptimizerConfig, Precision, ScalingConfig, Transport
from raypipe.errors import AbortedError, ConfigError, RaypipeError, RunError, StageFailedError, TransportError, TransportTimeoutError
from raypipe.network.clocks import Exchange, offset
from raypipe.network.estimate import NetworkEstimate
from raypipe.schedules.lower import DeviceProgram, Recv, Start

_LOG = logging.getLogger("raypipe.cluster.coordinator")
_GRACE_S = 3.0
"""After the first failure, how long to listen for one that explains it: a dead neighbour is seen by its peers first."""
_POLL_S = 5.0
_NUM_CLOCK_READINGS = 15
"""Of each node; the quickest of them counts."""
_CLOCKS_HOLD_S = 60.0
"""Until clocks are compared again: at 20 millionths of drift they are a millisecond off after that."""
_LINK_ANSWER_S = 1.0
_LINK_CONNECT_S = 5.0
_LINK_MESSAGE_S = 2.0
"""A link that takes longer is not worth a window's wait."""


@dataclass(frozen=True)
class Launched:
    """The actors were started and hold nothing yet."""


@dataclass(frozen=True)
class Connected:
    """The actors are built and connected, and wait for work."""

    epoch: int


@dataclass(frozen=True)
class Running:
    """The actors run a window."""

    epoch: int
    window: int
    job: str


@dataclass(frozen=True)
class Moving:
    """The layers go, with their optimizer state, to the devices that are to hold them."""

    epoch: int


@dataclass(frozen=True)
class Failed:
    """A part failed; the actors were told to stop."""

    error: RaypipeError


@dataclass(frozen=True)
class Closed:
    """The actors are gone."""


State = Launched | Connected | Running | Moving | Failed | Closed


@dataclass(frozen=True)
class WindowResult:
    """What all devices did in a window.

    Attributes:
        reports: by device.
        wall_s: seconds as the driver saw them.
        name: of the run.
        device_names: by number.
        num_updates: of the window.
        programs: The programs of the devices.
        clock_offsets_s: by how much the clock of each device's node is ahead of the driver's; empty where all have one clock.
    """

    reports: tuple[WindowReport, ...]
    wall_s: float
    name: str
    device_names: tuple[str, ...]
    num_updates: int
    programs: tuple[DeviceProgram, ...]
    clock_offsets_s: tuple[float, ...] = ()

    @property
    def began_s(self) -> tuple[float, ...]:
        """When each device began, by the driver's clock."""
        offsets_s = self.clock_offsets_s or (0.0,) * len(self.reports)
        return tuple(report.began_s - ahead_s for report, ahead_s in zip(self.reports, offsets_s, strict=True))

    @cached_property
    def trace(self) -> Trace:
        """The spans of all since the first of them began, by one clock."""
        origin = min(self.began_s)
        spans = tuple(
            span
            for report, program, began_s in zip(self.reports, self.programs, self.began_s, strict=True)
            for span in report.log.spans(program, shift_s=began_s - origin)
        )
        peaks = [report.peak_memory_bytes for report in self.reports]
        memory = tuple(((0.0, peak),) for peak in peaks if peak is not None)
        known = memory if len(memory) == len(peaks) else ()
        return Trace(self.name, Source.MEASURED, self.device_names, self.num_updates, spans, known)


Channel = tuple[int, int]
"""Two devices: who sends, and who receives."""


def shared_channels(
    channels: Iterable[Channel], *, places: Sequence[ActorInfo], names: Sequence[str], transport: Transport
) -> frozenset[Channel]:
    """The channels that go through shared memory, the host's or that of a GPU.

    Only what Ray calls one node counts as one: two nodes with one host name may be containers that share nothing.

    Args:
        channels: all of the run.
        places: of the devices.
        names: of the devices, for messages.
        transport: what was asked for.

    Raises:
        ConfigError: shared memory was asked for, and some cannot use it, or what carries messages is not for such devices; names them.
    """
    if on_gpus(places):
        if transport not in {Transport.AUTO, Transport.NCCL}:
            raise ConfigError(f"scaling.transport: {transport}: messages between GPUs go over NCCL; choose auto or nccl")
        if transport is Transport.NCCL:
            return frozenset()
        return frozenset(
            (source, target)
            for source, target in channels
            if places[source].gpus == places[target].gpus and places[source].node_id == places[target].node_id
        )
    if transport is Transport.NCCL:
        raise ConfigError("scaling.transport: nccl: the devices are CPU slots; choose auto, shm or gloo, or set scaling.use_gpu")
    if transport is Transport.GLOO:
        return frozenset()
    shared: set[Channel] = set()
    for source, target in channels:
        ends = (places[source], places[target])
        if ends[0].node_id == ends[1].node_id and all(end.shares_memory for end in ends):
            shared.add((source, target))
        elif transport is Transport.SHM:
            nodes = " and ".join(f"{names[device]} on node {places[device].node_id[:8]}" for device in (source, target))
            problem = "exchange messages" if ends[0].node_id != ends[1].node_id else "cannot share memory, for which they need Linux"
            raise ConfigError(f"scaling.transport: shm: devices {nodes} {problem}; choose auto or gloo, or fewer devices, all on one node")
    return frozenset(shared)


def on_gpus(places: Sequence[ActorInfo]) -> bool:
    """Whether the devices of a run are GPUs."""
    return bool(places) and all(place.gpus for place in places)


def check_places(slots: Sequence[Slot], places: Sequence[ActorInfo]) -> None:
    """Checks that every actor is where it was meant to be: its node, a process of its own, and a GPU of its own where it has one.

    Raises:
        RunError: names the first device that is elsewhere, or whose messages the others cannot read.
    """
    processes: dict[tuple[str, int], str] = {}
    gpus: dict[str, str] = {}
    for slot, place in zip(slots, places, strict=True):
        if slot.node_id != place.node_id:
            raise RunError(
                f"device {slot.name} was to be on node {slot.node_id[:8]}, but is on {place.node_id[:8]} ({place.ip}); try again"
            )
        other = processes.setdefault((place.node_id, place.pid), slot.name)
        if other != slot.name:
            raise RunError(f"devices {other} and {slot.name} share the process {place.pid} on {place.ip}; try again")
        if slot.num_gpus and not place.gpus:
            raise RunError(
                f"device {slot.name} was given no GPU that torch can see on {place.ip}; look at the driver there (nvidia-smi), and whether "
                "the torch that is installed there is one for CUDA"
            )
        if slot.num_gpus and not place.nccl and len(slots) > 1:
            raise RunError(
                f"device {slot.name} on {place.ip} has no cupy with NCCL, over which GPUs pass messages: pip install 'raypipe[cuda13]' "
                "there, or raypipe[cuda12] for a torch for CUDA 12"
            )
        if slot.num_gpus and place.nccl != places[0].nccl:
            others = f"{place.nccl or 'none'} on {place.ip} ({slot.name}), {places[0].nccl or 'none'} on {places[0].ip} ({slots[0].name})"
            raise RunError(f"devices have different versions of NCCL: {others}; install one version on all nodes")
        for gpu in place.gpus if slot.num_gpus >= 1 else ():
            if gpus.setdefault(gpu, slot.name) != slot.name:
                raise RunError(f"devices {gpus[gpu]} and {slot.name} were both given the GPU {gpu} on {place.ip}; see who else uses it")


class Coordinator:
    """The stage actors of one run.

    Args:
        run: its name, unique in the cluster.
        slots: the place of each device.
        stages: the stages of each device.
        scaling: resources of each actor, and what carries their messages.
        cluster: timeouts.

    Used as a context manager it ends the actors, whatever happens.
    """

    def __init__(
        self, *, run: str, slots: Sequence[Slot], stages: Sequence[tuple[int, ...]], scaling: ScalingConfig, cluster: ClusterConfig
    ):
        self.run = run
        self._places_of_all: tuple[ActorInfo, ...] = ()
        self._all_slots = tuple(slots)
        self._crew = tuple(range(len(slots)))
        """The numbers, as launched, of the actors that are the devices 0, 1, ... of the plan."""
        self.stages = tuple(stages)
        self.transport = scaling.transport
        self.cluster = cluster
        self.state: State = Launched()
        self.channels: tuple[Channel, ...] = ()
        self.shared: frozenset[Channel] = frozenset()
        self._windows: Counter[str] = Counter()
        self._programs: dict[str, tuple[DeviceProgram, ...]] = {}
        self._epoch = 0
        self.clock_offsets_s: tuple[float, ...] = ()
        self._clocks_read_s = 0.0
        self._watch = NetworkWatch(run=run, nodes=[slot.node for slot in slots], now_s=time.time())
        self._store: tuple[str, int] = ("", 0)
        self._num_links_probed = 0
        self._all_actors = launch(slots, stages=stages, run=run, scaling=scaling)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, state: State) -> None:
        _LOG.debug("%s: %s -> %s", self.run, self.state, state)
        self.state = state

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The places of the plan's devices, by number."""
        return tuple(self._all_slots[number] for number in self._crew)

    @property
    def places(self) -> tuple[ActorInfo, ...]:
        """Where the plan's devices run, by number; known once they are up."""
        return tuple(self._places_of_all[number] for number in self._crew)

    @property
    def _actors(self) -> list[Any]:
        return [self._all_actors[number] for number in self._crew]

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the devices by number."""
        return tuple(slot.name for slot in self.slots)

    @property
    def channel_text(self) -> str:
        """How many channels go which way."""
        if on_gpus(self.places):
            counts = {"within a GPU": len(self.shared), f"over NCCL {self.places[0].nccl}": len(self.channels) - len(self.shared)}
            return ", ".join(f"{count} channels {way}" for way, count in counts.items() if count)
        counts = {"through shared memory": len(self.shared), "over gloo": len(self.channels) - len(self.shared)}
        return ", ".join(f"{count} channels {way}" for way, count in counts.items() if count)

    # Setting up

    def wait_until_up(self) -> None:
        """Waits until all actors are there, and checks that each is on the node it was meant for.

        Raises:
            RunError: names those that did not come in time, or came elsewhere.
        """
        calls = {device: actor.whereabouts.remote() for device, actor in enumerate(self._actors)}
        self._places_of_all = tuple(self._gather(calls, _STARTING, timeout_s=self.cluster.start_timeout_s).values())
        check_places(self.slots, self.places)
        for device, (slot, place) in enumerate(zip(self.slots, self.places, strict=True)):
            _LOG.debug("device %d (%s): stages %s, pid %d on %s", device, slot.name, self.stages[device], place.pid, place.hostname)

    def measure(
        self,
        model: ModelFunction,
        batches: BatchFunction,
        *,
        optimizer: OptimizerConfig,
        seed: int,
        num_devices: int,
        effort: Effort = USUAL_EFFORT,
        precision: Precision = Precision.FLOAT32,
    ) -> list[list[LayerMeasurement]]:
        """The costs of the model's layers, measured on the first devices at the same time.

        Args:
            model: makes the model's description.
            batches: opens the rows of a split.
            optimizer: which, and its figures.
            seed: of the weights.
            num_devices: how many measure; on the CPU as many as there are cores, which slow each other as they do in training.
            effort: how often.
            precision: in which the layers compute.
        """
        actors = self._actors[:num_devices]
        calls = {
            device: actor.measure.remote(model, batches, optimizer=optimizer, seed=seed, effort=effort, precision=precision)
            for device, actor in enumerate(actors)
        }
        return list(self._gather(calls, "measuring layers").values())

    def check_storage(self, folder: str) -> None:
        """Checks that every node can write to a folder.

        Raises:
            ConfigError: names one that cannot.
        """
        self._gather({device: actor.check_storage.remote(folder) for device, actor in enumerate(self._actors)}, "checking the storage")

    def build(self, order: BuildOrder | Sequence[BuildOrder]) -> dict[int, LayerSize]:
        """Builds the stages on their actors; returns the size of each layer.

        Args:
            order: for all devices, or one for each.
        """
        orders = [order] * len(self._actors) if isinstance(order, BuildOrder) else order
        calls = {device: actor.build.remote(own) for device, (actor, own) in enumerate(zip(self._actors, orders, strict=True))}
        return {layer: size for sizes in self._gather(calls, "building layers").values() for layer, size in sizes.items()}

    def assign(self, devices: Sequence[int], stages: Sequence[tuple[int, ...]]) -> None:
        """Gives the actors their numbers in a plan and their stages, and takes from them what they held.

        Args:
            devices: for each device of the plan, the number of its slot; actors of other slots have nothing to do.
            stages: the stages of each device.
        """
        self._crew = tuple(devices)
        self.stages = tuple(stages)
        names = self.device_names
        calls = {
            device: actor.assign.remote(Identity(run=self.run, device=device, name=names[device], stages=held))
            for device, (actor, held) in enumerate(zip(self._actors, self.stages, strict=True))
        }
        for number, actor in enumerate(self._all_actors):
            if number not in self._crew:  # whether it hears that or not does not matter before it is asked for work again
                actor.assign.remote(None)
        self._gather(calls, "taking stages")

    def gone(self, devices: Iterable[int], *, timeout_s: float | None = None) -> list[int]:
        """The slots among some, by number, whose actors are dead or do not answer in time (`cluster.silence_timeout_s` by default)."""
        refs = {number: self._all_actors[number].status.options(concurrency_group="control").remote() for number in devices}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=self.cluster.silence_timeout_s if timeout_s is None else timeout_s)
        found: list[int] = []
        for number, ref in refs.items():
            try:
                ray.get(ref, timeout=0)
            except (GetTimeoutError, RayError):
                found.append(number)
        return found

    def move(
        self,
        devices: Sequence[int],
        stages: Sequence[tuple[int, ...]],
        *,
        order: BuildOrder,
        programs: Mapping[str, Sequence[DeviceProgram]],
    ) -> None:
        """Goes on with other stages on other devices: every layer goes with its optimizer state to the devices that are to hold it.

        The states travel from node to node, through Ray's object stores; no storage that nodes share is needed.

        Args:
            devices: as of `assign`.
            stages: likewise.
            order: builds the stages.
            programs: as of `connect`.

        Raises:
            RunError: something failed on the way; what was saved before stays.
        """
        self._move(Moving(self._epoch))
        refs = self._handed_out()
        self.assign(devices, stages)
        self.build(order)
        needed = self._gather({device: actor.needed_layers.remote() for device, actor in enumerate(self._actors)}, "asking for layers")
        calls = {
            device: self._actors[device].import_layers.remote(layers, *(refs[layer] for layer in layers))
            for device, layers in needed.items()
        }
        self._gather(calls, "taking layers over")
        self._epoch += 1
        self.connect(programs, order.cut)

    def _handed_out(self) -> dict[int, Any]:
        """A reference to the state of each layer, by its number, once all are in the object stores."""
        owned = self._gather({device: actor.owned_layers.remote() for device, actor in enumerate(self._actors)}, "asking for layers")
        refs: dict[int, Any] = {}
        done: dict[int, Any] = {}
        for device, layers in owned.items():
            if layers:
                *states, done[device] = self._actors[device].export_layers.options(num_returns=len(layers) + 1).remote(layers)
                refs |= dict(zip(layers, states, strict=True))
        self._gather(done, "handing layers out")
        return refs

    def connect(self, programs: Mapping[str, Sequence[DeviceProgram]], cut: Cut) -> None:
        """Connects the actors and gives them their programs.

        Args:
            programs: by name, the program of each device.
            cut: the layers of all stages.

        Raises:
            ConfigError: not all channels can go through shared memory, as they should.
        """
        self._programs = {name: tuple(of_devices) for name, of_devices in programs.items()}
        items = [(program.device, item) for of_devices in programs.values() for program in of_devices for item in program.items]
        self.channels = tuple(sorted({(item.device, device) for device, item in items if isinstance(item, Recv)}))
        self.shared = shared_channels(self.channels, places=self.places, names=self.device_names, transport=self.transport)
        groups = sorted({item.collective.devices for _, item in items if isinstance(item, Start)})
        specs = self._edge_specs(cut)
        host = self.places[0].ip
        timeout_s = self.cluster.start_timeout_s
        port = self._gather({0: self._actors[0].host_store.remote(host=host, timeout_s=timeout_s)}, "opening the store")[0]
        self._store = (host, port)
        order = ConnectOrder(
            names=self.device_names,
            channels=self.channels,
            shared=self.shared,
            groups=tuple(groups),
            host=host,
            port=port,
            prefix=f"{self.run}/{self._epoch}",
            connect_timeout_s=timeout_s,
            message_timeout_s=self.cluster.message_timeout_s,
        )
        self._gather(
            {
                device: actor.connect.remote(order, specs, host_ip=place.ip)
                for device, (actor, place) in enumerate(zip(self._actors, self.places, strict=True))
            },
            "connecting",
            timeout_s=2 * timeout_s,
        )
        loads = {
            device: actor.load_programs.remote({name: of_devices[device] for name, of_devices in programs.items()})
            for device, actor in enumerate(self._actors)
        }
        self._gather(loads, "taking programs")
        self._read_clocks()
        self._move(Connected(self._epoch))

    def _read_clocks(self) -> None:
        """Finds by how much the clock of each device's node is ahead of the driver's; nothing where all devices are on one node."""
        self._clocks_read_s = time.monotonic()
        nodes = [place.node_id for place in self.places]
        if len(set(nodes)) == 1:
            self.clock_offsets_s = ()
            return
        firsts = {node: nodes.index(node) for node in nodes}
        exchanges: dict[str, list[Exchange]] = {node: [] for node in firsts}
        for _ in range(_NUM_CLOCK_READINGS):
            for node, device in firsts.items():
                asked_s = time.time()
                ref = self._actors[device].read_clock.options(concurrency_group="control").remote()
                read_s = self._gather({device: ref}, "reading the clocks", timeout_s=self.cluster.silence_timeout_s)[device]
                exchanges[node].append(Exchange(asked_s, read_s, read_s, time.time()))
        found = {node: offset(of_node) for node, of_node in exchanges.items()}
        for node, clock in found.items():
            _LOG.debug("the clock of node %s is ahead by %.6f s, at most %.6f s off", node[:8], clock.offset_s, clock.residual_s)
        self.clock_offsets_s = tuple(found[node].offset_s for node in nodes)

    def _edge_specs(self, cut: Cut) -> EdgeSpecs:
        """What travels along each edge: asked stage by stage, in topological order."""
        made: dict[int, tuple[LayerOutput, ...]] = {}
        for stage in range(len(cut.stages)):
            # All that hold it: each of them gets its weights ready.
            holders = [device for device, stages in enumerate(self.stages) if stage in stages]
            calls = {device: self._actors[device].output_specs.remote(stage, made) for device in holders}
            made |= self._gather(calls, f"finding the shapes of stage {stage}")[holders[0]]
        return edge_specs(cut, made)

    # Working

    def run_window(self, job: str, *, num_updates: int, first_update: int, split: str = "train") -> WindowResult:
        """Runs a window of a job on all devices.

        Raises:
            StageFailedError: an actor died, raised or fell silent; names stage and node.
            TransportError: two devices lost each other.
        """
        return self._window(
            job,
            lambda actor: actor.run.remote(job, number=self._windows[job], first_update=first_update, split=split),
            num_updates=num_updates,
        )

    def run_on(self, job: str, batches: BatchSource, *, num_rows: int) -> WindowResult:
        """Runs a job of forwards over given rows, so many a microbatch; the reports have the last layer's outputs."""
        return self._window(
            job, lambda actor: actor.run_on.remote(job, number=self._windows[job], batches=batches, num_rows=num_rows), num_updates=1
        )

    def _window(self, job: str, call: Callable[[Any], Any], *, num_updates: int) -> WindowResult:
        if time.monotonic() - self._clocks_read_s > _CLOCKS_HOLD_S:
            self._read_clocks()
        number = self._windows[job]
        self._move(Running(self._epoch, number, job))
        since = time.perf_counter()
        reports = self._gather({device: call(actor) for device, actor in enumerate(self._actors)}, f"window {number} of {job}")
        wall_s = time.perf_counter() - since
        self._windows[job] += 1
        self._move(Connected(self._epoch))
        ordered = tuple(reports[device] for device in sorted(reports))
        result = WindowResult(ordered, wall_s, self.run, self.device_names, num_updates, self._programs[job], self.clock_offsets_s)
        if self._watch.estimate.links:
            self._watch_links(result)
        return result

    # The network

    @property
    def network(self) -> NetworkEstimate:
        """What the links between the run's nodes carry now, by the nodes' addresses; see docs/probing.md."""
        return self._watch.estimate

    def seed_network(self, topology: ClusterTopology, devices: Sequence[str] = ()) -> None:
        """Lets the estimates of the links begin with those of a plan's topology.

        Args:
            topology: of the plan.
            devices: what it calls the devices, as launched; their own names by default.
        """
        self._watch.seed(topology, devices or [slot.name for slot in self._all_slots], now_s=time.time())

    def _watch_links(self, result: WindowResult) -> None:
        """Learns from a window what the links carry, and probes one that has not been seen for long."""
        nodes = [slot.node for slot in self.slots]
        self._watch.observe(result.trace, result.programs, nodes, began_s=min(result.began_s), now_s=time.time())
        if (pair := self._watch.due(now_s=time.time())) is not None:
            self.probe_link(*pair)

    def probe_link(self, source_node: str, target_node: str) -> None:
        """Measures the link between two nodes, given by their addresses; takes a tenth of a second, and never fails the run."""
        source, target = self._watch.devices((source_node, target_node))  # as launched: idle actors probe, too
        if gone := self.gone((source, target), timeout_s=_LINK_ANSWER_S):  # the other end would wait for it, and all for that one
            problem = f"{' and '.join(self._all_slots[number].name for number in gone)} does not answer"
            self._watch.failed((source_node, target_node), problem, now_s=time.time())
            return
        self._num_links_probed += 1
        order = MeetOrder(
            source=source,
            target=target,
            names=(self._all_slots[source].name, self._all_slots[target].name),
            shared=False,
            store=self._store,
            prefix=f"{self.run}/{self._epoch}/link {source}-{target}, probe {self._num_links_probed}",
            connect_timeout_s=_LINK_CONNECT_S,
            timeout_s=_LINK_MESSAGE_S,
        )
        flow = Flow(source, target, PATTERN)
        refs = [
            self._all_actors[device].probe_link.remote(order, flow, host_ip=self._places_of_all[device].ip) for device in (source, target)
        ]
        try:
            readings, _ = ray.get(refs, timeout=_LINK_CONNECT_S + 10 * _LINK_MESSAGE_S)
        except RayError as error:  # what is wrong will show where the run needs the link
            self._watch.failed((source_node, target_node), str(error).strip().splitlines()[-1], now_s=time.time())
            return
        self._watch.probed((source_node, target_node), readings, now_s=time.time())

    def save(self, folder: str) -> None:
        """Lets every actor write its layers into a folder."""
        self._gather({device: actor.save.remote(folder) for device, actor in enumerate(self._actors)}, "saving")

    def load(self, folder: str) -> None:
        """Lets every actor read its layers from a folder."""
        self._gather({device: actor.load.remote(folder) for device, actor in enumerate(self._actors)}, "loading")

    # Listening

    def _gather(self, calls: Mapping[int, Any], what: str, *, timeout_s: float | None = None) -> dict[int, Any]:
        """The results of one call a device; the first failure ends all.

        Args:
            calls: by device.
            what: for messages.
            timeout_s: in which all must answer; `None` where only silence is a failure.
        """
        device_of = {ref: device for device, ref in calls.items()}
        open_refs = list(device_of)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s if timeout_s else None
        asked = time.monotonic()
        while open_refs:
            done, open_refs = ray.wait(open_refs, num_returns=1, timeout=_POLL_S)
            for ref in done:
                try:
                    results[device_of[ref]] = ray.get(ref)
                except RayError as error:
                    self._fail(self._translate(error, device_of[ref], what), device_of, open_refs, what)
            late = deadline is not None and time.monotonic() > deadline
            if open_refs and (late or time.monotonic() - asked > _POLL_S):
                failure = self._ask([device_of[ref] for ref in open_refs], what, late=late)
                if failure is not None:
                    self._fail(failure, device_of, open_refs, what)
                asked = time.monotonic()
        return {device: results[device] for device in sorted(results)}

    def _statuses(self, devices: Iterable[int], what: str, *, timeout_s: float) -> dict[int, Status | RaypipeError | None]:
        """What some actors are doing, by their control threads: a status, the failure of a dead one, `None` for a silent one."""
        refs = {device: self._actors[device].status.options(concurrency_group="control").remote() for device in devices}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
        found: dict[int, Status | RaypipeError | None] = {}
        for device, ref in refs.items():
            try:
                found[device] = ray.get(ref, timeout=0)
            except GetTimeoutError:
                found[device] = None
            except RayError as error:
                found[device] = self._translate(error, device, what)
        return found

    def _ask(self, devices: Sequence[int], what: str, *, late: bool) -> RaypipeError | None:
        """The failure of an actor that has not answered yet, if it is dead, silent or late."""
        patience_s = self.cluster.start_timeout_s if isinstance(self.state, Launched) else self.cluster.silence_timeout_s
        for device, status in self._statuses(devices, what, timeout_s=1.0 if late else patience_s).items():
            if isinstance(status, RaypipeError):
                return status
            if status is not None and status.failure is not None:
                return status.failure
            if status is None:
                remedy = "look at its node: it may be down, cut off, out of memory, or have no free CPU for it"
                return self._failure(device, what, "does not answer", remedy)
            if late:
                problem = f"is not done in time: {status.doing}, for {status.since_s:.0f} s"
                return self._failure(device, what, problem, "raise cluster.start_timeout_s")
        return None

    def _failure(self, device: int, what: str, problem: str, remedy: str) -> StageFailedError:
        slot = self.slots[device]
        stages = ",".join(map(str, self.stages[device]))
        return StageFailedError(slot.name, stages, slot.node, what, problem, remedy)

    def _fail(self, first: RaypipeError, device_of: Mapping[Any, int], open_refs: Sequence[Any], what: str) -> NoReturn:
        """Aborts all actors and raises the failure that explains the others: deaths, then raised errors, then lost messages.

        A message that did not come in time is explained by a device that is not itself waiting for one.
        """
        failures = [first]
        if isinstance(first, TransportTimeoutError):
            failures += self._hanging(first, what)
        self._abort(f"another part failed during {what}")
        deadline = time.monotonic() + _GRACE_S
        rest = list(open_refs)
        while rest and time.monotonic() < deadline:
            done, rest = ray.wait(rest, num_returns=1, timeout=max(deadline - time.monotonic(), 0.01))
            for ref in done:
                try:
                    ray.get(ref)
                except RayError as error:
                    failures.append(self._translate(error, device_of[ref], what))
        if not any(map(_is_death, failures)):
            # One may have died without having been asked for anything.
            statuses = self._statuses(range(len(self._actors)), what, timeout_s=1.0).values()
            failures += [status for status in statuses if isinstance(status, RaypipeError)]
        if isinstance(self.state, Moving) and not any(map(_is_death, failures)):
            # Or one that is left out from now on, with what it handed out.
            for number in self.gone(set(range(len(self._all_actors))) - set(self._crew), timeout_s=1.0):
                slot = self._all_slots[number]
                problem = "its process died, or does not answer, and others are to take over the layers that it held"
                failures.append(StageFailedError(slot.name, "none", slot.node, what, problem, _DEATH_REMEDY))
        failure = min(failures, key=_rank)
        self._move(Failed(failure))
        raise failure

    def _hanging(self, timeout: TransportTimeoutError, what: str) -> list[RaypipeError]:
        """Failures of the actors that compute while a message is overdue."""
        remedy = "look at what it does; raise cluster.message_timeout_s if that may take so long"
        return [
            self._failure(device, f"{what}, {status.doing}", f"it was still at it when time ran out ({timeout})", remedy)
            for device, status in self._statuses(range(len(self._actors)), what, timeout_s=2.0).items()
            if isinstance(status, Status) and status.computes
        ]

    def _translate(self, error: Exception, device: int, what: str) -> RaypipeError:
        if isinstance(error, RayTaskError) and isinstance(error.cause, RaypipeError):
            return error.cause
        if isinstance(error, RayActorError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # Not what Ray says of the actor, such as its name, which is the user's.
            told = [line for line in lines if not _FACT.match(line)]
            reason = next((line for line in told if "reason" in line.lower() or "exit" in line.lower()), lines[-1] if lines else "")
            remedy = _START_REMEDY if what == _STARTING else _DEATH_REMEDY
            return self._failure(device, what, f"its process died ({reason[:300]})", remedy)
        cause = error.cause if isinstance(error, RayTaskError) else error
        return self._failure(device, what, f"{type(cause).__name__}: {cause}", remedy_of(cause))

    # Ending

    def _abort(self, reason: str) -> None:
        for actor in self._all_actors:
            actor.abort.options(concurrency_group="control").remote(reason)

    def close(self) -> None:
        """Ends the actors. Safe to call twice."""
        if isinstance(self.state, Closed):
            return
        self._move(Closed())
        for actor in self._all_actors:
            ray.kill(actor, no_restart=True)


_STARTING = "starting"

_FACT = re.compile(r"[a-z_]+: ")

_DEATH_REMEDY = "look at its node for an out-of-memory kill or a crash; `--resume` goes on from the last checkpoint"


_START_REMEDY = "raypipe and the model must be importable on every node: install them there, or submit with --working-dir"


def _is_death(failure: RaypipeError) -> bool:
    return isinstance(failure, StageFailedError) and failure.remedy in {_DEATH_REMEDY, _START_REMEDY}


def _rank(failure: RaypipeError) -> int:
    """Causes first, consequences last."""
    if _is_death(failure):
        return 0
    if isinstance(failure, AbortedError):
        return 3
    return 2 if isinstance(failure, TransportError) else 1
