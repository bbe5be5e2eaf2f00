"""The mean time between failures, by which a run spaces the copies of its state."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypipe.config import FailureConfig
from raypipe.errors import RunError
from raypipe.training.recovery import Recovery


class Told:
    """Stands for the copies of a run: what they are told."""

    def __init__(self) -> None:
        self.every_s: list[float] = []

    def after_window(self, _: int, *, mtbf_s: float, **__: object) -> bool:
        self.every_s.append(mtbf_s)
        return False


def test_copies_are_told_of_all_failures_and_of_none_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    actors, told = SimpleNamespace(gone=set()), Told()
    recovery = Recovery(
        config=FailureConfig(spare_processes=False),
        coordinator=cast(Any, SimpleNamespace(actors=actors)),
        record=cast(Any, SimpleNamespace(notice=lambda _: None)),
        sums=cast(Any, None),
        strategy=cast(Any, None),
        copies=cast(Any, told),
        build_order=cast(Any, None),
        checkpoints=lambda: (),
        newest=lambda: None,
        adopt=cast(Any, None),
    )
    recovery._begin_s = now_s
    window = cast(Any, SimpleNamespace(wall_s=1.0, num_updates=1))
    now_s = 1060.0
    recovery.after_window(1, window)
    recovery._count(RunError("lost"), 1)
    recovery.after_window(2, window)  # the run has got on, and still knows of the failure
    actors.gone.add(1)
    recovery.after_window(3, window)
    assert told.every_s == [60.0, 30.0, 0.0]
