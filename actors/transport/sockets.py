"""TCP connections and network interfaces of this process, for abort and gloo."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from raypipe.errors import InputError

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface
_FD_FOLDER = "/dev/fd"
_PEER_ENDED = getattr(select, "POLLRDHUP", 0)  # of Linux alone


@dataclass(frozen=True)
class Connection:
    """One connected socket of this process, whoever opened it; the ends are "address:port".

    Attributes:
        inode: Tells it from another socket that got the same descriptor later.
    """

    inode: int
    descriptor: int = field(compare=False)
    local: str = field(compare=False)
    remote: str = field(compare=False)

    def shut_down(self) -> None:
        """Shut the connection down in both directions, which ends all waits; its owner still has to close it."""
        opened = self._open()
        if opened is None:
            return
        with opened, suppress(OSError):  # the other end was faster
            opened.shutdown(socket.SHUT_RDWR)

    def ended(self) -> bool:
        """Return whether an end was closed or shut down; earlier bytes may still be unread."""
        opened = self._open()
        if opened is None:
            return True
        with opened:
            looking = select.poll()
            looking.register(opened, _PEER_ENDED)  # that both ends did (POLLHUP) is told unasked
            return bool(looking.poll(0))

    def _open(self) -> socket.socket | None:
        opened = _open_copy(self.descriptor)
        if opened is not None and os.fstat(opened.fileno()).st_ino != self.inode:
            opened.close()
            return None
        return opened


def connections() -> frozenset[Connection]:
    """Return the TCP connections of this process."""
    found = (_connection(int(name)) for name in os.listdir(_FD_FOLDER))
    return frozenset(connection for connection in found if connection is not None)


def _connection(descriptor: int) -> Connection | None:
    opened = _open_copy(descriptor)
    if opened is None:
        return None
    with opened:
        if opened.family not in {socket.AF_INET, socket.AF_INET6}:
            return None
        try:
            local, remote = _text(opened.getsockname()), _text(opened.getpeername())
        except OSError:
            return None  # it listens, or is no longer connected
        return Connection(os.fstat(opened.fileno()).st_ino, descriptor, local, remote)


def _open_copy(descriptor: int) -> socket.socket | None:
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _text(address: tuple[str, int]) -> str:
    host = address[0].removeprefix("::ffff:").split("%", maxsplit=1)[0]
    return f"{host}:{address[1]}"


def interface_of(host_ip: str) -> str | None:
    """Return the network interface with this IPv4 address, `None` on other systems than Linux; raises `InputError` if none has it."""
    if sys.platform != "linux":
        return None
    addresses = {name: address for _, name in socket.if_nameindex() if (address := address_of(name))}
    for name, address in addresses.items():
        if address == host_ip:
            return name
    known = ", ".join(f"{name} {address}" for name, address in addresses.items())
    raise InputError(f"no interface of this host has the address {host_ip}; there are: {known}; set GLOO_SOCKET_IFNAME to choose one")


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, if it has one."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])


def listens(address: str, port: int, *, timeout_s: float) -> bool:
    """Return whether a process on this or another host takes connections at a port within some seconds."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def reaches(address: str, port: int, *, timeout_s: float) -> bool:
    """Return whether this host reaches another one within some seconds; that nobody listens at the port is an answer, too."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
