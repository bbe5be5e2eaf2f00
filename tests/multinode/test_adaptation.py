"""A run on four nodes whose links change while it trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.topology import Link
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
    command = [
        sys.executable,
        "-m",
        "tests.multinode.adapting_run",
        str(tmp_path / "topology.yaml"),
        str(tmp_path),
        str(NUM_UPDATES),
        str(WINDOW),
        "auto",
    ]
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
