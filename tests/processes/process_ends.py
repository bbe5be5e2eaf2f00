"""Ends of transports between processes: their settings, and what a process does that is only there to be a peer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from raypipe.actors.transport.process import ProcessTransport
from tests.processes.transport_contract import GROUPS, NAMES

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
