"""The peak of the memory that a device holds in a window, less what it holds without a model.

On a CPU: the process's peak (VmHWM, reset by writing to /proc/self/clear_refs), less its memory before stages were built, mapped files and
shared memory, as Linux counts them after the window. It counts pages, not tensors: also holes in the C library's heap. Freed memory stays
with the process: no window shows less than an earlier window, evaluation or checkpoint has left behind.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SHARED = ("RssFile", "RssShmem")


class MemoryMeter(Protocol):
    """Measures the peak of a device's memory."""

    def begin(self) -> None:
        """Start a new measurement."""

    def peak_bytes(self) -> int | None:
        """Return the peak since `begin`, less what the device held when the meter was made; `None` if unknown."""


def memory_meter(device: torch.device) -> MemoryMeter:
    """Return the meter of a device that holds no model yet."""
    return CudaMemory(device) if device.type == "cuda" else ProcessMemory()


class ProcessMemory:
    """The memory of this process."""

    def __init__(self) -> None:
        _use_torch_once(torch.device("cpu"))
        _return_free_memory()
        resident = _resident_bytes()
        self._before = None if resident is None else resident["RssAnon"]
        self._began = False

    def begin(self) -> None:
        """Start a new measurement."""
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
            self._began = True
        except OSError:  # not Linux, or forbidden
            self._began = False

    def peak_bytes(self) -> int | None:
        """Return the peak since `begin`; `None` if unknown."""
        resident = _resident_bytes()
        if resident is None or self._before is None or not self._began:
            return None
        return max(resident["VmHWM"] - sum(resident[name] for name in _SHARED) - self._before, 0)


class CudaMemory:
    """The memory of tensors on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        _use_torch_once(device)
        self._before = torch.cuda.memory_allocated(device)

    def begin(self) -> None:
        """Start a new measurement."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Return the peak since `begin`."""
        return max(torch.cuda.max_memory_allocated(self.device) - self._before, 0)


def _resident_bytes() -> dict[str, int] | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    words = [line.split() for line in lines]
    resident = {line[0].rstrip(":"): int(line[1]) * 1024 for line in words if len(line) == 3 and line[2] == "kB"}
    return resident if {"VmHWM", "RssAnon", *_SHARED} <= resident.keys() else None


def _use_torch_once(device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(2, 2, device=device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    with torch.enable_grad():
        nn.functional.layer_norm(torch.ones(2, 2, device=device) @ weight, (2,)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _return_free_memory() -> None:
    gc.collect()
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
