"""A listening socket that lets in only who proves to know the secret of the run, and to whom it proves the same.

    who listens     challenge (random)               -->
                                                     <--   who calls: its device, a challenge of its own, proof
                    proof                            -->
    both proofs cover both challenges, the device, and the purpose of the socket

Until then nothing else is read, and nothing is allocated for a caller but its socket. A caller that does not finish in time is dropped.
So is the oldest that has not finished when there are many: who calls again and again and proves nothing keeps nobody out.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, cast

from raypipe.actors.transport.secret import NUM_BYTES, Secret

_LOG = logging.getLogger("raypipe.transport")
_ANSWER = struct.Struct(f"<I{NUM_BYTES}s{NUM_BYTES}s")
"""The device that calls, its challenge, its proof."""
_DEVICE = struct.Struct("<I")
_CALLS, _LISTENS = b"calls", b"listens"
MOST_PENDING = 128
"""Callers that may be unproved at once."""
_PROVE_WITHIN_S = 10.0
_LOG_EVERY_S = 30.0
_POLL_MS = 5
_BACKLOG = 1024


class UnprovedError(OSError):
    """Whoever is at the other end does not know the secret, or went away before it proved to."""


class Admitted(NamedTuple):
    """A caller that proved to know the secret, and says that it is this device. Its socket does not block."""

    device: int
    end: socket.socket


@dataclass
class _Caller:
    end: socket.socket
    who: str
    challenge: bytes
    deadline_s: float
    said: bytes = b""


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


class Gate:
    """Lets callers in at a listening socket, which it then owns; `selectors` can wait for it to be readable.

    Args:
        server: Listens.
        secret: What both ends prove to know.
        purpose: What the socket is for, and whose it is; proofs for another purpose do not count.
    """

    def __init__(self, server: socket.socket, *, secret: Secret, purpose: str) -> None:
        server.listen(_BACKLOG)
        server.setblocking(False)
        self._server = server
        self._secret = secret
        self._purpose = purpose.encode()
        self._pending: OrderedDict[int, _Caller] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._num_refused = 0
        self._last_refused = ""
        self._log_from_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `admit` has something to do."""
        return cast(_HasDescriptor, self._selector).fileno()  # those of Linux and macOS have one

    def admit(self, timeout_s: float = 0.0) -> list[Admitted]:
        """Return who has proved to know the secret; wait for somebody to do anything for up to some seconds."""
        admitted: list[Admitted] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                self._accept()
            elif (caller := self._pending.get(key.fd)) is not None and (one := self._listen_to(caller)) is not None:
                admitted.append(one)
        now_s = time.monotonic()
        for caller in [caller for caller in self._pending.values() if caller.deadline_s <= now_s]:
            self._refuse(caller, f"it proved nothing within {_PROVE_WITHIN_S:g} s")
        self._log(now_s)
        return admitted

    def _accept(self) -> None:
        for _ in range(MOST_PENDING):  # then those who have come are heard
            try:
                end, address = self._server.accept()
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE}:  # no descriptor is free: one that waits in vain is given up
                    for caller in list(self._pending.values())[:1]:
                        self._refuse(caller, "this process has no descriptor left")
                    time.sleep(_POLL_MS / 1000)
                return  # else nobody is left
            end.setblocking(False)
            who = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a process of this host"
            caller = _Caller(end, who, secrets.token_bytes(NUM_BYTES), time.monotonic() + _PROVE_WITHIN_S)
            try:
                end.send(caller.challenge)
            except OSError:
                end.close()
                continue
            if len(self._pending) >= MOST_PENDING:
                self._refuse(next(iter(self._pending.values())), f"{MOST_PENDING} others had not proved to know it either")
            self._pending[end.fileno()] = caller
            self._selector.register(end, selectors.EVENT_READ)

    def _listen_to(self, caller: _Caller) -> Admitted | None:
        try:
            said = caller.end.recv(_ANSWER.size - len(caller.said))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        caller.said += said
        if not said:
            self._refuse(caller, "it ended before it proved anything")
        elif len(caller.said) == _ANSWER.size:
            device, challenge, proof = _ANSWER.unpack(caller.said)
            covered = (self._purpose, _DEVICE.pack(device), caller.challenge, challenge)
            if not self._secret.proves(proof, _CALLS, *covered):
                self._refuse(caller, "it does not know the secret of the run")
                return None
            self._forget(caller)
            try:
                caller.end.send(self._secret.proof(_LISTENS, *covered))
            except OSError:
                caller.end.close()
                return None
            return Admitted(int(device), caller.end)
        return None

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.end)
        del self._pending[caller.end.fileno()]

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._forget(caller)
        caller.end.close()
        self._num_refused += 1
        self._last_refused = f"{caller.who}: {why}"

    def _log(self, now_s: float) -> None:
        if self._num_refused and now_s >= self._log_from_s:
            self._log_from_s = now_s + _LOG_EVERY_S
            self._tell()

    def _tell(self) -> None:
        if self._num_refused:
            times = "a caller" if self._num_refused == 1 else f"{self._num_refused} callers"
            _LOG.warning("refused %s at the socket for %s, the last %s", times, self._purpose.decode(), self._last_refused)
            self._num_refused = 0

    def close(self) -> None:
        """Stop listening, and drop who has proved nothing yet."""
        self._tell()
        self._selector.close()
        self._server.close()
        for caller in self._pending.values():
            caller.end.close()
        self._pending.clear()


def prove(end: socket.socket, *, secret: Secret, purpose: str, device: int, check: Callable[[], None]) -> None:
    """Prove at a `Gate` to know the secret, and see that it knows it.

    Args:
        end: Connected with the gate; it does not block.
        secret: What both ends prove to know.
        purpose: As the gate's.
        device: Who calls.
        check: Raises what ends the wait; called many times a second.

    Raises:
        UnprovedError: Whoever listens does not know the secret, or went away.
        OSError: The connection broke.
    """
    challenge, own = _read(end, check), secrets.token_bytes(NUM_BYTES)
    covered = (purpose.encode(), _DEVICE.pack(device), challenge, own)
    end.send(_ANSWER.pack(device, own, secret.proof(_CALLS, *covered)))
    if not secret.proves(_read(end, check), _LISTENS, *covered):
        raise UnprovedError("whoever listens there does not know the secret of the run")


def _read(end: socket.socket, check: Callable[[], None]) -> bytes:
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    said = b""
    while len(said) < NUM_BYTES:
        if waiting.poll(_POLL_MS):
            got = end.recv(NUM_BYTES - len(said))
            if not got:
                raise UnprovedError("it was closed before both ends had proved to know the secret of the run")
            said += got
        check()
    return said


def call(host: str, port: int, *, secret: Secret, purpose: str, device: int, check: Callable[[], None]) -> socket.socket:
    """Return a connection with the gate at an address, after both ends have proved to know the secret; see `prove`."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    end = socket.socket(family, kind, protocol)
    try:
        end.setblocking(False)
        end.connect_ex(resolved)
        waiting = select.poll()
        waiting.register(end, select.POLLOUT)
        while not waiting.poll(_POLL_MS):
            check()
        if error := end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        prove(end, secret=secret, purpose=purpose, device=device, check=check)
    except BaseException:
        end.close()
        raise
    return end
