"""Messages and sums over TCP connections of raypipe's own, whose chunks leave in the order of one policy.

    executor -- send, start --> Sender --> the way out of a peer --> its connection --> Receiver of the peer --> recv, sums
                                one thread a device, and whoever finds the way idle        one thread a device, or who waits in recv

* Two devices share one connection, in which messages, shares and totals of sums follow each other as frames.
* A receiver always reads, so nothing depends on posted receives: sums that this device has not started yet are kept.
* The kernel holds about a chunk's time of unsent bytes. What is not in its hands is still the policy's to order.
* Where a long message passes one end of a link, sums of other devices leave it meanwhile (`tcp_holds`).

This module finds the peers. `tcp_link` reads a connection, `tcp_sender` and `tcp_receiver` are the threads, `tcp_channel` and `tcp_sum`
what they carry, `tcp_port` holds all of one device.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.sockets import address_of
from raypipe.actors.transport.tcp_holds import Address

_HELLO = struct.Struct("<16sI")
"""The token of who listens, and the number of who calls."""
_POLL_MS = 20
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Connected:
    """A connection with a peer; `is_local` says that both are on one host."""

    end: socket.socket
    is_local: bool


@dataclass(frozen=True)
class Connections:
    """Connections with peers, a socket for datagrams, and the addresses of this device and of all others that have connections."""

    ends: dict[int, Connected]
    datagrams: socket.socket
    own: Address
    addresses: dict[int, Address]


def connect(rendezvous: Rendezvous, peers: Collection[int], *, others: Collection[int], host_ip: str | None) -> Connections:
    """Connect with peers, each of which calls this with this device among its own; raise as `ProcessTransport.connect`.

    `others` also call this. The device with the lower number calls its peer. A call needs no answer, so no order of calls can end in a
    circle of waits.
    """
    host = _own_host(rendezvous, host_ip)
    with ExitStack() as undo:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = undo.enter_context(socket.create_server((host, 0), family=family, backlog=len(peers) + 16))
        datagrams = undo.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        datagrams.bind((host, 0))
        datagrams.setblocking(False)
        own = Address(host, server.getsockname()[1], datagrams.getsockname()[1], secrets.token_hex(16))
        rendezvous.publish("tcp", json.dumps([own.host, own.port, own.datagram_port, own.token]))
        order = sorted({*peers, *others})
        addresses = {peer: Address(*json.loads(text)) for peer, text in zip(order, rendezvous.wait_for("tcp", order), strict=True)}
        ends: dict[int, socket.socket] = {}
        for peer in sorted(peers):
            if peer > rendezvous.device:
                ends[peer] = undo.enter_context(_call(rendezvous, peer, addresses[peer]))
        _answer(rendezvous, server, own, {peer for peer in peers if peer < rendezvous.device}, ends, undo)
        for end in ends.values():
            end.setblocking(True)  # for who waits for a message; all others ask not to wait
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.close()
        undo.pop_all()
    connected = {peer: Connected(end, is_local=addresses[peer].host == host) for peer, end in ends.items()}
    return Connections(connected, datagrams, own, addresses)


def _own_host(rendezvous: Rendezvous, host_ip: str | None) -> str:
    chosen = os.environ.get(_INTERFACE_VARIABLE)
    if chosen and (address := address_of(chosen)) is not None:
        return address
    if host_ip is not None:
        return host_ip
    host, port = rendezvous.address
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(there)  # sends nothing; chooses the interface that leads to the store
        return str(asking.getsockname()[0])


def _call(rendezvous: Rendezvous, peer: int, address: Address) -> socket.socket:
    while True:
        try:
            return _try_to_call(rendezvous, peer, address)
        except OSError as error:
            problem = f"{address.host} port {address.port} does not answer: {error.strerror or error}"
            rendezvous.check_deadline(rendezvous.names[peer], problem)
            rendezvous.aborting.check()
            rendezvous.aborting.aborted.wait(0.05)


def _try_to_call(rendezvous: Rendezvous, peer: int, address: Address) -> socket.socket:
    family, kind, protocol, _, resolved = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    end = socket.socket(family, kind, protocol)
    try:
        end.setblocking(False)
        with suppress(BlockingIOError):
            end.connect(resolved)
        while not _writable(end):
            rendezvous.aborting.check()
            rendezvous.check_deadline(rendezvous.names[peer], f"{address.host} port {address.port} does not answer")
        if error := end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        end.sendall(_HELLO.pack(bytes.fromhex(address.token), rendezvous.device))
    except BaseException:
        end.close()
        raise
    return end


def _writable(end: socket.socket) -> bool:
    polling = select.poll()
    polling.register(end, select.POLLOUT)
    return bool(polling.poll(_POLL_MS))


def _answer(
    rendezvous: Rendezvous, server: socket.socket, own: Address, missing: set[int], ends: dict[int, socket.socket], undo: ExitStack
) -> None:
    server.setblocking(False)
    said: dict[socket.socket, bytes] = {}
    while missing:
        for ready in _readable([server, *said]):
            if ready is server:
                end = undo.enter_context(server.accept()[0])
                end.setblocking(False)
                said[end] = b""
                continue
            said[ready] += (got := _read(ready, _HELLO.size - len(said[ready])))
            if got and len(said[ready]) < _HELLO.size:
                continue
            device = _device(said.pop(ready), own)
            if device in missing:
                missing.remove(device)
                ends[device] = ready
            else:
                ready.close()  # somebody else's call
        if missing:
            rendezvous.aborting.check()
            rendezvous.check_deadline(", ".join(rendezvous.names[peer] for peer in sorted(missing)), "it did not call")
    for stranger in said:
        stranger.close()


def _readable(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    polling, by_descriptor = select.poll(), {one.fileno(): one for one in sockets}
    for descriptor in by_descriptor:
        polling.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in polling.poll(_POLL_MS)]


def _read(end: socket.socket, most: int) -> bytes:
    try:
        return end.recv(most)
    except BlockingIOError:
        return b""
    except OSError:
        return b""


def _device(said: bytes, own: Address) -> int:
    if len(said) < _HELLO.size:
        return -1
    token, device = _HELLO.unpack(said)
    return int(device) if secrets.compare_digest(token, bytes.fromhex(own.token)) else -1
