"""How the processes of a run find each other before they are connected: through a store that one of them hosts."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol, Self

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, says the manual

from raypipe.actors.transport.sockets import connections
from raypipe.errors import AbortedError, TransportTimeoutError


class Interruptible(Protocol):
    """A connection that a wait depends on."""

    def shut_down(self) -> None:
        """End the wait, and every later one, with an error at both ends."""


class AbortGroup:
    """All connections that the waits of a transport depend on."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._members: set[Interruptible] = set()

    def add(self, members: Iterable[Interruptible]) -> None:
        """Add connections; raises `AbortedError` after `abort`."""
        with self._lock:
            self._members.update(members)
        self.check()

    def remove(self, members: Iterable[Interruptible]) -> None:
        """Remove connections, which then outlive an abort."""
        with self._lock:
            self._members.difference_update(members)

    def abort(self, reason: str) -> None:
        """Shut all connections down. The first reason stays."""
        with self._lock:
            self.reason = self.reason or reason
        self.aborted.set()
        self.shut_down()

    def shut_down(self) -> None:
        """End the waits that depend on the connections."""
        with self._lock:
            members = list(self._members)
        for member in members:
            member.shut_down()

    def check(self) -> None:
        """Raise `AbortedError` after `abort`."""
        if self.reason is not None:
            raise AbortedError(self.reason)


def limit(seconds: float) -> timedelta:
    """Return a limit for torch: whole milliseconds, rounded up, never 0, which means for ever."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))


def host_store(host: str, *, timeout_s: float) -> tuple[TCPStore, int]:
    """Open the store, which must be kept alive, and return it with its port; `host` is this host as the others reach it."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit(timeout_s))
    return store, store.port


class Rendezvous:
    """One device's presence at the store, from `with` to its end; `timeout_s` limits the whole rendezvous.

    A wait in the store cannot be ended from outside, and complains on stderr. So this polls until the others have published.
    """

    def __init__(
        self, device: int, *, names: Sequence[str], address: tuple[str, int], prefix: str, timeout_s: float, aborting: AbortGroup
    ) -> None:
        self.device = device
        self.names = names
        self.aborting = aborting
        self.address = address
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._to_store: list[Interruptible] = []

    @property
    def name(self) -> str:
        """Name of this device."""
        return self.names[self.device]

    def __enter__(self) -> Self:
        before = connections()
        store = self._reach_store()
        self.store = PrefixStore(self._prefix, store)
        # If the store hangs, or a member between its coming and its connecting, abort ends this connection.
        self._to_store = [connection for connection in connections() - before if connection.remote.endswith(f":{store.port}")]
        self.aborting.add(self._to_store)
        return self

    def __exit__(self, *_: object) -> None:
        self.aborting.remove(self._to_store)

    def _reach_store(self) -> TCPStore:
        host, port = self.address
        # The store's own attempts to connect write stack traces to stderr and cannot be ended: first see that it answers.
        while True:
            self.aborting.check()
            try:
                socket.create_connection((host, port), timeout=min(0.5, self.left_s)).close()
                break
            except OSError as error:
                self.check_deadline(f"(store {host}:{port})", f"there is no answer: {error}")
                self.aborting.aborted.wait(0.05)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit(self.left_s))

    def publish(self, topic: str, value: str = "") -> None:
        """Tell the other devices a value."""
        self.store.set(f"{topic}/{self.device}", value)

    def wait_for(self, topic: str, devices: Sequence[int]) -> list[str]:
        """Return what these devices publish, once all have; raises `TransportTimeoutError` or, after `abort`, `AbortedError`."""
        keys = [f"{topic}/{device}" for device in devices]
        pause_s = 0.001
        while not self.store.check(keys):
            self.aborting.check()
            missing = [self.names[device] for device, key in zip(devices, keys, strict=True) if not self.store.check([key])]
            self.check_deadline(", ".join(missing), "it did not come")
            self.aborting.aborted.wait(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        self.aborting.check()
        return [value.decode() for value in self.store.multi_get(keys)]

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never 0."""
        return max(0.001, self._deadline_s - time.monotonic())

    def check_deadline(self, peer: str, problem: str) -> None:
        """Raise `TransportTimeoutError` once the time is over."""
        if time.monotonic() >= self._deadline_s:
            raise TransportTimeoutError(self.name, peer, "connecting", f"{problem} within {self._timeout_s:g} s")
