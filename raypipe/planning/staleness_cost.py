"""How many more updates late gradients take to the same loss, by optimizer.

Seconds to a loss are seconds of an update times the number of updates. The first is simulated; the second was measured, for one small
model: `python benchmarks/staleness_cost.py` prints what `MEASURED` holds, NAdamW at its best synchronous rate, Muon below its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from raypipe.config import OptimizerConfig, OptimizerName
from raypipe.schedules.ir import Schedule
from raypipe.schedules.metrics import mean_delays
from raypipe.units import seconds

MEASURED: Mapping[str, tuple[tuple[float, float], ...]] = {
    OptimizerName.NADAMW.value: ((0.0, 1.0), (0.05, 1.03), (0.09, 1.06), (0.11, 1.1), (0.22, 1.33), (0.37, 2.98), (0.99, 5.1)),
    OptimizerName.MUON.value: ((0.0, 1.0), (0.99, 1.57)),
}
"""Points (mean delay in updates, number of updates over that without delay), by rising delay; straight lines between and beyond. Muon's
is that with `optimizer.gradient_correction`, of one seed: what lies between is interpolated, not measured."""
_NEAR_MEASURED = 0.2
"""Part of its mean delay within which a measured point stands for others."""
_OF_OTHERS = OptimizerName.NADAMW.value
"""AdamW bears delay no better than NAdamW, and of other optimizers nothing is known: they pay as much."""


def known_optimizer(config: OptimizerConfig) -> str:
    """Return the name in `MEASURED` under which an optimizer's late gradients are charged."""
    is_muon = config.name == OptimizerName.MUON and config.gradient_correction > 0
    return OptimizerName.MUON.value if is_muon else _OF_OTHERS


def more_updates(optimizer: str, mean_delay: float) -> float:
    """Return how many times as many updates an optimizer needs for the same loss.

    Args:
        optimizer: A name in `MEASURED`, or any other.
        mean_delay: Updates by which gradients are late, over microbatches and stages of a window.
    """
    points = MEASURED.get(optimizer, MEASURED[_OF_OTHERS])
    (low, at_low), (high, at_high) = next(((a, b) for a, b in pairwise(points) if mean_delay <= b[0]), points[-2:])
    return at_low + (mean_delay - low) * (at_high - at_low) / (high - low)


def stand_in(optimizer: str) -> str:
    """Return in words that an optimizer pays for late gradients as another one; empty where it was measured itself."""
    if optimizer in MEASURED:
        return ""
    return (
        f"late gradients are taken to cost {optimizer!r} as many updates as {_OF_OTHERS}: by this name nothing was measured "
        f"(measured are {', '.join(MEASURED)})"
    )


def both_halves(update_s: float, mean_delay: float, optimizer: str) -> str:
    """Return in words what a choice takes until a loss: seconds of an update, and how many more updates."""
    more = more_updates(optimizer, mean_delay)
    known = optimizer if optimizer in MEASURED else f"an optimizer like {_OF_OTHERS}"
    delays = [delay for delay, _ in MEASURED.get(optimizer, MEASURED[_OF_OTHERS])]
    is_measured = any(abs(delay - mean_delay) <= _NEAR_MEASURED * delay for delay in delays)
    how = f"{'inter' if mean_delay < delays[-1] else 'extra'}polated, not measured"
    return (
        f"{seconds(update_s)} an update; gradients are {mean_delay:.2g} updates late on average, for which {known} takes about "
        f"{more - 1:.1%} more updates to the same loss{'' if is_measured else f' ({how})'}"
    )


def window_delay(schedule: Schedule, num_updates: int) -> float | None:
    """Return the mean delay of a window of so many updates, of which a schedule has the first ones.

    The first update of a window has nothing late, those after it may have less than the others. `None` stands for a schedule that ends
    before its updates are equally late.
    """
    late = [0.0] * schedule.num_updates
    for (_, update), delay in mean_delays(schedule).items():
        late[update] += delay / schedule.num_stages
    more = max(num_updates - len(late), 0)
    if more and (len(late) == 1 or not math.isclose(late[-1], late[-2])):
        return None
    return (sum(late) + more * late[-1]) / (len(late) + more)
