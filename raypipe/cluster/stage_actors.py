"""The stage actors of a run: launches them, and tells which failure explains the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.actor import StageActor
from raypipe.actors.actor_info import ActorInfo
from raypipe.actors.cores import NodePosition
from raypipe.actors.orders import Identity, Status
from raypipe.actors.spare import SpareProcess
from raypipe.artifacts.branches import stages_text
from raypipe.cluster.actor_group import POLL_S, SILENCE_REMEDY, STARTING, ActorGroup, Failure, Member
from raypipe.cluster.checks import check_actors
from raypipe.cluster.lost_links import LostLinks
from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.config import ClusterConfig, ScalingConfig
from raypipe.errors import StageFailedError, TransportError, TransportTimeoutError

CONTROL = "control"
"""Concurrency group of methods that actors answer while they compute."""
COPIES = "copies"
"""Concurrency group of the method that keeps copies of another node's layers."""
SAVING = "saving"
"""Concurrency group in which an actor writes a copy of its layers while it computes."""
_GROUPS = {CONTROL: 2, COPIES: 1, SAVING: 1}
_ABORT_S = 2.0  # for actors to take an abort
_SUSPECT_S = 1.0  # for an actor that is named as the cause of a failure to come to rest
_GRACE_S = 3.0  # from the first failure, for one that explains it: peers notice a dead neighbor first
_FOLLOW_S = 1.0
_MOST_SILENCES = 10


def waits_for(lost: str, statuses: Mapping[int, Status], *, names: Sequence[str]) -> list[str]:
    """Return which devices wait for a transfer with a device that is gone or silent, and for which."""
    return [
        f"device {names[device]} waited for its {status.awaited.transfer}"
        for device, status in statuses.items()
        if status.awaited is not None and lost in {names[other] for other in status.awaited.devices}
    ]


def as_ray_actor(actor: type[StageActor | SpareProcess]) -> Any:
    """Return Ray's class of actors for a class of stage actors, or of spare processes."""
    # Concurrency groups can be named here only, not in `.options`.
    return ray.remote(concurrency_groups=_GROUPS, max_restarts=0, max_task_retries=0)(actor)


def launch_stage_actors(
    slots: Sequence[DeviceSlot],
    *,
    stages: Sequence[tuple[int, ...]],
    run: str,
    scaling: ScalingConfig,
    only: Collection[int] | None = None,
    start: int = 1,
) -> list[Any]:
    """Start a stage actor in each slot, or `only` in some by number; return their handles before the actors are up.

    `start` says for which time actors of the run are started: Ray wants a name of its own for each.
    """
    actor_class = as_ray_actor(StageActor)
    handles: list[Any] = []
    positions = node_positions(slots, scaling)
    again = f" (start {start})" if start > 1 else ""
    for device, (slot, of_device) in enumerate(zip(slots, stages, strict=True)):
        if device not in (range(len(slots)) if only is None else only):
            continue
        node_id, identity = slot.node.node_id, Identity(run=run, device=device, name=slot.name, stages=of_device)
        actor = actor_class.options(
            name=(f"{run}: stage {identity.stage_text} on device {slot.name}" if of_device else f"{run}: device {slot.name}") + again,
            num_cpus=scaling.cpus_per_device,
            num_gpus=slot.num_gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        handles.append(
            actor.remote(identity, num_threads=scaling.threads_per_device, gpu_share=slot.num_gpus, node_position=positions[device])
        )
    return handles


def node_positions(slots: Sequence[DeviceSlot], scaling: ScalingConfig) -> list[NodePosition | None]:
    """Return the position of each slot's actor among those of its node; `None` where actors are not bound to cores."""
    if not scaling.bind_cores:
        return [None] * len(slots)
    counts = Counter(slot.node.node_id for slot in slots)
    seen: Counter[str] = Counter()
    positions: list[NodePosition | None] = []
    for slot in slots:
        positions.append(NodePosition(seen[slot.node.node_id], counts[slot.node.node_id]))
        seen[slot.node.node_id] += 1
    return positions


class StageActors(ActorGroup):
    """The stage actors of one run, by device of the plan; other launched actors are idle."""

    death_remedy = "look at its node for an out-of-memory kill or a crash; `--resume` goes on from the last checkpoint"

    def __init__(
        self, run: str, slots: Sequence[DeviceSlot], *, stages: Sequence[tuple[int, ...]], scaling: ScalingConfig, cluster: ClusterConfig
    ) -> None:
        self.run = run
        self.cluster = cluster
        self.scaling = scaling
        handles = launch_stage_actors(slots, stages=stages, run=run, scaling=scaling)
        self.launched = [Member(*columns) for columns in zip(handles, slots, stages, strict=True)]
        super().__init__(self.launched)
        self.launched_infos: tuple[ActorInfo, ...] = ()
        self.devices = tuple(range(len(slots)))  # number of each device's slot
        self.branches: tuple[str, ...] = ()  # branch of each stage, once stages are built; for messages
        self.patience_s = cluster.start_timeout_s  # time that an actor has to tell its status
        self.leaving: frozenset[int] = frozenset()  # slots whose actors leave the plan, but hold layers that others still need
        self.gone: set[int] = set()  # numbers of slots whose actors are lost and not replaced
        self._silent: set[str] = set()  # names of slots whose actors have not answered for as long as they are awaited
        self._num_starts = 1
        self._lost_links = LostLinks(cluster.silence_timeout_s)  # as seen in the call that is under way
        self._aborts: dict[Any, int] = {}  # calls, and the numbers of their actors

    @property
    def infos(self) -> tuple[ActorInfo, ...]:
        """Report of each device's actor."""
        return tuple(self.launched_infos[number] for number in self.devices)

    def wait_until_up(self) -> None:
        """Wait until all actors answer, and check that they run where they should."""
        infos = self.ask(STARTING, lambda _, actor: actor.info.remote(), timeout_s=self.cluster.start_timeout_s)
        self.launched_infos = tuple(infos.values())
        check_actors([member.slot for member in self.launched], self.launched_infos)

    def follow(self, calls: Mapping[int, Any], task: str, notice: Callable[[str], None]) -> None:
        """Report what the first called actor is doing, whenever that changes, until it answers or stays silent."""
        device, ref = next(iter(calls.items()))
        told, num_silences = task, 0
        while not ray.wait([ref], timeout=_FOLLOW_S)[0] and num_silences < _MOST_SILENCES:
            status = _statuses({device: self.members[device]}, timeout_s=_FOLLOW_S)[device]
            if not isinstance(status, Status):
                num_silences += 1  # gathering the answers says what is wrong
            elif status.doing != told:
                told = status.doing
                notice(told)

    def assign(self, devices: Sequence[int], stages: Sequence[tuple[int, ...]]) -> None:
        """Make these slots' actors the devices 0, 1, ..., others idle; all drop their layers."""
        self.devices, self.branches = tuple(devices), ()
        self.members = [replace(self.launched[number], stages=of_device) for number, of_device in zip(devices, stages, strict=True)]
        identities = [Identity(self.run, device, member.slot.name, member.stages) for device, member in enumerate(self.members)]
        for number in set(range(len(self.launched))).difference(devices, self.gone):  # no answer is needed before they get work again
            self.launched[number].handle.assign.remote(None)
        self.ask("taking stages", lambda device, actor: actor.assign.remote(identities[device]))

    def dead(self, numbers: Iterable[int], *, timeout_s: float | None = None) -> list[int]:
        """Return the slots with dead or, by default for `cluster.silence_timeout_s`, silent actors."""
        members = {number: self.launched[number] for number in numbers}
        return dead(members, timeout_s=self.cluster.silence_timeout_s if timeout_s is None else timeout_s)

    def abort(self, reason: str) -> None:
        """Make all actors stop their work."""
        for number, member in self.alive().items():
            self._aborts[member.handle.abort.options(concurrency_group=CONTROL).remote(reason)] = number

    def alive(self) -> dict[int, Member]:
        """Return the actors that are not lost, by the number of their slot."""
        return {number: member for number, member in enumerate(self.launched) if number not in self.gone}

    def nodes(self, *, with_idle_core: bool) -> set[ClusterNode]:
        """Return the nodes of the actors that are not lost; `with_idle_core`, only nodes with more cores than these actors use."""
        alive, num_threads = self.alive(), self.scaling.threads_per_device
        num_busy = Counter(member.slot.node for member in alive.values())
        num_cores = {member.slot.node: self.launched_infos[number].num_cores for number, member in alive.items()}
        return {node for node, count in num_busy.items() if not with_idle_core or num_cores[node] > count * num_threads}

    def rest(self, suspects: Collection[int]) -> list[int]:
        """Abort all actors until they have nothing to do, and end those that are dead, silent or stuck: their slots' numbers are in `gone`.

        Return the numbers of those that gave no answer. Of the `suspects` it is awaited for a short time only, and of those that were found
        to be silent no more.
        """
        self.abort("the run recovers from a failure")
        silent = {number for number in self.alive() if self.launched[number].slot.name in self._silent}
        self._silent.clear()
        if awaited := [ref for ref, number in self._aborts.items() if number not in silent.union(suspects)]:
            ray.wait(awaited, num_returns=len(awaited), timeout=_ABORT_S)
        self._aborts = {}
        calls = {number: member.handle.restart.remote(None) for number, member in self.alive().items()}
        others, suspected = calls.keys() - silent.union(suspects), (calls.keys() & set(suspects)) - silent
        for numbers, timeout_s in ((others, self.cluster.silence_timeout_s), (suspected, _SUSPECT_S)):
            if refs := [calls[number] for number in numbers]:
                ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        outcomes = {number: _outcome(ref) for number, ref in calls.items()}
        lost = {number for number, error in outcomes.items() if error is not None}
        for number in lost:
            ray.kill(self.launched[number].handle, no_restart=True)
        self.gone |= lost
        return [number for number, error in outcomes.items() if isinstance(error, GetTimeoutError | ActorUnavailableError)]

    def replace(self, slots: Mapping[int, DeviceSlot], taken: Mapping[int, Any]) -> None:
        """Use other actors for some numbers, in these slots: those `taken`, by number, and new ones once they are up."""
        self._num_starts += 1
        all_slots = [slots.get(number, member.slot) for number, member in enumerate(self.launched)]
        numbers = sorted(slots.keys() - taken.keys())
        launched = launch_stage_actors(
            all_slots, stages=[()] * len(all_slots), run=self.run, scaling=self.scaling, only=numbers, start=self._num_starts
        )
        handles = dict(zip(numbers, launched, strict=True)) | dict(taken)
        new = [Member(handles[number], slots[number]) for number in sorted(slots)]
        try:
            infos = ActorGroup(new).ask(STARTING, lambda _, actor: actor.info.remote(), timeout_s=self.cluster.start_timeout_s)
            check_actors([member.slot for member in new], tuple(infos.values()))
        except BaseException:
            for handle in handles.values():
                ray.kill(handle, no_restart=True)
            raise
        replaced = dict(zip(sorted(slots), zip(new, infos.values(), strict=True), strict=True))
        self.gone -= set(slots)
        self.launched = [replaced[number][0] if number in replaced else member for number, member in enumerate(self.launched)]
        self.launched_infos = tuple(replaced[number][1] if number in replaced else info for number, info in enumerate(self.launched_infos))

    def try_link(self, nodes: Collection[str], *, timeout_s: float) -> Any:
        """Let a process on one of two nodes connect with the other node; return the call, for `is_reached`, or `None` if a node is lost."""
        members = {member.slot.node.node_id: member for member in self.alive().values()}
        if not members.keys() >= set(nodes):
            return None
        one, other = (members[node_id] for node_id in sorted(nodes))
        node = other.slot.node
        return one.handle.reaches.options(concurrency_group=CONTROL).remote(node.address, node.port, timeout_s=timeout_s)

    def is_reached(self, trial: Any, *, timeout_s: float) -> bool:
        """Return whether a trial of a link has succeeded within some seconds."""
        if trial is None:
            return False
        try:
            return bool(ray.get(trial, timeout=timeout_s))
        except RayError:
            return False

    def kill(self) -> None:
        """End all actors."""
        for member in self.launched:
            ray.kill(member.handle, no_restart=True)

    # Failures

    def _error(self, device: int, task: str, problem: str, remedy: str) -> StageFailedError:
        slot, stages = self.members[device].slot, stages_text(self.members[device].stages, self.branches)
        return StageFailedError(slot.name, stages, slot.node.address, task, problem, remedy)

    def _failure(self, error: Exception, device: int, task: str) -> Failure:
        if isinstance(error, ActorUnavailableError):
            self._silent.add(self.members[device].slot.name)  # it would not answer when the others come to rest, either
        return super()._failure(error, device, task)

    def gather(self, calls: Mapping[int, Any], task: str, *, timeout_s: float | None = None, poll_s: float = POLL_S) -> dict[int, Any]:
        """Return the answers by device, or raise the failure of one, be it silence or a lost link; see `ActorGroup.gather`."""
        self._lost_links = LostLinks(self.cluster.silence_timeout_s)
        return super().gather(calls, task, timeout_s=timeout_s, poll_s=poll_s)

    def _overdue(self, devices: Sequence[int], task: str, *, is_late: bool) -> Failure | None:
        # Those that have answered are asked, too: what they have sent may not have come through.
        statuses = _statuses(dict(enumerate(self.members)), timeout_s=1.0 if is_late else self.patience_s)
        known = [status for status in statuses.values() if isinstance(status, Status)]
        lost = self._lost_links.look(known, now_s=time.monotonic())
        for device in devices:
            status = statuses[device]
            if isinstance(status, RayError):
                return self._failure(status, device, task)
            if status is None:
                if not is_late:
                    self._silent.add(self.members[device].slot.name)
                return Failure(self._error(device, task, "does not answer", SILENCE_REMEDY), is_death=True)
            if status.failure is not None:
                return Failure(status.failure)
            if is_late:
                problem = f"is not done in time: {status.doing}, for {status.since_s:.0f} s"
                return Failure(self._error(device, task, problem, "raise cluster.start_timeout_s"))
        return None if lost is None else Failure(self._lost_link(*lost, task))

    def _lost_link(self, device: int, peer: int, task: str) -> TransportError:
        problem = f"nothing that was sent came through within {self.cluster.silence_timeout_s:g} s; the link is down"
        return TransportError(self.members[device].slot.name, self.members[peer].slot.name, task, problem)

    def _fail(self, failure: Failure, pending: Mapping[Any, int], task: str) -> NoReturn:
        failures = [failure]
        if isinstance(failure.error, TransportTimeoutError):
            failures += self._busy(failure.error, task)
        self.abort(f"another part failed during {task}")
        deadline, refs = time.monotonic() + _GRACE_S, list(pending)
        # Nothing explains a death better: others are not waited for.
        while refs and time.monotonic() < deadline and not any(one.is_death for one in failures):
            ready, refs = ray.wait(refs, num_returns=1, timeout=max(deadline - time.monotonic(), 0.01))
            for ref in ready:
                try:
                    ray.get(ref)
                except RayError as error:
                    failures.append(self._failure(error, pending[ref], task))
        if not any(one.is_death for one in failures):
            # An actor may have died without having been asked for anything.
            statuses = _statuses(dict(enumerate(self.members)), timeout_s=1.0)
            failures += [self._failure(status, device, task) for device, status in statuses.items() if isinstance(status, RayError)]
        if not any(one.is_death for one in failures):
            failures += self._lost_layers(task)
        first = min(failures, key=lambda one: one.rank)
        raise self._awaited_from(first.error) if first.is_death and isinstance(first.error, StageFailedError) else first.error

    def _awaited_from(self, lost: StageFailedError) -> StageFailedError:
        # An actor that is gone or silent cannot say which Op it was at; what the others wait for it has not ended.
        names = [member.slot.name for member in self.members]
        others = {device: member for device, member in enumerate(self.members) if names[device] != lost.device}
        statuses = _statuses(others, timeout_s=1.0)
        known = {device: status for device, status in statuses.items() if isinstance(status, Status)}
        problem = "; ".join([lost.problem, *waits_for(lost.device, known, names=names)])
        return StageFailedError(lost.device, lost.stages, lost.node, lost.during, problem, lost.remedy)

    def _busy(self, timeout: TransportTimeoutError, task: str) -> list[Failure]:
        # What an actor computed while a message was overdue explains the wait of the others.
        remedy = "look at what it does; raise cluster.message_timeout_s if that may take so long"
        return [
            Failure(self._error(device, f"{task}, {status.doing}", f"it was still at it when time ran out ({timeout})", remedy))
            for device, status in _statuses(dict(enumerate(self.members)), timeout_s=2.0).items()
            if isinstance(status, Status) and status.computes
        ]

    def _lost_layers(self, task: str) -> list[Failure]:
        problem = "its process died, or does not answer, and others are to take over the layers that it held"
        slots = [self.launched[number].slot for number in self.dead(self.leaving - self.gone, timeout_s=1.0)]
        errors = [StageFailedError(slot.name, "none", slot.node.address, task, problem, self.death_remedy) for slot in slots]
        return [Failure(error, is_death=True) for error in errors]


def dead(members: Mapping[int, Member], *, timeout_s: float) -> list[int]:
    """Return the numbers of the actors that are dead or silent."""
    return [number for number, status in _statuses(members, timeout_s=timeout_s).items() if not isinstance(status, Status)]


def _outcome(ref: Any) -> RayError | None:
    try:
        ray.get(ref, timeout=0)
    except RayError as error:
        return error
    return None


def _statuses(members: Mapping[int, Member], *, timeout_s: float) -> dict[int, Status | RayError | None]:
    # None for a silent actor, Ray's error for a dead one.
    refs = {number: member.handle.status.options(concurrency_group=CONTROL).remote() for number, member in members.items()}
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    statuses: dict[int, Status | RayError | None] = {}
    for number, ref in refs.items():
        try:
            statuses[number] = ray.get(ref, timeout=0)
        except GetTimeoutError:
            statuses[number] = None
        except RayError as error:
            statuses[number] = error
    return statuses
