"""Long computations end where it is due: by work, by time, or because somebody asks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from raypipe import stopping
from raypipe.stopping import SearchStopped, Stop, searching


def worked(steps: list[int], *, count: int = 100) -> None:
    """Do steps of a second each, and note their numbers."""
    for number in range(count):
        stopping.spend(1.0)
        steps.append(number)


def with_plan() -> Stop:
    return Stop(has_plan=True)


def test_work_goes_on_where_nobody_ends_it() -> None:
    steps: list[int] = []
    worked(steps)
    with searching(with_plan()):
        worked(steps)
    assert len(steps) == 200


def test_a_part_ends_after_its_work_and_what_follows_goes_on() -> None:
    steps: list[int] = []
    with searching(with_plan()):
        with stopping.part(work_s=3.0):
            worked(steps)
        worked(steps, count=5)
    assert steps == [0, 1, 2, 0, 1, 2, 3, 4]


def test_shares_are_those_of_what_is_left() -> None:
    first: list[int] = []
    second: list[int] = []
    with searching(with_plan()), stopping.part(work_s=16.0):
        with stopping.part(share=0.25):
            worked(first)
        with stopping.part(share=0.5):
            worked(second)
    assert (len(first), len(second)) == (4, 5)  # The step that is refused counts, too.


def test_inner_parts_end_first_so_that_each_has_its_result() -> None:
    ended: list[str] = []
    with searching(with_plan()):
        with stopping.part(work_s=2.0):
            with stopping.part():
                worked([])
            ended.append("inner")
            worked([])
            ended.append("never")
        ended.append("outer")
    assert ended == ["inner", "outer"]


def test_generators_end_with_the_part_that_asks_them() -> None:
    def numbers() -> Iterator[int]:
        for number in range(10):
            stopping.spend(1.0)
            yield number

    found: list[int] = []
    with searching(with_plan()), stopping.part(work_s=4.0):
        found += [0]
        for number in numbers():
            found.append(number)
    assert found == [0, 0, 1, 2, 3]


def test_without_a_plan_parts_last_longer_but_not_for_ever() -> None:
    steps: list[int] = []
    with searching(Stop()), stopping.part(work_s=3.0):
        worked(steps)
    assert 3 < len(steps) < 30


def test_a_time_limit_waits_for_a_plan() -> None:
    steps: list[int] = []
    with searching(Stop.after(0.0)):
        worked(steps)
        stopping.note_plan()
        with pytest.raises(SearchStopped):
            worked(steps)
    assert len(steps) == 100


def test_who_asks_is_heard_at_once_and_parts_do_not_hide_it() -> None:
    steps: list[int] = []
    with pytest.raises(SearchStopped), searching(Stop.after(None, lambda: len(steps) == 2)), stopping.part(work_s=math.inf):
        worked(steps)
    assert len(steps) == 2


def test_what_must_be_done_is_done_to_the_end() -> None:
    steps: list[int] = []
    with searching(Stop.after(0.0, lambda: True)), stopping.to_the_end():
        worked(steps)
    assert len(steps) == 100
