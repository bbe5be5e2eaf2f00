"""cupy's NCCL and CUDA's stream for `raypipe.actors.transport.ray_backend`, in a process without a GPU: notes what is asked of them."""

from __future__ import annotations

import os
from typing import Any

_NUMBERS = {
    name: number
    for number, name in enumerate(
        ["NCCL_SUM", "NCCL_PROD", "NCCL_MIN", "NCCL_MAX"]
        + [f"NCCL_{kind}" for kind in ("FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64", "INT8", "UINT8", "INT32", "INT64")],
        start=100,
    )
}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_ADDRESSES = {"allReduce": 2, "reduce": 2, "broadcast": 2, "allGather": 2, "reduceScatter": 2, "send": 1, "recv": 1}
"""How many addresses each call begins with."""
STREAM = 7


class FakeNccl:
    """In place of `cupy.cuda.nccl`."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.unique_id = b""
        self.destroyed = False

    def __getattr__(self, name: str) -> int:
        return _NUMBERS[name]

    def NcclCommunicator(self, num_ranks: int, unique_id: bytes, rank: int) -> _Communicator:  # noqa: N802  # cupy's name
        assert 0 <= rank < num_ranks
        self.unique_id = unique_id
        return _Communicator(self)


class _Communicator:
    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl

    def __getattr__(self, name: str) -> Any:
        num_addresses = _ADDRESSES[name]

        def call(*arguments: int) -> None:
            addresses, rest = arguments[:num_addresses], arguments[num_addresses:]
            assert all(address > 1 << 12 for address in addresses)
            assert rest[-1] == STREAM
            self._nccl.calls.append((name, *(_NAMES.get(argument, argument) for argument in rest[:-1]), "stream"))

        return call

    def destroy(self) -> None:
        self._nccl.destroyed = True


class FakeCuda:
    """In place of `raypipe.actors.transport.cuda.Cuda`."""

    def __init__(self) -> None:
        self.nccl = FakeNccl()

    def unique_id(self) -> bytes:
        return os.urandom(128)

    def current_stream(self) -> int:
        return STREAM
