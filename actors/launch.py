"""Ray's side of stage actors: which nodes, how many on each, pinned where they belong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.stage import Identity, StageActor
from raypipe.config import ScalingConfig
from raypipe.errors import PlanError

CONTROL_THREADS = 2
"""For `status` and `abort`, which must be answered while an actor computes."""

_RELEASE_S = 15.0


@dataclass(frozen=True)
class Slot:
    """A place for one stage actor.

    Attributes:
        node_id: Ray's name for the node.
        node: its address, for messages.
        name: of the device: the node's address and a number.
    """

    node_id: str
    node: str
    name: str


def find_slots(scaling: ScalingConfig) -> list[Slot]:
    """Places for all devices, node after node, on the nodes of the connected cluster that are alive.

    Raises:
        PlanError: the cluster has fewer places, or others hold them; says how many each node has and what to do.
    """
    slots: list[Slot] = []
    seen: list[str] = []
    numbers: Counter[str] = Counter()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # The head comes first, so that a run that fits on it needs no network.
    nodes.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"], node["NodeID"]))
    amount = scaling.cpus_per_device
    for node in nodes:
        total = node["Resources"].get("CPU", 0.0)
        address = node["NodeManagerAddress"]
        seen.append(f"{address} has {total:g} CPU")
        for _ in range(int(total / amount + 1e-9) if amount else scaling.num_devices):
            # Several nodes of Ray may share an address.
            slots.append(Slot(node["NodeID"], address, f"{address}/{numbers[address]}"))
            numbers[address] += 1
    if len(slots) < scaling.num_devices:
        raise PlanError(
            f"{scaling.num_devices} devices of {amount:g} CPU are needed, the cluster has room for {len(slots)} "
            f"({'; '.join(seen)}); add nodes, or lower scaling.num_devices or scaling.cpus_per_device"
        )
    _wait_until_free(scaling.num_devices * amount)
    return slots[: scaling.num_devices]


def _wait_until_free(num_cpus: float) -> None:
    """Waits a little for CPUs that an earlier run is just giving back.

    Raises:
        PlanError: others hold them.
    """
    deadline = time.monotonic() + _RELEASE_S
    while (free := ray.available_resources().get("CPU", 0.0)) < num_cpus:
        if time.monotonic() > deadline:
            raise PlanError(f"{num_cpus:g} CPUs are needed, of the cluster's only {free:g} are free; wait for other runs or add nodes")
        time.sleep(0.2)


def launch(slots: Sequence[Slot], *, stages: Sequence[tuple[int, ...]], run: str, scaling: ScalingConfig) -> list[Any]:
    """Starts a stage actor in each slot; returns their handles at once, before they are there.

    Args:
        slots: by device number.
        stages: the stages of each device.
        run: the run's name, unique in the cluster.
        scaling: resources and threads of each actor.
    """
    handles: list[Any] = []
    for device, (slot, held) in enumerate(zip(slots, stages, strict=True)):
        identity = Identity(run=run, device=device, name=slot.name, stages=held)
        # Concurrency groups can be named here only, not in `.options`.
        actor_class = ray.remote(concurrency_groups={"control": CONTROL_THREADS}, max_restarts=0, max_task_retries=0)(StageActor)
        actor = actor_class.options(
            name=f"{run}: stage {identity.stage_text} on device {slot.name}",
            num_cpus=scaling.cpus_per_device,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node_id, soft=False),
        )
        handles.append(actor.remote(identity, num_threads=scaling.threads_per_device))
    return handles
