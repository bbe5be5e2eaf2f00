"""Updates without rows that count are left out, unless the run is to go on with all; their gradients are looked at all the same."""

from __future__ import annotations

import math

import pytest

from raypipe.actors.execution.report import WindowReport
from raypipe.cluster.window import WindowResult
from raypipe.config import OnNonFinite
from raypipe.errors import NonFiniteError
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.nonfinite import NonFiniteUpdates

SCHEDULE = build("1f1b", ScheduleRequest(2, 2))


def window(*, weight: float, norm: float) -> WindowResult:
    """Return a window of one update, whose losses are all 0."""
    report = WindowReport(0, 0.0, losses={0: 0.0, 1: 0.0}, loss_weights={0: weight, 1: weight}, norms={0: norm})
    return WindowResult((report,), 1.0, "window", ("device 0",), 1, ())


def must_repeat(policy: OnNonFinite, result: WindowResult, told: list[str], *, can_repeat: bool) -> tuple[bool, set[int]]:
    updates = NonFiniteUpdates(policy, can_repeat=can_repeat, notice=told.append)
    repeats = updates.must_repeat(result, SCHEDULE, first_update=4, layers=list)
    return repeats, set(updates.skipped(4, 1))


@pytest.mark.parametrize("policy", [OnNonFinite.STOP, OnNonFinite.SKIP])
def test_an_update_without_rows_that_count_is_left_out_where_the_window_can_run_again(policy: OnNonFinite) -> None:
    told: list[str] = []
    assert must_repeat(policy, window(weight=0.0, norm=0.0), told, can_repeat=True) == (True, {0})
    assert must_repeat(policy, window(weight=0.0, norm=0.0), told, can_repeat=False) == (False, set())
    assert ["runs again" in text for text in told] == [True, False]


def test_who_wants_to_go_on_with_all_updates_leaves_out_none() -> None:
    told: list[str] = []
    assert must_repeat(OnNonFinite.CONTINUE, window(weight=0.0, norm=0.0), told, can_repeat=True) == (False, set())
    assert "run.on_nonfinite is continue" in told[0]


@pytest.mark.parametrize("policy", [OnNonFinite.STOP, OnNonFinite.SKIP])
def test_a_gradient_that_is_no_number_ends_a_run_even_if_no_row_counts(policy: OnNonFinite) -> None:
    with pytest.raises(NonFiniteError, match=r"update 5: the norm of the gradient is nan"):
        must_repeat(policy, window(weight=0.0, norm=math.nan), [], can_repeat=False)


def test_the_norm_of_an_update_with_rows_is_looked_at() -> None:
    assert must_repeat(OnNonFinite.SKIP, window(weight=1.0, norm=math.inf), [], can_repeat=True) == (True, {0})
    assert must_repeat(OnNonFinite.SKIP, window(weight=1.0, norm=1.0), [], can_repeat=True) == (False, set())
