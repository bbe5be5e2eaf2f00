"""Runs on several nodes whose links change while they train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import Link
from raypipe.schedules.metrics import metrics
from tests.multinode.adapting_run import Settings
from tests.multinode.cluster import Cluster
from tests.multinode.test_plans import GOODPUT, LATENCY_S
from tests.on_ray.plans import lab

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

RATE = 25e6
"""Bytes per second from each node to each other one."""
WINDOW = 5
"""Updates of a window."""
NUM_UPDATES = 5 * WINDOW
DROP_AFTER = 2 * WINDOW
F_S = 0.02


def topology(path: Path) -> None:
    """What `raypipe probe` would find at first."""
    links = [
        Link(source=f"node{a}", target=f"node{b}", bandwidth_bytes_per_s=RATE * GOODPUT, latency_s=LATENCY_S, one_way=True)
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    lab({f"node{number}": 1 for number in range(4)}, links=links).save(path)


def test_a_run_leaves_a_link_that_drops_to_a_tenth_within_two_windows(machines: Cluster, tmp_path: Path) -> None:
    """`benchmarks/adaptation.py` compares with the best fixed way; here it must be found, and be far better than staying."""
    topology(tmp_path / "topology.yaml")
    machines.set_rates(RATE)
    lines: list[dict[str, Any]] = []
    command = Settings(NUM_UPDATES, WINDOW).command(tmp_path / "topology.yaml", tmp_path)
    try:
        with machines.start(command) as run:
            assert run.stdout is not None
            for line in run.stdout:
                lines.append(json.loads(line))
                if lines[-1].get("update") == DROP_AFTER:
                    machines.set_rate(0, 1, RATE / 10)
                    machines.set_rate(1, 0, RATE / 10)
    finally:
        machines.set_rates(None)
    update_s = {line["update"]: line["update_s"] for line in lines if "update" in line}
    assert set(update_s) == set(range(WINDOW, NUM_UPDATES + 1, WINDOW)), lines
    decisions = [json.loads(line) for line in (Path(lines[-1]["path"]) / "adaptation.jsonl").read_text().splitlines()]
    switches = [decision for decision in decisions if decision["switch"]]
    assert switches[0]["update"] in {DROP_AFTER + WINDOW, DROP_AFTER + 2 * WINDOW}
    assert "Mbit/s; predicted" in switches[0]["text"]
    assert any(line.get("notice", "").endswith(switches[0]["text"]) for line in lines)
    # Over the link that dropped, a message takes 160 ms: twelve of them take longer than all of an update before.
    worst_s = max(update_s[DROP_AFTER + WINDOW], update_s[DROP_AFTER + 2 * WINDOW])
    assert worst_s > 1.5 * update_s[DROP_AFTER]
    assert update_s[NUM_UPDATES] < min(worst_s / 1.5, 1.5 * update_s[DROP_AFTER])


@pytest.mark.slow
def test_a_hop_that_becomes_longer_gets_more_forwards_in_flight_within_two_windows(machines: Cluster, tmp_path: Path) -> None:
    """`benchmarks/slow_hop.py` has other delays and orders."""
    settings = Settings(
        num_updates=14,
        updates_per_window=2,
        schedule="1f1b",
        among=("1f1b",),
        num_layers=4,
        num_microbatches=16,
        width=10_000,
        forward_s=F_S,
        input_grad_s=F_S,
        weight_grad_s=F_S,
    )
    link = Link(source="node0", target="node1", bandwidth_bytes_per_s=RATE * GOODPUT, latency_s=LATENCY_S)
    lab({"node0": 2, "node1": 2}, links=[link]).save(tmp_path / "topology.yaml")
    machines.set_rates({(0, 1): RATE, (1, 0): RATE})
    lines: list[dict[str, Any]] = []
    try:
        with machines.start(settings.command(tmp_path / "topology.yaml", tmp_path)) as run:
            assert run.stdout is not None
            for line in run.stdout:
                lines.append(json.loads(line))
                if lines[-1].get("update") == 4:
                    machines.set_delay(0, 1, 2 * F_S)
                    machines.set_delay(1, 0, 2 * F_S)
    finally:
        machines.set_delay(0, 1, None)
        machines.set_delay(1, 0, None)
        machines.set_rates(None)
    assert "path" in lines[-1], lines
    decisions = [json.loads(line) for line in (Path(lines[-1]["path"]) / "adaptation.jsonl").read_text().splitlines()]
    switch = next((decision for decision in decisions if decision["switch"]), None)
    assert switch is not None, decisions
    assert switch["update"] in {6, 8}, decisions
    assert "forwards ahead" in switch["text"]
    plan = Plan.load(Path(lines[-1]["path"]) / "plan.json")
    assert plan.schedule.name == "1f1b"
    latency_s = plan.topology.path("node0/0", "node1/0").latency_s
    assert latency_s == pytest.approx(2 * F_S, abs=F_S / 2), "it was probed"
    first, second, *_ = metrics(plan.schedule).peak_in_flight
    # Of the 4 and 3 of 1f1b; F + B of each one more cover the delay there and back.
    more = math.ceil(4 * F_S / (3 * F_S))
    assert (first, second) >= (4 + more, 3 + more)
