"""Spare processes: what they load, and how to let them be ready whenever one is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ray import cloudpickle

from raypipe.actors.execution.batches import FixedBatch
from raypipe.actors.orders import BatchFunction, BuildOrder, ModelFunction
from raypipe.artifacts.cut import Cut
from raypipe.cluster.slots import DeviceSlot
from raypipe.cluster.spares import Spares
from raypipe.config import OptimizerConfig
from raypipe.schedules.ir import WeightRule


class Watched:
    """What becomes of the spare processes of runs."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        """Ray's handles of them."""
        self.taken: list[list[int]] = []
        """The numbers of the lost actors whose places they took, by recovery."""


def watch_spares(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Let recoveries wait for spare processes that load, however busy the machine is; return what becomes of them."""
    watched, keep, take = Watched(), Spares.keep, Spares.take

    def keep_noted(spares: Spares, wanted: Mapping[Any, int], order: Callable[[], Any], *, is_urgent: bool = False) -> None:
        keep(spares, wanted, order, is_urgent=is_urgent)
        waiting = [spare.handle for of_node in spares._waiting.values() for spare in of_node]
        watched.started += [handle for handle in waiting if handle not in watched.started]

    def take_noted(spares: Spares, slots: Mapping[int, DeviceSlot]) -> dict[int, Any]:
        taken = take(spares, slots)
        watched.taken.append(sorted(taken))
        return taken

    monkeypatch.setattr("raypipe.cluster.spares._LOADING_S", 60.0)
    monkeypatch.setattr(Spares, "keep", keep_noted)
    monkeypatch.setattr(Spares, "take", take_noted)
    return watched


def no_rows(split: str) -> FixedBatch:
    """Return rows that nobody reads."""
    assert split in {"train", "validation"}
    return FixedBatch({})


def spare_order(model: ModelFunction, batches: BatchFunction = no_rows) -> bytes:
    """Return an order to build two layers, as it is sent."""
    return bytes(cloudpickle.dumps(two_layers(model, batches)))


def two_layers(model: ModelFunction, batches: BatchFunction = no_rows) -> BuildOrder:
    """Return an order to build two layers, by default without rows."""
    return BuildOrder(
        model=model,
        batches=batches,
        cut=Cut(stages=((0,), (1,)), edges=((0, 1),)),
        weight_rule=WeightRule.FLUSH,
        optimizer=OptimizerConfig(),
        num_rows=1,
        num_updates=1,
        seed=0,
    )
