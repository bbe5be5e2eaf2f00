"""When a search ends before it is done: at a time limit, or when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Poll = Callable[[bool], None]
"""Called now and then by a search that says whether it has a plan; raises `SearchStopped` to end it."""


class SearchStopped(Exception):  # noqa: N818  # It is no error: the best plan so far is the answer.
    """A search ends with the best plan so far."""


def never(_: bool) -> None:
    """Let a search go on to its end."""


@dataclass
class Stop:
    """Ends a search at `end_s` of the monotonic clock once there is a plan, or at once where `asked` returns True."""

    end_s: float | None = None
    asked: Callable[[], bool] | None = None
    _has_plan: bool = False

    def __call__(self, has_plan: bool) -> None:
        """Raise `SearchStopped` where the search must end."""
        self._has_plan |= has_plan
        if self.asked is not None and self.asked():
            raise SearchStopped
        if self._has_plan and self.end_s is not None and time.monotonic() >= self.end_s:
            raise SearchStopped

    @classmethod
    def after(cls, time_limit_s: float | None, asked: Callable[[], bool] | None) -> Stop:
        """Return one that counts from now."""
        return cls(None if time_limit_s is None else time.monotonic() + time_limit_s, asked)
