"""Matches a topology's devices with slots of the cluster: nodes by name, devices by number among those of their kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from raypipe.artifacts.topology import ClusterTopology, Device
from raypipe.cluster.slots import NODE_LABEL, ClusterNode, DeviceSlot, nodes_called
from raypipe.config import ScalingConfig
from raypipe.errors import PlanError


def is_cpu_kind(kind: str) -> bool:
    """Return whether a kind of device, such as `cpu-slow`, is a CPU slot; all others are GPUs."""
    return kind.lower().startswith("cpu")


def is_gpu(device: Device) -> bool:
    """Return whether a device is a GPU."""
    return not is_cpu_kind(device.kind)


def num_slots(topology: ClusterTopology, devices: Sequence[str]) -> int:
    """Return how many slots one node needs to stand for the node of any of these devices."""
    return max([device.name for device in topology.node_of(name).devices].index(name) + 1 for name in devices)


def match_slots(
    topology: ClusterTopology, devices: Sequence[str], nodes: Sequence[ClusterNode], *, scaling: ScalingConfig, stand_ins: bool = False
) -> list[DeviceSlot]:
    """Return the slots of these devices on the cluster's `nodes`, lost ones included; with `stand_ins`, CPU slots stand for GPUs.

    Raises:
        PlanError: Nodes or devices are not as in the topology.
    """
    needed: dict[str, list[str]] = {}
    for device in devices:
        needed.setdefault(topology.node_of(device).name, []).append(device)
    matched: dict[str, ClusterNode] = {}
    problems: list[str] = []
    for name, of_node in needed.items():
        matches = nodes_called(name, nodes)
        if len(matches) == 1:
            matched[name] = matches[0]
        else:
            problems.append(_no_one_node(name, of_node, matches, nodes))
    problems += _matched_twice(matched)
    for name, node in matched.items():
        for device in (device.name for device in topology.node_of(needed[name][0]).devices if device.name in needed[name]):
            problems += _misfit(topology, device, node, scaling=scaling, stand_ins=stand_ins)
    if problems:
        there = "; ".join(str(node) for node in nodes if node.alive) or "none"
        raise PlanError(
            f"the cluster is not the one that the plan was made for: {'; '.join(problems)}. Its nodes: {there}. "
            f"Bring back what is missing, name nodes by the label {NODE_LABEL}, or probe the cluster and plan again"
        )
    return [
        DeviceSlot(
            matched[topology.node_of(device).name],
            device,
            scaling.gpus_per_device if is_gpu(topology.device(device)) and not stand_ins else 0.0,
        )
        for device in devices
    ]


def _no_one_node(name: str, devices: Sequence[str], matches: Sequence[ClusterNode], nodes: Sequence[ClusterNode]) -> str:
    which = f"node {name!r} (device{'s' if len(devices) > 1 else ''} {', '.join(devices)})"
    if matches:
        ids = ", ".join(node.node_id[:8] for node in matches)
        return f"{which} could be any of {len(matches)} nodes ({ids}), which must each have a label {NODE_LABEL} of its own"
    if any(name in {node.label, node.address, node.hostname} for node in nodes if not node.alive):
        return f"{which} is no longer alive"
    return f"{which} is not there: no node has this label, address or host name"


def _matched_twice(matched: Mapping[str, ClusterNode]) -> list[str]:
    by_id: dict[str, list[str]] = {}
    for name, node in matched.items():
        by_id.setdefault(node.node_id, []).append(name)
    return [f"nodes {' and '.join(map(repr, names))} are one node of the cluster" for names in by_id.values() if len(names) > 1]


def _misfit(topology: ClusterTopology, name: str, node: ClusterNode, *, scaling: ScalingConfig, stand_ins: bool) -> list[str]:
    device = topology.device(name)
    gpu = is_gpu(device) and not stand_ins
    alike = [other.name for other in topology.node_of(name).devices if stand_ins or is_gpu(other) is gpu]
    number = alike.index(name) + 1
    room = node.room({"GPU": scaling.gpus_per_device} if gpu else {"CPU": scaling.cpus_per_device})
    if gpu and room and node.accelerators and not any(_same_kind(device.kind, kind) for kind in node.accelerators):
        return [f"device {name!r} is of kind {device.kind!r}, node {node.address} has {', '.join(node.accelerators)}"]
    if number <= room:
        return []
    sort = f"GPU (kind {device.kind!r})" if gpu else f"slot of {scaling.cpus_per_device:g} CPU"
    return [f"device {name!r} is {sort} number {number} of its node, node {node.address} has {room}"]


def _same_kind(kind: str, accelerator: str) -> bool:
    # One name must have all words and numbers of the other: `A100` is `nvidia-a100-sxm4`, `A10` is not; `gpu` is any.
    ours, theirs = (set(re.findall(r"[a-z]+|[0-9]+", text.lower())) - {"g", "gb"} for text in (kind, accelerator))
    return ours == {"gpu"} or ours <= theirs or theirs <= ours
