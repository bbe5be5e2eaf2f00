"""What a run that has failed goes on from, and what it does about devices that do not start; without actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.cluster.state_copies import StateCopy
from raypipe.config import FailureConfig, ScalingConfig
from raypipe.errors import RunError
from raypipe.training import recovery as module
from raypipe.training.recovery import Recovery


def recovery(
    *, copies: Sequence[int] = (), checkpoints: Callable[[], Sequence[Any]] = lambda: (), newest: Any = None, told: list[str] | None = None
) -> Recovery:
    candidates = [StateCopy(update, {}) for update in copies]
    actors = SimpleNamespace(gone=set(), scaling=ScalingConfig(), launched=[], launched_infos=())
    return Recovery(
        config=FailureConfig(spare_processes=False),
        coordinator=cast(Any, SimpleNamespace(actors=actors)),
        record=cast(Any, SimpleNamespace(notice=(told if told is not None else []).append)),
        sums=cast(Any, None),
        strategy=cast(Any, None),
        copies=cast(Any, SimpleNamespace(candidates=lambda: candidates)),
        build_order=cast(Any, None),
        checkpoints=checkpoints,
        newest=lambda: newest,
        adopt=cast(Any, None),
    )


def checkpoint(update: int) -> Checkpoint:
    return cast(Checkpoint, SimpleNamespace(index=SimpleNamespace(update=update), path=f"update-{update}"))


def unreachable() -> Sequence[Checkpoint]:
    raise OSError("the storage does not answer")


def test_copies_that_are_newer_than_all_checkpoints_need_no_storage() -> None:
    told: list[str] = []
    sources = recovery(copies=[9, 8], checkpoints=unreachable, newest=checkpoint(8), told=told)._sources()
    assert [next(sources).update, next(sources).update] == [9, 8]
    assert not told
    assert list(sources) == [], "the run does not begin anew"
    assert told == ["the checkpoints cannot be read: the storage does not answer"]


def test_of_copies_and_checkpoints_the_newest_comes_first() -> None:
    saved = [checkpoint(4), checkpoint(7), checkpoint(2)]
    sources = list(recovery(copies=[8, 4], checkpoints=lambda: saved, newest=saved[1])._sources())
    assert [(source.update, source.text) for source in sources] == [
        (8, "the copies in memory"),
        (7, "the checkpoint update-7"),
        (4, "the copies in memory"),
        (4, "the checkpoint update-4"),
        (2, "the checkpoint update-2"),
    ]


def test_copies_of_which_parts_went_with_a_node_are_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    run = recovery(copies=[9, 8])
    monkeypatch.setattr(module, "lie_only_on", lambda nodes, states: nodes == {"n"} and states == {9: []})
    for copy in run.copies.candidates():
        cast(dict[int, Any], copy.states)[copy.update] = []
    run._lost_nodes.add("n")
    assert [source.update for source in run._sources()] == [8, 9, 0]
    run.newest = lambda: checkpoint(7)
    assert [source.update for source in run._sources()] == [8]


def test_only_a_run_without_checkpoints_begins_anew() -> None:
    assert [source.text for source in recovery(copies=[3])._sources()] == ["the copies in memory", "the beginning"]
    assert [source.text for source in recovery(checkpoints=lambda: [], newest=checkpoint(5))._sources()] == []


def test_a_device_that_does_not_start_stays_out_for_ever_longer_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = 1000.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(module, "unreached", lambda *_, **__: set())
    node = SimpleNamespace(node_id="n", name="n")
    slot = SimpleNamespace(node=node, name="n/0", num_gpus=0.0)
    run = recovery(told=told)
    actors = cast(Any, run.coordinator).actors
    actors.gone, actors.launched = {0}, [SimpleNamespace(slot=slot)]
    offered: list[float] = []

    def spare_slots(*_: object, without: set[str], **__: object) -> dict[int, Any]:
        return {} if "n" in without else {0: slot}

    def replace(_: object) -> None:
        offered.append(now_s)
        raise RunError("the GPU is gone")

    monkeypatch.setattr(module, "spare_slots", spare_slots)
    cast(Any, run.coordinator).replace = replace
    for _ in range(4000):
        now_s += 10.0
        run._take_back(7)
    waits_s = [later - earlier for earlier, later in pairwise(offered)]
    assert waits_s == pytest.approx([600.0, 2400.0, 9600.0], abs=10.0)
    assert told[0] == "update 7: going on without n/0: the GPU is gone"


def test_what_a_new_device_needs_is_what_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, float]] = []

    def spare_slots(_: object, __: object, needs: dict[str, float], **___: object) -> dict[int, Any]:
        asked.append(needs)
        return {}

    monkeypatch.setattr(module, "spare_slots", spare_slots)
    monkeypatch.setattr(module, "end_processes", lambda _: set())
    run = recovery()
    cast(Any, run.coordinator).actors.launched = [SimpleNamespace(slot=SimpleNamespace(num_gpus=1.0))]
    run._free_slots()
    assert asked == [{"CPU": 1.0, "GPU": 1.0}]
