"""What differs between a CPU and a GPU, beyond clocks and transports."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from raypipe.model import Batch

CPU = torch.device("cpu")
_NUM_FILLERS = 16
_FILLER_BYTES = 256 << 20
"""To write so many bytes takes a fast GPU some 60 us."""


@lru_cache(maxsize=1)
def _filler(device: torch.device) -> Tensor:
    return torch.empty(_FILLER_BYTES, dtype=torch.uint8, device=device)


def upload(batch: Batch, device: torch.device) -> Batch:
    """The fields of a batch on a device; the host does not wait until they are there."""
    if device.type == "cpu":
        return batch
    return {name: _pinned(tensor, device).to(device, non_blocking=True) for name, tensor in batch.items()}


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in memory that does not move, from which a GPU reads by itself; torch keeps it until it has been read."""
    return tensor.contiguous().pin_memory() if device.type == "cuda" else tensor


def seed(device: torch.device, number: int) -> None:
    """Seeds all that layers on a device may draw from: torch's generator of the host, and of the device."""
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes a hundred times as long
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(number)


def stop_watch(device: torch.device) -> Callable[[], float]:
    """Begins to take the time of a device; the function that it returns ends that, and returns the seconds."""
    if device.type == "cpu":
        since_s = time.perf_counter()
        return lambda: time.perf_counter() - since_s
    module = torch.get_device_module(device)
    module.synchronize()
    if device.type == "cuda":
        # While the device works on these, the host gets ahead of it, as it is in training: its own time does not count.
        for _ in range(_NUM_FILLERS):
            _filler(device).zero_()
    first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
    first.record()

    def stop() -> float:
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    return stop


def drop_fillers() -> None:
    """Gives back what `stop_watch` has kept a GPU busy with."""
    if _filler.cache_info().currsize:
        _filler.cache_clear()
        torch.cuda.empty_cache()


def peak_bytes(what: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors on a GPU at any time of what is done, beyond those before it."""
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    what()
    return int(module.max_memory_allocated(device)) - int(before)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context in which this thread tells a GPU what to do in an order of its own."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    context: AbstractContextManager[object] = module.stream(module.Stream(device))
    return context


def settle(device: torch.device, *, timeout_s: float) -> bool:
    """Waits, without sleep, until a device has done what this thread told it; returns whether it did in time."""
    if device.type == "cpu":
        return True
    event = torch.get_device_module(device).Event()
    event.record()
    deadline_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline_s:
            return False
    return True
