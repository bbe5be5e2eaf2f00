"""Stage actors for as long as a run or a rehearsal lasts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.session import session
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import ClusterConfig, ScalingConfig
from raypipe.units import counted


class FindSlots(Protocol):
    """A function from whether the cluster was started for this run to the slots of its devices."""

    def __call__(self, *, local: bool) -> list[DeviceSlot]:
        """Return the slots."""


@contextlib.contextmanager
def stage_actors(
    name: str,
    *,
    stages: Sequence[tuple[int, ...]],
    num_slots: int,
    find_slots: FindSlots,
    scaling: ScalingConfig,
    cluster: ClusterConfig,
    notice: Callable[[str], None],
) -> Iterator[Coordinator]:
    """Yield the coordinator of actors that are up, in the cluster or a local one; end them afterwards.

    Args:
        name: Start of the run's name in the cluster.
        stages: Stages of each device.
        num_slots: Number of device slots that a local cluster needs.
        find_slots: Returns the slots of the devices.
        scaling: Resources of each actor, and what carries their messages.
        cluster: Address and timeouts.
        notice: Receives lines for the user.
    """
    address = cluster.resolved_address
    notice(f"connecting to the Ray cluster at {address}" if address else "starting Ray")
    with session(cluster, num_devices=num_slots, cpus_per_device=scaling.cpus_per_device) as connected:
        if connected.dashboard_url:
            notice(f"Ray dashboard: {connected.dashboard_url} (its token: `ray get-auth-token`)")
        slots = find_slots(local=connected.local)
        notice(f"starting {counted(len(slots), 'actor')}")
        run = f"{name}-{time.time_ns() // 1_000_000:x}"
        with Coordinator(run=run, slots=slots, stages=stages, scaling=scaling, cluster=cluster) as coordinator:
            coordinator.actors.wait_until_up()
            yield coordinator
