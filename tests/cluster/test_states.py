"""From which nodes the states of layers come where some nodes do not reach each other, and which nodes keep copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayError

from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.cluster.stage_actors import StageActors
from raypipe.cluster.state_copies import StateCopies, StateCopy
from raypipe.cluster.states import within_reach
from raypipe.config import ClusterConfig
from raypipe.errors import StateLostError

HOLDERS = {"a's": {"a"}, "b's": {"b"}, "of b and c": {"b", "c"}, "small": set[str]()}
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


def test_copies_are_kept_on_other_nodes_alone() -> None:
    assert StateCopies(actors("aab"), share=1.0)._keepers() == {0: 2, 1: 2, 2: 0}
    assert StateCopies(actors("aa"), share=1.0)._keepers() == {}


def test_actors_without_stages_drop_old_copies_once_newer_ones_are_kept() -> None:
    calls: list[tuple[str, Sequence[int]]] = []

    class Dropping:
        def __init__(self, name: str) -> None:
            call = SimpleNamespace(remote=lambda kept: calls.append((name, kept)))
            self.drop_copies = SimpleNamespace(options=lambda **_: call)

    alive = {number: SimpleNamespace(handle=Dropping(name)) for number, name in enumerate("abc")}
    copies = StateCopies(cast(StageActors, SimpleNamespace(alive=lambda: alive)), share=1.0)
    copies._idle = {0: 3, 1: 4, 2: 4}
    copies._drop_elsewhere((3, 4))
    assert calls == []
    del alive[2]
    for kept in ((4, 5), (5, 6), (6, 7)):
        copies._drop_elsewhere(kept)
    assert calls == [("a", (4, 5)), ("b", (5, 6))]
    assert copies._idle == {}


class Process:
    """An actor on a node that keeps copies of other devices' layers, and exports copies or does not."""

    def __init__(self, node: str, kept: set[tuple[int, int]], *, exports: bool = True) -> None:
        self.slot = DeviceSlot(ClusterNode(node, node), f"{node}/0")
        self.handle = self
        self.kept_copies = self._call(lambda: kept)
        done = None if exports else LOST
        self.export_kept = self._call(lambda number, device, layers: [*(f"{layer} of {device} from {node}" for layer in layers), done])
        self.export_copy = self._call(lambda part, layers: [*(f"{layer} of {part} on {node}" for layer in layers), done])

    def _call(self, method: Callable[..., Any]) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=method))


LOST = RayError()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Any, **_: Any) -> Any:
        if answer is LOST:
            raise LOST
        return answer

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("ray.wait", lambda calls, **_: (calls, []))


def copies_of(*processes: Process) -> StateCopies:
    alive = dict(enumerate(processes))
    return StateCopies(cast(StageActors, SimpleNamespace(alive=lambda: alive, cluster=ClusterConfig())), share=1.0)


def copy() -> StateCopy:
    """Return copy 5: of two layers on node a, and of one on node b."""
    return StateCopy(10, 5, {0: (0, 1), 1: (2,)}, {0: ("a", "part"), 1: ("b", "other part")})


@pytest.mark.usefixtures("answering")
def test_a_copy_comes_from_the_stores_of_its_nodes() -> None:
    found = copy()
    copies = copies_of(Process("b", {(5, 0), (4, 0)}), Process("a", {(5, 1)}))
    states = copies.states(found)
    assert states == {0: ["0 of part on a"], 1: ["1 of part on a"], 2: ["2 of other part on b"]}
    assert copies.states(found) is states


@pytest.mark.usefixtures("answering")
def test_what_was_on_a_lost_node_comes_from_its_keeper() -> None:
    states = copies_of(Process("a", {(4, 1)}), Process("c", {(5, 1)})).states(copy())
    assert states == {0: ["0 of part on a"], 1: ["1 of part on a"], 2: ["2 of 1 from c"]}


@pytest.mark.usefixtures("answering")
def test_what_a_node_does_not_export_comes_from_its_keeper() -> None:
    states = copies_of(Process("a", set(), exports=False), Process("b", {(5, 0)})).states(copy())
    assert states == {0: ["0 of 0 from b"], 1: ["1 of 0 from b"], 2: ["2 of other part on b"]}


@pytest.mark.usefixtures("answering")
def test_what_is_on_a_node_without_actors_and_has_no_keeper_is_fetched_by_another_one() -> None:
    states = copies_of(Process("a", {(4, 1)})).states(copy())
    assert states[2] == ["2 of other part on a"]


@pytest.mark.usefixtures("answering")
def test_a_copy_of_which_nobody_exports_a_part_is_lost() -> None:
    with pytest.raises(StateLostError, match="device 0"):
        copies_of(Process("a", set(), exports=False), Process("b", {(4, 0)})).states(copy())
