"""Spare processes that are ready when they are needed, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import ray

from raypipe.cluster.slots import DeviceSlot
from raypipe.cluster.spares import Spares


class Watched:
    """What becomes of the spare processes of runs."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        """Ray's handles of them."""
        self.taken: list[list[int]] = []
        """The numbers of the lost actors whose places they took, by recovery."""


def watch_spares(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Let no window begin before spare processes are ready; return what becomes of them."""
    watched, keep, take = Watched(), Spares.keep, Spares.take

    def keep_ready(spares: Spares, wanted: Mapping[Any, int], order: Callable[[], Any]) -> None:
        keep(spares, wanted, order)
        waiting = [spare for of_node in spares._waiting.values() for spare in of_node]
        ray.wait([spare.prepared for spare in waiting], num_returns=len(waiting), timeout=60.0)
        watched.started += [spare.handle for spare in waiting if spare.handle not in watched.started]

    def take_noted(spares: Spares, slots: Mapping[int, DeviceSlot]) -> dict[int, Any]:
        taken = take(spares, slots)
        watched.taken.append(sorted(taken))
        return taken

    monkeypatch.setattr(Spares, "keep", keep_ready)
    monkeypatch.setattr(Spares, "take", take_noted)
    return watched
