"""From which nodes the states of layers come where some nodes do not reach each other, and which nodes keep copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import RayError

from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.cluster.stage_actors import StageActors
from raypipe.cluster.state_copies import StateCopies
from raypipe.cluster.states import lie_only_on, within_reach

HOLDERS = {"a's": {"a"}, "b's": {"b"}, "c's": {"c"}, "of b and c": {"b", "c"}, "small": set[str]()}
APART = [frozenset("ab")]


class Handle:
    """An actor that hands on what it is given."""

    def __init__(self, node: str) -> None:
        self.hand_on = SimpleNamespace(remote=lambda part: f"{part} by {node}")


def actors(nodes: str) -> StageActors:
    members = [SimpleNamespace(handle=Handle(name), slot=DeviceSlot(ClusterNode(name, name), f"{name}/0")) for name in nodes]
    return cast(StageActors, SimpleNamespace(members=members, alive=lambda: dict(enumerate(members))))


@pytest.fixture(autouse=True)
def locations(monkeypatch: pytest.MonkeyPatch) -> None:
    def where(parts: Sequence[str]) -> dict[str, Any]:
        return {part: {"node_ids": sorted(HOLDERS[part])} for part in parts}

    monkeypatch.setattr("ray.experimental.get_object_locations", where)


def test_a_state_on_a_node_that_is_not_reached_is_handed_on_by_one_that_has_it_or_reaches_both() -> None:
    states = {0: ["a's"], 1: ["b's", "of b and c"], 2: ["small"]}
    found = within_reach(actors("abc"), states, 0, [0, 1, 2], apart=APART)
    assert found == {0: ["a's"], 1: ["b's by c", "of b and c by c"], 2: ["small"]}


def test_a_node_that_is_not_reached_may_fetch_a_state_meanwhile_and_is_not_asked_for_it() -> None:
    assert within_reach(actors("abc"), {0: ["c's"]}, 0, [0], apart=APART) == {0: ["c's by c"]}
    assert within_reach(actors("acd"), {0: ["c's"]}, 0, [0], apart=APART) == {0: ["c's"]}, "a lost node fetches nothing"


def test_states_that_went_with_a_node_are_told_from_those_that_lie_elsewhere_too() -> None:
    assert lie_only_on({"b"}, {0: ["a's"], 1: ["of b and c", "b's"]})
    assert not lie_only_on({"b"}, {0: ["a's"], 1: ["of b and c"], 2: ["small"]})
    assert lie_only_on({"b", "c"}, {1: ["of b and c"]})
    assert not lie_only_on(set(), {1: ["b's"]})


def test_a_state_on_a_lost_node_is_handed_on_by_one_that_has_a_copy() -> None:
    # Ray would ask the lost node first, for as long as it takes it for alive.
    states = {1: ["of b and c", "b's"]}
    found = within_reach(actors("ac"), states, 0, [1], apart=[frozenset("ab"), frozenset("bc")])
    assert found == {1: ["of b and c by c", "b's"]}


def test_a_device_whose_node_reaches_all_others_gets_states_as_they_are() -> None:
    states = {1: ["b's"]}
    assert within_reach(actors("abc"), states, 2, [1], apart=APART) is states
    assert within_reach(actors("abc"), states, 0, [1], apart=[]) is states


def test_without_a_node_between_a_state_is_left_to_ray() -> None:
    assert within_reach(actors("ab"), {1: ["b's"]}, 0, [1], apart=APART) == {1: ["b's"]}


def test_copies_are_kept_by_nodes_that_are_reached() -> None:
    copies = StateCopies(actors("abc"), share=1.0)
    assert copies._keepers() == {0: 1, 1: 2, 2: 0}
    copies.cut_links = APART
    assert copies._keepers() == {0: 2, 1: 2, 2: 0}


def test_actors_that_keep_no_new_copies_drop_their_old_ones_once_newer_ones_are_kept() -> None:
    calls: list[tuple[str, int]] = []

    class Dropping:
        def __init__(self, name: str) -> None:
            call = SimpleNamespace(remote=lambda before: calls.append((name, before)))
            self.drop_held = SimpleNamespace(options=lambda **_: call)

    alive = {number: SimpleNamespace(handle=Dropping(name)) for number, name in enumerate("abc")}
    copies = StateCopies(cast(StageActors, SimpleNamespace(alive=lambda: alive)), share=1.0)
    for update, keeping in ((1, {0, 1}), (2, {1, 2}), (3, {1, 2}), (4, {1, 2})):
        copies._drop_elsewhere(keeping, update=update, oldest=max(update - 1, 1))
    assert calls == [("a", 2)]
    del alive[2]
    for update in (5, 6):
        copies._drop_elsewhere({0, 1}, update=update, oldest=update - 1)
    assert calls == [("a", 2)]
    assert copies._holding.keys() == {0, 1}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_window_that_is_run_again_is_beside_copies_that_are_still_fetched(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    copies = StateCopies(actors("abc"), share=0.05)
    copies._fetching = {"call": ("a", "b")}
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []) if is_there else ([], calls))
    monkeypatch.setattr(ray, "get", lambda _: None)
    copies.drop_after(1)
    assert copies._is_beside is not is_there


def test_beside_a_copy_that_a_node_failed_to_fetch_the_last_whole_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = True

    def get(_: object) -> None:
        if fails:
            raise RayError("the keeper is gone")

    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(ray, "get", get)
    copies = StateCopies(actors(""), share=1.0)
    monkeypatch.setattr(copies, "_export", dict)
    kept: list[list[int]] = []
    for update in range(1, 6):
        fails = update in {3, 4}  # what was copied behind updates 2 and 3
        copies.after_window(update, seconds=1.0, num_updates=1, mtbf_s=0.0)
        copies._fetching = {"call": ("a", "b")}
        kept.append([copy.update for copy in copies.candidates()])
    assert kept == [[1], [2, 1], [3, 1], [4, 1], [5, 4]]
    fails = True
    assert not copies._is_fetching()
    assert [copy.update for copy in copies.candidates()] == [5, 4], "a process that is lost goes back to the newest"


def test_copies_that_are_renewed_do_not_wait_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    copies = StateCopies(actors("abc"), share=0.05)
    monkeypatch.setattr(copies, "_take", taken.append)
    copies._pace.note_wait(1e6)
    copies._taken_at_s = time.monotonic()
    for update in range(1, 4):
        if update == 2:
            copies.renew()
        copies.after_window(update, seconds=1.0, num_updates=1, mtbf_s=0.0)
    assert taken == [2]
