"""Where the processes of a run find each other before they are connected: a store that one of them keeps."""

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


def limit(seconds: float) -> timedelta:
    """A limit as torch understands it: whole milliseconds, not sooner than asked for, and never 0, which means for ever."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))


def host_store(host: str, *, timeout_s: float) -> tuple[TCPStore, int]:
    """The store at which the transports of a run meet, and its port; it lives as long as the object.

    Args:
        host: this host's address as the others reach it.
        timeout_s: for each request to it.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit(timeout_s))
    return store, store.port


class Line(Protocol):
    """Something that a wait hangs on."""

    def shut_down(self) -> None:
        """Ends the wait with an error, and every later one, at both ends."""


class Lines:
    """All that the waits of a transport hang on, so that another thread can end them."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._lines: set[Line] = set()

    def add(self, lines: Iterable[Line]) -> None:
        """Lets these be cut, too.

        Raises:
            AbortedError: `abort` was called.
        """
        with self._lock:
            self._lines.update(lines)
        self.check()

    def remove(self, lines: Iterable[Line]) -> None:
        """Leaves these alone from now on."""
        with self._lock:
            self._lines.difference_update(lines)

    def abort(self, reason: str) -> None:
        """Cuts all lines. The first reason stays."""
        with self._lock:
            self.reason = self.reason or reason
        self.aborted.set()
        self.cut()

    def cut(self) -> None:
        """Ends the waits that hang on the lines there are."""
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.shut_down()

    def check(self) -> None:
        """Nothing, unless `abort` was called.

        Raises:
            AbortedError: it was.
        """
        if self.reason is not None:
            raise AbortedError(self.reason)


class Meeting:
    """One device's presence at the store, from `with` to its end.

    A wait in the store cannot be ended from outside, and complains on stderr. So this looks there again and again until the
    others have said what it waits for.

    Args:
        device: this one.
        names: of all devices, for messages.
        address: host and port of the store that one process opened with `host_store`.
        prefix: keeps runs, and the attempts of a run, apart in the store; never use one twice.
        timeout_s: for the whole meeting.
        lines: whose `abort` ends the meeting.
    """

    def __init__(self, device: int, *, names: Sequence[str], address: tuple[str, int], prefix: str, timeout_s: float, lines: Lines) -> None:
        self.device = device
        self.names = names
        self.lines = lines
        self._address = address
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._to_store: list[Line] = []

    @property
    def name(self) -> str:
        """Of this device."""
        return self.names[self.device]

    def __enter__(self) -> Self:
        before = connections()
        store = self._reach_store()
        self.store = PrefixStore(self._prefix, store)
        # If the store hangs, or a member between its coming and its connecting, abort ends this connection.
        self._to_store = [connection for connection in connections() - before if connection.remote.endswith(f":{store.port}")]
        self.lines.add(self._to_store)
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.remove(self._to_store)

    def _reach_store(self) -> TCPStore:
        host, port = self._address
        # The store's own attempts to connect write stack traces to stderr and cannot be ended: first see that it answers.
        while True:
            self.lines.check()
            try:
                socket.create_connection((host, port), timeout=min(0.5, self.left_s)).close()
                break
            except OSError as error:
                self.check_deadline(f"(store {host}:{port})", f"there is no answer: {error}")
                self.lines.aborted.wait(0.05)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit(self.left_s))

    def say(self, what: str, value: str = "") -> None:
        """Tells all that are interested."""
        self.store.set(f"{what}/{self.device}", value)

    def hear(self, what: str, devices: Sequence[int]) -> list[str]:
        """What these devices say, once all have.

        Raises:
            TransportTimeoutError: names those that did not.
            AbortedError: `abort` was called.
        """
        keys = [f"{what}/{device}" for device in devices]
        pause_s = 0.001
        while not self.store.check(keys):
            self.lines.check()
            missing = [self.names[device] for device, key in zip(devices, keys, strict=True) if not self.store.check([key])]
            self.check_deadline(", ".join(missing), "it did not come")
            self.lines.aborted.wait(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        self.lines.check()
        return [value.decode() for value in self.store.multi_get(keys)]

    @property
    def left_s(self) -> float:
        """Seconds until all must have met, never 0."""
        return max(0.001, self._deadline_s - time.monotonic())

    def check_deadline(self, peer: str, problem: str) -> None:
        """Nothing, unless time is over.

        Raises:
            TransportTimeoutError: it is.
        """
        if time.monotonic() >= self._deadline_s:
            raise TransportTimeoutError(self.name, peer, "connecting", f"{problem} within {self._timeout_s:g} s")
