"""Two traces figure by figure."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.comparison import Figure
from raypipe.show.amounts import ratio, seconds
from raypipe.trace import Source, Trace

WORDS = {Source.SIMULATED: "predicted", Source.REHEARSED: "rehearsed", Source.MEASURED: "measured"}
"""What a trace of each source is called beside another one."""


def differences(first: Trace, second: Trace) -> list[Figure]:
    """Update time, makespan, bubble, and for each device that both have its busy and waiting time and its bubble.

    `predicted` of a figure is the first trace's, `measured` the second's.
    """

    def figure(name: str, unit: str, values: tuple[float, float]) -> Figure:
        return Figure(name, unit, *values, spread=0.0)

    found = [
        figure("update time", "s", (first.update_s, second.update_s)),
        figure("makespan", "s", (first.makespan_s, second.makespan_s)),
        figure("bubble", "ratio", (first.bubble_ratio, second.bubble_ratio)),
    ]
    for device, name in enumerate(first.devices[: len(second.devices)]):
        found += [
            figure(f"device {name}: busy", "s", (first.busy_s[device], second.busy_s[device])),
            figure(f"device {name}: waiting", "s", (first.wait_s[device], second.wait_s[device])),
            figure(f"device {name}: bubble", "ratio", (first.device_bubble_ratios[device], second.device_bubble_ratios[device])),
        ]
    return found


def header(first: Trace, second: Trace) -> tuple[str, ...]:
    """The names of the columns of `rows`."""
    if first.source is second.source:
        return "figure", "first", "second", "difference"
    return "figure", WORDS[first.source], WORDS[second.source], "error"


def rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """The figures in words; the last column is relative for times and in points for ratios."""
    return [(figure.name, _shown(figure.predicted, figure), _shown(figure.measured, figure), _error(figure)) for figure in figures]


def _shown(value: float, figure: Figure) -> str:
    return seconds(value) if figure.unit == "s" else ratio(value)


def _error(figure: Figure) -> str:
    if figure.unit != "s":
        return f"{100 * figure.error:+.1f} points"
    return f"{figure.error:+.1%}" if figure.measured or not figure.predicted else "-"
