"""What differs between a CPU and a GPU, besides clocks and transports."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypipe.model import Batch

CPU = torch.device("cpu")
_NUM_FILLERS = 16
_FILLER_BYTES = 256 << 20  # a fast GPU writes this in about 60 us


@lru_cache(maxsize=1)
def _filler(device: torch.device) -> Tensor:
    return torch.empty(_FILLER_BYTES, dtype=torch.uint8, device=device)


def upload(batch: Batch, device: torch.device) -> Batch:
    """Copy to a device, without waiting, what of a batch is not there."""
    return batch if device.type == "cpu" else {name: _uploaded(tensor, device) for name, tensor in batch.items()}


def _uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.is_cpu:
        # A GPU reads pinned memory by itself; torch keeps the pinned copy until it has been read.
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


def seed(device: torch.device, number: int) -> None:
    """Seed torch's generators of the host and of a device."""
    torch.default_generator.manual_seed(number)  # 100 times as fast as `torch.manual_seed`
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(number)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(number)


def stop_watch(device: torch.device) -> Callable[[], float]:
    """Start timing a device; the returned function stops it and returns the seconds.

    Of a CPU, those in which the calling thread waited for a core do not count: what shares cores with it is not its own time.
    """
    if device.type == "cpu":
        # The clock is read first here and last below: of a wait between two readings, no more is taken off than has passed.
        since_s, waited_s, worked_s = time.perf_counter(), _waited_s(), time.thread_time()

        def stop_core() -> float:
            until_worked_s, until_waited_s = time.thread_time(), _waited_s()
            return max(time.perf_counter() - since_s - (until_waited_s - waited_s), until_worked_s - worked_s)

        return stop_core
    module = torch.get_device_module(device)
    module.synchronize()
    if device.type == "cuda":
        # While the device works on these the host gets ahead, as in training, so that the host's time does not count.
        for _ in range(_NUM_FILLERS):
            _filler(device).zero_()
    first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
    first.record()

    def stop() -> float:
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    return stop


def _waited_s() -> float:
    """Return the seconds for which the calling thread could run and had no core; 0 where the system does not say."""
    try:
        _, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(waited_ns) / 1e9


def drop_fillers() -> None:
    """Free the memory that `stop_watch` writes to."""
    if _filler.cache_info().currsize:
        _filler.cache_clear()
        torch.cuda.empty_cache()


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU during some work, less the bytes before it."""
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    work()
    return int(module.max_memory_allocated(device)) - int(before)


def mark(device: torch.device) -> Any:
    """Record what the computing stream of this thread has been told so far; `None` on a CPU, where that is done."""
    if device.type == "cpu":
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Give this thread a GPU stream of its own in this context."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    context: AbstractContextManager[object] = module.stream(module.Stream(device))
    return context


def wait_for_queued(device: torch.device, *, timeout_s: float) -> bool:
    """Wait, without sleep, for the work that this thread has queued; return whether it ended in time."""
    if device.type == "cpu":
        return True
    event = mark(device)
    deadline_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline_s:
            return False
    return True
