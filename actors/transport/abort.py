"""Ends the waits of a transport from another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from raypipe.errors import AbortedError


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
