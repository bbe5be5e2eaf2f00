"""How often a run copies its state."""

from __future__ import annotations

import pytest

from raypipe.cluster.copy_pace import CopyPace


def paced(share: float = 0.05, *, alone_s: float, beside_s: float, wait_s: float = 0.0, num_updates: int = 4) -> CopyPace:
    """After a first window, six windows that take turns, and a copy."""
    pace = CopyPace(share)
    pace.window(100.0, num_updates=1, is_beside=True)
    for _ in range(3):
        pace.waited(wait_s)
        pace.window(beside_s * num_updates, num_updates=num_updates, is_beside=True)
        pace.window(alone_s * num_updates, num_updates=num_updates, is_beside=False)
    return pace


def test_a_copy_costs_the_wait_and_what_windows_take_longer_beside_it() -> None:
    assert paced(alone_s=0.1, beside_s=0.13, wait_s=0.02).cost_s == pytest.approx(0.02 + 4 * 0.03)


def test_windows_that_are_quicker_beside_copies_do_not_make_up_for_the_wait() -> None:
    assert paced(alone_s=0.13, beside_s=0.1, wait_s=0.02).cost_s == pytest.approx(0.02)


def test_a_copy_that_is_fetched_for_two_windows_costs_what_both_take_longer() -> None:
    pace = paced(alone_s=0.1, beside_s=0.13)
    pace.waited(0.0)
    for _ in range(2):
        pace.window(4 * 0.13, num_updates=4, is_beside=True)
    assert pace.cost_s == pytest.approx(8 * 0.03)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_next_copy_is_due_once_the_last_one_is_within_the_share(share: float) -> None:
    pace = paced(share, alone_s=0.1, beside_s=0.13)
    assert not pace.is_due(seconds=0.99 * 0.12 / share, was_beside=False)
    assert pace.is_due(seconds=1.01 * 0.12 / share, was_beside=False)


def test_until_both_are_known_a_window_beside_a_copy_is_followed_by_one_without() -> None:
    pace = CopyPace(0.05)
    assert pace.is_due(seconds=10.0, was_beside=False)
    for _ in range(3):
        pace.waited(0.01)
        pace.window(1.0, num_updates=2, is_beside=True)
        assert not pace.is_due(seconds=10.0, was_beside=True)
        pace.window(1.0, num_updates=2, is_beside=False)
        assert pace.is_due(seconds=10.0, was_beside=False)
    assert pace.is_due(seconds=10.0, was_beside=True)


def test_another_plan_has_other_windows() -> None:
    pace = paced(alone_s=0.1, beside_s=0.2, wait_s=0.02)
    pace.begin_anew()
    assert pace.cost_s == pytest.approx(0.02)
    assert not pace.is_due(seconds=10.0, was_beside=True)


def test_whoever_gives_copies_all_time_has_one_behind_each_window() -> None:
    pace = paced(1.0, alone_s=0.1, beside_s=10.0)
    assert pace.is_due(seconds=0.0, was_beside=True)
