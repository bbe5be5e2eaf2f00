"""Runs on four nodes with one port each, of which a wire or a port falls while they train; for tests and benchmarks."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe import plan
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.models.waiting import waiting
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.request import ScheduleRequest
from tests.multinode.adapting_run import Settings
from tests.multinode.cluster import Cluster
from tests.multinode.exchanging_run import MODEL, NUM_MICROBATCHES, NUM_ROWS, WIDTH
from tests.multinode.network import NetworkError
from tests.multinode.ports import PORT, set_port, topology
from tests.on_ray.plans import plan_of, profile_of

WINDOW = 5
"""Updates of a window."""
FALL_AFTER = 3 * WINDOW
LAST = FALL_AFTER + 4 * WINDOW
_BEST_LAST = 3 * WINDOW
"""Last update of the run of the best fixed way."""
_ENOUGH = 20 * LAST
"""Updates of a run that is ended when all has been seen."""


@dataclass(frozen=True)
class Reacted:
    """What a run made of a change.

    Attributes:
        update_s: Seconds of an update of each window, by its last update.
        decisions: The lines of `adaptation.jsonl`.
        best_s: Seconds of an update of the best fixed way: the median of windows of a run of its own.
    """

    update_s: dict[int, float]
    decisions: list[dict[str, Any]]
    best_s: float | None = None

    @property
    def before_s(self) -> float:
        """Seconds of an update right before the change."""
        return self.update_s[FALL_AFTER]

    @property
    def fixed_s(self) -> float:
        """Seconds of an update right behind the change, before anything was decided."""
        return self.update_s[FALL_AFTER + WINDOW]

    @property
    def adapted_s(self) -> float:
        """Seconds of an update behind the second window: the median of windows."""
        return statistics.median(update_s for update, update_s in self.update_s.items() if update > FALL_AFTER + 2 * WINDOW)

    def gained(self, best_s: float | None) -> float:
        """Return the part of what the best fixed way gains that the run gains behind the second window."""
        assert best_s is not None
        return (self.fixed_s - self.adapted_s) / (self.fixed_s - best_s)


def wire_falls(machines: Cluster, folder: Path, *, exact: bool) -> Reacted:
    """A stage on all four nodes; the wire from node 1 to node 2 falls to a tenth of a port."""
    profile = profile_of(waiting(**MODEL), {"inputs": torch.zeros(NUM_ROWS, WIDTH)})
    schedule = build("1f1b", ScheduleRequest(1, NUM_MICROBATCHES, 1, update_scope=UpdateScope.STAGE))
    everybody = [[(f"node{node}/0", 0.25) for node in range(4)]]
    plan_of(profile, topology(), schedule, everybody, sizes=[2], microbatch_size=NUM_ROWS).save(folder / "plan.json")
    bits = "exact" if exact else "free"
    command = ["tests.multinode.exchanging_run", str(folder / "plan.json"), str(folder), str(_ENOUGH), str(WINDOW), bits]
    try:
        seconds = _run(machines, command, lambda: machines.set_rate(1, 2, PORT / 10))
    finally:
        machines.set_rate(1, 2, None)
    return Reacted(seconds, _decisions(folder / "exchanging"))


def port_falls(machines: Cluster, folder: Path, *, part: float) -> Reacted:
    """Four stages; the port of the second, which passes on twice as much as the first and the last, falls to a part of its rate."""
    topology().save(folder / "topology.yaml")
    fallen: list[int] = []
    first: list[Plan] = []

    def fall() -> None:
        first.append(Plan.load(folder / "adapting" / "plan.json"))
        fallen.append(int(first[0].topology.node_of(first[0].devices[1]).name.removeprefix("node")))
        set_port(machines, fallen[0], part * PORT)

    settings = Settings(num_updates=_ENOUGH, updates_per_window=WINDOW)
    try:
        seconds = _run(machines, settings.command(folder / "topology.yaml", folder)[2:], fall)
        _planned(first[0], topology({fallen[0]: part})).save(folder / "best.json")
        settings = Settings(num_updates=_BEST_LAST, updates_per_window=WINDOW, adapts=False, plan=str(folder / "best.json"))
        best = _run(machines, settings.command(folder / "topology.yaml", folder / "best")[2:], last=_BEST_LAST)
    finally:
        for node in fallen:
            set_port(machines, node, PORT)
    return Reacted(seconds, _decisions(folder / "adapting"), statistics.median(best.values()))


def _planned(first: Plan, fallen: ClusterTopology) -> Plan:
    """Return the plan that the run would have begun with, had the port been so from the start."""
    return plan(
        first.profile,
        fallen,
        num_microbatches=first.schedule.num_microbatches,
        microbatch_size=first.microbatch_size,
        updates_per_window=WINDOW,
        max_staleness=1,
        max_mismatch=1,
        optimizer="adamw",
    )


def _run(machines: Cluster, command: list[str], fall: Callable[[], None] | None = None, last: int = LAST) -> dict[int, float]:
    lines: list[dict[str, Any]] = []
    seconds: dict[int, float] = {}
    with machines.start([sys.executable, "-m", *command]) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        for line in run.stdout:
            lines.append(json.loads(line))
            if (update := lines[-1].get("update")) is not None:
                seconds[update] = lines[-1]["update_s"]
            if fall and update == FALL_AFTER:
                fall()
            if update == last:
                return seconds
        raise NetworkError(f"the run ended early: {lines[-1:]} {run.stderr.read()[-2000:]}")


def _decisions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "adaptation.jsonl").read_text().splitlines()]
