"""Spare processes that are ready whenever one is needed, and what becomes of them."""

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
    """Let no place be taken before all spare processes are ready; return what becomes of them."""
    watched, keep, take = Watched(), Spares.keep, Spares.take

    def keep_noted(spares: Spares, wanted: Mapping[Any, int], order: Callable[[], Any], *, is_urgent: bool = False) -> None:
        keep(spares, wanted, order, is_urgent=is_urgent)
        watched.started += [spare.handle for spare in _waiting(spares) if spare.handle not in watched.started]

    def take_when_ready(spares: Spares, slots: Mapping[int, DeviceSlot]) -> dict[int, Any]:
        loading = [spare.prepared for spare in _waiting(spares) if spare.prepared is not None]
        if loading:
            ray.wait(loading, num_returns=len(loading), timeout=60.0)
        taken = take(spares, slots)
        watched.taken.append(sorted(taken))
        return taken

    monkeypatch.setattr(Spares, "keep", keep_noted)
    monkeypatch.setattr(Spares, "take", take_when_ready)
    return watched


def _waiting(spares: Spares) -> list[Any]:
    return [spare for of_node in spares._waiting.values() for spare in of_node]
