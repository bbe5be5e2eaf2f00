"""What a run that overlaps its sums with everything knows of the links, where nobody waits for what passes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multinode.cluster import Cluster
from tests.multinode.ports import GOODPUT, PORT, nodes_with_ports, set_port, topology

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

FALLEN = 0.4
STEADY_WINDOWS = 20
SUMS = {(0, 2), (2, 0), (1, 3), (3, 1)}
MESSAGES = {(0, 1), (1, 0), (2, 3), (3, 2)}


@pytest.fixture(scope="module")
def ports() -> Iterator[Cluster]:
    with nodes_with_ports(cpus_per_node=1) as machines:
        yield machines


@pytest.mark.slow
def test_links_under_full_overlap_are_known_within_a_tenth_and_a_port_that_falls_is_seen_within_two_windows(
    ports: Cluster, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    number_of = {node.ip: node.number for node in ports.nodes}
    windows: list[dict[Any, Any]] = []
    topology().save(tmp_path / "topology.yaml")
    command = [sys.executable, "-m", "tests.multinode.summed_run", str(stop), str(tmp_path / "topology.yaml")]
    try:
        with ports.start(command) as run:
            assert run.stdout is not None
            for line in run.stdout:
                told = {tuple(map(number_of.__getitem__, pair.split())): of_link for pair, of_link in json.loads(line)["links"].items()}
                windows.append(told)
                if len(windows) == STEADY_WINDOWS:
                    set_port(ports, 0, FALLEN * PORT)
                if len(windows) == STEADY_WINDOWS + 2:
                    stop.touch()
    finally:
        set_port(ports, 0, PORT)
    assert len(windows) > STEADY_WINDOWS + 1, "the run failed"
    before, after = windows[STEADY_WINDOWS - 1], windows[STEADY_WINDOWS + 1]
    for link in SUMS | MESSAGES:
        bandwidth, num_transfers, num_changes = before[link]
        assert bandwidth == pytest.approx(PORT * GOODPUT, rel=0.1), link
        assert num_transfers >= STEADY_WINDOWS, link
        assert num_changes == 0, link
    for link in SUMS | MESSAGES:
        bandwidth, _, num_changes = after[link]
        if 0 in link:
            assert num_changes > 0, link
            # A message is late if it waits at the port for chunks from another node.
            assert bandwidth == pytest.approx(FALLEN * PORT * GOODPUT, rel=0.1 if link in SUMS else 0.3), link
        else:
            assert bandwidth == pytest.approx(PORT * GOODPUT, rel=0.1), link
