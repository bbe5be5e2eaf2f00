"""How often a run copies its state."""

from __future__ import annotations

from itertools import count

import pytest

from raypipe.cluster.copy_pace import CopyPace


def paced(share: float = 0.05, *, alone_s: float, beside_s: float, wait_s: float = 0.0, drift_s: float = 0.0) -> CopyPace:
    """After a first window, eight windows of four updates that take turns, each by `drift_s` longer than the last."""
    pace = CopyPace(share)
    pace.note_window(100.0, num_updates=4, is_beside=True)
    drift = (drift_s * number for number in count())
    for _ in range(4):
        pace.note_wait(wait_s)
        for seconds, is_beside in ((beside_s, True), (alone_s, False)):
            pace.note_window(4 * (seconds + next(drift)), num_updates=4, is_beside=is_beside)
    return pace


def test_a_copy_costs_the_wait_and_what_windows_take_longer_beside_it() -> None:
    assert paced(alone_s=0.1, beside_s=0.13, wait_s=0.02).cost_s == pytest.approx(0.02 + 4 * 0.03)


@pytest.mark.parametrize("drift_s", [-0.02, 0.02])
def test_a_machine_that_becomes_busier_or_less_busy_is_no_cost(drift_s: float) -> None:
    assert paced(alone_s=0.5, beside_s=0.5, drift_s=drift_s).cost_s <= 4 * 0.02
    assert paced(alone_s=0.5, beside_s=0.6, drift_s=drift_s).cost_s == pytest.approx(4 * 0.1, abs=4 * 0.02 + 1e-9)


def test_windows_that_are_quicker_beside_copies_do_not_make_up_for_the_wait() -> None:
    assert paced(alone_s=0.13, beside_s=0.1, wait_s=0.02).cost_s == pytest.approx(0.02)


def test_a_copy_that_is_fetched_for_two_windows_costs_what_both_take_longer() -> None:
    pace = paced(alone_s=0.1, beside_s=0.13)
    pace.note_wait(0.0)
    for _ in range(2):
        pace.note_window(4 * 0.13, num_updates=4, is_beside=True)
    assert pace.cost_s == pytest.approx(8 * 0.03)


def test_windows_of_fewer_updates_are_not_compared() -> None:
    pace = CopyPace(0.05)
    for number in range(20):
        pace.note_wait(0.01)
        pace.note_window(1.0, num_updates=10, is_beside=number % 2 == 0)
        pace.note_window(0.8, num_updates=5, is_beside=number % 2 == 1)
    assert pace.cost_s == pytest.approx(0.01)


def test_the_copy_behind_one_that_did_not_get_through_does_not_wait() -> None:
    pace = paced(alone_s=0.1, beside_s=0.2)
    pace.note_wait(0.0)
    for _ in range(50):
        pace.note_window(4 * 0.2, num_updates=4, is_beside=True)
    assert not pace.is_due(40.0)
    pace.note_end_of_hopeless_fetch()
    assert pace.is_due(40.0)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_next_copy_is_due_once_the_last_one_is_within_the_share(share: float) -> None:
    pace = paced(share, alone_s=0.1, beside_s=0.13)
    assert not pace.is_due(0.99 * 0.12 / share)
    assert pace.is_due(1.01 * 0.12 / share)


@pytest.mark.parametrize(("mtbf_s", "interval_s"), [(0.0, 2.4), (10.0, 2.4), (60.0, 3.79), (1800.0, 20.8), (1e6, 24.0)])
def test_the_interval_is_youngs_between_the_share_and_a_tenth_of_it(mtbf_s: float, interval_s: float) -> None:
    pace = paced(0.05, alone_s=0.1, beside_s=0.13)
    assert pace.interval_s(mtbf_s) == pytest.approx(interval_s, rel=1e-2)
    assert not pace.is_due(0.98 * interval_s, mtbf_s=mtbf_s)
    assert pace.is_due(1.02 * interval_s, mtbf_s=mtbf_s)


def test_until_enough_are_compared_a_window_beside_a_copy_is_followed_by_one_without() -> None:
    pace = CopyPace(0.05)
    pace.note_window(1.0, num_updates=2, is_beside=False)
    assert pace.is_due(10.0)
    for _ in range(3):
        pace.note_wait(0.01)
        pace.note_window(1.0, num_updates=2, is_beside=True)
        assert not pace.is_due(10.0)
        pace.note_window(1.0, num_updates=2, is_beside=False)
        assert pace.is_due(10.0)
    pace.note_wait(0.01)
    pace.note_window(1.0, num_updates=2, is_beside=True)
    assert pace.is_due(10.0)


def test_windows_without_copies_are_looked_at_now_and_then() -> None:
    pace = paced(alone_s=0.1, beside_s=0.1)
    due = []
    for _ in range(9):
        pace.note_wait(0.0)
        pace.note_window(0.4, num_updates=4, is_beside=True)
        due.append(pace.is_due(1.0))
    assert due == [True] * 7 + [False] * 2
    pace.note_window(0.4, num_updates=4, is_beside=False)
    assert pace.is_due(1.0)


def test_another_plan_has_other_windows() -> None:
    pace = paced(alone_s=0.1, beside_s=0.2, wait_s=0.02)
    pace.begin_anew()
    assert pace.cost_s == pytest.approx(0.02)
    for _ in range(2):
        pace.note_window(1.0, num_updates=1, is_beside=True)
    assert not pace.is_due(10.0)


def test_whoever_gives_copies_all_time_has_one_behind_each_window() -> None:
    pace = paced(1.0, alone_s=0.1, beside_s=10.0)
    assert pace.is_due(0.0)
