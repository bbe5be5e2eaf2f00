"""How runs on four nodes with one port each react to a port and to a wire that falls while they train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode import reacting
from tests.multinode.cluster import Cluster
from tests.multinode.ports import nodes_with_ports
from tests.multinode.reacting import FALL_AFTER, WINDOW

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

WITHIN_TWO_WINDOWS = {FALL_AFTER + WINDOW, FALL_AFTER + 2 * WINDOW}


@pytest.fixture(scope="module")
def ports() -> Iterator[Cluster]:
    with nodes_with_ports(cpus_per_node=2) as machines:
        yield machines


@pytest.mark.slow
@pytest.mark.parametrize(("exact", "pattern", "most_gained"), [(False, "ring 0 ", 1.0), (True, "direct 0 1 2 3", 0.63)])
def test_sums_go_round_a_wire_that_falls_to_a_tenth(ports: Cluster, tmp_path: Path, exact: bool, pattern: str, most_gained: float) -> None:
    """No way is quicker than the ring before. Direct exchange sends a third as much over the wire: by simulation, it gains 0.63 of that."""
    found = reacting.wire_falls(ports, tmp_path, exact=exact)
    (change,) = (line for line in found.decisions if line.get("changes"))
    assert change["update"] in WITHIN_TWO_WINDOWS
    assert change["pattern"].startswith(pattern)
    assert found.gained(found.before_s) >= 0.8 * most_gained, found


@pytest.mark.slow
def test_a_port_that_falls_to_0_4_is_left_by_the_stage_that_needs_it(ports: Cluster, tmp_path: Path) -> None:
    """The best fixed way is the plan that is made for the fallen port: nothing late, since that takes AdamW more updates than it gains."""
    found = reacting.port_falls(ports, tmp_path, part=0.4)
    (switch,) = (line for line in found.decisions if line["switch"])
    assert switch["update"] in WITHIN_TWO_WINDOWS
    assert found.gained(found.best_s) >= 0.8, found
