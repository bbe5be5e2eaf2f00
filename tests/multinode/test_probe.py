"""The prober on four nodes with set rates, and the estimates of a run whose link changes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.driver import Driver, driver
from tests.multinode.network import NetworkError
from tests.on_ray.plans import plan_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MBIT = 1e6 / 8
SCHEDULE = build("1f1b", ScheduleRequest(4, 4))
PAIRS = tuple(itertools.permutations(range(4), 2))
RATES = dict(zip(PAIRS, (rate * MBIT for rate in (50, 100, 200, 1000, 400, 75, 150, 300, 600, 800, 500, 250)), strict=True))

# Prints what Ray exports of the links on the node of the driver, once there is something.
METRICS = """
import os, ray, time, urllib.request
ray.init(log_to_driver=False, logging_level="ERROR")
(port,) = (node["MetricsExportPort"] for node in ray.nodes() if node["NodeManagerAddress"] == os.environ["NODE_IP"])
lines, deadline = [], time.monotonic() + 30
while not any("link_bandwidth" in line for line in lines) and time.monotonic() < deadline:
    page = urllib.request.urlopen(f"http://{os.environ['NODE_IP']}:{port}/metrics", timeout=10).read().decode()
    lines = [line for line in page.splitlines() if line.startswith("ray_raypipe_link_")]
    time.sleep(0.2)
print(*lines, sep="\\n")
"""


@pytest.fixture(scope="module")
def four(machines: Cluster) -> Cluster:
    machines.set_rates(RATES)
    return machines


def probed(commands: Driver, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = commands.json("probe", *arguments)
    return found


def numbers(four: Cluster) -> dict[str, int]:
    """The nodes by their labels, which are their names."""
    return {f"node{node.number}": node.number for node in four.nodes}


def probe_processes(four: Cluster) -> list[str]:
    """The probe actors on any node, as their processes call themselves."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if "ProbeActor" in command and str(four.folder).encode() in environment:
            found.append(command)
    return found


def none_left(four: Cluster) -> list[str]:
    deadline = time.monotonic() + 20
    while (left := probe_processes(four)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def test_every_rate_from_50_mbit_to_1_gbit_is_found_within_a_tenth(four: Cluster, commands: Driver, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    number = numbers(four)
    # What else runs on the cores of this machine may delay a probe.
    for _ in range(3):
        found = probed(commands, "-o", path)
        measured = {(number[link["from"]], number[link["to"]]): link["bandwidth_bytes_per_s"] for link in found["links"]}
        wrong = {pair: measured[pair] / rate for pair, rate in RATES.items() if abs(measured[pair] / rate - 1) > 0.1}
        late = [link for link in found["links"] if not 0 < link["latency_s"] < 0.005]
        if not wrong and not late:
            break
    assert measured.keys() == RATES.keys()
    assert wrong == {}
    assert late == []
    # One clock serves all nodes here.
    assert all(abs(node["clock"]["offset_s"]) <= node["clock"]["residual_s"] + 1e-4 for node in found["nodes"])
    assert found["num_rounds"]["tournament"] == 6
    assert found["seconds"] < 60
    topology = ClusterTopology.load(path)
    assert topology.path("node0/0", "node1/1").bandwidth_bytes_per_s == pytest.approx(measured[0, 1], rel=0.03)
    assert topology.num_devices == 9
    assert none_left(four) == []


def shared_links(four: Cluster, found: dict[str, Any]) -> dict[frozenset[tuple[int, int]], float]:
    """Members of each shared link, with its bandwidth in megabits per second."""
    number = numbers(four)
    return {
        frozenset((number[source], number[target]) for source, target in one["members"]): one["bandwidth_bytes_per_s"] / MBIT
        for one in found["shared_links"]
    }


def test_planted_bottlenecks_are_found_and_links_have_what_they_have_alone(four: Cluster, commands: Driver) -> None:
    leaving = ((1, 0), (1, 2), (1, 3))
    four.set_rates(200 * MBIT)
    four.set_uplink(1, 150 * MBIT)
    four.share(leaving, 300 * MBIT)
    uplink = frozenset(itertools.product((2, 3), (0, 1)))
    planted = {uplink: pytest.approx(150, rel=0.1), frozenset(leaving): pytest.approx(300, rel=0.1)}
    try:
        # Acknowledgements of a pair that goes the other way queue behind the uplink's data, and may make it look as if it shared a link.
        for _ in range(3):
            found = probed(commands, "--devices-per-node", "1")
            if shared_links(four, found) == planted:
                break
    finally:
        four.unshare(leaving)
        four.set_uplink(1, None)
        four.set_rates(RATES)
    assert shared_links(four, found) == planted
    number = numbers(four)
    alone = {(number[link["from"]], number[link["to"]]): link["bandwidth_bytes_per_s"] / MBIT for link in found["links"]}
    assert alone == {pair: pytest.approx(150 if pair in uplink else 200, rel=0.1) for pair in PAIRS}


def test_links_that_shared_an_uplink_are_measured_again_though_shared_links_are_not_looked_for(four: Cluster, commands: Driver) -> None:
    four.set_rates(200 * MBIT)
    four.set_uplink(1, 200 * MBIT)
    try:
        # A machine that stands still for a moment makes a link look slower; those that shared the uplink would be half as fast each time.
        for _ in range(3):
            # Enough for the streams of slow links only.
            found = probed(commands, "--devices-per-node", "1", "--budget-bytes", str(60 << 20))
            rates = {(link["from"], link["to"]): link["bandwidth_bytes_per_s"] / MBIT for link in found["links"]}
            if rates == dict.fromkeys(rates, pytest.approx(200, rel=0.1)):
                break
    finally:
        four.set_uplink(1, None)
        four.set_rates(RATES)
    assert "shared links were not looked for" in found["notices"][0]
    assert found["shared_links"] == []
    assert rates == dict.fromkeys(rates, pytest.approx(200, rel=0.1))


def test_an_interrupted_probe_leaves_no_actor(four: Cluster) -> None:
    with four.start([sys.executable, "-m", "raypipe", "probe", "--devices-per-node", "1"]) as process:
        assert process.stderr is not None
        assert any("rounds for the links" in line for line in process.stderr)
        assert len(probe_processes(four)) == 4
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert none_left(four) == []


def test_the_passive_estimate_follows_a_link_that_changes(four: Cluster, tmp_path: Path) -> None:
    link = f"{four.nodes[0].ip} {four.nodes[1].ip}"
    four.set_rate(0, 1, 200 * MBIT)
    stop = tmp_path / "stop"
    with four.start([sys.executable, str(Path(__file__).with_name("watched_run.py")), str(stop)]) as process:
        try:
            before = read_until(process, link, 200 * MBIT, most_updates=40)
            four.set_rate(0, 1, 50 * MBIT)
            at = before["updates"]
            after = read_until(process, link, 50 * MBIT, most_updates=at + 20)
            assert after["updates"] <= at + 20
            four.set_rate(0, 1, 200 * MBIT)
            again = read_until(process, link, 200 * MBIT, most_updates=after["updates"] + 20)
            assert again["links"][link][2] >= 1, "a step was seen as one"
            source, target = link.split()
            lines = [line for line in four.run(METRICS, timeout_s=60).stdout.splitlines() if f'source="{source}",target="{target}"' in line]
            found = {line.split("{")[0].removeprefix("ray_raypipe_link_"): float(line.split()[-1]) for line in lines}
            assert found.keys() >= {
                "bandwidth_bytes_per_second",
                "age_seconds",
                "changes_total",
                "busy_ratio",
                "queued_bytes",
                "bytes_total",
            }
            assert 0 < found["busy_ratio"] < 1
            assert found["bytes_total"] > 1e6
            assert any('traffic="message"' in line for line in lines)
        finally:
            stop.touch()
            out, _ = process.communicate(timeout=60)
            four.set_rate(0, 1, RATES[0, 1])
    last = json.loads(out.splitlines()[-1])
    back = f"{four.nodes[1].ip} {four.nodes[0].ip}"
    assert last["links"][back][0] == pytest.approx(RATES[1, 0], rel=0.3), "it was probed between two windows"
    assert all(abs(offset_s) < 2e-3 for offset_s in last["clock_offsets_s"]), "one clock serves all nodes here"


def read_until(process: subprocess.Popen[str], link: str, bandwidth: float, *, most_updates: int) -> dict[str, Any]:
    """The first line by which the estimate of a link is within 15 % of a bandwidth."""
    assert process.stdout is not None
    told: dict[str, Any] = {}
    for line in process.stdout:
        told = json.loads(line)
        estimate = told["links"][link][0]
        if estimate is not None and abs(estimate / bandwidth - 1) < 0.15:
            return told
        if told["updates"] >= most_updates:
            break
    pytest.fail(f"after {told.get('updates')} updates the link is taken to carry {told.get('links')}, not {bandwidth:.3g} bytes/s")


@pytest.mark.slow
def test_a_link_that_carries_nothing_is_named(four: Cluster, commands: Driver) -> None:
    four.set_rate(2, 3, 100)  # bytes per second
    try:
        with pytest.raises(NetworkError, match=r"link node2 -> node3: its bandwidth was measured as zero"):
            probed(commands, "--devices-per-node", "1")
    finally:
        four.set_rate(2, 3, RATES[2, 3])
    assert none_left(four) == []


@pytest.mark.slow
def test_nodes_that_do_not_reach_each_other_are_no_pair_of_a_plan(tmp_path: Path) -> None:
    # Nodes of its own: others may still forget what the tests before have set.
    with cluster(nodes=4, cpus_per_node=2) as four, driver(four) as commands:
        _check_parted(four, commands, tmp_path)


def _check_parted(four: Cluster, commands: Driver, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    four.part(1, 3)
    try:
        found = probed(commands, "--devices-per-node", "1", "-o", path)
        topology = ClusterTopology.load(path)
        profile = ModelProfile.uniform(4, forward_s=0.01, backward_s=0.02, output_bytes=10_000, parameter_bytes=10_000)
        # The plan's first device does not reach its last one, and need not.
        apart, next_to = ((1, 0, 2, 3), (0, 1, 3, 2))
        for order in (apart, next_to):
            plan = plan_of(profile, topology, SCHEDULE, [[(f"node{node}/0", 1.0)] for node in order], sizes=[1] * 4, microbatch_size=1)
            plan.save(tmp_path / f"{order[0]}.json")
        rehearsal = commands.json("rehearse", tmp_path / "1.json", "--updates", "1")
        with pytest.raises(NetworkError, match=r"no link between them"):
            commands.json("rehearse", tmp_path / "0.json", "--updates", "1")
    finally:
        four.join(1, 3)
    assert found["missing_links"] == [["node1", "node3"]]
    assert {frozenset((link["from"], link["to"])) for link in found["links"]} == {
        frozenset(pair) for pair in itertools.combinations(numbers(four), 2) if pair != ("node1", "node3")
    }
    assert any("node1 and node3 do not reach each other" in text for text in found["notices"])
    assert not topology.reach("node1/0", "node3/0").exists
    assert rehearsal["update_s"] > 0
