"""Plans for tests: of a model as it is, or of layers that only have times and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import ray
import torch

from raypipe.actors.measure.layer_costs import Effort
from raypipe.actors.measure.layers import measure_layers
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Replica
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, Overheads
from raypipe.model import Batch, Model
from raypipe.profiling.profiler import model_profile
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import over_graph

Workers = Sequence[Sequence[tuple[str, float]]]
"""For each worker, its devices with their shares."""


def profile_of(model: Model, batch: Batch) -> ModelProfile:
    """What a model's layers hold, and some times."""
    measured = measure_layers(model, batch, optimizer=partial(torch.optim.AdamW, lr=0.1), seed=0, effort=Effort(repeats=1, warm_up=0))
    return model_profile([measured], model, name="model", microbatch_size=len(next(iter(batch.values()))))


def lab(
    nodes: Mapping[str, int],
    *,
    links: Sequence[Link] = (),
    speeds: Mapping[str, float] | None = None,
    overheads: Overheads | None = None,
    default_link: NodeLink | None = None,
) -> ClusterTopology:
    """Nodes with so many devices, called NODE/0, NODE/1 and so on."""
    return ClusterTopology(
        name="lab",
        nodes=tuple(
            Node(
                name=name,
                devices=tuple(
                    Device(f"{name}/{number}", "cpu", speed=(speeds or {}).get(f"{name}/{number}", 1.0)) for number in range(count)
                ),
                link=NodeLink(bandwidth_bytes_per_s=3e9, latency_s=1e-4),
            )
            for name, count in nodes.items()
        ),
        links=tuple(links),
        default_link=default_link or NodeLink(latency_s=2e-4),
        overheads=overheads,
    )


def this_node() -> str:
    """The address of the only node of the connected cluster."""
    (node,) = (node for node in ray.nodes() if node["Alive"])
    address: str = node["NodeManagerAddress"]
    return address


def plan_of(
    profile: ModelProfile, topology: ClusterTopology, schedule: Schedule, workers: Workers, *, sizes: Sequence[int], microbatch_size: int
) -> Plan:
    """A plan whose stages have so many layers each."""
    edges = tuple((edge.producer, edge.consumer) for edge in profile.edges())
    cut = Cut.of_sizes(sizes, edges, profile.ties())
    return Plan(
        name="test",
        planner="given",
        microbatch_size=microbatch_size,
        stages=tuple(tuple(profile.layers[layer].name for layer in layers) for layers in cut.stages),
        workers=tuple(tuple(Replica(device=device, share=share) for device, share in members) for members in workers),
        schedule=over_graph(schedule, cut.graph),
        profile=profile,
        topology=topology,
        profile_digest=profile.digest,
        topology_digest=topology.digest,
    )


def in_turn(node: str, shares: Sequence[Sequence[float]]) -> Workers:
    """Workers on the devices of one node, one after the other."""
    numbers = iter(range(100))
    return [[(f"{node}/{next(numbers)}", share) for share in worker] for worker in shares]
