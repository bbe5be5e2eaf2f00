"""Makes Ray actors of raypipe's plain classes, each pinned to the node of its slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.actors.actor import StageActor
from raypipe.actors.cores import NodePosition
from raypipe.actors.orders import Identity
from raypipe.actors.probe_actor import ProbeActor
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import ScalingConfig

CONTROL = "control"
"""Concurrency group of the methods that an actor answers while it computes."""
_CONTROL_THREADS = 2


def _on_node_of(slot: DeviceSlot) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(slot.node.node_id, soft=False)


def launch_stage_actors(slots: Sequence[DeviceSlot], *, stages: Sequence[tuple[int, ...]], run: str, scaling: ScalingConfig) -> list[Any]:
    """Start a stage actor in each slot; return their handles at once, before the actors are up."""
    # Concurrency groups can be named here only, not in `.options`.
    actor_class = ray.remote(concurrency_groups={CONTROL: _CONTROL_THREADS}, max_restarts=0, max_task_retries=0)(StageActor)
    handles: list[Any] = []
    counts = Counter(slot.node.node_id for slot in slots)
    positions: Counter[str] = Counter()
    for device, (slot, of_device) in enumerate(zip(slots, stages, strict=True)):
        identity = Identity(run=run, device=device, name=slot.name, stages=of_device)
        actor = actor_class.options(
            name=f"{run}: stage {identity.stage_text} on device {slot.name}" if of_device else f"{run}: device {slot.name}",
            num_cpus=scaling.cpus_per_device,
            num_gpus=slot.num_gpus,
            scheduling_strategy=_on_node_of(slot),
        )
        node_id = slot.node.node_id
        position = NodePosition(positions[node_id], counts[node_id]) if scaling.bind_cores else None
        positions[node_id] += 1
        handles.append(actor.remote(identity, num_threads=scaling.threads_per_device, gpu_share=slot.num_gpus, node_position=position))
    return handles


def launch_probe_actors(slots: Sequence[DeviceSlot]) -> list[Any]:
    """Start a probe actor in each slot; return their handles at once. They reserve no CPU, so that runs may go on beside them."""
    actor_class = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(ProbeActor)
    return [
        actor_class.options(num_gpus=slot.num_gpus, scheduling_strategy=_on_node_of(slot)).remote(device, use_gpu=slot.num_gpus > 0)
        for device, slot in enumerate(slots)
    ]
