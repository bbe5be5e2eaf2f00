"""Stage actors of a run, and the topology that predictions assume where no plan brings one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from raypipe.artifacts.calibration import Calibration, TransportCosts
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.cluster.checks import on_gpus
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.session import session
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import ClusterConfig, ScalingConfig, TrainConfig, Transport, calibration_file
from raypipe.errors import PlanError
from raypipe.units import counted

Notice = Callable[[str], None]

# Assumed where neither a topology file nor a calibration says more: gloo over loopback, PCIe 4.0 between the GPUs of a node,
# 10 Gbit/s between nodes.
_LOOPBACK = NodeLink(bandwidth_bytes_per_s=3e9, latency_s=1e-4)
_PCIE = NodeLink(bandwidth_bytes_per_s=2e10, latency_s=2e-5)
_ETHERNET = NodeLink(bandwidth_bytes_per_s=1.25e9, latency_s=2e-4)


@contextlib.contextmanager
def stage_actors(
    name: str,
    *,
    stages: Sequence[tuple[int, ...]],
    num_slots: int,
    find_slots: Callable[..., list[DeviceSlot]],
    scaling: ScalingConfig,
    cluster: ClusterConfig,
    spare_processes: bool | None = False,
    notice: Callable[[str], None],
) -> Iterator[Coordinator]:
    """Yield the coordinator of running actors, in the cluster or a local one of `num_slots` slots; end them afterwards.

    Spare processes are started, too, as `FailureConfig` says.
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
            if spare_processes:
                coordinator.spares.start({slot.node for slot in slots})
            coordinator.actors.wait_until_up()
            if spare_processes is None:
                coordinator.spares.start(coordinator.actors.nodes(with_idle_core=True))
            yield coordinator


def run_topology(config: TrainConfig, coordinator: Coordinator, notice: Notice, *, num_devices: int) -> ClusterTopology:
    """Return the configured topology, or one of the devices in use.

    Raises:
        PlanError: The configured topology has fewer devices than the run.
    """
    scaling = config.scaling
    if scaling.topology is not None:
        topology = ClusterTopology.load(scaling.topology)
        if topology.num_devices < num_devices:
            raise PlanError(
                f"the run needs {num_devices} devices, {scaling.topology} has {topology.num_devices}; "
                "add devices to it or lower scaling.num_devices"
            )
        return topology
    if on_gpus(coordinator.actors.infos):
        return _gpu_topology(coordinator)
    costs = _calibrated(scaling, notice)
    cores = {
        slot.node.address: max(info.num_cores // scaling.threads_per_device, 1)
        for slot, info in zip(coordinator.slots, coordinator.actors.infos, strict=True)
    }
    devices: dict[str, list[Device]] = {}
    for slot in coordinator.slots:
        devices.setdefault(slot.node.address, []).append(Device(slot.name, "cpu"))
    return ClusterTopology(
        name="measured cores, calibrated links" if costs else "measured cores, assumed links",
        nodes=_nodes(devices, link=costs.link if costs else _LOOPBACK, cores=cores),
        default_link=_ETHERNET,
        overheads=costs.overheads if costs else None,
    )


def num_measuring_devices(coordinator: Coordinator, scaling: ScalingConfig) -> int:
    """Return how many devices of the first node measure layers at once: one of GPUs; on CPUs as many as its cores, or twice as many.

    Devices that share a core push each other out of its caches, in training as here.
    """
    infos = coordinator.actors.infos
    if on_gpus(infos):
        return 1
    num_cores = max(infos[0].num_cores // scaling.threads_per_device, 1)
    node = coordinator.slots[0].node
    return min(sum(slot.node == node for slot in coordinator.slots), 2 * num_cores)


def _gpu_topology(coordinator: Coordinator) -> ClusterTopology:
    devices: dict[str, list[Device]] = {}
    gpus: dict[str, set[str]] = {}
    for slot, info in zip(coordinator.slots, coordinator.actors.infos, strict=True):
        memory_bytes = None if info.gpu_bytes is None else int(info.gpu_bytes * slot.num_gpus)
        devices.setdefault(slot.node.address, []).append(Device(slot.name, info.gpu_kind, memory_bytes=memory_bytes))
        gpus.setdefault(slot.node.address, set()).update(info.gpus)
    # Devices share the GPUs of their node where it has fewer.
    cores = {node: len(gpus[node]) if len(gpus[node]) < len(of_node) else None for node, of_node in devices.items()}
    return ClusterTopology(name="GPUs, assumed links", nodes=_nodes(devices, link=_PCIE, cores=cores), default_link=_ETHERNET)


def _nodes(devices: Mapping[str, list[Device]], *, link: NodeLink, cores: Mapping[str, int | None]) -> tuple[Node, ...]:
    return tuple(Node(name=node, devices=tuple(of_node), link=link, cores=cores[node]) for node, of_node in devices.items())


def _calibrated(scaling: ScalingConfig, notice: Notice) -> TransportCosts | None:
    path = Path(scaling.calibration) if scaling.calibration else calibration_file()
    if not scaling.calibration and not path.exists():
        notice("predictions assume message costs; measure them once: `raypipe calibrate`")
        return None
    return Calibration.load(path).of("shm" if scaling.transport is not Transport.GLOO else "gloo")
