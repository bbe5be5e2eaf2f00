"""Who waits for whom in the end."""

from __future__ import annotations

from raypipe.actors.orders import Awaited, Status
from raypipe.cluster.watching import _NAME, WatchedDevice, awaited_by


def device(number: int, *waits_for: int) -> WatchedDevice:
    awaited = Awaited(waits_for, f"message {number}") if waits_for else None
    return WatchedDevice(f"d{number}", Status(number, "window 0", 1.0, computes=not waits_for, awaited=awaited))


def test_a_chain_of_waits_ends_at_the_device_that_computes() -> None:
    assert awaited_by([device(0, 1), device(1, 2), device(2), device(3)]) == {"d2": ["d0", "d1"]}


def test_a_sum_is_waited_for_with_all_that_have_not_come() -> None:
    assert awaited_by([device(0, 1, 2), device(1), device(2)]) == {"d1": ["d0"], "d2": ["d0"]}


def test_a_circle_of_waits_has_no_end_and_is_none() -> None:
    assert awaited_by([device(0, 1), device(1, 0)]) == {}


def test_a_device_that_does_not_answer_is_an_end() -> None:
    assert awaited_by([device(0, 1), WatchedDevice("d1", None)]) == {"device 1": ["d0"]}


def test_actors_are_found_by_their_names() -> None:
    match = _NAME.fullmatch("gpt: 2: stage 0,4 on device lab0/1")
    assert match is not None
    assert (match["run"], match["device"]) == ("gpt: 2", "lab0/1")
    match = _NAME.fullmatch("gpt-2: device lab0/1")
    assert match is not None
    assert (match["run"], match["device"]) == ("gpt-2", "lab0/1")
