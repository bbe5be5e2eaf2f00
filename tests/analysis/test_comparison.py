"""What was predicted of a run beside what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.analysis.comparison import ComparedFigure, compare
from raypipe.artifacts.trace import Source, Trace
from raypipe.schedules.catalogue import build
from raypipe.schedules.lower import lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.cost import StageCost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs


def predicted() -> Trace:
    schedule = build("1f1b", ScheduleRequest(2, 4))
    cost = equal_stages(schedule)
    stages = dict.fromkeys(cost.stages, StageCost(1.0, 2.0, 1.0, saved_bytes=100, state_bytes=700))
    return simulate_programs(lower(schedule), replace(cost, stages=stages), name="1f1b")


def measured(*peaks: int) -> Trace:
    return replace(predicted(), source=Source.MEASURED, memory=tuple(((0.0, peak),) for peak in peaks))


def memory_figures(*windows: Trace) -> list[ComparedFigure]:
    return [figure for figure in compare(predicted(), windows) if figure.unit == "bytes"]


def test_the_memory_of_each_device_is_compared_by_the_median_of_its_peaks() -> None:
    first, second = memory_figures(measured(1000, 800), measured(1100, 800), measured(900, 800))
    assert (first.name, first.predicted, first.measured) == ("memory of device 0", 900, 1000)
    assert first.error == pytest.approx(-0.1)
    assert first.spread == 100
    assert (second.name, second.error, second.spread) == ("memory of device 1", 0.0, 0.0)


def test_memory_that_a_window_does_not_know_is_left_out() -> None:
    assert memory_figures(measured(1000, 800), measured()) == []
    assert [figure.name for figure in compare(replace(predicted(), memory=()), [measured(1000, 800)])][-1] == "bubble of device 1"


def test_errors_are_relative_for_what_has_a_unit() -> None:
    assert ComparedFigure("a time", "s", 1.5, 1.0, 0.0).error == 0.5
    assert ComparedFigure("a share", "ratio", 0.5, 0.25, 0.0).error == 0.25
    assert ComparedFigure("nothing", "bytes", 5.0, 0.0, 0.0).error == 5.0
