"""The nodes of the connected Ray cluster, and the slots that a run finds on them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.transport.sockets import listens
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.node_matching import is_gpu, match_slots
from raypipe.cluster.slots import NODE_LABEL, ClusterNode, DeviceSlot, resource_text, resources_per_device
from raypipe.config import ScalingConfig
from raypipe.errors import PlanError

_REACH_S = 2.0  # for Ray's process on a node to be reached
_ANSWER_S = 5.0  # for one that is reached to start a worker
_RELEASE_S = 15.0  # for an earlier run to give back its resources


def cluster_nodes() -> list[ClusterNode]:
    """Return the cluster's nodes, lost ones too. The head is first: a run that fits on it needs no network."""
    nodes: list[ClusterNode] = []
    for node in ray.nodes():
        resources, labels = node.get("Resources", {}), node.get("Labels") or {}
        kinds = {name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")}
        if kind := labels.get("ray.io/accelerator-type"):
            kinds.add(kind)
        nodes.append(
            ClusterNode(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                hostname=node.get("NodeManagerHostname", ""),
                label=labels.get(NODE_LABEL, ""),
                alive=node["Alive"],
                is_head="node:__internal_head__" in resources,
                num_cpus=resources.get("CPU", 0.0),
                num_gpus=resources.get("GPU", 0.0),
                accelerators=tuple(sorted(kinds)),
                port=node.get("NodeManagerPort", 0),
            )
        )
    return sorted(nodes, key=lambda node: (not node.is_head, node.address, node.node_id))


def find_slots(scaling: ScalingConfig) -> list[DeviceSlot]:
    """Return slots for all devices, node after node, once their resources are free; refuse a cluster that is too small."""
    nodes = [node for node in cluster_nodes() if node.alive]
    needs = resources_per_device(scaling)
    slots: list[DeviceSlot] = []
    numbers: Counter[str] = Counter()  # several nodes of Ray may share an address
    for node in nodes:
        count = min(node.room(needs), scaling.num_devices)
        slots += node.slots(count, first=numbers[node.name], num_gpus=needs.get("GPU", 0.0))
        numbers[node.name] += count
    if len(slots) < scaling.num_devices:
        offers = "; ".join(f"{node.address} has {resource_text({kind: node.resources[kind] for kind in needs})}" for node in nodes)
        raise PlanError(
            f"{scaling.num_devices} devices of {resource_text(needs)} are needed, the cluster has room for {len(slots)} "
            f"({offers}); add nodes, or lower scaling.num_devices, scaling.cpus_per_device"
            + (" or scaling.gpus_per_device" if scaling.use_gpu else "")
        )
    _wait_until_free({kind: scaling.num_devices * amount for kind, amount in needs.items()})
    return slots[: scaling.num_devices]


def unreached(nodes: Iterable[ClusterNode], *, timeout_s: float) -> set[str]:
    """Return the ids of nodes where Ray takes no connection within some seconds; Ray itself may hold them to be alive for longer."""
    ports = [node for node in nodes if node.port]
    with ThreadPoolExecutor(max(len(ports), 1)) as pool:
        answers = pool.map(lambda node: listens(node.address, node.port, timeout_s=timeout_s), ports)
        return {node.node_id for node, answer in zip(ports, answers, strict=True) if not answer}


def end_processes(processes: Collection[tuple[ClusterNode, int]]) -> set[str]:
    """End some processes of Ray, by node and process id, which do not answer; return the ids of nodes that do not answer, either.

    Ray itself takes ten seconds for a process that is stopped, and as long its resources are not free.
    """
    nodes = {node.node_id: node for node, _ in processes}
    reached = nodes.keys() - unreached(nodes.values(), timeout_s=_REACH_S)
    pids: dict[str, list[int]] = {}
    for node, pid in processes:
        if node.node_id in reached:
            pids.setdefault(node.node_id, []).append(pid)
    task = ray.remote(num_cpus=0, max_retries=0)(_end)
    calls = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(of_node): node_id
        for node_id, of_node in pids.items()
    }
    if not calls:
        return nodes.keys() - reached
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_S)
    silent = (nodes.keys() - reached) | {calls[ref] for ref in late}
    for ref in ready:
        try:
            ray.get(ref)
        except RayError:
            silent.add(calls[ref])
    return silent


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        # Another process may have got the number by now.
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)


def spare_slots(
    slots: Sequence[DeviceSlot], lost: Sequence[int], needs: Mapping[str, float], *, without: Collection[str] = ()
) -> dict[int, DeviceSlot]:
    """Return slots for the actors with these numbers, which are lost: their own where its node lives, else one on an equal node with room.

    Each device needs `needs` of its node's resources; nodes in `without` are not used. Those without such a slot are left out.
    """
    nodes = {node.node_id: node for node in cluster_nodes() if node.alive and node.node_id not in without}
    found = {number: slots[number] for number in lost if slots[number].node.node_id in nodes}
    homeless = [number for number in lost if number not in found]
    used = Counter(slot.node.node_id for number, slot in enumerate(slots) if number not in homeless)
    names = {slot.name for slot in slots}
    for number in homeless:
        slot = slots[number]
        for node in nodes.values():
            # GPUs of another kind would change what the plan expects of a device.
            if node.accelerators == slot.node.accelerators and used[node.node_id] < node.room(needs):
                name = next(name for count in itertools.count() if (name := f"{node.name}/{count}") not in names)
                found[number] = DeviceSlot(node, name, slot.num_gpus)
                names.add(name)
                used[node.node_id] += 1
                break
    return found


def planned_slots(
    topology: ClusterTopology, devices: Sequence[str], scaling: ScalingConfig, *, local: bool = False, stand_ins: bool = False
) -> list[DeviceSlot]:
    """Return the slots of a topology's devices once their resources are free: see `match_slots`.

    A `local` cluster, started for this run, stands for the devices' only node, whatever its name is.
    """
    nodes = cluster_nodes()
    names = {topology.node_of(device).name for device in devices}
    if local and len(names) == 1:
        nodes = [replace(node, label=next(iter(names))) for node in nodes]
    slots = match_slots(topology, devices, nodes, scaling=scaling, stand_ins=stand_ins)
    num_gpus = 0 if stand_ins else sum(is_gpu(topology.device(device)) for device in devices)
    _wait_until_free({"CPU": len(slots) * scaling.cpus_per_device} | ({"GPU": num_gpus * scaling.gpus_per_device} if num_gpus else {}))
    return slots


def _wait_until_free(needs: Mapping[str, float]) -> None:
    deadline = time.monotonic() + _RELEASE_S
    while True:
        available = ray.available_resources()
        free = {kind: available.get(kind, 0.0) for kind in needs}
        if all(free[kind] + 1e-9 >= amount for kind, amount in needs.items()):
            return
        if time.monotonic() > deadline:
            raise PlanError(
                f"{resource_text(needs)} are needed, of the cluster's only {resource_text(free)} are free; wait for other runs or add nodes"
            )
        time.sleep(0.2)
