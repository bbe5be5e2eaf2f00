"""Where an actor runs: its node, its process and its GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.actors.transport import cuda, shm


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node, as its driver describes it; 0, `unknown` or empty where it does not."""

    name: str
    uuid: str
    memory_bytes: int
    pcie_generation: int
    pcie_lanes: int
    numa_node: int | None
    num_nvlinks: int


@dataclass(frozen=True)
class ActorInfo:
    """Where an actor runs.

    Attributes:
        shares_memory: Whether messages within the node can go through shared memory.
        node_gpus: All GPUs of the node.
        gpus: UUIDs of the actor's GPUs.
        gpu_kind: Kind of the first of them, such as `nvidia-h200`; empty for a CPU slot.
        gpu_bytes: Memory of the first of them.
        nccl: Version of NCCL; empty where it is missing.
    """

    node_id: str
    ip: str
    hostname: str
    pid: int
    num_cores: int
    memory_bytes: int
    shares_memory: bool
    node_gpus: tuple[Gpu, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_kind: str = ""
    gpu_bytes: int | None = None
    nccl: str = ""


def actor_info(on: torch.device, *, num_cores: int) -> ActorInfo:
    """Return where this Ray actor runs, which computes on a device of torch."""
    import ray  # noqa: PLC0415  # only Ray can tell, and the classes of actors work without it

    context = ray.get_runtime_context()
    # A process that has taken the place of another one has a GPU of which Ray does not know that it is its own.
    gpus = _visible_gpus() if on.type == "cuda" or context.get_accelerator_ids().get("GPU") else ()
    computes_on_gpu = on.type == "cuda" and bool(gpus)
    return ActorInfo(
        node_id=context.get_node_id(),
        ip=ray.util.get_node_ip_address(),
        hostname=os.uname().nodename,
        pid=os.getpid(),
        num_cores=num_cores,
        memory_bytes=usable_memory_bytes(),
        shares_memory=shm.available(),
        node_gpus=find_gpus(),
        gpus=gpus,
        gpu_kind=cuda.kind(on) if computes_on_gpu else "",
        gpu_bytes=cuda.memory_bytes(on) if computes_on_gpu else None,
        nccl=cuda.nccl_version() if computes_on_gpu else "",
    )


def _visible_gpus() -> tuple[str, ...]:
    return tuple(str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count()))


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this node; none where the driver or nvidia-ml-py (extras `cuda12`, `cuda13`) is missing."""
    try:
        import pynvml  # noqa: PLC0415  # an extra
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver
    try:
        return tuple(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()  # this process may not use them
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    def asked(function: Callable[..., Any], *arguments: int) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return 0

    memory, bus = asked(nvml.nvmlDeviceGetMemoryInfo), asked(nvml.nvmlDeviceGetPciInfo)
    return Gpu(
        name=_text(asked(nvml.nvmlDeviceGetName) or "unknown"),
        uuid=_text(asked(nvml.nvmlDeviceGetUUID) or ""),
        memory_bytes=int(memory.total) if memory else 0,
        pcie_generation=int(asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration)),
        pcie_lanes=int(asked(nvml.nvmlDeviceGetMaxPcieLinkWidth)),
        numa_node=_numa_node(_text(bus.busId)) if bus else None,
        num_nvlinks=sum(asked(nvml.nvmlDeviceGetNvLinkState, link) == 1 for link in range(nvml.NVML_NVLINK_MAX_LINKS)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _numa_node(bus: str) -> int | None:
    domain, _, rest = bus.lower().partition(":")
    try:
        number = int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None  # the system writes -1 where there is none


def usable_memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or less where its control group has a limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit, or the word `max`
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)
