"""Spare processes: they wait on the nodes of a run, with all modules loaded, to take the places of lost actors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.actor import StageActor
from raypipe.actors.orders import BuildOrder, Identity
from raypipe.actors.spare import standing_in_for
from raypipe.cluster.reservation import Reservation
from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.cluster.stage_actors import CONTROL, StageActors, as_ray_actor, node_positions

_LOG = logging.getLogger("raypipe.cluster.spares")
_SPARE_ACTOR = standing_in_for(StageActor)
_LOADING_S = 5.0  # for a spare process that loads to be done, as a new actor would load as much; nothing else computes meanwhile
_ANSWER_S = 3.0  # for a spare process to take a CPU slot
_GPU_S = 10.0  # for Ray to give out a GPU that has become free, and for a spare process to take it


@dataclass
class _Spare:
    handle: Any
    prepared: Any = None
    """Ray's reference to the answer that says that the process has loaded its modules; `None` before it was told to."""
    since_s: float = 0.0

    @property
    def has_answered(self) -> bool:
        return self.prepared is not None and bool(ray.wait([self.prepared], timeout=0)[0])

    def prepare(self, order: BuildOrder, *, when_idle: bool) -> None:
        self.prepared, self.since_s = self.handle.prepare.remote(cloudpickle.dumps(order), when_idle=when_idle), time.monotonic()


@dataclass(frozen=True)
class _Reserved:
    node_id: str
    handle: Any
    gpus: Any
    """Ray's reference to the names of its GPUs."""


class Spares:
    """The spare processes of a run, and the reservations of those that have taken devices."""

    def __init__(self, actors: StageActors) -> None:
        self._actors = actors
        self._waiting: dict[str, list[_Spare]] = {}  # by node
        self._reserved: dict[int, _Reserved] = {}  # by the number of the device's slot
        self._busy: set[str] = set()  # nodes that left no processor time for loading
        self._num_starts = 0

    def start(self, nodes: Iterable[ClusterNode]) -> None:
        """Start a process on each node before the first window, so that windows are not disturbed; it loads nothing yet."""
        for node in nodes:
            self._waiting[node.node_id] = [self._start(node)]

    def keep(self, wanted: Mapping[ClusterNode, int], order: Callable[[], BuildOrder], *, is_urgent: bool = False) -> None:
        """Start processes on nodes where fewer than wanted wait; let all load what `order` needs beside the windows.

        Processes that are urgent, or whose node is too busy otherwise, load at the usual priority, the others as `run_when_idle` says.
        """
        self._drop_overdue()
        for node, count in wanted.items():
            waiting = self._waiting.setdefault(node.node_id, [])
            while len(waiting) < count:
                waiting.append(self._start(node))
            for spare in waiting:
                if spare.prepared is None:
                    spare.prepare(order(), when_idle=not is_urgent and node.node_id not in self._busy)

    def _start(self, node: ClusterNode) -> _Spare:
        self._num_starts += 1
        run, scaling = self._actors.run, self._actors.scaling
        name = f"spare process {self._num_starts} on {node.name}"
        actor = as_ray_actor(_SPARE_ACTOR).options(name=f"{run}: {name}", num_cpus=0, scheduling_strategy=_on(node.node_id))
        return _Spare(actor.remote(run, name, num_threads=scaling.threads_per_device))

    def _drop_overdue(self) -> None:
        latest_s = time.monotonic() - self._actors.cluster.start_timeout_s
        for node_id, spares in self._waiting.items():
            overdue = [spare for spare in spares if spare.prepared is not None and spare.since_s < latest_s and not spare.has_answered]
            for spare in overdue:
                ray.kill(spare.handle, no_restart=True)
                self._busy.add(node_id)
            self._waiting[node_id] = [spare for spare in spares if spare not in overdue]

    def are_ready(self, nodes: Collection[ClusterNode]) -> bool:
        """Return whether all processes on these nodes have loaded their modules, or failed to."""
        return all(spare.has_answered for node in nodes for spare in self._waiting.get(node.node_id, []))

    def hurry(self, node_ids: Collection[str]) -> list[Any]:
        """Let processes on these nodes that still load their modules do so at the usual priority; return Ray's references to their answers.

        A run that waits for one of them calls this as soon as it knows.
        """
        waiting = [spare for node_id in node_ids for spare in self._waiting.get(node_id, [])]
        loading = [spare for spare in waiting if spare.prepared is not None and not spare.has_answered]
        for spare in loading:
            spare.handle.hurry.options(concurrency_group=CONTROL).remote()
        return [spare.prepared for spare in loading]

    def take(self, slots: Mapping[int, DeviceSlot]) -> dict[int, Any]:
        """Let processes take devices in these slots, by number; return the handles of those that did so within seconds.

        Processes that still load get seconds to be done.
        """
        loading = self.hurry({slot.node.node_id for slot in slots.values()})
        if loading:
            ray.wait(loading, num_returns=len(loading), timeout=_LOADING_S)
        chosen = {number: spare for number, slot in slots.items() if (spare := self._choose(slot)) is not None}
        for number, slot in slots.items():
            self._reserve(number, slot if number in chosen else None)
        calls = dict(self._calls({number: (spare, slots[number]) for number, spare in chosen.items()}))
        if calls:
            timeout_s = _GPU_S if any(slot.num_gpus for slot in slots.values()) else _ANSWER_S
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
        taken = {number: chosen[number].handle for number, call in calls.items() if _has_succeeded(call, slots[number])}
        for number in chosen.keys() - taken.keys():
            ray.kill(chosen[number].handle, no_restart=True)
            self._reserve(number, None)
        return taken

    def _choose(self, slot: DeviceSlot) -> _Spare | None:
        waiting = self._waiting.get(slot.node.node_id, [])
        spare = next((spare for spare in waiting if spare.has_answered), None)
        if spare is not None:
            waiting.remove(spare)
        return spare

    def _reserve(self, number: int, slot: DeviceSlot | None) -> None:
        """Reserve what a device needs in a slot, unless that is reserved already; without a slot end the reservation."""
        reserved = self._reserved.get(number)
        if reserved is not None and (slot is None or slot.node.node_id != reserved.node_id):
            ray.kill(self._reserved.pop(number).handle, no_restart=True)
        if slot is not None and number not in self._reserved:
            options = {"num_cpus": self._actors.scaling.cpus_per_device, "num_gpus": slot.num_gpus, "max_restarts": 0}
            handle = ray.remote(Reservation).options(**options, scheduling_strategy=_on(slot.node.node_id)).remote()
            self._reserved[number] = _Reserved(slot.node.node_id, handle, handle.gpus.remote())

    def _calls(self, chosen: Mapping[int, tuple[_Spare, DeviceSlot]]) -> Iterator[tuple[int, Any]]:
        actors = self._actors
        slots = {number: slot for number, (_, slot) in chosen.items()}
        positions = node_positions([slots.get(number, member.slot) for number, member in enumerate(actors.launched)], actors.scaling)
        for number, (spare, slot) in chosen.items():
            gpus = self._gpus(number) if slot.num_gpus else ""
            if gpus is not None:
                identity = Identity(actors.run, number, slot.name, stages=())
                yield (
                    number,
                    spare.handle.take_device.remote(identity, gpu_share=slot.num_gpus, node_position=positions[number], gpus=gpus),
                )

    def _gpus(self, number: int) -> str | None:
        try:
            return str(ray.get(self._reserved[number].gpus, timeout=_GPU_S))
        except RayError:
            return None

    def close(self) -> None:
        """End all processes that wait, and all reservations."""
        waiting = [spare.handle for spares in self._waiting.values() for spare in spares]
        for handle in [*waiting, *(reserved.handle for reserved in self._reserved.values())]:
            ray.kill(handle, no_restart=True)
        self._waiting, self._reserved = {}, {}


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _has_succeeded(call: Any, slot: DeviceSlot) -> bool:
    try:
        ray.get(call, timeout=0)
    except RayError as error:
        _LOG.warning("no spare process takes device %s: %s", slot.name, error)
        return False
    return True
