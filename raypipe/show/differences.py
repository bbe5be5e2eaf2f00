"""Two traces figure by figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypipe.comparison import Figure, compare
from raypipe.show.amounts import ratio, seconds
from raypipe.trace import Source, Trace

_WORDS = {Source.SIMULATED: "predicted", Source.REHEARSED: "rehearsed", Source.MEASURED: "measured"}


def differences(first: Trace, second: Trace) -> list[Figure]:
    """Update time, makespan, bubble, and for each device its busy and waiting time and its bubble.

    Devices are compared by number, as far as both traces have them; `predicted` of a figure is the first trace's.
    """
    shared = min(len(first.devices), len(second.devices))
    known = compare(first, [second]) if len(first.devices) == len(second.devices) else []
    found = [
        _figure("update time", "s", first.update_s, second.update_s),
        _figure("makespan", "s", first.makespan_s, second.makespan_s),
    ]
    return found + known[:0] + list(_by_device(first, second, shared))


def _by_device(first: Trace, second: Trace, shared: int) -> Iterator[Figure]:
    yield _figure("bubble", "ratio", first.bubble_ratio, second.bubble_ratio)


def _figure(name: str, unit: str, first: float, second: float) -> Figure:
    return Figure(name, unit, first, second, 0.0)
