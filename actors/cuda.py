"""CUDA and NCCL as `raypipe.actors.nccl` needs them, by torch and cupy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raypipe.errors import ConfigError

_BEFORE_OTHERS = -1
"""The priority of streams whose work goes before that of streams with 0, where both could begin."""

_TYPES = {torch.float32: "NCCL_FLOAT32", torch.float64: "NCCL_FLOAT64", torch.int64: "NCCL_INT64", torch.int32: "NCCL_INT32"}
"""Of what is summed."""


def environment(host: str) -> dict[str, str]:
    """What the processes of a run on GPUs must have in their environment before they touch CUDA; what is there already stays.

    Args:
        host: unlike for each process that shares a GPU with another, by which NCCL takes them for hosts of their own; empty else.
    """
    found = {
        # Each stream gets a queue of its own, up to so many: in a common one, a kernel that waits for a peer holds up the others.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # What waits for a message keeps so many multiprocessors from computing.
        "NCCL_MAX_CTAS": "4",
    }
    if host:
        found |= {"NCCL_HOSTID": host, "NCCL_MAX_CTAS": "1"}
    return {name: value for name, value in found.items() if name not in os.environ}


def kind(device: torch.device) -> str:
    """What topologies call such a GPU, such as `nvidia-h200`."""
    return torch.cuda.get_device_properties(device).name.lower().replace(" ", "-")


def memory_bytes(device: torch.device) -> int:
    """Of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def nccl_version() -> str:
    """The version of NCCL that messages would go over, which must be one on all devices; empty where it is missing."""
    try:
        from cupy.cuda import nccl  # noqa: PLC0415  # an extra
    except ImportError:
        return ""
    if not nccl.available:
        return ""
    number = int(nccl.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class Cuda:
    """The CUDA device of this process, with its current stream as the one that computes.

    Args:
        device: of torch.

    Raises:
        ConfigError: cupy or NCCL is missing; says what to install.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            from cupy.cuda import nccl, runtime  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise ConfigError(f"messages between GPUs need cupy: pip install 'raypipe[{_extra()}]' ({error})") from error
        if not nccl.available:
            raise ConfigError(f"cupy finds no NCCL library: pip install 'raypipe[{_extra()}]', or put libnccl.so.2 where it looks")
        self.nccl = nccl
        self.runtime = runtime

    def unique_id(self) -> bytes:
        """See `Library`."""
        return bytes(self.nccl.get_unique_id())

    def current_stream(self) -> int:
        """The address of the computing stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def communicator(self, num_ranks: int, unique_id: bytes, rank: int) -> CupyCommunicator:
        """See `Library`."""
        torch.cuda.set_device(self.device)  # of this thread
        return CupyCommunicator(self.nccl, self.nccl.NcclCommunicator(num_ranks, unique_id, rank))

    def stream(self) -> torch.cuda.Stream:
        """See `Library`."""
        return torch.cuda.Stream(self.device, priority=_BEFORE_OTHERS)  # type: ignore[no-untyped-call]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Library`."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """See `Library`."""
        stream.wait_stream(torch.cuda.current_stream(self.device))

    def use(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """See `Library`."""
        tensor.record_stream(stream)

    def reached(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See `Library`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, event: torch.cuda.Event, *, timeout_s: float) -> None:  # the limit is the clock's
        """See `Library`."""
        event.wait(torch.cuda.current_stream(self.device))

    def happened(self, event: torch.cuda.Event) -> bool:
        """See `Library`."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    # Between processes of one GPU

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """See `SharingLibrary`."""
        kept = _KEPT.get(num_bytes)
        if kept:
            return kept.pop()
        address = int(self.runtime.malloc(num_bytes))
        handle = bytes(self.runtime.ipcGetMemHandle(address))
        _HANDLES[address] = num_bytes, handle
        return address, handle

    def free(self, address: int) -> None:
        """See `SharingLibrary`."""
        num_bytes, handle = _HANDLES[address]
        _KEPT.setdefault(num_bytes, []).append((address, handle))

    def open(self, handle: bytes) -> int:
        """See `SharingLibrary`."""
        return int(self.runtime.ipcOpenMemHandle(handle))

    def close(self, address: int) -> None:
        """See `SharingLibrary`."""
        self.runtime.ipcCloseMemHandle(address)

    def shared_event(self) -> tuple[torch.cuda.Event, bytes]:
        """See `SharingLibrary`."""
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        return event, bytes(event.ipc_handle())  # type: ignore[no-untyped-call]

    def open_event(self, handle: bytes) -> torch.cuda.Event:
        """See `SharingLibrary`."""
        return torch.cuda.Event.from_ipc_handle(self.device, handle)  # type: ignore[no-any-return, no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
        """See `SharingLibrary`."""
        event.record(stream or torch.cuda.current_stream(self.device))

    def delay(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `SharingLibrary`."""
        event.wait(stream)

    def copy(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream | None) -> None:
        """See `SharingLibrary`."""
        on = stream or torch.cuda.current_stream(self.device)
        self.runtime.memcpyAsync(target, source, num_bytes, self.runtime.memcpyDeviceToDevice, on.cuda_stream)


def _extra() -> str:
    """The extra of raypipe that goes with torch's CUDA."""
    return "cuda13" if (torch.version.cuda or "13").startswith("13") else "cuda12"


_HANDLES: dict[int, tuple[int, bytes]] = {}
"""Of memory that this process has shared, by its address: its bytes and its handle."""
_KEPT: dict[int, list[tuple[int, bytes]]] = {}
"""That of which no channel makes use now, by its bytes."""


class CupyCommunicator:
    """A communicator of cupy, given tensors of torch: both see the same memory.

    Args:
        nccl: cupy's module.
        communicator: cupy's.
    """

    def __init__(self, nccl: Any, communicator: Any) -> None:
        self.nccl = nccl
        self.communicator = communicator
        self.ended = False

    def send(self, tensors: Sequence[Tensor], peer: int, stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        self._pass(self.communicator.send, tensors, peer, stream)

    def recv(self, tensors: Sequence[Tensor], peer: int, stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        self._pass(self.communicator.recv, tensors, peer, stream)

    def _pass(self, call: Any, tensors: Sequence[Tensor], peer: int, stream: torch.cuda.Stream) -> None:
        if len(tensors) > 1:
            self.nccl.groupStart()
        try:
            for tensor in tensors:
                call(tensor.data_ptr(), tensor.nbytes, self.nccl.NCCL_UINT8, peer, stream.cuda_stream)
        finally:
            if len(tensors) > 1:
                self.nccl.groupEnd()

    def all_reduce(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        start, kind = tensor.data_ptr(), getattr(self.nccl, _TYPES[tensor.dtype])
        self.communicator.allReduce(start, start, tensor.numel(), kind, self.nccl.NCCL_SUM, stream.cuda_stream)

    def problem(self) -> str | None:
        """See `Communicator`."""
        if self.ended:
            return "its communicator was ended"
        try:
            self.communicator.check_async_error()
        except self.nccl.NcclError as error:
            return f"NCCL failed: {error}; NCCL_DEBUG=INFO in the environment of the actors says more"
        return None

    def shut_down(self) -> None:
        """See `Communicator`."""
        if not self.ended:
            self.ended = True
            self.communicator.abort()
