"""Ray's side of stage actors: which nodes, how many on each, pinned where they belong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.actor import Identity, StageActor
from raypipe.actors.cores import Place
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.node_matching import NODE_LABEL, ClusterNode, is_gpu, locate
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
        name: of the device: as the plan says, else the node's address and a number.
        num_gpus: that the actor reserves.
    """

    node_id: str
    node: str
    name: str
    num_gpus: float = 0.0


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
    needs = needed(scaling)
    names = {node.node_id: node.name for node in cluster_nodes()}
    for node in nodes:
        resources, address = node["Resources"], node["NodeManagerAddress"]
        seen.append(f"{address} has {amounts({kind: resources.get(kind, 0.0) for kind in needs})}")
        for _ in range(room(resources, scaling)):
            # Several nodes of Ray may share an address.
            name = names.get(node["NodeID"], address)
            slots.append(Slot(node["NodeID"], address, f"{name}/{numbers[name]}", needs.get("GPU", 0.0)))
            numbers[name] += 1
    if len(slots) < scaling.num_devices:
        raise PlanError(
            f"{scaling.num_devices} devices of {amounts(needs)} are needed, the cluster has room for {len(slots)} "
            f"({'; '.join(seen)}); add nodes, or lower scaling.num_devices, scaling.cpus_per_device"
            + (" or scaling.gpus_per_device" if scaling.use_gpu else "")
        )
    _wait_until_free({kind: scaling.num_devices * amount for kind, amount in needs.items()})
    return slots[: scaling.num_devices]


def needed(scaling: ScalingConfig) -> dict[str, float]:
    """What each device reserves of its node, as Ray names it."""
    return {"CPU": scaling.cpus_per_device} | ({"GPU": scaling.gpus_per_device} if scaling.use_gpu else {})


def room(resources: Mapping[str, float], scaling: ScalingConfig) -> int:
    """How many devices a node with some resources has room for, of those that are asked for."""
    found = [int(resources.get(kind, 0.0) / amount + 1e-9) for kind, amount in needed(scaling).items() if amount]
    return min([*found, scaling.num_devices])


def amounts(resources: Mapping[str, float]) -> str:
    """Resources in words."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def planned_slots(plan: Plan, scaling: ScalingConfig, *, local: bool = False, stand_ins: bool = False) -> list[Slot]:
    """The places of a plan's devices on the nodes of the connected cluster, by device number; see `slots_of`."""
    return slots_of(plan.topology, plan.devices, scaling, local=local, stand_ins=stand_ins)


def slots_of(
    topology: ClusterTopology, devices: Sequence[str], scaling: ScalingConfig, *, local: bool = False, stand_ins: bool = False
) -> list[Slot]:
    """The places of some devices of a topology on the nodes of the connected cluster, in their order.

    Args:
        topology: names the nodes.
        devices: by name.
        scaling: CPUs of each device.
        local: whether the cluster is one node that was started for this run: the only node of the devices then stands for it.
        stand_ins: whether CPU slots may stand for devices of all kinds.

    Raises:
        PlanError: the cluster is not the one of the topology; says what changed.
    """
    nodes = cluster_nodes()
    names = {topology.node_of(device).name for device in devices}
    if local and len(names) == 1:
        nodes = [replace(node, label=next(iter(names))) for node in nodes]
    places = locate(
        topology,
        devices,
        nodes,
        cpus_per_device=scaling.cpus_per_device,
        gpus_per_device=scaling.gpus_per_device,
        stand_ins=stand_ins,
    )
    num_gpus = 0 if stand_ins else sum(is_gpu(topology.device(device)) for device in devices)
    _wait_until_free({"CPU": len(places) * scaling.cpus_per_device} | ({"GPU": num_gpus * scaling.gpus_per_device} if num_gpus else {}))
    return [
        Slot(node.node_id, node.address, device, scaling.gpus_per_device if is_gpu(topology.device(device)) and not stand_ins else 0.0)
        for device, node in places.items()
    ]


def cluster_nodes() -> list[ClusterNode]:
    """The nodes of the connected cluster, with those that it has lost."""
    found: list[ClusterNode] = []
    for node in ray.nodes():
        resources, labels = node.get("Resources", {}), node.get("Labels") or {}
        kinds = {name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")}
        if kind := labels.get("ray.io/accelerator-type"):
            kinds.add(kind)
        found.append(
            ClusterNode(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                hostname=node.get("NodeManagerHostname", ""),
                label=labels.get(NODE_LABEL, ""),
                alive=node["Alive"],
                num_cpus=resources.get("CPU", 0.0),
                num_gpus=resources.get("GPU", 0.0),
                accelerators=tuple(sorted(kinds)),
            )
        )
    return found


def _wait_until_free(needs: Mapping[str, float]) -> None:
    """Waits a little for CPUs and GPUs that an earlier run is just giving back.

    Raises:
        PlanError: others hold them.
    """
    deadline = time.monotonic() + _RELEASE_S
    while True:
        available = ray.available_resources()
        free = {kind: available.get(kind, 0.0) for kind in needs}
        if all(free[kind] + 1e-9 >= amount for kind, amount in needs.items()):
            return
        if time.monotonic() > deadline:
            raise PlanError(
                f"{amounts(needs)} are needed, of the cluster's only {amounts(free)} are free; wait for other runs or add nodes"
            )
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
    counts = Counter(slot.node_id for slot in slots)
    positions: Counter[str] = Counter()
    for device, (slot, held) in enumerate(zip(slots, stages, strict=True)):
        identity = Identity(run=run, device=device, name=slot.name, stages=held)
        # Concurrency groups can be named here only, not in `.options`.
        actor_class = ray.remote(concurrency_groups={"control": CONTROL_THREADS}, max_restarts=0, max_task_retries=0)(StageActor)
        actor = actor_class.options(
            name=f"{run}: stage {identity.stage_text} on device {slot.name}" if held else f"{run}: device {slot.name}",
            num_cpus=scaling.cpus_per_device,
            num_gpus=slot.num_gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node_id, soft=False),
        )
        place = Place(positions[slot.node_id], counts[slot.node_id]) if scaling.bind_cores else None
        positions[slot.node_id] += 1
        handles.append(actor.remote(identity, num_threads=scaling.threads_per_device, gpu_share=slot.num_gpus, place=place))
    return handles
