"""Which cores of its node an actor keeps to, where it keeps to some (`scaling.bind_cores`).

In a node with several sockets each core has memory and GPUs that are near and others that are far; a scheduler moves a process that
often sleeps wherever a core looks idle, away from what it works on. Where stages take turns on too few cores it is better left alone:
four that compute on two were 16 to 25 % slower with two bound to each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

_SYSTEM = Path("/sys")


class Place(NamedTuple):
    """Which of the actors of its node one is.

    Attributes:
        position: from 0, in the order of devices.
        num_actors: of them.
    """

    position: int
    num_actors: int


def share(cores: Sequence[int], place: Place, *, num_threads: int) -> list[int]:
    """The cores of one actor among several on a node: equally many, or all where there is not one for each of their threads.

    Args:
        cores: of the node, those next to each other that share most.
        place: which actor.
        num_threads: of each actor.
    """
    size = len(cores) // place.num_actors
    return list(cores[place.position * size :][:size] if size >= num_threads else cores)


def usable(system: Path = _SYSTEM) -> list[int]:
    """The cores that this process may use: by socket, threads of one core next to each other."""

    def whereabouts(core: int) -> tuple[int, int, int]:
        folder = system / "devices/system/cpu" / f"cpu{core}" / "topology"
        return _number(folder / "physical_package_id"), _number(folder / "core_id"), core

    return sorted(os.sched_getaffinity(0), key=whereabouts)


def near(device: torch.device) -> list[int]:
    """Of the cores that this process may use, those next to a GPU; all of them where the system does not tell."""
    facts: Any = torch.cuda.get_device_properties(device)
    return near_pci(f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0")


def near_pci(address: str, system: Path = _SYSTEM) -> list[int]:
    """The same for whatever has an address on the PCI bus."""
    cores = usable(system)
    with suppress(OSError, ValueError):
        local = _listed((system / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii"))
        cores = [core for core in cores if core in local] or cores
    return cores


def bind(cores: Sequence[int]) -> None:
    """Keeps all threads of this process to some cores, and those that they will start."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0  # the system does not tell


def _listed(text: str) -> set[int]:
    """The numbers of a list like `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
