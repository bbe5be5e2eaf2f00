"""Where the devices of a plan are in a cluster of today, and whether its workers' shares are whole rows.

A node of the topology is found in the cluster by what it is called there: its label `raypipe.io/node`, else its address, else its
host name. The n-th CPU device of a node is its n-th slot, the n-th GPU its n-th GPU. What no longer is as the plan says is refused,
all of it in one message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from raypipe.artifacts.topology import ClusterTopology, Device
from raypipe.errors import PlanError
from raypipe.schedules.lower import Placement

NODE_LABEL = "raypipe.io/node"
"""The label of a Ray node that gives it its name in topologies: `ray start --labels raypipe.io/node=NAME`."""

_MOST_PARTS = 1000
"""Shares are taken as fractions with at most this denominator: 0.3333 of a file is no third, 1 / 3 of a program is."""


@dataclass(frozen=True)
class ClusterNode:
    """One node, as Ray tells of it.

    Attributes:
        node_id: Ray's own name for it.
        address: of it in the cluster.
        hostname: of its machine; those of several nodes may be equal.
        label: what its label `raypipe.io/node` says; empty where it has none.
        alive: whether it is part of the cluster now.
        num_cpus: CPUs that it offers.
        num_gpus: GPUs that it offers.
        accelerators: the kinds of its GPUs, such as `H200`; empty where Ray does not know.
    """

    node_id: str
    address: str
    hostname: str = ""
    label: str = ""
    alive: bool = True
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    accelerators: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What topologies call it if nothing else is known: its label, else its address."""
        return self.label or self.address

    def __str__(self) -> str:
        name = f"{self.label} " if self.label and self.label != self.address else ""
        gpus = f", {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{name}{self.address} with {self.num_cpus:g} CPU{gpus}"


def is_cpu_kind(kind: str) -> bool:
    """Whether a kind of device is a CPU slot: `cpu`, and kinds such as `cpu-slow`; all others are GPUs."""
    return kind.lower().startswith("cpu")


def is_gpu(device: Device) -> bool:
    """Whether a device of a topology is a GPU."""
    return not is_cpu_kind(device.kind)


def locate(
    topology: ClusterTopology,
    devices: Sequence[str],
    nodes: Sequence[ClusterNode],
    *,
    cpus_per_device: float,
    gpus_per_device: float = 1.0,
    stand_ins: bool = False,
) -> dict[str, ClusterNode]:
    """The node of each of some devices of a topology.

    Args:
        topology: the cluster as it was.
        devices: names of those that are needed.
        nodes: the cluster as it is, with the nodes that it has lost.
        cpus_per_device: that each CPU slot takes.
        gpus_per_device: that each GPU device takes.
        stand_ins: whether CPU slots may stand for devices of all kinds, where nothing is computed.

    Raises:
        PlanError: says of every node and device what is no longer as it was.
    """
    needed: dict[str, list[str]] = {}
    for device in devices:
        needed.setdefault(topology.node_of(device).name, []).append(device)
    found: dict[str, ClusterNode] = {}
    problems: list[str] = []
    for name, its_devices in needed.items():
        matches = nodes_called(name, nodes)
        if len(matches) == 1:
            found[name] = matches[0]
        else:
            problems.append(_no_one_node(name, its_devices, matches, nodes))
    problems += _met_twice(found)
    for name, node in found.items():
        for device in _in_order(topology, name, needed[name]):
            problems += _unfit(
                topology, device, node, cpus_per_device=cpus_per_device, gpus_per_device=gpus_per_device, stand_ins=stand_ins
            )
    if problems:
        there = "; ".join(str(node) for node in nodes if node.alive) or "none"
        raise PlanError(
            f"the cluster is not the one that the plan was made for: {'; '.join(problems)}. Its nodes: {there}. "
            f"Bring back what is missing, name nodes by the label {NODE_LABEL}, or probe the cluster and plan again"
        )
    return {device: found[topology.node_of(device).name] for device in devices}


def _in_order(topology: ClusterTopology, node: str, devices: Iterable[str]) -> list[str]:
    """Some devices of a node in the order of the topology."""
    wanted = set(devices)
    return [device.name for of_node in topology.nodes if of_node.name == node for device in of_node.devices if device.name in wanted]


def num_places(topology: ClusterTopology, devices: Sequence[str]) -> int:
    """The places that a node needs for some devices of a topology, if all of them are on one: up to the last that is in use."""
    return max([device.name for device in topology.node_of(name).devices].index(name) + 1 for name in devices)


def nodes_called(name: str, nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
    """The living nodes that a name stands for: labels before addresses, these before host names."""
    alive = [node for node in nodes if node.alive]
    for names in ([node.label for node in alive], [node.address for node in alive], [node.hostname for node in alive]):
        if matches := [node for node, own in zip(alive, names, strict=True) if own == name]:
            return matches
    return []


def _no_one_node(name: str, devices: Sequence[str], matches: Sequence[ClusterNode], nodes: Sequence[ClusterNode]) -> str:
    which = f"node {name!r} (device{'s' if len(devices) > 1 else ''} {', '.join(devices)})"
    if matches:
        ids = ", ".join(node.node_id[:8] for node in matches)
        return f"{which} could be any of {len(matches)} nodes ({ids}), which must each have a label {NODE_LABEL} of its own"
    if any(name in {node.label, node.address, node.hostname} for node in nodes if not node.alive):
        return f"{which} is no longer alive"
    return f"{which} is not there: no node has this label, address or host name"


def _met_twice(found: Mapping[str, ClusterNode]) -> list[str]:
    by_id: dict[str, list[str]] = {}
    for name, node in found.items():
        by_id.setdefault(node.node_id, []).append(name)
    return [f"nodes {' and '.join(map(repr, names))} are one node of the cluster" for names in by_id.values() if len(names) > 1]


def _unfit(
    topology: ClusterTopology, name: str, node: ClusterNode, *, cpus_per_device: float, gpus_per_device: float, stand_ins: bool
) -> list[str]:
    """What is wrong with a device's place: the node has too few of its sort, or another kind."""
    device = topology.device(name)
    gpu = is_gpu(device) and not stand_ins
    alike = [other.name for other in topology.node_of(name).devices if stand_ins or is_gpu(other) is gpu]
    number = alike.index(name) + 1
    if gpu:
        room = int(node.num_gpus / gpus_per_device + 1e-9)
        if room and node.accelerators and not any(_same_kind(device.kind, kind) for kind in node.accelerators):
            return [f"device {name!r} is of kind {device.kind!r}, node {node.address} has {', '.join(node.accelerators)}"]
    else:
        room = int(node.num_cpus / cpus_per_device + 1e-9) if cpus_per_device else number
    if number <= room:
        return []
    sort = f"GPU (kind {device.kind!r})" if gpu else f"slot of {cpus_per_device:g} CPU"
    return [f"device {name!r} is {sort} number {number} of its node, node {node.address} has {room}"]


def _same_kind(kind: str, accelerator: str) -> bool:
    """Whether one name has all words and numbers of the other, as `A100` of `nvidia-a100-sxm4`, not of `A10`; `gpu` is any."""
    ours, theirs = (set(re.findall(r"[a-z]+|[0-9]+", text.lower())) - {"g", "gb"} for text in (kind, accelerator))
    return ours == {"gpu"} or ours <= theirs or theirs <= ours


def least_rows(boundaries: Iterable[float], *, most: int) -> int:
    """The fewest rows of which all shares that begin and end at some boundaries are whole numbers; `most` where that takes more.

    Args:
        boundaries: from 0 to 1.
        most: rows there are.
    """
    return min(math.lcm(*(Fraction(boundary).limit_denominator(_MOST_PARTS).denominator for boundary in boundaries)), most)


def check_rows(placement: Placement, num_rows: int) -> None:
    """Checks that every device has whole rows of a microbatch: what is predicted for its share is then what it works on.

    Raises:
        PlanError: names the shares that would work.
    """
    for worker, members in enumerate(placement.workers):
        if len(members) > num_rows:
            raise PlanError(
                f"worker {worker} has {len(members)} devices for microbatches of {num_rows} rows; use a microbatch_size of at least "
                f"{len(members)}, or fewer replicas"
            )
        wanted = [share * num_rows for _, share in members]
        if all(abs(rows - round(rows)) < 1e-6 and round(rows) for rows in wanted):
            continue
        whole = _nearest_whole(wanted, num_rows)
        parts = math.lcm(*(Fraction(share).limit_denominator(_MOST_PARTS).denominator for _, share in members))
        remedy = f"the nearest that work: {', '.join(f'{rows}/{num_rows}' for rows in whole)}"
        if parts <= _MOST_PARTS:
            remedy += f"; or a microbatch_size that is a multiple of {parts}"
        raise PlanError(
            f"worker {worker}: the shares {', '.join(f'{share:g}' for _, share in members)} of {num_rows} rows are "
            f"{', '.join(f'{rows:g}' for rows in wanted)} rows, which cannot be cut; {remedy}"
        )


def _nearest_whole(wanted: Sequence[float], num_rows: int) -> list[int]:
    """Whole numbers of at least 1 with the same sum, near to some amounts."""
    spare = num_rows - len(wanted)
    # Everyone has a row; what is left is divided where the running sums are rounded.
    beyond = [max(rows - 1.0, 0.0) for rows in wanted]
    scale = spare / math.fsum(beyond) if any(beyond) else 0.0
    sums = [0.0]
    for rows in beyond:
        sums.append(sums[-1] + rows * scale)
    whole = [1 + round(end) - round(first) for first, end in pairwise(sums)]
    whole[-1] += num_rows - sum(whole)
    return whole
