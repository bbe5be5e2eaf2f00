"""Two traces figure by figure."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.comparison import Figure
from raypipe.show.amounts import ratio, seconds
from raypipe.trace import Source, Trace

_WORDS = {Source.SIMULATED: "predicted", Source.REHEARSED: "rehearsed", Source.MEASURED: "measured"}


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
    for device, bare_name in enumerate(first.devices[: len(second.devices)]):
        name = f"device {bare_name}" if bare_name.isdigit() else bare_name
        found += [
            figure(f"{name}: busy", "s", (first.busy_s[device], second.busy_s[device])),
            figure(f"{name}: waiting", "s", (first.wait_s[device], second.wait_s[device])),
            figure(f"{name}: bubble", "ratio", (first.device_bubble_ratios[device], second.device_bubble_ratios[device])),
        ]
    return found


def names(first: Trace, second: Trace) -> tuple[str, str]:
    """What two traces are called beside each other: by their sources, or if these are the same by their order."""
    return ("first", "second") if first.source is second.source else (_WORDS[first.source], _WORDS[second.source])


def header(first: Trace, second: Trace) -> tuple[str, ...]:
    """The names of the columns of `rows`."""
    return "figure", *names(first, second), "difference" if first.source is second.source else "error"


def rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """The figures in words; the last column is relative for times and in points for ratios."""
    return [(figure.name, _shown(figure.predicted, figure), _shown(figure.measured, figure), _error(figure)) for figure in figures]


def _shown(value: float, figure: Figure) -> str:
    return seconds(value) if figure.unit == "s" else ratio(value)


def _error(figure: Figure) -> str:
    if figure.unit != "s":
        return f"{100 * figure.error:+.1f} points"
    # Adding zero makes -0.0 positive.
    return f"{round(figure.error, 3) + 0.0:+.1%}" if figure.measured or not figure.predicted else "-"
