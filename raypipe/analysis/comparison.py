"""Predicted against measured, figure by figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.artifacts.trace import Trace


@dataclass(frozen=True)
class ComparedFigure:
    """A predicted and a measured figure.

    Attributes:
        unit: `s`, `bytes` or `ratio`.
        measured: Median over the windows.
        spread: Half the distance between the quartiles of the windows.
    """

    name: str
    unit: str
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        """Difference predicted - measured, for seconds and bytes over measured."""
        difference = self.predicted - self.measured
        return difference / self.measured if self.is_amount and self.measured else difference

    @property
    def is_amount(self) -> bool:
        """Whether the error is relative."""
        return self.unit != "ratio"


def compare(predicted: Trace, measured: Sequence[Trace]) -> list[ComparedFigure]:
    """Compare update time, bubble ratios and known peak memory with at least one window of the same programs."""
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
    """Return the window whose update time is nearest to the median."""
    middle = statistics.median(trace.update_s for trace in measured)
    return min(measured, key=lambda trace: abs(trace.update_s - middle))
