"""Spare processes: one takes the place of a lost actor, and a run goes on as it would with a new one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.util.state import list_actors

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.cluster.discovery import cluster_nodes
from raypipe.cluster.spares import Spares
from raypipe.cluster.stage_actors import CONTROL, StageActors
from raypipe.config import ClusterConfig, ScalingConfig
from raypipe.errors import StageFailedError
from raypipe.model import Model
from raypipe.models.mlp import mlp
from tests.marks import slow_unless
from tests.on_ray.test_recovery import trainer
from tests.spares import Watched, two_layers, watch_spares

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return what becomes of spare processes, which are ready when one is needed."""
    return watch_spares(monkeypatch)


@pytest.fixture(scope="module")
def calm_losses(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a run without faults, which wants no spare processes and gets none."""
    with pytest.MonkeyPatch.context() as patch:
        watched = watch_spares(patch)
        losses = trainer(tmp_path_factory.mktemp("calm")).fit().losses
    assert not watched.started
    return losses


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


def policies(handle: Any) -> set[int]:
    """Return the scheduling policies of the threads of an actor's process: field 41 of proc(5)."""
    tasks = Path(f"/proc/{ray.get(handle.info.remote()).pid}/task").iterdir()
    return {int((task / "stat").read_text().rpartition(")")[2].split()[38]) for task in tasks}


def test_spare_processes_take_the_places_and_losses_stay_equal(tmp_path: Path, watched: Watched, calm_losses: list[float]) -> None:
    before, reservations, computing = living(), [], []

    def look() -> None:
        reservations.append(living().count("Reservation"))
        computing.append(policies(watched.started[1]))

    faults = FaultScript()
    for window, kind in ((1, FaultKind.KILL), (2, FaultKind.STOP)):
        faults = faults.fail_at(device=1, before="1B2", kind=kind, window=window)
    struck = trainer(tmp_path, spares=True, faults=faults)
    struck.callbacks.append(AtUpdate(9, look))
    assert struck.fit().losses == calm_losses
    assert watched.taken == [[1], [1]]
    assert reservations == [1]  # one device runs in a process of which Ray knows no resources
    if sys.platform == "linux":
        assert computing == [{os.SCHED_OTHER}]
    assert living() == before


@pytest.mark.parametrize("num_cores", [2, 3])
def test_they_are_kept_by_default_where_a_core_is_left(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, calm_losses: list[float], num_cores: int
) -> None:
    wait, before = StageActors.wait_until_up, living()

    def wait_until_up(actors: StageActors) -> None:
        wait(actors)
        actors.launched_infos = tuple(replace(info, num_cores=num_cores) for info in actors.launched_infos)

    monkeypatch.setattr(StageActors, "wait_until_up", wait_until_up)
    faults = FaultScript().fail_at(device=1, before="1B2", kind=FaultKind.KILL, window=1)
    assert trainer(tmp_path, spares=None, faults=faults).fit().losses == calm_losses
    assert watched.taken == ([[1]] if num_cores > 2 else [[]])
    assert bool(watched.started) is (num_cores > 2)
    assert living() == before


@pytest.mark.slow
def test_without_a_spare_process_that_answers_a_new_actor_takes_the_place(
    tmp_path: Path, watched: Watched, calm_losses: list[float]
) -> None:
    struck_ones: list[Any] = []

    def strike_spare(number: signal.Signals) -> None:
        struck_ones.append(watched.started[-1])
        struck_ones[-1].hurry.options(concurrency_group=CONTROL).remote()
        os.kill(ray.get(struck_ones[-1].info.remote()).pid, number)

    faults = FaultScript()
    for window, device in ((1, 0), (2, 1)):
        faults = faults.fail_at(device=device, before=f"{device}F1", kind=FaultKind.KILL, window=window)
    struck = trainer(tmp_path, spares=True, faults=faults)
    struck.callbacks.append(AtUpdate(3, partial(strike_spare, signal.SIGKILL)))
    struck.callbacks.append(AtUpdate(6, partial(strike_spare, signal.SIGSTOP)))
    assert struck.fit().losses == calm_losses
    assert watched.taken == [[], []]
    assert watched.started[:2] == struck_ones
    assert len(watched.started) == 3


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root may give a thread a higher priority")
@pytest.mark.parametrize("is_up", slow_unless({True}, [False, True]))
def test_processes_that_load_are_hurried_on_the_nodes_that_are_named(tmp_path: Path, is_up: bool) -> None:
    node, loading = cluster_nodes()[0], tmp_path / "loading"
    actors = SimpleNamespace(run=f"hurried {is_up}", scaling=ScalingConfig(), cluster=ClusterConfig())
    spares = Spares(cast("StageActors", actors))
    order = two_layers(partial(model_when_hurried, loading))
    try:
        spares.keep({node: 1}, lambda: order)
        wait_for(lambda: not is_up or loading.exists())
        assert spares.hurry(["another node"]) == []
        assert not spares.are_ready([node])
        ray.get(spares.hurry([node.node_id]), timeout=60.0)
        assert spares.are_ready([node])
    finally:
        spares.close()


def model_when_hurried(loading: Path) -> Model:
    """Return a model once the calling thread has the priority that the threads of its process usually have."""
    loading.touch()
    usual, own = os.getpid(), threading.get_native_id()
    wait_for(lambda: os.sched_getscheduler(0) == os.SCHED_OTHER and niceness(own) == niceness(usual))
    return mlp(num_layers=2)


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.slow
def test_spare_processes_end_with_a_run_that_fails(tmp_path: Path, watched: Watched) -> None:
    before = living()
    faults = FaultScript().fail_at(device=1, before="1F3", kind=FaultKind.KILL, window=1, repeats=True)
    with pytest.raises(StageFailedError, match="process died"):
        trainer(tmp_path, spares=True, faults=faults, max_failures=1).fit()
    assert watched.taken == [[1]]
    assert living() == before
