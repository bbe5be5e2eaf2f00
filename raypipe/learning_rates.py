"""Curves of the learning rate over a run, as factors of the highest rate.

`p` is the progress after the warm-up, from 0 to 1, and `f` the final rate divided by the highest:

    constant   1
    linear     f + (1 - f) (1 - p)
    cosine     f + (1 - f) (1 + cos(pi p)) / 2                              Loshchilov and Hutter 2017, arXiv 1608.03983
    wsd        1 until the decay begins, then linear down to f              Hu et al. 2024, arXiv 2404.06395, section 4
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from enum import StrEnum

from raypipe.errors import ConfigError, suggestion
from raypipe.user_code import named

RateFunction = Callable[[int, int], float]
"""Returns the factor of an update, counted from 0, of a run with so many updates."""

_DECAY_SHARE = 5  # A fifth of the run, as Hagele et al. 2024 (arXiv 2405.18392) find enough.


class LearningRateSchedule(StrEnum):
    """The curves that raypipe knows by name."""

    CONSTANT = "constant"
    """The highest rate throughout."""
    LINEAR = "linear"
    """Down to the final rate in a straight line."""
    COSINE = "cosine"
    """Down to the final rate along half a wave of the cosine."""
    WSD = "wsd"
    """Warm-up, stable, decay: the highest rate until the last updates, in which it falls in a straight line."""


def check_curve(name: str) -> None:
    """Refuse a name that is neither a curve's nor of the form `module:function`.

    Raises:
        ConfigError: Lists the names.
    """
    names = [schedule.value for schedule in LearningRateSchedule]
    if ":" not in name and name not in names:
        known = f"{suggestion(name, names)}; expected {', '.join(names)}, module:function or file.py:function"
        raise ConfigError(f"there is no learning rate schedule {name!r}{known}")


@functools.lru_cache(maxsize=16)
def curve(name: str) -> RateFunction:
    """Return the user's function of this name.

    Raises:
        ConfigError: There is no such function.
    """
    function = named(name, what="optimizer.learning_rate_schedule", such_as="curves:triangle")
    if not callable(function):
        raise ConfigError(f"optimizer.learning_rate_schedule {name!r}: expected a function, got {type(function).__name__}")
    found: RateFunction = function
    return found


def learning_rate(
    update: int, *, name: str, highest: float, final: float, num_updates: int, warmup_updates: int, decay_updates: int | None
) -> float:
    """Return the learning rate of an update, counted from 0.

    Args:
        update: Number of the update.
        name: A `LearningRateSchedule`, or the name of a function of one's own.
        highest: Highest rate.
        final: Rate of the last update.
        num_updates: Updates of the run.
        warmup_updates: Updates in which the rate rises to the highest in a straight line.
        decay_updates: Updates in which it falls with `wsd`; `None` for a fifth of the run.

    Raises:
        ConfigError: A user's function returned no finite number that is at least 0.
    """
    if name not in set(LearningRateSchedule):
        rise = min((update + 1) / warmup_updates, 1.0) if warmup_updates else 1.0
        return highest * rise * _own(name, update, num_updates)
    if update < warmup_updates:
        return highest * (update + 1) / warmup_updates
    last = num_updates - 1
    progress = min((update - warmup_updates) / max(last - warmup_updates, 1), 1.0)
    match name:
        case LearningRateSchedule.CONSTANT:
            return highest
        case LearningRateSchedule.LINEAR:
            return final + (highest - final) * (1 - progress)
        case LearningRateSchedule.WSD:
            decay = max(num_updates // _DECAY_SHARE, 1) if decay_updates is None else decay_updates
            return final + (highest - final) * min(max(last - update, 0) / decay, 1.0)
        case _:
            return final + (highest - final) * (1 + math.cos(math.pi * progress)) / 2


def _own(name: str, update: int, num_updates: int) -> float:
    factor = curve(name)(update, num_updates)
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 0:
        raise ConfigError(
            f"optimizer.learning_rate_schedule {name!r} returned {factor!r} for update {update} of {num_updates}; "
            "expected a finite number that is at least 0"
        )
    return float(factor)
