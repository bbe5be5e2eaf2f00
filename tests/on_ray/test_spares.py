"""Spare processes: one takes the place of a lost actor, and a run goes on as it would with a new one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.util.state import list_actors

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.errors import StageFailedError
from tests.on_ray.test_recovery import trainer
from tests.spares import Watched, watch_spares

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return what becomes of spare processes, which are ready before the next window begins."""
    return watch_spares(monkeypatch)


class AtUpdate(Callback):
    """Calls a function behind the window that ends with an update."""

    def __init__(self, update: int, function: Callable[[], None]) -> None:
        self.update = update
        self.function = function

    def on_window(self, run: Run, window: Window) -> None:
        if window.update == self.update:
            self.function()


def living(run: str = "") -> list[str]:
    """Return the classes of the actors that Ray holds to be alive."""
    address = ray.get_runtime_context().gcs_address  # there may be other clusters on this machine
    found = list_actors(address=address, limit=1000)
    return sorted(actor.class_name for actor in found if actor.state not in {"DEAD"} and run in (actor.name or ""))


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP])
def test_a_spare_process_takes_the_place_and_losses_stay_equal(tmp_path: Path, watched: Watched, kind: FaultKind) -> None:
    before = living()
    calm = trainer(tmp_path / "calm").fit()
    assert not watched.started
    faults = FaultScript().fail_at(device=1, before="1B2", kind=kind, window=1).fail_at(device=1, before="1B2", kind=kind, window=2)
    struck, reservations = trainer(tmp_path / "struck", spares=True, faults=faults), []
    struck.callbacks.append(AtUpdate(9, lambda: reservations.append(living().count("Reservation"))))
    found = struck.fit()
    assert found.losses == calm.losses
    assert watched.taken == [[1], [1]]
    assert reservations == [1]  # one device runs in a process of which Ray knows no resources
    assert living() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_spare_process_that_answers_a_new_actor_takes_the_place(tmp_path: Path, watched: Watched, number: signal.Signals) -> None:
    def strike_spares() -> None:
        for handle in watched.started:
            os.kill(ray.get(handle.info.remote()).pid, number)

    calm = trainer(tmp_path / "calm").fit()
    struck = trainer(tmp_path / "struck", spares=True, faults=FaultScript().fail_at(device=0, before="0F1", kind=FaultKind.KILL, window=2))
    struck.callbacks.append(AtUpdate(6, strike_spares))
    assert struck.fit().losses == calm.losses
    assert watched.taken == [[]]
    assert len(watched.started) == 2


def test_spare_processes_end_with_a_run_that_fails(tmp_path: Path, watched: Watched) -> None:
    before = living()
    faults = FaultScript().fail_at(device=1, before="1F3", kind=FaultKind.KILL, window=1, repeats=True)
    with pytest.raises(StageFailedError, match="process died"):
        trainer(tmp_path, spares=True, faults=faults, max_failures=1).fit()
    assert watched.taken == [[1]]
    assert living() == before
