"""The driver's side of a run: starts the stage actors, gives them windows, gathers what they report, and ends them.

    Launched --> Connected --> Running(window) --> Connected --> ... --> Closed
        |            |             |
        +------------+-------------+--> Failed --> Closed

States are classes with the data that hold in them. Only the coordinator has actor handles.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raypipe.actors.executor import BatchSource
from raypipe.actors.held import edge_specs
from raypipe.actors.job import Job
from raypipe.actors.launch import Slot, launch
from raypipe.actors.measure import LayerMeasurement
from raypipe.actors.report import WindowReport
from raypipe.actors.stage import BatchFunction, BuildOrder, ConnectOrder, ModelFunction, Status, Whereabouts
from raypipe.actors.transport import TensorSpec
from raypipe.config import ClusterConfig, OptimizerConfig, ScalingConfig, Transport
from raypipe.cut import Cut
from raypipe.errors import AbortedError, ConfigError, RaypipeError, RunError, StageFailedError, TransportError, TransportTimeoutError
from raypipe.schedules.lower import Recv, Start
from raypipe.trace import Source, Trace

_LOG = logging.getLogger("raypipe.coordinator")
_GRACE_S = 3.0
"""After the first failure, how long to listen for one that explains it: a dead neighbour is seen by its peers first."""
_POLL_S = 5.0


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
class Failed:
    """A part failed; the actors were told to stop."""

    error: RaypipeError


@dataclass(frozen=True)
class Closed:
    """The actors are gone."""


State = Launched | Connected | Running | Failed | Closed


@dataclass(frozen=True)
class WindowResult:
    """What all devices did in a window.

    Attributes:
        reports: by device.
        wall_s: seconds as the driver saw them.
        name: of the run.
        device_names: by number.
        num_updates: of the window.
        jobs: of the devices.
    """

    reports: tuple[WindowReport, ...]
    wall_s: float
    name: str
    device_names: tuple[str, ...]
    num_updates: int
    jobs: tuple[Job, ...]

    @cached_property
    def trace(self) -> Trace:
        """The spans of all since the first of them began.

        Clocks of different nodes are taken as they are; devices of one node share theirs.
        """
        origin = min(report.began_s for report in self.reports)
        spans = tuple(
            span
            for report, job in zip(self.reports, self.jobs, strict=True)
            for span in report.log.spans(job, shift_s=report.began_s - origin)
        )
        return Trace(self.name, Source.MEASURED, self.device_names, self.num_updates, spans)


Channel = tuple[int, int]
"""Two devices: who sends, and who receives."""


def shared_channels(
    channels: Iterable[Channel], *, places: Sequence[Whereabouts], names: Sequence[str], transport: Transport
) -> frozenset[Channel]:
    """The channels that go through shared memory.

    Only what Ray calls one node counts as one: two nodes with one host name may be containers that share nothing.

    Args:
        channels: all of the run.
        places: of the devices.
        names: of the devices, for messages.
        transport: what was asked for.

    Raises:
        ConfigError: shared memory was asked for, and some cannot use it; names them.
    """
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
        self.slots = tuple(slots)
        self.stages = tuple(stages)
        self.transport = scaling.transport
        self.cluster = cluster
        self.state: State = Launched()
        self.places: tuple[Whereabouts, ...] = ()
        self.channels: tuple[Channel, ...] = ()
        self.shared: frozenset[Channel] = frozenset()
        self._windows: Counter[str] = Counter()
        self._jobs: dict[str, tuple[Job, ...]] = {}
        self._epoch = 0
        self._actors = launch(slots, stages=stages, run=run, scaling=scaling)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, state: State) -> None:
        _LOG.debug("%s: %s -> %s", self.run, self.state, state)
        self.state = state

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the devices by number."""
        return tuple(slot.name for slot in self.slots)

    @property
    def channel_text(self) -> str:
        """How many channels go which way."""
        counts = {"through shared memory": len(self.shared), "over gloo": len(self.channels) - len(self.shared)}
        return ", ".join(f"{count} channels {way}" for way, count in counts.items() if count)

    # Setting up

    def wait_until_up(self) -> None:
        """Waits until all actors are there, and checks that each is on the node it was meant for.

        Raises:
            RunError: names those that did not come in time, or came elsewhere.
        """
        calls = {device: actor.whereabouts.remote() for device, actor in enumerate(self._actors)}
        self.places = tuple(self._gather(calls, "starting", timeout_s=self.cluster.start_timeout_s).values())
        for device, (slot, place) in enumerate(zip(self.slots, self.places, strict=True)):
            if slot.node_id != place.node_id:
                raise RunError(
                    f"device {slot.name} was to be on node {slot.node_id[:8]}, but is on {place.node_id[:8]} ({place.ip}); try again"
                )
            _LOG.debug("device %d (%s): stages %s, pid %d on %s", device, slot.name, self.stages[device], place.pid, place.hostname)

    def measure(
        self, model: ModelFunction, batches: BatchFunction, *, optimizer: OptimizerConfig, seed: int, num_devices: int
    ) -> list[list[LayerMeasurement]]:
        """The costs of the model's layers, measured on the first devices at the same time.

        Args:
            model: makes the model's description.
            batches: opens the rows of a split.
            optimizer: AdamW's figures.
            seed: of the weights.
            num_devices: how many measure; on the CPU as many as there are cores, which slow each other as they do in training.
        """
        actors = self._actors[:num_devices]
        calls = {device: actor.measure.remote(model, batches, optimizer=optimizer, seed=seed) for device, actor in enumerate(actors)}
        return list(self._gather(calls, "measuring layers").values())

    def check_storage(self, folder: str) -> None:
        """Checks that every node can write to a folder.

        Raises:
            ConfigError: names one that cannot.
        """
        self._gather({device: actor.check_storage.remote(folder) for device, actor in enumerate(self._actors)}, "checking the storage")

    def build(self, order: BuildOrder) -> int:
        """Builds the stages on their actors; returns how many numbers the weights of all devices have."""
        counts = self._gather({device: actor.build.remote(order) for device, actor in enumerate(self._actors)}, "building layers")
        return sum(counts.values())

    def connect(self, jobs: Mapping[str, Sequence[Job]], cut: Cut) -> None:
        """Connects the actors and gives them their programs.

        Args:
            jobs: by name, the job of each device.
            cut: the layers of all stages.

        Raises:
            ConfigError: not all channels can go through shared memory, as they should.
        """
        self._jobs = {name: tuple(of_devices) for name, of_devices in jobs.items()}
        items = [(job.program.device, item) for of_devices in jobs.values() for job in of_devices for item in job.program.items]
        self.channels = tuple(sorted({(item.device, device) for device, item in items if isinstance(item, Recv)}))
        self.shared = shared_channels(self.channels, places=self.places, names=self.device_names, transport=self.transport)
        groups = sorted({item.collective.devices for _, item in items if isinstance(item, Start)})
        specs = self._edge_specs(cut)
        host = self.places[0].ip
        timeout_s = self.cluster.start_timeout_s
        port = self._gather({0: self._actors[0].host_store.remote(host=host, timeout_s=timeout_s)}, "opening the store")[0]
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
            device: actor.load_jobs.remote({name: of_devices[device] for name, of_devices in jobs.items()})
            for device, actor in enumerate(self._actors)
        }
        self._gather(loads, "taking programs")
        self._move(Connected(self._epoch))

    def _edge_specs(self, cut: Cut) -> dict[tuple[int, int], tuple[tuple[TensorSpec, ...], ...]]:
        """What travels along each edge: asked stage by stage, in topological order."""
        made: dict[int, tuple[TensorSpec, ...]] = {}
        for stage in range(len(cut.stages)):
            device = next(device for device, stages in enumerate(self.stages) if stage in stages)
            made |= self._gather({device: self._actors[device].output_specs.remote(stage, made)}, f"finding the shapes of stage {stage}")[
                device
            ]
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
        number = self._windows[job]
        self._move(Running(self._epoch, number, job))
        since = time.perf_counter()
        reports = self._gather({device: call(actor) for device, actor in enumerate(self._actors)}, f"window {number} of {job}")
        wall_s = time.perf_counter() - since
        self._windows[job] += 1
        self._move(Connected(self._epoch))
        ordered = tuple(reports[device] for device in sorted(reports))
        return WindowResult(ordered, wall_s, self.run, self.device_names, num_updates, self._jobs[job])

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
            reason = next((line for line in lines if "reason" in line.lower() or "exit" in line.lower()), lines[-1] if lines else "")
            remedy = _START_REMEDY if isinstance(self.state, Launched) else _DEATH_REMEDY
            return self._failure(device, what, f"its process died ({reason[:300]})", remedy)
        cause = error.cause if isinstance(error, RayTaskError) else error
        return self._failure(device, what, f"{type(cause).__name__}: {cause}", "see the actor's log in the Ray dashboard")

    # Ending

    def _abort(self, reason: str) -> None:
        for actor in self._actors:
            actor.abort.options(concurrency_group="control").remote(reason)

    def close(self) -> None:
        """Ends the actors. Safe to call twice."""
        if isinstance(self.state, Closed):
            return
        self._move(Closed())
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


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
