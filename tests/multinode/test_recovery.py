"""Runs over several nodes go on when a node, a process or a link is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multinode.cluster import Cluster, cluster
from tests.multinode.recovering_run import Settings

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_UPDATES = 300


class Run:
    """A run, and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    def until(self, key: str, *, at_least: float = 0, words: str = "") -> dict[str, Any]:
        """Read until a line has this key, with a number of at least so much, or with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            document: dict[str, Any] = json.loads(line)
            self.said.append(document)
            if key in document and (words in document[key] if words else key == "losses" or document[key] >= at_least):
                return document
        pytest.fail(
            f"the run ended without {key} {words or at_least}; it said {self.said[-5:]} and\n{self.process.communicate()[1][-3000:]}"
        )

    @property
    def folder(self) -> Path:
        return Path(self.said[0]["notice"].removeprefix("run folder: "))

    def go_on(self, *, num_updates: int = 15) -> None:
        """Read until so many more updates are done."""
        done = max((document["update"] for document in self.said if "update" in document), default=0)
        self.until("update", at_least=done + num_updates)


@contextlib.contextmanager
def running(machines: Cluster, folder: Path, settings: Settings) -> Iterator[Run]:
    with machines.start(settings.command(folder)) as process:
        yield Run(process)


def losses(folder: Path) -> list[float]:
    """Return the losses that a run has written, update after update."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line]
    assert [line["update"] for line in found] == list(range(1, len(found) + 1))
    return [line["loss"] for line in found]


def stage_process(machines: Cluster, node: int) -> int:
    """Return the process on a node that runs windows."""
    (pid,) = machines.processes(node, r"ray::\w+\.run", within_s=10.0)
    return pid


@pytest.mark.slow
def test_a_spare_process_of_the_node_takes_the_place_of_a_lost_one_and_none_is_left_behind(tmp_path: Path) -> None:
    with cluster(nodes=2, cpus_per_node=1) as machines:
        with running(machines, tmp_path, Settings(num_devices=2, waits_for_spares=True)) as run:
            run.until("update", at_least=20)
            spares = machines.processes(1, "ray::SpareProcess", within_s=10.0)
            os.kill(stage_process(machines, 1), signal.SIGKILL)
            run.until("notice", words="with new actors on node1/0")
            run.go_on()
            assert [stage_process(machines, 1)] == spares
        deadline_s = time.monotonic() + 30.0  # the driver has been killed
        while left := [pid for node in range(2) for pid in machines.processes(node, "ray::S")]:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.2)


def test_lost_processes_nodes_and_links_leave_the_losses_as_they_are(tmp_path: Path) -> None:
    with cluster(nodes=4, cpus_per_node=1) as machines:
        with running(machines, tmp_path / "calm", Settings(num_devices=3)) as run:
            run.until("update", at_least=NUM_UPDATES)
            calm = losses(run.folder)
        # No fault is noticed by a message that is missed: processes are silent, and systems acknowledge nothing.
        with running(machines, tmp_path / "struck", Settings(num_devices=3, message_timeout_s=300.0)) as run:
            run.until("update", at_least=20)
            os.kill(stage_process(machines, 1), signal.SIGKILL)
            run.until("notice", words="with new actors on node1/0")
            run.go_on()
            machines.kill(2)  # the next node has a copy of its layers
            run.until("notice", words="with new actors on node3/0")
            run.go_on()
            os.kill(stage_process(machines, 3), signal.SIGSTOP)
            run.until("notice", words="with new actors on node3/0")
            run.go_on()
            equal = losses(run.folder)
            machines.sever(1, 3)
            run.until("notice", words="a link is lost")
            run.go_on()
            machines.kill(1)
            run.until("notice", words="2 of 3 devices are left")
            run.go_on()
            found = losses(run.folder)
        assert equal == calm[: len(equal)]  # to the last bit while the cut is the same
        assert found == pytest.approx(calm[: len(found)], abs=1e-10)
        assert len(found) > len(equal) > 60
        sources = [json.loads(line)["source"] for line in (run.folder / "failures.jsonl").read_text().splitlines()]
        assert sources == ["the copies in memory"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no route", "no packet"])
def test_a_link_that_comes_back_is_used_again(tmp_path: Path, how: str) -> None:
    settings = Settings(num_devices=3, message_timeout_s=300.0)
    with cluster(nodes=3, cpus_per_node=1) as machines, running(machines, tmp_path, settings) as run:
        run.until("update", at_least=20)
        sever, rejoin = (machines.sever, machines.rejoin) if how == "no route" else (machines.part, machines.join)
        sever(1, 2)
        run.until("notice", words="nothing that was sent came through within 3 s")
        run.until("notice", words="a link is lost")
        run.go_on()
        rejoin(1, 2)
        run.until("notice", words="all links are back")
        run.go_on()
        found = losses(run.folder)
        assert len(list(run.folder.glob("plan-until-update-*.json"))) == 2
        (failure,) = (json.loads(line) for line in (run.folder / "failures.jsonl").read_text().splitlines())
        assert failure["source"] == "the copies in memory"
    assert len(found) > 40


@pytest.mark.slow
def test_devices_that_come_back_are_used_again(tmp_path: Path) -> None:
    with cluster(nodes=3, cpus_per_node=1) as machines, running(machines, tmp_path, Settings(num_devices=3)) as run:
        run.until("update", at_least=20)
        machines.crash(2)
        run.until("notice", words="2 of 3 devices are left")
        run.go_on()
        machines.start_node(2, num_cpus=1)
        run.until("notice", words="all devices are back")
        run.go_on()
