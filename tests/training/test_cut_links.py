"""Which links a run does without, and when it uses them again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypipe.cluster.slots import ClusterNode, DeviceSlot
from raypipe.cluster.stage_actors import StageActors
from raypipe.errors import RunError, StageFailedError, TransportError
from raypipe.training.cut_links import CutLinks


class Actors:
    """Actors on nodes a, b and c, of which some do not reach each other."""

    def __init__(self, *severed: str) -> None:
        self.severed = {frozenset(pair) for pair in severed}
        self.tried: list[str] = []
        nodes = [ClusterNode(name, f"10.0.0.{number}") for number, name in enumerate("abc")]
        self.launched = [SimpleNamespace(slot=DeviceSlot(node, f"{node.node_id}/0")) for node in nodes]

    def try_link(self, nodes: frozenset[str], *, timeout_s: float) -> Any:
        assert timeout_s > 0
        self.tried.append("".join(sorted(nodes)))
        return nodes

    def is_reached(self, trial: Any, *, timeout_s: float) -> bool:
        assert timeout_s >= 0
        return trial not in self.severed


def links(actors: Actors) -> CutLinks:
    return CutLinks(cast(StageActors, actors))


def lost(device: str, peer: str) -> TransportError:
    return TransportError(device, peer, "activation 0->1 of microbatch 0", "it did not come")


def test_a_link_is_cut_at_once_whose_nodes_do_not_reach_each_other() -> None:
    cut = links(Actors("ab"))
    assert cut.loses(lost("a/0", "b/0")) == frozenset("ab")
    assert list(cut) == [frozenset("ab")]


def test_a_link_whose_nodes_reach_each_other_is_cut_when_it_fails_twice_without_progress() -> None:
    cut = links(Actors())
    assert cut.loses(lost("a/0", "b/0")) is None
    cut.trust()
    assert cut.loses(lost("a/0", "b/0")) is None
    assert cut.loses(lost("b/0", "a/0")) == frozenset("ab")


def test_of_a_sum_the_member_is_found_that_is_not_reached() -> None:
    cut = links(Actors("ac"))
    assert cut.loses(lost("a/0", "b/0, c/0")) == frozenset("ac")
    cut = links(Actors())
    for _ in range(3):
        assert cut.loses(lost("a/0", "b/0, c/0")) is None  # which of the two is not known
    assert len(cut) == 0


def test_other_failures_cut_no_link() -> None:
    actors = Actors("ab")
    cut = links(actors)
    failures: list[RunError | None] = [
        None,
        StageFailedError("a/0", "0", "a", "window 0", "its process died", ""),
        lost("a/0", "a/0"),
        lost("a/0", "the store"),
    ]
    assert [cut.loses(error) for error in failures] == [None] * 4
    assert actors.tried == []


def test_a_link_comes_back_when_its_nodes_reach_each_other_and_later_each_time_it_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("raypipe.training.cut_links.time.monotonic", lambda: clock.now_s)
    actors = Actors("ab")
    cut = links(actors)

    def seconds_until_back(mended_s: float) -> float:
        since_s = clock.now_s
        while clock.now_s < since_s + 1000.0:
            clock.now_s += 1.0
            if clock.now_s - since_s >= mended_s:
                actors.severed.clear()
            if cut.come_back():
                return float(clock.now_s - since_s)
        pytest.fail("the link does not come back")

    for usual_s in (5.0, 20.0, 80.0):
        actors.severed = {frozenset("ab")}
        assert cut.loses(lost("a/0", "b/0")) is not None
        # A trial that was under way does not hold up the run: its answer is looked at the next time.
        assert seconds_until_back(0.0) == usual_s + 1.0
        assert list(cut) == []
    actors.severed = {frozenset("ab")}
    assert cut.loses(lost("a/0", "b/0")) is not None
    assert seconds_until_back(400.0) == pytest.approx(400.0, abs=2.0)


def test_a_link_that_no_plan_does_without_is_used_again() -> None:
    cut = links(Actors("ab"))
    nodes = cut.loses(lost("a/0", "b/0"))
    assert nodes is not None
    cut.keep(nodes)
    assert len(cut) == 0
    assert not cut.come_back()
