"""When two devices have lost each other."""

from __future__ import annotations

from raypipe.actors.orders import Status
from raypipe.cluster.lost_links import LostLinks


def status(device: int, *unanswered: int) -> Status:
    return Status(device, "window 3", 1.0, computes=True, unanswered=unanswered)


def test_a_link_is_lost_that_has_acknowledged_nothing_for_as_long_as_is_allowed() -> None:
    links = LostLinks(4.0)
    assert links.look([status(0, 1), status(1)], now_s=10.0) is None
    assert links.look([status(0, 1), status(1)], now_s=13.9) is None
    assert links.look([status(0, 1), status(1)], now_s=14.0) == (0, 1)


def test_a_link_that_answers_in_between_is_not_lost() -> None:
    links = LostLinks(4.0)
    for now_s, lost in ((0.0, [1]), (2.0, []), (3.0, [1]), (6.0, [1])):
        assert links.look([status(0, *lost)], now_s=now_s) is None
    assert links.look([status(0, 1)], now_s=7.0) == (0, 1)


def test_of_two_lost_links_the_one_is_named_that_was_lost_first() -> None:
    links = LostLinks(1.0)
    links.look([status(0), status(2, 3)], now_s=0.0)
    assert links.look([status(0, 1), status(2, 3)], now_s=0.5) is None
    assert links.look([status(0, 1), status(2, 3)], now_s=2.0) == (2, 3)
