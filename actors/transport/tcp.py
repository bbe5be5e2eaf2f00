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
import socket
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

from raypipe.actors.transport import gate
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.secret import Secret
from raypipe.actors.transport.sockets import address_of
from raypipe.actors.transport.tcp_holds import Address

_LOOK_EVERY_S = 0.02
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Connected:
    """A connection with a peer; `is_local` says that both are on one host."""

    end: socket.socket
    is_local: bool


@dataclass(frozen=True)
class Connections:
    """Connections with peers, a socket for datagrams, and the addresses of this device and of all others that have connections.

    `secret` is that of the run, which datagrams prove, too.
    """

    ends: dict[int, Connected]
    datagrams: socket.socket
    own: Address
    addresses: dict[int, Address]
    secret: Secret


def connect(rendezvous: Rendezvous, peers: Collection[int], *, others: Collection[int], host_ip: str | None) -> Connections:
    """Connect with peers, each of which calls this with this device among its own; raise as `ProcessTransport.connect`.

    `others` also call this. The device with the lower number calls its peer, and answers the calls of others meanwhile, so no order of
    calls can end in a circle of waits.
    """
    host = _own_host(rendezvous, host_ip)
    with ExitStack() as undo:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        entrance = undo.enter_context(gate.Gate(server, secret=rendezvous.secret, purpose=_purpose(rendezvous, rendezvous.device)))
        datagrams = undo.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        datagrams.bind((host, 0))
        datagrams.setblocking(False)
        own = Address(host, server.getsockname()[1], datagrams.getsockname()[1], secrets.token_hex(16))
        rendezvous.publish("tcp", json.dumps([own.host, own.port, own.datagram_port, own.token]))
        order = sorted({*peers, *others})
        addresses = {peer: Address(*json.loads(text)) for peer, text in zip(order, rendezvous.wait_for("tcp", order), strict=True)}
        answering = _Answering(rendezvous, entrance, {peer for peer in peers if peer < rendezvous.device}, undo)
        called = {
            peer: undo.enter_context(_call(rendezvous, peer, addresses[peer], answering))
            for peer in sorted(peers)
            if peer > rendezvous.device
        }
        ends = called | answering.all()
        for end in ends.values():
            end.setblocking(True)  # for who waits for a message; all others ask not to wait
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        entrance.close()
        undo.pop_all()
    connected = {peer: Connected(end, is_local=addresses[peer].host == host) for peer, end in ends.items()}
    return Connections(connected, datagrams, own, addresses, rendezvous.secret)


def _own_host(rendezvous: Rendezvous, host_ip: str | None) -> str:
    chosen = os.environ.get(_INTERFACE_VARIABLE)
    if chosen and (address := address_of(chosen)) is not None:
        return address
    if host_ip is not None:
        return host_ip
    host, port = rendezvous.address.host, rendezvous.address.port
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(there)  # sends nothing; chooses the interface that leads to the store
        return str(asking.getsockname()[0])


def _purpose(rendezvous: Rendezvous, listener: int) -> str:
    return f"connections of device {listener} in {rendezvous.prefix}"


class _Answering:
    """Takes the calls of the peers that call this device, also while this one waits for the answer of another."""

    def __init__(self, rendezvous: Rendezvous, entrance: gate.Gate, expected: Collection[int], undo: ExitStack) -> None:
        self._rendezvous = rendezvous
        self._entrance = entrance
        self._expected = expected
        self._undo = undo
        self._ends: dict[int, socket.socket] = {}

    def some(self, *, wait_s: float = 0.0) -> None:
        """Take the calls that have come; wait for one for up to some seconds."""
        for device, end in self._entrance.admit(wait_s):
            self._undo.enter_context(end)
            if device not in self._expected:
                end.close()
                continue
            if (former := self._ends.get(device)) is not None:
                former.close()  # it calls again: the first connection broke before it heard that it was let in
            self._ends[device] = end

    def all(self) -> dict[int, socket.socket]:
        """Return the connections with all who call, once they have."""
        while missing := [self._rendezvous.names[peer] for peer in sorted(self._expected) if peer not in self._ends]:
            self._rendezvous.check(", ".join(missing), "it did not call")
            self.some(wait_s=_LOOK_EVERY_S)
        return self._ends


def _call(rendezvous: Rendezvous, peer: int, address: Address, answering: _Answering) -> socket.socket:
    where = f"{address.host} port {address.port} does not answer"

    def check() -> None:
        answering.some()
        rendezvous.check(rendezvous.names[peer], where)

    purpose = _purpose(rendezvous, peer)
    while True:
        try:
            return gate.call(address.host, address.port, secret=rendezvous.secret, purpose=purpose, device=rendezvous.device, check=check)
        except OSError as error:
            answering.some()
            rendezvous.check(rendezvous.names[peer], f"{where}: {error.strerror or error}")
            rendezvous.aborting.aborted.wait(_LOOK_EVERY_S)
