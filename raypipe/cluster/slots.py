"""Where the devices of a run are: each in a slot of a Ray node."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypipe.config import ScalingConfig
from raypipe.errors import PlanError

NODE_LABEL = "raypipe.io/node"
"""Label that gives a Ray node its name in topologies: `ray start --labels raypipe.io/node=NAME`."""


@dataclass(frozen=True)
class ClusterNode:
    """A node as Ray reports it, with the kinds of its GPUs, such as `H200`. One machine may be several nodes.

    Attributes:
        port: Port of Ray's node manager, which all nodes must reach; 0 where it is not known.
    """

    node_id: str
    address: str
    hostname: str = ""
    label: str = ""
    alive: bool = True
    is_head: bool = False
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    accelerators: tuple[str, ...] = ()
    port: int = 0

    @property
    def name(self) -> str:
        """Default name in topologies."""
        return self.label or self.address

    @property
    def resources(self) -> dict[str, float]:
        """CPUs and GPUs, by Ray's names."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus}

    def room(self, needs: Mapping[str, float]) -> int:
        """Return how many devices with these needs fit on the node."""
        counts = [int(self.resources[kind] / amount + 1e-9) for kind, amount in needs.items() if amount]
        return min(counts, default=sys.maxsize)

    def slots(self, count: int, *, name: str = "", first: int = 0, num_gpus: float = 0.0) -> list[DeviceSlot]:
        """Return `count` slots named `NAME/FIRST` and up."""
        return [DeviceSlot(self, f"{name or self.name}/{number}", num_gpus) for number in range(first, first + count)]

    def __str__(self) -> str:
        name = f"{self.label} " if self.label and self.label != self.address else ""
        gpus = f", {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{name}{self.address} with {self.num_cpus:g} CPU{gpus}"


@dataclass(frozen=True)
class DeviceSlot:
    """The place of one device, named as in plans."""

    node: ClusterNode
    name: str
    num_gpus: float = 0.0  # may be a fraction of one


def resources_per_device(scaling: ScalingConfig) -> dict[str, float]:
    """Return what each device reserves, by Ray's names."""
    return {"CPU": scaling.cpus_per_device} | ({"GPU": scaling.gpus_per_device} if scaling.use_gpu else {})


def resource_text(resources: Mapping[str, float]) -> str:
    """Return a text such as `2 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def nodes_called(name: str, nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
    """Return the living nodes with this label, else this address, else this host name."""
    alive = [node for node in nodes if node.alive]
    for names in ([node.label for node in alive], [node.address for node in alive], [node.hostname for node in alive]):
        if matches := [node for node, called in zip(alive, names, strict=True) if called == name]:
            return matches
    return []


def unique_name(node: ClusterNode, nodes: Sequence[ClusterNode]) -> str:
    """Return a node's name in topologies: its label if unique, else its address; refuse a node that shares both."""
    for name in filter(None, (node.label, node.address)):
        if nodes_called(name, nodes) == [node]:
            return name
    others = ", ".join(other.node_id[:8] for other in nodes if node.address == other.address)
    raise PlanError(
        f"node {node} has no name of its own: the nodes {others} share its address; start each with a label, "
        f"`ray start --labels={NODE_LABEL}=NAME`"
    )
