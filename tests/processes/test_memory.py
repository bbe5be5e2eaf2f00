"""The peak of a device's memory is the model's: what the process was before, mapped files and shared memory are left out."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from raypipe.actors.measure import memory
from raypipe.actors.measure.memory import CudaMemory, ProcessMemory, memory_meter

MB = 10**6
NOISE_BYTES = 16 * MB
"""Of a process in which other tests ran."""


def filled(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), 7, dtype=torch.uint8)


def meter() -> ProcessMemory:
    found = ProcessMemory()
    found.begin()
    if found.peak_bytes() is None:
        pytest.skip("Linux does not tell the peak of this process")
    return found


def test_what_was_held_for_a_while_is_in_the_peak_until_the_next_window() -> None:
    of_process = meter()
    held = filled(200 * MB)
    del held
    assert of_process.peak_bytes() == pytest.approx(200 * MB, abs=NOISE_BYTES)
    of_process.begin()
    assert of_process.peak_bytes() == pytest.approx(0, abs=NOISE_BYTES)


def test_what_was_held_before_does_not_count() -> None:
    held = filled(200 * MB)
    of_process = meter()
    assert of_process.peak_bytes() == pytest.approx(0, abs=NOISE_BYTES)
    assert held[0] == 7


def test_shared_memory_does_not_count() -> None:
    of_process = meter()
    with mmap.mmap(-1, 200 * MB) as shared:
        shared.write(b"7" * (200 * MB))
        of_process.begin()
        assert of_process.peak_bytes() == pytest.approx(0, abs=NOISE_BYTES)


@pytest.mark.parametrize("name", ["_CLEAR_REFS", "_STATUS"])
def test_where_linux_does_not_help_the_peak_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(memory, name, tmp_path / "absent" / "file")
    of_process = ProcessMemory()
    of_process.begin()
    assert of_process.peak_bytes() is None


def test_an_account_without_all_of_its_lines_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  100 kB\nVmRSS:\t  100 kB\n")
    monkeypatch.setattr(memory, "_STATUS", status)
    of_process = ProcessMemory()
    of_process.begin()
    assert of_process.peak_bytes() is None


def test_of_a_cuda_device_torch_tells_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.device] = []
    loaded: list[torch.device] = []
    monkeypatch.setattr(memory, "_use_torch_once", loaded.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    device = torch.device("cuda", 1)
    of_device = memory_meter(device)
    assert isinstance(of_device, CudaMemory)
    of_device.begin()
    assert of_device.peak_bytes() == 250
    assert begun == loaded == [device]


def test_other_devices_are_measured_by_their_process() -> None:
    assert isinstance(memory_meter(torch.device("cpu")), ProcessMemory)
