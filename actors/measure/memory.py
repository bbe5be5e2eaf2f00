"""The most memory that a device holds in a window, beyond what it holds without a model.

Of a CPU device that is what Linux counts of its process: the peak of the resident memory (VmHWM), which /proc/self/clear_refs sets
back. Four things in it are not the model's and are taken off:

* what the process had of its own before its stages were built: interpreter, Ray, torch. What torch loads when it is first used, 70 MB
  for its optimizers alone, is loaded before that is looked at, and what was freed before, such as layers that were measured, goes
  back to the system;
* mapped files: the code of libraries, of which more comes in as it is used;
* shared memory: the rings of channels, Ray's object store.

The last two are taken as they are behind the window, since Linux tells no peak of each. What remains counts pages, not tensors: also
holes that the C library could not fill, and buffers that libraries keep. As it keeps what was freed, a window never shows less than what
an earlier one, an evaluation or a checkpoint left behind.
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
    """Finds the peak of a device's memory."""

    def begin(self) -> None:
        """Looks at what comes from now on."""

    def peak_bytes(self) -> int | None:
        """The most that was held since `begin`, less what was held when the meter was made; `None` where it cannot be known."""


def memory_meter(device: torch.device) -> MemoryMeter:
    """The meter of a device that holds nothing of a model yet."""
    return CudaMemory(device) if device.type == "cuda" else ProcessMemory()


class ProcessMemory:
    """See the top: the memory of this process."""

    def __init__(self) -> None:
        _load_what_comes_late(torch.device("cpu"))
        _give_back_what_is_free()
        found = _resident_bytes()
        self._before = None if found is None else found["RssAnon"]
        self._began = False

    def begin(self) -> None:
        """See `MemoryMeter`."""
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
            self._began = True
        except OSError:  # not Linux, or forbidden
            self._began = False

    def peak_bytes(self) -> int | None:
        """See `MemoryMeter`."""
        found = _resident_bytes()
        if found is None or self._before is None or not self._began:
            return None
        return max(found["VmHWM"] - sum(found[name] for name in _SHARED) - self._before, 0)


class CudaMemory:
    """The memory that torch's allocator gave to tensors on a CUDA device; what it keeps besides is left out.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        _load_what_comes_late(device)
        self._before = torch.cuda.memory_allocated(device)

    def begin(self) -> None:
        """See `MemoryMeter`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """See `MemoryMeter`."""
        return max(torch.cuda.max_memory_allocated(self.device) - self._before, 0)


def _resident_bytes() -> dict[str, int] | None:
    """What Linux counts of this process; `None` where it does not tell all of it."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    words = [line.split() for line in lines]
    found = {line[0].rstrip(":"): int(line[1]) * 1024 for line in words if len(line) == 3 and line[2] == "kB"}
    return found if {"VmHWM", "RssAnon", *_SHARED} <= found.keys() else None


def _load_what_comes_late(device: torch.device) -> None:
    """Does once what stages do: torch loads the half of itself when it is first used, and has memory of its own for products on a GPU."""
    weight = nn.Parameter(torch.zeros(2, 2, device=device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    with torch.enable_grad():
        nn.functional.layer_norm(torch.ones(2, 2, device=device) @ weight, (2,)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _give_back_what_is_free() -> None:
    """Lets the C library give free pages back, also those that it was told to keep."""
    gc.collect()
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
