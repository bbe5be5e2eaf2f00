"""Stage actors that serve one test after another.

Starting an actor takes seconds: a process imports Ray, torch and its compiler. A run asks for actors in one place and ends them in
one place; here both are a pool. What an actor held is dropped when it is assigned to the next run, as when a run moves its layers.
Tests of how actors start, fail and end have actors of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raypipe.actors.orders import Identity
from raypipe.cluster.actor_group import Member
from raypipe.cluster.slots import DeviceSlot
from raypipe.cluster.stage_actors import StageActors, launch_stage_actors
from raypipe.config import ScalingConfig

POOLED = "pooled"
"""First word of the names of shared actors."""


class ActorPool:
    """Idle stage actors on CPU slots, by node. They reserve no CPU, so that the cluster looks as free as without them."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Any]] = {}

    def launch(self, slots: Sequence[DeviceSlot], *, stages: Sequence[tuple[int, ...]], run: str, scaling: ScalingConfig) -> list[Any]:
        """Return an actor for each slot: idle ones, and new ones where these are too few."""
        assert not scaling.use_gpu
        assert not scaling.bind_cores
        nodes = [slot.node.node_id for slot in slots]
        idle = {node: self._idle.setdefault(node, []) for node in nodes}
        missing = [device for device, node in enumerate(nodes) if nodes[:device].count(node) >= len(idle[node])]
        free = replace(scaling, cpus_per_device=0.0)
        new = launch_stage_actors(
            [slots[device] for device in missing], stages=[stages[device] for device in missing], run=f"{POOLED} {run}", scaling=free
        )
        for device, actor in zip(missing, new, strict=True):
            idle[nodes[device]].append(actor)
        actors = [idle[node].pop() for node in nodes]
        for device, (actor, slot, of_device) in enumerate(zip(actors, slots, stages, strict=True)):
            identity = Identity(run=run, device=device, name=slot.name, stages=of_device)
            actor.assign.remote(identity)
            actor.use_device.remote(identity, 0.0, None)  # as if it had been launched for that slot: probes of links call it by its number
        return actors

    def take_back(self, members: Sequence[Member]) -> None:
        """Keep the actors of a run that ended well for the next one."""
        for member in members:
            member.handle.assign.remote(None)
            self._idle[member.slot.node.node_id].append(member.handle)


@contextlib.contextmanager
def runs_take_their_actors_from(pool: ActorPool) -> Iterator[None]:
    """Let runs take their actors from a pool, and give them back unless they had to be told to stop."""
    stopped: set[int] = set()

    def abort(actors: StageActors, reason: str) -> None:
        stopped.add(id(actors))
        StageActors.abort(actors, reason)

    def kill(actors: StageActors) -> None:
        if id(actors) in stopped:
            StageActors.kill(actors)
        else:
            pool.take_back(actors.launched)

    pooled = type("PooledActors", (StageActors,), {"abort": abort, "kill": kill})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypipe.cluster.stage_actors.launch_stage_actors", pool.launch)
        patch.setattr("raypipe.cluster.coordinator.StageActors", pooled)
        patch.setattr("raypipe.cluster.spares.Spares.start", lambda *_: None)
        patch.setattr("raypipe.cluster.spares.Spares.keep", lambda *_, **__: None)
        yield
