"""CUDA and NCCL as `raypipe.actors.transport.nccl` needs them, by torch and cupy."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.cuda_ipc import SharedBuffer
from raypipe.errors import ConfigError

_BEFORE_OTHERS = -1
"""Priority of streams that go before those with 0."""

_HANDLE_BYTES = 64
"""Size of CUDA's handle of memory or of an event."""
_IN_USE_S = 0.3
"""Limit until a communicator is aborted under a call that does not return."""
_LOOK_EVERY_S = 0.001

_TYPES = {torch.float32: "NCCL_FLOAT32", torch.float64: "NCCL_FLOAT64", torch.int64: "NCCL_INT64", torch.int32: "NCCL_INT32"}
"""Dtypes of sums."""


def environment(host: str) -> dict[str, str]:
    """Return the environment variables to set in each process before it uses CUDA, but for those that are set already.

    `host` is a unique text for each process that shares a GPU, so that NCCL treats each as a host; empty otherwise.
    """
    found = {
        # Each stream gets a queue of its own, up to so many: in a common one, a kernel that waits for a peer holds up the others.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # What waits for a message keeps so many multiprocessors from computing.
        "NCCL_MAX_CTAS": "4",
        # All ways are opened when a communicator is made: later that would hold hosts up, in windows.
        "NCCL_RUNTIME_CONNECT": "0",
    }
    if host:
        found |= {"NCCL_HOSTID": host, "NCCL_MAX_CTAS": "1"}
    return {name: value for name, value in found.items() if name not in os.environ}


def kind(device: torch.device) -> str:
    """Return the kind of a GPU in topologies, such as `nvidia-h200`."""
    return torch.cuda.get_device_properties(device).name.lower().replace(" ", "-")


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def nccl_version() -> str:
    """Return the version of NCCL, which must be the same on all devices; empty if it is missing."""
    try:
        from cupy.cuda import nccl  # noqa: PLC0415  # an extra
    except ImportError:
        return ""
    if not nccl.available:
        return ""
    number = int(nccl.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class Cuda:
    """The CUDA device of this process, computing on its current stream; raises `ConfigError` if cupy or NCCL is missing."""

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
        self._kept: dict[int, list[SharedBuffer]] = {}
        self._retired: list[SharedBuffer] = []
        """Buffers whose events another process may still wait for: they must not end before this process does."""

    def unique_id(self) -> bytes:
        """See `Library`."""
        return bytes(self.nccl.get_unique_id())

    def current_stream(self) -> int:
        """Return the address of the computing stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def communicator(self, num_ranks: int, unique_id: bytes, rank: int) -> CupyCommunicator:
        """See `Library`."""
        torch.cuda.set_device(self.device)  # of this thread
        return CupyCommunicator(self.nccl, self.nccl.NcclCommunicator(num_ranks, unique_id, rank), self.stream())

    def stream(self) -> torch.cuda.Stream:
        """See `Library`. Torch has only 32 streams of its own, which it hands out again."""
        with torch.cuda.device(self.device):
            made = self.runtime.streamCreateWithPriority(self.runtime.streamNonBlocking, _BEFORE_OTHERS)
        return torch.cuda.ExternalStream(int(made), self.device)  # type: ignore[no-untyped-call]

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

    def make_buffer(self, num_bytes: int) -> SharedBuffer:
        """See `SharingLibrary`."""
        kept = self._kept.get(num_bytes)
        if kept:
            old = kept.pop()
            self._retired.append(old)
            address, memory = old.address, old.handles[:_HANDLE_BYTES]
        else:
            address = self._malloc(num_bytes)
            memory = bytes(self.runtime.ipcGetMemHandle(address))
        # New events, also for old memory: a process that died may have recorded the old ones behind work that never ends. What this
        # process copied there before is done: its clock lets the device come to rest before each window.
        filled, taken = (torch.cuda.Event(interprocess=True) for _ in range(2))  # type: ignore[no-untyped-call]
        handles = [memory, *(bytes(event.ipc_handle()) for event in (filled, taken))]  # type: ignore[no-untyped-call]
        return SharedBuffer(address, num_bytes, filled, taken, b"".join(handles))

    def _malloc(self, num_bytes: int) -> int:
        try:
            return int(self.runtime.malloc(num_bytes))
        except self.runtime.CUDARuntimeError:
            torch.cuda.empty_cache()
        try:
            return int(self.runtime.malloc(num_bytes))
        except self.runtime.CUDARuntimeError as error:
            raise torch.OutOfMemoryError(f"no memory for {num_bytes} bytes of a message: {error}") from error

    def keep_buffer(self, slot: SharedBuffer) -> None:
        """See `SharingLibrary`."""
        self._kept.setdefault(slot.num_bytes, []).append(slot)

    def open_buffer(self, num_bytes: int, handles: bytes) -> SharedBuffer:
        """See `SharingLibrary`."""
        memory, filled, taken = (handles[first : first + _HANDLE_BYTES] for first in range(0, 3 * _HANDLE_BYTES, _HANDLE_BYTES))
        address = int(self.runtime.ipcOpenMemHandle(memory))
        return SharedBuffer(address, num_bytes, self._open_event(filled), self._open_event(taken), handles)

    def _open_event(self, handle: bytes) -> torch.cuda.Event:
        return torch.cuda.Event.from_ipc_handle(self.device, handle)  # type: ignore[no-any-return, no-untyped-call]

    def close_buffer(self, slot: SharedBuffer) -> None:
        """See `SharingLibrary`."""
        self.runtime.ipcCloseMemHandle(slot.address)

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
    return "cuda13" if (torch.version.cuda or "13").startswith("13") else "cuda12"


class CupyCommunicator:
    """A communicator of cupy (`nccl` is its module) for tensors of torch."""

    def __init__(self, nccl: Any, communicator: Any, stream: torch.cuda.Stream) -> None:
        self.nccl = nccl
        self.communicator = communicator
        self.stream = stream
        self._lock = threading.Lock()
        self._ended = False
        self._num_calls = 0
        """Calls under way in other threads, which need the communicator."""

    def send(self, tensors: Sequence[Tensor], peer: int, stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        with self._in_use():
            self._pass(self.communicator.send, tensors, peer, stream)

    def recv(self, tensors: Sequence[Tensor], peer: int, stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        with self._in_use():
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
        with self._in_use():
            self.communicator.allReduce(start, start, tensor.numel(), kind, self.nccl.NCCL_SUM, stream.cuda_stream)

    def to_owners(self, parts: Sequence[tuple[Tensor, int | None]], stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        communicator, nccl = self.communicator, self.nccl
        with self._in_use(), self._as_one():
            for tensor, owner in parts:
                start, kind = tensor.data_ptr(), getattr(nccl, _TYPES[tensor.dtype])
                if owner is None:
                    communicator.allReduce(start, start, tensor.numel(), kind, nccl.NCCL_SUM, stream.cuda_stream)
                else:
                    communicator.reduce(start, start, tensor.numel(), kind, nccl.NCCL_SUM, owner, stream.cuda_stream)

    def from_owners(self, parts: Sequence[tuple[Tensor, int]], stream: torch.cuda.Stream) -> None:
        """See `Communicator`."""
        with self._in_use(), self._as_one():
            for tensor, owner in parts:
                start = tensor.data_ptr()
                self.communicator.broadcast(start, start, tensor.nbytes, self.nccl.NCCL_UINT8, owner, stream.cuda_stream)

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def problem(self) -> str | None:
        """See `Communicator`."""
        try:
            with self._in_use():
                self.communicator.check_async_error()
        except ChannelError as error:
            return error.problem
        return None

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the communicator alive during a call; raises `ChannelError` if it was aborted, or NCCL fails."""
        with self._lock:
            if self._ended:
                raise ChannelError(CLOSED_BY_PEER)
            self._num_calls += 1
        try:
            yield
        except self.nccl.NcclError as error:
            raise ChannelError(f"NCCL failed: {error}; NCCL_DEBUG=INFO in the environment of the actors says more") from error
        finally:
            with self._lock:
                self._num_calls -= 1

    def shut_down(self) -> None:
        """See `Communicator`. In a thread: aborting one may wait for the GPU, on which others must be aborted first."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        threading.Thread(target=self._abort, name="raypipe ends a communicator", daemon=True).start()

    def _abort(self) -> None:
        deadline_s = time.monotonic() + _IN_USE_S
        # A call that waits inside NCCL ends only with the communicator.
        while self._num_calls and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
        with suppress(self.nccl.NcclError):
            self.communicator.abort()
