"""What limits cost: the update of the plan that would be chosen without one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, NodeLink
from raypipe.errors import PlanError
from raypipe.simulation.simulator import simulate


@dataclass(frozen=True)
class WithoutLimit:
    """The seconds of an update if a limit were not there: `memory`, `transfers` or `interactions` of branches."""

    limit: str
    update_s: float


def without_limits(plan: Plan, again: Callable[[ModelProfile, ClusterTopology], Plan]) -> Iterator[WithoutLimit]:
    """Yield what an update would take without each limit that a plan has; `again` plans with the same options."""
    # The plan itself is one of those that could be chosen: a search that misses it must not make a limit look like a gain.
    update_s = simulate(plan).update_s if plan.predicted is None else plan.predicted.update_s
    for limit, profile, topology in _relaxed(plan.profile, plan.topology):
        try:
            found = again(profile, topology).predicted
        except PlanError:
            found = None
        yield WithoutLimit(limit, min(update_s, update_s if found is None else found.update_s))


def _relaxed(profile: ModelProfile, topology: ClusterTopology) -> Iterator[tuple[str, ModelProfile, ClusterTopology]]:
    if any(device.memory_bytes is not None for device in topology.devices):
        nodes = tuple(
            replace(node, devices=tuple(replace(device, memory_bytes=None) for device in node.devices)) for node in topology.nodes
        )
        yield "memory", profile, replace(topology, nodes=nodes)
    if topology.num_devices > 1:
        free = NodeLink(latency_s=0.0)
        nodes = tuple(replace(node, link=free) for node in topology.nodes)
        yield "transfers", profile, replace(topology, nodes=nodes, links=(), shared_links=(), default_link=free)
    apart = without_interactions(profile)
    if apart is not None:
        yield "interactions", apart, topology


def without_interactions(profile: ModelProfile) -> ModelProfile | None:
    """Return a profile whose branches do not read each other; `None` where they do not anyway."""
    branch_of = {layer.name: layer.branch for layer in profile.layers}

    def interacts(edge: NamedEdge) -> bool:
        ends = branch_of[edge.producer], branch_of[edge.consumer]
        return None not in ends and ends[0] != ends[1]

    edges = profile.named_edges or ()
    kept = tuple(edge for edge in edges if not interacts(edge))
    return None if len(kept) == len(edges) else replace(profile, named_edges=kept)
