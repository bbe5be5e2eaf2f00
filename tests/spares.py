"""Spare processes that are ready whenever one is needed, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

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
