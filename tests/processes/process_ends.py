"""Ends of transports between processes: their settings, and what a process does that is only there to be a peer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch import Tensor

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.secret import StoreAddress
from raypipe.actors.transport.shm_channel import Description
from raypipe.actors.transport.tcp_link import HEADER, Kind
from tests.processes.transport_contract import GROUPS, NAMES, announced, gradient, together

INTERFACE = "GLOO_SOCKET_IFNAME"


class Make(Protocol):
    """Makes the unconnected end of a device of `num_devices`, closed after the test; settings of ProcessTransport may be given."""

    def __call__(self, device: int, num_devices: int = 2, **changed: Any) -> ProcessTransport: ...


Peers = Callable[..., tuple[ProcessTransport, list[BaseProcess]]]
"""Connects device 0 of this process with the others, each in a process that does nothing once connected."""


def all_channels(num_devices: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(num_devices), 2))


def settings(device: int, *, num_devices: int, run: int, store: StoreAddress, **changed: Any) -> dict[str, Any]:
    return {
        "device": device,
        "names": NAMES,
        "channels": all_channels(num_devices),
        "groups": [members for members in GROUPS if max(members) < num_devices],
        "store": store,
        "prefix": f"{run}/0",
        "timeout_s": 20.0,
    } | changed


def connected(make: Make, num_devices: int = 2, **changed: Any) -> list[ProcessTransport]:
    ends = [make(device, num_devices, **changed) for device in range(num_devices)]
    together(*(end.connect for end in ends))
    return ends


def members_of(num_devices: int) -> dict[str, Any]:
    everybody = tuple(range(num_devices))
    return {"names": ("alpha", "beta", "gamma", "delta"), "groups": [everybody], "channels": [(0, 1)]}


def ring_sum(tensors: Sequence[Tensor]) -> Tensor:
    """What the ring makes of the tensors, added here in its order: of small ones, that of the members."""
    count, numel = len(tensors), tensors[0].numel()
    if numel * max(tensors[0].itemsize, 4) <= 1024:
        return sum((tensor.float() for tensor in tensors[1:]), start=tensors[0].float()).to(tensors[0].dtype)
    base, longer = divmod(numel, count)
    starts = [number * base + min(number, longer) for number in range(count + 1)]
    dtype = torch.float32 if tensors[0].dtype is torch.bfloat16 else tensors[0].dtype
    total = torch.empty(numel, dtype=dtype)
    for number in range(count):
        part = slice(starts[number], starts[number + 1])
        of_slice = tensors[number][part].to(dtype)
        for step in range(1, count):
            of_slice = of_slice + tensors[(number + step) % count][part].to(dtype)
        total[part] = of_slice
    return total.to(tensors[0].dtype)


def connect_and_hang(arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    transport = ProcessTransport(**arguments)
    transport.connect()
    transport.open_window({}, {})
    threading.Event().wait(50.0)


def connect_and_send_half(arguments: dict[str, Any]) -> None:
    """Connects, announces a message of 1000 bytes for device 0, sends half of it and hangs."""
    torch.set_num_threads(1)
    transport = ProcessTransport(**arguments)
    transport.connect()
    port = transport._endpoints.port
    assert port is not None
    text = Description(announced(gradient(0), torch.ones(250))).packet
    port.links[0].end.sendall(HEADER.pack(Kind.MESSAGE, len(text), 0, 0, 1000) + text + bytes(500))
    threading.Event().wait(50.0)
