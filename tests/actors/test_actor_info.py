"""What an actor knows of the GPUs and the memory of its node."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from raypipe.actors.actor_info import find_gpus, usable_memory_bytes


def test_a_node_without_a_driver_has_no_gpus() -> None:
    assert all(gpu.memory_bytes > 0 for gpu in find_gpus())
    assert usable_memory_bytes() > 1 << 20


class Driver:
    """Stands in for the module `pynvml` with two GPUs: one with NVLinks, and one that tells little of itself."""

    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        """What the driver refuses."""

    def __init__(self) -> None:
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802  # the library's names, here and below
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return b"NVIDIA Old" if handle else "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self._known(handle, 150_000_000_000))

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=b"FFFFFFFF:FF:1F.7")  # no such bus: its NUMA node is not known

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return self._known(handle, 5)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return self._known(handle, 16)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        return self._known(handle, int(link < 4))

    def _known(self, handle: int, value: int) -> int:
        if handle:
            raise self.NVMLError
        return value


def test_gpus_are_described_as_far_as_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with_links, without = find_gpus()
    assert (with_links.name, with_links.uuid, with_links.memory_bytes) == ("NVIDIA H200", "GPU-0", 150_000_000_000)
    assert (with_links.pcie_generation, with_links.pcie_lanes, with_links.numa_node, with_links.num_nvlinks) == (5, 16, None, 4)
    assert (without.name, without.memory_bytes, without.pcie_generation, without.num_nvlinks) == ("NVIDIA Old", 0, 0, 0)
    assert driver.num_open == 0
