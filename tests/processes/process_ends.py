"""Ends of transports between processes: their settings, and what a process does that is only there to be a peer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.shm_channel import Description
from raypipe.actors.transport.tcp_link import HEADER, Kind
from tests.processes.transport_contract import GROUPS, NAMES, announced, gradient

INTERFACE = "GLOO_SOCKET_IFNAME"


class Make(Protocol):
    """Makes the unconnected end of a device of `num_devices`, closed after the test; settings of ProcessTransport may be given."""

    def __call__(self, device: int, num_devices: int = 2, **changed: Any) -> ProcessTransport: ...


Peers = Callable[..., tuple[ProcessTransport, list[BaseProcess]]]
"""Connects device 0 of this process with the others, each in a process that does nothing once connected."""


def all_channels(num_devices: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(num_devices), 2))


def settings(device: int, *, num_devices: int, run: int, port: int, **changed: Any) -> dict[str, Any]:
    return {
        "device": device,
        "names": NAMES,
        "channels": all_channels(num_devices),
        "groups": [members for members in GROUPS if max(members) < num_devices],
        "store": ("127.0.0.1", port),
        "prefix": f"{run}/0",
        "timeout_s": 20.0,
    } | changed


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
