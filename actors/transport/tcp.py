"""Connections between devices over TCP, which carry messages and pieces of sums as frames.

    header (32 bytes)   kind, phase, slice, occurrence, key, offset, number of bytes
    message             its description (`key` bytes), then its tensors, each at a multiple of 64 bytes
    piece of a sum      bytes of a slice, from `offset` on

Each pair of devices that exchange anything has one connection. What a device sends takes turns (`tcp_sender`); a thread of its own
reads whatever comes (`tcp_receiver`), so that no transfer depends on another one being taken.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from raypipe.actors.transport.rendezvous import Rendezvous

HEADER = struct.Struct("<BBHIQQQ")
ALIGNMENT_BYTES = 64
_HELLO = struct.Struct("<I16s")
_TCP_NOTSENT_LOWAT = 25
"""Of <linux/tcp.h>; Python's socket module has no name for it."""
_UNSENT_BYTES = 64 << 10
"""Bytes that the kernel holds beyond what is on its way: what is there cannot be overtaken."""
_LOOK_EVERY_S = 0.05


class FrameKind(IntEnum):
    """What a frame carries."""

    MESSAGE = 0
    PIECE = 1


class Frame(NamedTuple):
    """A header.

    Attributes:
        phase: Of a sum: 0 while slices are added up, 1 while their sums are passed on.
        occurrence: How many sums with this key came before.
        key: Bytes of a message's description, or the name of a sum.
        num_bytes: Bytes of the payload.
    """

    kind: int
    phase: int
    slice: int
    occurrence: int
    key: int
    offset: int
    num_bytes: int


class PeerSocket:
    """A connection with another device, as one that `abort` can end."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # not Linux: more is in the kernel's hands
            end.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self.end = end
        self._lock = threading.Lock()

    def limit(self, num_bytes: int) -> None:
        """Limit what the kernel holds and has on its way: what has left the process cannot be overtaken, in no queue behind it either."""
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def shut_down(self) -> None:
        """End all waits at both ends. Called from any thread."""
        with self._lock, suppress(OSError):  # the peer was faster, or it is closed
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self.end.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which must outlive it."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def connect(rendezvous: Rendezvous, peers: Collection[int]) -> dict[int, PeerSocket]:
    """Connect this device with others, of which the one with the smaller number calls. Raises as `ProcessTransport.connect`."""
    family, host = _address_towards_store(rendezvous)
    token = secrets.token_bytes(16)
    found: dict[int, PeerSocket] = {}
    with socket.create_server((host, 0), family=family, backlog=max(len(peers), 1)) as server:
        rendezvous.publish("tcp", f"{host} {server.getsockname()[1]} {token.hex()}")
        for peer in sorted(peer for peer in peers if peer > rendezvous.device):
            found[peer] = _call(rendezvous, peer)
            rendezvous.aborting.add([found[peer]])
        server.settimeout(_LOOK_EVERY_S)
        awaited = {peer for peer in peers if peer < rendezvous.device}
        while awaited:
            rendezvous.aborting.check()
            rendezvous.check_deadline(", ".join(rendezvous.names[peer] for peer in sorted(awaited)), "it came, but did not call")
            with suppress(TimeoutError):
                end, _ = server.accept()
                caller = _greeted(end, token)
                if caller not in awaited:
                    end.close()  # a stranger
                    continue
                awaited.remove(caller)
                found[caller] = PeerSocket(end)
                rendezvous.aborting.add([found[caller]])
    return found


def _address_towards_store(rendezvous: Rendezvous) -> tuple[socket.AddressFamily, str]:
    # The interface over which this host reaches the store is one over which the others reach this host.
    with socket.create_connection(rendezvous.address, timeout=rendezvous.left_s) as to_store:
        return to_store.family, to_store.getsockname()[0]


def _call(rendezvous: Rendezvous, peer: int) -> PeerSocket:
    host, port, token = rendezvous.wait_for("tcp", [peer])[0].split()
    while True:
        rendezvous.aborting.check()
        try:
            end = socket.create_connection((host, int(port)), timeout=min(rendezvous.left_s, 1.0))
        except OSError as error:
            rendezvous.check_deadline(rendezvous.names[peer], f"{host}:{port} does not answer ({error})")
            rendezvous.aborting.aborted.wait(_LOOK_EVERY_S)
            continue
        end.sendall(_HELLO.pack(rendezvous.device, bytes.fromhex(token)))
        return PeerSocket(end)


def _greeted(end: socket.socket, token: bytes) -> int | None:
    """Return the device that calls; `None` if it does not know the token."""
    end.settimeout(1.0)
    hello = b""
    with suppress(OSError):
        while len(hello) < _HELLO.size and (more := end.recv(_HELLO.size - len(hello))):
            hello += more
    if len(hello) < _HELLO.size:
        return None
    device, said = _HELLO.unpack(hello)
    return int(device) if secrets.compare_digest(said, token) else None
