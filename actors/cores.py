"""Counts the cores that an actor may use, and binds it to some of them, if `scaling.bind_cores` asks for it.

Binding helps on several sockets with enough cores: four stages on two cores were 16 to 25 % slower when bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

_SYSTEM = Path("/sys")
_GROUPS = Path("/proc/self/cgroup")


class NodePosition(NamedTuple):
    """An actor's position among its node's actors, in the order of devices."""

    position: int
    num_actors: int


def share(cores: Sequence[int], actor: NodePosition, *, num_threads: int) -> list[int]:
    """Return an actor's equal share of a node's cores, or all cores if the node has fewer cores than threads."""
    size = len(cores) // actor.num_actors
    return list(cores[actor.position * size :][:size] if size >= num_threads else cores)


def usable(system: Path = _SYSTEM) -> list[int]:
    """Return this process's cores, by socket and physical core."""

    def location(core: int) -> tuple[int, int, int]:
        folder = system / "devices/system/cpu" / f"cpu{core}" / "topology"
        return _number(folder / "physical_package_id"), _number(folder / "core_id"), core

    return sorted(os.sched_getaffinity(0), key=location)


def num_usable(system: Path = _SYSTEM, groups: Path = _GROUPS) -> int:
    """Return how many cores this process can keep busy: those that it may run on, or as many as the limit of its container allows."""
    return max(math.floor(min(len(usable(system)), _limit(system, groups))), 1)


def _limit(system: Path, groups: Path) -> float:
    """Return the processor time that control groups allow, in seconds a second; infinite without a limit."""
    limit = math.inf
    with suppress(OSError, ValueError):
        for line in groups.read_text(encoding="ascii").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                root, read = system / "fs/cgroup", _limit_of_v2
            elif "cpu" in controllers.split(","):
                root, read = system / "fs/cgroup/cpu", _limit_of_v1
            else:
                continue
            # Within a container its own group may be the root of what is mounted, whatever the path says. Limits above it hold, too.
            parts = [part for part in path.split("/") if part not in {"", ".."}]
            limit = min([limit, *(read(root.joinpath(*parts[:depth])) for depth in range(len(parts) + 1))])
    return limit


def _limit_of_v2(folder: Path) -> float:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return float(quota) / float(period)  # a ValueError for "max"
    return math.inf


def _limit_of_v1(folder: Path) -> float:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota > 0 and period > 0 else math.inf  # -1 without a limit


def near(device: torch.device) -> list[int]:
    """Return the usable cores close to a GPU; all if unknown."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return near_pci(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def near_pci(address: str, system: Path = _SYSTEM) -> list[int]:
    """Return the usable cores close to a PCI address; all if unknown."""
    cores = usable(system)
    with suppress(OSError, ValueError):
        local = _listed((system / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii"))
        cores = [core for core in cores if core in local] or cores
    return cores


def bind(cores: Sequence[int]) -> None:
    """Bind all present and future threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread), cores)


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0  # the system does not tell


def _listed(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
