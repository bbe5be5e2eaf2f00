"""The peak of the memory that a device holds in a window, less what it holds without a model.

On a CPU: the process's peak less its memory before stages were built, mapped files and shared memory. It counts pages, not tensors: also
holes in the C library's heap and freed memory, so no window shows less than an earlier one has left behind.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SHARED = ("RssFile", "RssShmem")


class ProcessMemory:
    """The memory of this process."""

    def __init__(self) -> None:
        _use_torch_once(torch.device("cpu"))
        gc.collect()
        with suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        resident = _resident_bytes()
        self._before = None if resident is None else resident["RssAnon"]
        self._began = False

    def begin(self) -> None:
        """Start a new measurement."""
        try:
            _CLEAR_REFS.write_text("5", encoding="ascii")  # resets VmHWM
            self._began = True
        except OSError:  # not Linux, or forbidden
            self._began = False

    def peak_bytes(self) -> int | None:
        """Return the peak since `begin`; `None` if unknown."""
        resident = _resident_bytes()  # of mapped files and shared memory Linux has no peak
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


MemoryMeter = ProcessMemory | CudaMemory


def memory_meter(device: torch.device) -> MemoryMeter:
    """Return the meter of a device that holds no model yet."""
    return CudaMemory(device) if device.type == "cuda" else ProcessMemory()


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
    optimizer = torch.optim.AdamW([weight], fused=True)  # torch loads 70 MB for its optimizers on first use
    with torch.enable_grad():
        nn.functional.layer_norm(torch.ones(2, 2, device=device) @ weight, (2,)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
