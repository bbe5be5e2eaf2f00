"""Seconds and bytes as text, round numbers for axes, and the typical of several times."""

from __future__ import annotations

import math
from collections.abc import Sequence

_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit, as name and seconds, for one to three digits before the point."""
    return next((unit for unit in _TIME_UNITS if abs(seconds) >= unit[1] * 0.99995), _TIME_UNITS[0] if not seconds else _TIME_UNITS[-1])


def seconds(value: float) -> str:
    """Return a time with four significant digits, such as `18.52 ms`."""
    name, size = time_unit(value)
    return f"{number(value / size)} {name}"


def size(value: float) -> str:
    """Return bytes with three significant digits, in powers of 1000, such as `1.5 GB`."""
    power = min(int(math.log(abs(value) * 1.0005, 1000)), len(_BYTE_UNITS) - 1) if abs(value) >= 1 else 0
    return f"{value / 1000**power:.3g} {_BYTE_UNITS[power]}"


def number(value: float) -> str:
    """Return a number with four significant digits, without exponent below ten million."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def ratio(value: float) -> str:
    """Return a share in percent."""
    return f"{value:.1%}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as `8 microbatches`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def ticks(end: float, most: int) -> Sequence[float]:
    """Return at most `most` round numbers from 0 to `end`, 1, 2 or 5 times a power of ten apart."""
    if not end or most < 2:
        return [0.0]
    rough = end / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(int(end / step * (1 + 1e-9)) + 1)]


def lower_quartile(times_s: Sequence[float]) -> float:
    """Return the lower quartile of repeated measurements: disturbances only ever add time, often to more than half of a few repeats."""
    # One of the values: between two of them, a disturbance of the larger would count.
    return sorted(times_s)[len(times_s) // 4]
