"""The rows of a microbatch that each device of a worker takes, and how long it computes on them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Seconds = TypeVar("Seconds", float, npt.NDArray[np.float64])

_MOST_FIXED = 0.99  # Part of the time that does not depend on the rows; with more of it, they are divided equally.


class Factors(NamedTuple):
    """What turns seconds of a whole microbatch at speed 1 into those of a device on its rows."""

    of_all: float
    of_fixed: float

    @classmethod
    def of(cls, row_ratio: float, speed: float) -> Factors:
        """Return those of a device, for a part of the rows of a microbatch."""
        return cls(row_ratio / speed, (1 - row_ratio) / speed)  # `factor_of_rows`, with both parts as seconds

    def seconds(self, whole: Seconds, fixed: Seconds) -> Seconds:
        """Return the seconds of work; `fixed` is the part of `whole` that does not depend on the number of rows."""
        return whole * self.of_all + fixed * self.of_fixed


def fixed_rows(microbatch_size: int, fixed_share: float) -> float:
    """Return the rows that take as long as the part of a microbatch's time that does not depend on their number."""
    share = min(fixed_share, _MOST_FIXED)
    return share / (1 - share) * microbatch_size


def divided_rows(microbatch_size: int, powers: Sequence[float], *, fixed_rows: float = 0.0) -> tuple[int, ...] | None:
    """Return the whole rows, at least one, of devices of unequal power, so that the slowest is as fast as possible.

    Each device takes as much longer as `fixed_rows` more would. Returns `None` where there are too few rows.
    """
    if len(powers) > microbatch_size:
        return None
    total = math.fsum(powers)
    most = microbatch_size + fixed_rows * len(powers)

    def done(position: int, of_device: int) -> float:
        return (of_device + fixed_rows) / powers[position]

    # The best division gives each device at least the whole rows of its fair share: only the rest is divided one by one.
    rows = [max(int(most * power / total - fixed_rows), 1) for power in powers]
    while sum(rows) > microbatch_size:
        last = max((position for position, of_device in enumerate(rows) if of_device > 1), key=lambda at: done(at, rows[at]))
        rows[last] -= 1
    queue = [(done(position, of_device + 1), position) for position, of_device in enumerate(rows)]
    heapq.heapify(queue)
    for _ in range(microbatch_size - sum(rows)):
        _, position = heapq.heappop(queue)
        rows[position] += 1
        heapq.heappush(queue, (done(position, rows[position] + 1), position))
    return tuple(rows)
