"""Raypipe's NCCL as a backend of `ray.util.collective`, for your own actors that pass tensors between GPUs.

    import raypipe.actors.transport.ray_backend as collective     # in the driver and in every actor
    collective.register()
    ray.util.collective.init_collective_group(world_size, rank, backend="raypipe_nccl")

Takes tensors of torch, and arrays of cupy (DLPack). All work follows torch's current stream; no host waits. Two ranks that both send
first wait for ever, as with NCCL itself. Ray's own backend fails for cupy's arrays, and is not ordered with torch's streams (Ray 2.60).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.collective import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)
from torch import Tensor
from torch.utils import dlpack

from raypipe.actors.transport.cuda import Cuda, nccl_version
from raypipe.errors import RunError

NAME = "raypipe_nccl"
_CONNECT_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.02
_KINDS = {
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
}
_OPERATIONS = {ReduceOp.SUM: "NCCL_SUM", ReduceOp.PRODUCT: "NCCL_PROD", ReduceOp.MIN: "NCCL_MIN", ReduceOp.MAX: "NCCL_MAX"}


class NcclLibrary(Protocol):
    """What a group needs of `Cuda`; `nccl` is cupy's module."""

    nccl: Any
    """cupy's module."""

    def unique_id(self) -> bytes:
        """Return the id of a new communicator."""

    def current_stream(self) -> int:
        """Return the address of the computing stream."""


def register() -> None:
    """Register the backend in this process; may be called again."""
    try:
        register_collective_backend(NAME, NcclGroup)
    except ValueError:  # it is registered
        return


def _library() -> NcclLibrary:
    return Cuda(torch.device("cuda", torch.cuda.current_device()))


class _Keeper:
    def __init__(self, unique_id: bytes) -> None:
        self._unique_id = unique_id

    def kept(self) -> bytes:
        return self._unique_id


class NcclGroup(BaseGroup):  # type: ignore[misc]  # Ray has no types
    """The ranks of a group, one communicator."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._library = _library()
        self._keeper: Any = None
        self._nccl = self._library.nccl
        self._communicator = self._nccl.NcclCommunicator(world_size, self._shared_id(), rank)

    @property
    def _keeper_name(self) -> str:
        return f"{NAME}/{self.group_name}/{self.world_size}"

    def _shared_id(self) -> bytes:
        name = self._keeper_name
        if self.rank == 0:
            unique_id = self._library.unique_id()
            self._keeper = ray.remote(num_cpus=0)(_Keeper).options(name=name).remote(unique_id)
            ray.get(self._keeper.kept.remote(), timeout=_CONNECT_TIMEOUT_S)
            return unique_id
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            try:
                return bytes(ray.get(ray.get_actor(name).kept.remote(), timeout=_CONNECT_TIMEOUT_S))
            except (ValueError, RayActorError, GetTimeoutError):
                if time.monotonic() > deadline_s:
                    problem = f"rank 0 of the collective group {self.group_name!r} did not come within {_CONNECT_TIMEOUT_S:g} s"
                    raise RunError(problem) from None
            time.sleep(_LOOK_EVERY_S)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return NAME.upper()

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return whether this process has NCCL."""
        return bool(nccl_version())

    def destroy_group(self) -> None:
        """End the communicator."""
        self._communicator.destroy()
        if self._keeper is not None:
            ray.kill(self._keeper)
            # Until the name is gone: a group that is made anew under it must not find this one.
            deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
            with suppress(ValueError):
                while ray.get_actor(self._keeper_name) and time.monotonic() < deadline_s:
                    time.sleep(_LOOK_EVERY_S)

    # What ray.util.collective calls; it gives tensors in lists of one

    def allreduce(self, tensor: Sequence[Any], allreduce_options: Any = AllReduceOptions()) -> None:  # noqa: B008  # as Ray has it
        """Combine a tensor of each rank, in place."""
        own = _one(tensor)
        operation = self._operation(allreduce_options)
        self._communicator.allReduce(own.data_ptr(), own.data_ptr(), own.numel(), self._kind(own), operation, self._stream())

    def barrier(self, barrier_options: Any = BarrierOptions()) -> None:  # noqa: B008
        """Let the streams of all ranks wait for each other."""
        self.allreduce([torch.zeros(1, device="cuda")])

    def reduce(self, tensor: Sequence[Any], reduce_options: Any = ReduceOptions()) -> None:  # noqa: B008
        """Combine a tensor of each rank in the root's; the others' do not change."""
        own, root = _one(tensor), reduce_options.root_rank
        operation = self._operation(reduce_options)
        self._communicator.reduce(own.data_ptr(), own.data_ptr(), own.numel(), self._kind(own), operation, root, self._stream())

    def broadcast(self, tensor: Sequence[Any], broadcast_options: Any = BroadcastOptions()) -> None:  # noqa: B008
        """Send the tensor of the root to all ranks."""
        own, root = _one(tensor), broadcast_options.root_rank
        self._communicator.broadcast(own.data_ptr(), own.data_ptr(), own.numel(), self._kind(own), root, self._stream())

    def allgather(self, tensor_list: Sequence[Sequence[Any]], tensor: Sequence[Any], allgather_options: Any = AllGatherOptions()) -> None:  # noqa: B008
        """Send the tensors of all ranks to all ranks."""
        own = _one(tensor)
        targets = [_tensor(each) for each in tensor_list[0]]
        gathered = torch.empty((len(targets), *own.shape), dtype=own.dtype, device=own.device)
        self._communicator.allGather(own.data_ptr(), gathered.data_ptr(), own.numel(), self._kind(own), self._stream())
        for target, part in zip(targets, gathered, strict=True):
            target.copy_(part)

    def reducescatter(
        self,
        tensor: Sequence[Any],
        tensor_list: Sequence[Sequence[Any]],
        reducescatter_options: Any = ReduceScatterOptions(),  # noqa: B008
    ) -> None:
        """Combine the n-th tensors of all ranks in the tensor of rank n."""
        target = _one(tensor)
        own = torch.stack([_tensor(each) for each in tensor_list[0]])
        operation = self._operation(reducescatter_options)
        self._communicator.reduceScatter(own.data_ptr(), target.data_ptr(), target.numel(), self._kind(target), operation, self._stream())

    def send(self, tensor: Sequence[Any], send_options: Any = SendOptions()) -> None:  # noqa: B008
        """Send a tensor to a rank, which receives one of the same size."""
        own = _one(tensor)
        self._communicator.send(own.data_ptr(), own.numel(), self._kind(own), send_options.dst_rank, self._stream())

    def recv(self, tensor: Sequence[Any], recv_options: Any = RecvOptions()) -> None:  # noqa: B008
        """Receive a tensor from a rank."""
        own = _one(tensor)
        self._communicator.recv(own.data_ptr(), own.numel(), self._kind(own), recv_options.src_rank, self._stream())

    def _kind(self, tensor: Tensor) -> int:
        if tensor.dtype not in _KINDS:
            raise ValueError(f"NCCL has no tensors of {tensor.dtype}; it has {', '.join(map(str, _KINDS))}")
        return int(getattr(self._nccl, _KINDS[tensor.dtype]))

    def _operation(self, options: Any) -> int:
        return int(getattr(self._nccl, _OPERATIONS[options.reduceOp]))

    def _stream(self) -> int:
        return self._library.current_stream()


def _one(tensors: Sequence[Any]) -> Tensor:
    (tensor,) = tensors
    return _tensor(tensor)


def _tensor(own: Any) -> Tensor:
    tensor: Tensor = own if isinstance(own, Tensor) else dlpack.from_dlpack(own)
    if not tensor.is_contiguous():
        raise ValueError("NCCL takes contiguous tensors; give `tensor.contiguous()`")
    return tensor
