"""When a long computation ends before it is done: at a time limit, when somebody asks, or when its share of the work is done.

Loops that may take long call `spend` with the work that comes next. Whoever starts the computation says under which conditions it ends
(`searching`, `part`); without these, `spend` does nothing. Work counts in nominal seconds: about those of one core of 2025. They depend
on the computation alone, so a search that ends by its work ends everywhere at the same point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

_MOST_WITHOUT_PLAN = 4.0
"""Times its work after which a part ends though there is no plan yet."""


class SearchStopped(Exception):  # noqa: N818  # It is no error: the best plan so far is the answer.
    """A search ends with the best plan so far."""


@dataclass
class Stop:
    """Conditions under which a search ends.

    Attributes:
        end_s: Time of the monotonic clock at which it ends, once there is a plan.
        asked: Returns True where the search shall end at once.
        has_plan: Whether there is a plan.
    """

    end_s: float | None = None
    asked: Callable[[], bool] | None = None
    has_plan: bool = False

    @classmethod
    def after(cls, time_limit_s: float | None, asked: Callable[[], bool] | None = None) -> Stop:
        """Return conditions whose time counts from now."""
        return cls(None if time_limit_s is None else time.monotonic() + time_limit_s, asked)

    def check(self) -> None:
        """Raise `SearchStopped` where the search must end."""
        if self.asked is not None and self.asked():
            raise SearchStopped
        if self.has_plan and self.end_s is not None and time.monotonic() >= self.end_s:
            raise SearchStopped


class _PartDone(Exception):  # noqa: N818  # It is no error: the next part begins.
    """A part of a search has done its share of the work."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.part = part


@dataclass(eq=False)
class Part:
    """Part of a search: that of a `with` block, which it ends where it is due.

    Attributes:
        stop: Conditions of the whole search.
        whole_s: Nominal seconds of work after which the part ends.
        outer: Part of which this is one.
        done_s: Nominal seconds of work done in it.
    """

    stop: Stop
    whole_s: float
    outer: Part | None = None
    done_s: float = 0.0
    _token: Token[Part | None] | None = None

    def __enter__(self) -> Part:
        self._token = _current.set(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> bool:
        assert self._token is not None, "a part ends that has begun"
        _current.reset(self._token)
        return isinstance(error, _PartDone) and error.part is self

    def spend(self, work_s: float) -> None:
        """Count work; raises what ends the search, or the innermost part that has done all its work."""
        spent: Part | None = None
        part: Part | None = self
        while part is not None:
            part.done_s += work_s
            if part.done_s > part.whole_s * (1.0 if self.stop.has_plan else _MOST_WITHOUT_PLAN):
                spent = spent or part  # The innermost part that is done ends, with what it has; then the next one.
            part = part.outer
        self.stop.check()
        if spent is not None:
            raise _PartDone(spent)


_current: ContextVar[Part | None] = ContextVar("part of a search", default=None)


def spend(work_s: float = 0.0) -> None:
    """Count work that comes next; ends the search, or a part of it, where that is due."""
    part = _current.get()
    if part is not None:
        part.spend(work_s)


def note_plan() -> None:
    """Note that there is a plan, with which the search may end."""
    part = _current.get()
    if part is not None:
        part.stop.has_plan = True


@contextmanager
def searching(stop: Stop) -> Iterator[None]:
    """End the computations of a block under these conditions, by `SearchStopped`."""
    with Part(stop, math.inf):
        yield


@contextmanager
def to_the_end() -> Iterator[None]:
    """Let the computations of a block go on to their ends."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def part(*, work_s: float = math.inf, share: float = 1.0) -> Part:
    """End the computations of a block after so much work, or after a share of what is left to the enclosing part; then go on behind it."""
    outer = _current.get() or Part(Stop(), math.inf)
    return Part(outer.stop, min(work_s, share * max(outer.whole_s - outer.done_s, 0.0)), outer)
