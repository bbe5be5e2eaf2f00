"""How stale an order's weights may be: limits, and what an order has of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raypipe.schedules.metrics import ScheduleMetrics

_PARTS = 1000
"""Of an update: how exactly limits are told."""


def rounded_up(mean: float) -> float:
    """Return a limit in few digits that allows a mean."""
    return math.ceil(mean * _PARTS) / _PARTS


@dataclass(frozen=True)
class StalenessLimits:
    """Limits of `ScheduleMetrics.max_delay`, `max_mismatch` and `mean_delay`; `None` for no limit."""

    max_staleness: int | None = None
    max_mismatch: int | None = None
    max_mean_staleness: float | None = None

    @classmethod
    def of(cls, known: ScheduleMetrics) -> StalenessLimits:
        """Return the least in few digits that allows an order."""
        return cls(known.max_delay, known.max_mismatch, rounded_up(known.mean_delay))

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return bool(self._given())

    def _given(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def allow_delay(self) -> bool:
        """Whether any delay was asked for: some limit of it is above zero, and none is zero."""
        limits = [limit for limit in (self.max_staleness, self.max_mean_staleness) if limit is not None]
        return bool(limits) and all(limits)

    def exceeded_by(self, known: ScheduleMetrics) -> dict[str, float]:
        """Return the limits that an order does not keep, with what it has of each."""
        exact = vars(StalenessLimits(known.max_delay, known.max_mismatch, known.mean_delay))
        told = vars(StalenessLimits.of(known))
        return {name: told[name] for name, limit in self._given().items() if exact[name] > limit}

    def nearest(self, found: Iterable[StalenessLimits]) -> str:
        """Of what would allow several orders the least, in words: of what is limited here."""
        values = min([getattr(each, name) for name in self._given()] for each in found)
        return ", ".join(f"{name} {value:g}" for name, value in zip(self._given(), values, strict=True))

    def __str__(self) -> str:
        return self.nearest([self])
