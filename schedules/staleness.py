"""Limits on how stale the weights of an order may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raypipe.schedules.metrics import ScheduleMetrics

_PARTS = 1000
"""Limits are reported in this many parts of an update."""


def rounded_up(mean: float) -> float:
    """Return the smallest limit of few digits that allows a mean delay."""
    return math.ceil(mean * _PARTS) / _PARTS


@dataclass(frozen=True)
class StalenessLimits:
    """Limits of `ScheduleMetrics.max_delay`, `max_mismatch` and `mean_delay`; `None` for no limit."""

    max_staleness: int | None = None
    max_mismatch: int | None = None
    max_mean_staleness: float | None = None

    @classmethod
    def of(cls, metrics: ScheduleMetrics) -> StalenessLimits:
        """Return the smallest limits of few digits that allow an order with these metrics."""
        return cls(metrics.max_delay, metrics.max_mismatch, rounded_up(metrics.mean_delay))

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return bool(self._limits())

    def _limits(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def allow_delay(self) -> bool:
        """Whether the user asked for delay: a limit on delay is set, and none that is set is zero."""
        limits = [limit for limit in (self.max_staleness, self.max_mean_staleness) if limit is not None]
        return bool(limits) and all(limits)

    def exceeded_by(self, metrics: ScheduleMetrics) -> dict[str, float]:
        """Return, by name, the limits that an order exceeds, each with the order's value."""
        exact = vars(StalenessLimits(metrics.max_delay, metrics.max_mismatch, metrics.mean_delay))
        rounded = vars(StalenessLimits.of(metrics))
        return {name: rounded[name] for name, limit in self._limits().items() if exact[name] > limit}

    def nearest(self, candidates: Iterable[StalenessLimits]) -> str:
        """Return the smallest candidate as text; name only the limits that are set here."""
        values = min([getattr(each, name) for name in self._limits()] for each in candidates)
        return ", ".join(f"{name} {value:g}" for name, value in zip(self._limits(), values, strict=True))

    def __str__(self) -> str:
        return self.nearest([self])
