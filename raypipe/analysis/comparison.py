"""Predicted against measured, figure by figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.artifacts.trace import Trace


@dataclass(frozen=True)
class ComparedFigure:
    """One figure, predicted and measured.

    Attributes:
        name: what it is.
        unit: `s`, `bytes` or `ratio`.
        predicted: by simulation.
        measured: the median over the windows.
        spread: half the distance between the quartiles of the windows, in the same unit.
    """

    name: str
    unit: str
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        """For seconds and bytes (predicted - measured) / measured, for ratios predicted - measured."""
        difference = self.predicted - self.measured
        return difference / self.measured if self.is_amount and self.measured else difference

    @property
    def is_amount(self) -> bool:
        """Whether it has a unit, so that its error is relative."""
        return self.unit != "ratio"


def compare(predicted: Trace, measured: Sequence[Trace]) -> list[ComparedFigure]:
    """Update time, bubble ratio of the run and of each device, and where both sides know it the peak memory of each device.

    Args:
        predicted: one simulated window.
        measured: windows of the same programs; at least one.
    """
    figures = [
        _figure("update time", "s", predicted.update_s, [trace.update_s for trace in measured]),
        _figure("bubble", "ratio", predicted.bubble_ratio, [trace.bubble_ratio for trace in measured]),
    ]
    for device, name in enumerate(predicted.devices):
        values = [trace.device_bubble_ratios[device] for trace in measured]
        figures.append(_figure(f"bubble of device {name}", "ratio", predicted.device_bubble_ratios[device], values))
    if all(any(trace.peak_memory_bytes) for trace in (predicted, *measured)):
        for device, name in enumerate(predicted.devices):
            peaks = [float(trace.peak_memory_bytes[device]) for trace in measured]
            if not statistics.median(peaks):
                continue  # less than what was there before the model: nobody knows by how much
            figures.append(_figure(f"memory of device {name}", "bytes", float(predicted.peak_memory_bytes[device]), peaks))
    return figures


def _figure(name: str, unit: str, predicted: float, values: list[float]) -> ComparedFigure:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return ComparedFigure(name, unit, predicted, statistics.median(values), (quartiles[2] - quartiles[0]) / 2)


def median_window(measured: Sequence[Trace]) -> Trace:
    """The window whose update time is the median's nearest."""
    middle = statistics.median(trace.update_s for trace in measured)
    return min(measured, key=lambda trace: abs(trace.update_s - middle))
