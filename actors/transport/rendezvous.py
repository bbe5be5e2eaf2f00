"""How the processes of a run find each other before they are connected: through a store that one of them hosts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol, Self

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, says the manual

from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreClient
from raypipe.errors import AbortedError, TransportTimeoutError

_LOOK_EVERY_S = 0.5
_STORE_GRACE_S = 2.0


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


class Rendezvous:
    """One device's presence at the store, from `with` to its end; `timeout_s` limits the whole rendezvous."""

    def __init__(
        self, device: int, *, names: Sequence[str], address: StoreAddress, prefix: str, timeout_s: float, aborting: AbortGroup
    ) -> None:
        self.device = device
        self.names = names
        self.aborting = aborting
        self.address = address
        self.prefix = prefix
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    @property
    def name(self) -> str:
        """Name of this device."""
        return self.names[self.device]

    @property
    def secret(self) -> Secret:
        """The secret of the run."""
        return self.address.secret

    def __enter__(self) -> Self:
        self._client = self._reach_store()
        self.store = PrefixStore(self.prefix, self._client)
        # If the store hangs, or a member between its coming and its connecting, abort ends this connection.
        self.aborting.add([self._client])
        return self

    def __exit__(self, *_: object) -> None:
        self.aborting.remove([self._client])
        self._client.close()

    def _reach_store(self) -> StoreClient:
        store = f"(store {self.address})"

        def check() -> None:
            self.aborting.check()
            # At the deadline, who waits for a device names that device: only a store that does not even say that it is missing is named.
            if time.monotonic() >= self._deadline_s + _STORE_GRACE_S:
                self.check_deadline(store, "it does not answer")

        while True:
            self.aborting.check()
            try:
                return StoreClient(self.address, device=self.device, check=check)
            except OSError as error:
                self.check_deadline(store, f"there is no answer: {error}")
                self.aborting.aborted.wait(0.05)

    def publish(self, topic: str, value: str = "") -> None:
        """Tell the other devices a value."""
        self._client.set(self._key(topic, self.device), value)

    def wait_for(self, topic: str, devices: Sequence[int]) -> list[str]:
        """Return what these devices publish, once all have; raises `TransportTimeoutError` or, after `abort`, `AbortedError`."""
        keys = {device: self._key(topic, device) for device in devices}
        while (values := self._client.find(list(keys.values()), wait_s=min(_LOOK_EVERY_S, self.left_s))) is None:
            missing = [self.names[device] for device, key in keys.items() if not self._client.check([key])]
            self.check(", ".join(missing), "it did not come")
        self.aborting.check()
        return [value.decode() for value in values]

    def _key(self, topic: str, device: int) -> str:
        return f"{self.prefix}/{topic}/{device}"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never 0."""
        return max(0.001, self._deadline_s - time.monotonic())

    def check(self, peer: str, problem: str) -> None:
        """Raise `AbortedError` after an abort, `TransportTimeoutError` once the time is over."""
        self.aborting.check()
        self.check_deadline(peer, problem)

    def check_deadline(self, peer: str, problem: str) -> None:
        """Raise `TransportTimeoutError` once the time is over."""
        if time.monotonic() >= self._deadline_s:
            raise TransportTimeoutError(self.name, peer, "connecting", f"{problem} within {self._timeout_s:g} s")
