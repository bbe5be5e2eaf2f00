"""What an actor is doing, for threads that ask while it computes."""

from __future__ import annotations

import time

from raypipe.errors import AbortedError


class Activity:
    """The call that an actor is in."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.abort_reason: str | None = None
        self._since = time.monotonic()

    @property
    def since_s(self) -> float:
        """Seconds since the activity began."""
        return time.monotonic() - self._since

    def begin(self, doing: str) -> None:
        """Begin an activity; raises `AbortedError` if the actor was aborted."""
        self.doing = doing
        self._since = time.monotonic()
        if self.abort_reason is not None:
            raise AbortedError(self.abort_reason)

    def wait(self, doing: str) -> None:
        """Note that the actor has nothing to do."""
        self.doing = doing
        self._since = time.monotonic()
