"""Ray's side of stage actors: which nodes, how many on each, pinned where they belong."""

from __future__ import annotations

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
        PlanError: the cluster has fewer free places; says how many each node has and what to do.
    """
    resource, amount = ("GPU", 1.0) if scaling.use_gpu else ("CPU", scaling.cpus_per_device)
    slots: list[Slot] = []
    seen: list[str] = []
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # The head comes first, so that a run that fits on it needs no network.
    nodes.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"], node["NodeID"]))
    for node in nodes:
        total = node["Resources"].get(resource, 0.0)
        count = int(total / amount + 1e-9) if amount else scaling.num_devices
        address = node["NodeManagerAddress"]
        seen.append(f"{address} has {total:g} {resource}")
        slots += [Slot(node["NodeID"], address, f"{address}/{number}") for number in range(count)]
    if len(slots) < scaling.num_devices:
        raise PlanError(
            f"{scaling.num_devices} devices of {amount:g} {resource} are needed, the cluster has room for {len(slots)} "
            f"({'; '.join(seen)}); add nodes, or lower scaling.num_devices or scaling.cpus_per_device"
        )
    return slots[: scaling.num_devices]


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
            num_cpus=0 if scaling.use_gpu else scaling.cpus_per_device,
            num_gpus=1 if scaling.use_gpu else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node_id, soft=False),
        )
        handles.append(actor.remote(identity, num_threads=scaling.threads_per_device))
    return handles
