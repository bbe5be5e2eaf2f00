"""Checks what the actors of a run report, and says which of their channels go through shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypipe.actors.actor_info import ActorInfo
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import Transport
from raypipe.errors import ConfigError, RunError
from raypipe.units import counted


def on_gpus(infos: Sequence[ActorInfo]) -> bool:
    """Return whether the devices of a run are GPUs."""
    return bool(infos) and all(info.gpus for info in infos)


def check_actors(slots: Sequence[DeviceSlot], infos: Sequence[ActorInfo]) -> None:
    """Refuse actors that are on another node than their slot, share a process or a GPU, or cannot exchange messages."""
    processes: dict[tuple[str, int], str] = {}
    gpus: dict[str, str] = {}
    for slot, info in zip(slots, infos, strict=True):
        if slot.node.node_id != info.node_id:
            raise RunError(
                f"device {slot.name} belongs on node {slot.node.node_id[:8]}, but is on {info.node_id[:8]} ({info.ip}); try again"
            )
        other = processes.setdefault((info.node_id, info.pid), slot.name)
        if other != slot.name:
            raise RunError(f"devices {other} and {slot.name} share the process {info.pid} on {info.ip}; try again")
        if slot.num_gpus:
            _check_gpu(slot, info, first=infos[0], first_name=slots[0].name, is_alone=len(slots) == 1)
        for gpu in info.gpus if slot.num_gpus >= 1 else ():
            if gpus.setdefault(gpu, slot.name) != slot.name:
                raise RunError(f"devices {gpus[gpu]} and {slot.name} both got the GPU {gpu} on {info.ip}; see who else uses it")


def _check_gpu(slot: DeviceSlot, info: ActorInfo, *, first: ActorInfo, first_name: str, is_alone: bool) -> None:
    if not info.gpus:
        raise RunError(
            f"device {slot.name} got no GPU that torch can see on {info.ip}; check the driver there (nvidia-smi), and that the torch "
            "installed there is one for CUDA"
        )
    if not info.nccl and not is_alone:
        raise RunError(
            f"device {slot.name} on {info.ip} has no cupy with NCCL, over which GPUs exchange messages: pip install 'raypipe[cuda13]' "
            "there, or raypipe[cuda12] for a torch for CUDA 12"
        )
    if info.nccl != first.nccl:
        versions = f"{info.nccl or 'none'} on {info.ip} ({slot.name}), {first.nccl or 'none'} on {first.ip} ({first_name})"
        raise RunError(f"devices have different versions of NCCL: {versions}; install one version on all nodes")


def shared_channels(
    channels: Iterable[tuple[int, int]], *, infos: Sequence[ActorInfo], names: Sequence[str], transport: Transport
) -> frozenset[tuple[int, int]]:
    """Return the channels (sender, receiver) through shared memory, the host's or a GPU's; refuse a transport that does not fit."""
    # Both ends are on one node of Ray. The same host name is not enough, as containers that share nothing may have it.
    if on_gpus(infos):
        if transport not in {Transport.AUTO, Transport.NCCL}:
            raise ConfigError(f"scaling.transport: {transport}: messages between GPUs go over NCCL; choose auto or nccl")
        within = (ends for ends in channels if len({(infos[device].node_id, infos[device].gpus) for device in ends}) == 1)
        return frozenset() if transport is Transport.NCCL else frozenset(within)
    if transport is Transport.NCCL:
        raise ConfigError("scaling.transport: nccl: the devices are CPU slots; choose auto, shm, gloo or tcp, or set scaling.use_gpu")
    if transport is Transport.GLOO:
        return frozenset()
    shared: set[tuple[int, int]] = set()
    for source, target in channels:
        ends = (infos[source], infos[target])
        if ends[0].node_id == ends[1].node_id and all(end.shares_memory for end in ends):
            shared.add((source, target))
        elif transport is Transport.SHM:
            nodes = " and ".join(f"{names[device]} on node {infos[device].node_id[:8]}" for device in (source, target))
            remedy = "choose auto, tcp or gloo, or fewer devices, all on one node"
            problem = "exchange messages" if ends[0].node_id != ends[1].node_id else "cannot share memory, for which they need Linux"
            raise ConfigError(f"scaling.transport: shm: devices {nodes} {problem}; {remedy}")
    return frozenset(shared)


def channel_text(infos: Sequence[ActorInfo], *, num_channels: int, num_shared: int, transport: Transport) -> str:
    """Return how many channels use which transport, in words."""
    if on_gpus(infos):
        shared, other = "within a GPU", f"over NCCL {infos[0].nccl}"
    else:
        shared, other = "through shared memory", "over gloo" if transport is Transport.GLOO else "over tcp"
    counts = {shared: num_shared, other: num_channels - num_shared}
    return ", ".join(f"{counted(count, 'channel')} {kind}" for kind, count in counts.items() if count)
