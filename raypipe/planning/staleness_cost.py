"""How many more updates late gradients take to the same loss, by optimizer.

Seconds to a loss are seconds of an update times the number of updates. The first is simulated; the second was measured, for one small
model: `python benchmarks/staleness_cost.py` prints what `MEASURED` and `LEFT_BY_START` hold, at synchronous rates that were tuned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from raypipe.config import OptimizerConfig, OptimizerName
from raypipe.schedules.ir import Schedule
from raypipe.schedules.metrics import mean_delays
from raypipe.units import seconds

MEASURED: Mapping[str, tuple[tuple[float, float], ...]] = {
    OptimizerName.NADAMW.value: ((0.0, 1.0), (0.05, 1.03), (0.09, 1.06), (0.11, 1.1), (0.22, 1.33), (0.37, 2.98), (0.99, 5.1)),
    OptimizerName.MUON.value: ((0.0, 1.0), (0.12, 1.03), (1.0, 2.15)),
}
"""Points (mean delay in updates, number of updates over that without delay), by rising delay; straight lines between and beyond. Muon's
are those with `optimizer.gradient_correction`, of one seed: what lies between is interpolated, not measured."""
LEFT_BY_START: Mapping[str, float] = {OptimizerName.NADAMW.value: 0.48, OptimizerName.MUON.value: 0.69}
"""Part of the loss by late gradients that is left where the first `MEASURED_START` of the updates, the warm-up, are on time."""
NO_START, MEASURED_START = 0.1, 0.2
"""Shares of the updates on time at the start of a run. Up to the first, which is half of the warm-up, nothing was gained
(`benchmarks/late_emulator.py`); the second is that of `LEFT_BY_START`."""
_NEAR_MEASURED = 0.2
"""Part of its mean delay within which a measured point stands for others."""
_OF_OTHERS = OptimizerName.NADAMW.value
"""AdamW bears delay no better than NAdamW, and of other optimizers nothing is known: they pay as much."""


def known_optimizer(config: OptimizerConfig) -> str:
    """Return the name in `MEASURED` under which an optimizer's late gradients are charged."""
    is_muon = config.name == OptimizerName.MUON and config.gradient_correction > 0
    return OptimizerName.MUON.value if is_muon else _OF_OTHERS


def more_updates(optimizer: str, mean_delay: float, synchronous_share: float = 0.0) -> float:
    """Return how many times as many updates an optimizer needs for the same loss.

    A start on time leaves a part of the loss that late gradients cost. Near its end a run has the loss a - b ln N, so that a part of the
    loss is a power of the number of updates.

    Args:
        optimizer: A name in `MEASURED`, or any other.
        mean_delay: Updates by which gradients are late, over microbatches and stages of a window.
        synchronous_share: Share of the run's updates that are the first ones, of which none is late.
    """
    more = _on_lines(MEASURED.get(optimizer, MEASURED[_OF_OTHERS]), mean_delay)
    left = LEFT_BY_START.get(optimizer, LEFT_BY_START[_OF_OTHERS])
    points = ((0.0, 1.0), (NO_START, 1.0), (MEASURED_START, left), (1.0, 0.0))
    return float(more ** _on_lines(points, synchronous_share))


def _on_lines(points: Sequence[tuple[float, float]], at: float) -> float:
    (low, at_low), (high, at_high) = next(((a, b) for a, b in pairwise(points) if at <= b[0]), points[-2:])
    return at_low + (at - low) * (at_high - at_low) / (high - low)


def drain_s(makespan_s: float, steady_s: float, num_updates: int, window: int) -> float:
    """Return how many seconds longer than its part of a window an update takes behind which the pipeline drains.

    Args:
        makespan_s: Seconds of a simulated window.
        steady_s: Seconds of an update in its middle.
        num_updates: Number of updates that were simulated.
        window: Number of updates of the planned window.
    """
    return max(makespan_s - num_updates * steady_s, 0.0) * (1 - 1 / window)


def stand_in(optimizer: str) -> str:
    """Return in words that an optimizer pays for late gradients as another one; empty where it was measured itself."""
    if optimizer in MEASURED:
        return ""
    return (
        f"late gradients are taken to cost {optimizer!r} as many updates as {_OF_OTHERS}: by this name nothing was measured "
        f"(measured are {', '.join(MEASURED)})"
    )


def both_halves(update_s: float, mean_delay: float, optimizer: str, synchronous_share: float = 0.0, more_s: float | None = None) -> str:
    """Return in words what a choice takes until a loss: seconds of an update, and how many more updates.

    Args:
        update_s: Seconds of an update that is late.
        mean_delay: As in `more_updates`.
        optimizer: As in `more_updates`.
        synchronous_share: As in `more_updates`.
        more_s: How much longer an update takes that is drained, as `drain_s`; `None` where that is not known.
    """
    known = optimizer if optimizer in MEASURED else f"an optimizer like {_OF_OTHERS}"
    delays = [delay for delay, _ in MEASURED.get(optimizer, MEASURED[_OF_OTHERS])]
    is_measured = any(abs(delay - mean_delay) <= _NEAR_MEASURED * delay for delay in delays)
    how = f"{'inter' if mean_delay < delays[-1] else 'extra'}polated, not measured"

    def halves(share: float) -> tuple[float, float]:
        return update_s + share * (more_s or 0.0), more_updates(optimizer, mean_delay, share)

    (mean_s, more), (start_s, fewer) = halves(synchronous_share), halves(max(synchronous_share, MEASURED_START))
    remedy = (
        f"; with schedule.synchronous_updates at {MEASURED_START:.0%} of the run's updates, {fewer - 1:.1%} and {seconds(start_s)}"
        if more_s is not None and start_s * fewer < mean_s * more
        else ""
    )
    return (
        f"{seconds(mean_s)} an update; gradients are {mean_delay:.2g} updates late on average"
        f"{f' behind the first {synchronous_share:.0%} of the updates' if synchronous_share else ''}, for which {known} takes about "
        f"{more - 1:.1%} more updates to the same loss{'' if is_measured else f' ({how})'}{remedy}"
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
