"""The windows of a run between two switches of its plan, and how they compare with their prediction."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from raypipe.analysis.comparison import ComparedFigure, compare, median_window
from raypipe.artifacts.trace import Trace
from raypipe.show.page import draw_page
from raypipe.show.svg import draw_traces
from raypipe.training.run_folder import RunFolder

_NUM_WINDOWS_KEPT = 50


class Phase:
    """The windows that ran under one plan.

    Attributes:
        predicted: Simulated window of the largest size.
        reason: Why the run switched to this plan; empty for its first.
        windows: Traces of the last windows of the predicted size.
    """

    def __init__(self, *, predicted: Trace, reason: str) -> None:
        self.predicted = predicted
        self.reason = reason
        self.windows: deque[Trace] = deque(maxlen=_NUM_WINDOWS_KEPT)

    def add(self, trace: Trace) -> None:
        """Keep the trace of a window, unless the window was a short one."""
        if trace.num_updates == self.predicted.num_updates:
            self.windows.append(trace)

    @property
    def measured(self) -> list[Trace]:
        """The windows without the first, in which connections, caches and memory warm up."""
        windows = list(self.windows)
        return windows[1:] or windows

    def save(self, folder: RunFolder, *, until: int) -> None:
        """Write the median window and its prediction under the number of the update that ended the phase."""
        if self.windows:
            median_window(self.measured).save(folder.file(f"trace-until-update-{until:06d}.json"))
            self.predicted.save(folder.file(f"predicted-until-update-{until:06d}.json"))


def write_report(folder: RunFolder, phases: Sequence[Phase]) -> list[ComparedFigure]:
    """Write traces, timelines and comparison of the last phase that had a whole window; return predicted against measured."""
    phase = next(phase for phase in reversed(phases) if phase.windows)
    predicted = phase.predicted
    window = dataclasses.replace(median_window(phase.measured), notes=tuple(phase.reason for phase in phases if phase.reason))
    window.save(folder.file("trace.json"))
    predicted.save(folder.file("predicted.json"))
    folder.write_json("trace.perfetto.json", {"traceEvents": predicted.to_chrome() + window.to_chrome()})
    # Two updates from the middle: few enough to read the Ops.
    middle = max(window.num_updates // 2 - 1, 0)
    shown = [trace.of_updates(middle, min(middle + 2, trace.num_updates)) for trace in (predicted, window)]
    folder.file("timeline.svg").write_text(draw_traces(shown), encoding="utf-8")
    folder.file("timeline.html").write_text(draw_page((predicted, window)), encoding="utf-8")
    figures = compare(predicted, phase.measured)
    folder.write_json("comparison.json", [dataclasses.asdict(figure) | {"error": figure.error} for figure in figures])
    return figures
