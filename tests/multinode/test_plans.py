"""Plans on four nodes with set rates: rehearsals that take as long as simulated, actors where the plan says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from raypipe import simulate
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link
from raypipe.artifacts.trace import Trace
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.request import ScheduleRequest
from tests.multinode.cluster import Cluster
from tests.multinode.driver import Driver
from tests.multinode.ops_overheads import ops_overheads
from tests.on_ray.plans import Workers, lab, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MBIT = 1e6 / 8
RATES = {
    (source, target): rate * MBIT
    for source, rates in enumerate(((0, 250, 50, 100), (125, 0, 25, 125), (50, 50, 0, 12.5), (100, 125, 25, 0)))
    for target, rate in enumerate(rates)
    if source != target
}
"""Bytes per second of the wires: so few that two cores carry what all of them can at once."""

GOODPUT = 0.992
"""Of a wire's bytes, those that are not headers of Ethernet, IP and TCP, with packets of 9,000 bytes."""

LATENCY_S = 4e-4
"""Of a message over gloo between two nodes of this machine, beyond the time of its bytes."""

ROWS = 4


def four_nodes(speeds: Mapping[str, float] | None = None, *, devices: int = 2) -> ClusterTopology:
    links = [
        Link(source=f"node{source}", target=f"node{target}", bandwidth_bytes_per_s=rate * GOODPUT, latency_s=LATENCY_S, one_way=True)
        for (source, target), rate in RATES.items()
    ]
    return lab({f"node{number}": devices for number in range(4)}, links=links, speeds=speeds)


@pytest.fixture(scope="module")
def four(machines: Cluster) -> Cluster:
    machines.set_rates(RATES)
    return machines


def layers(count: int, *, forward_s: float, output_bytes: int, parameter_bytes: int = 0) -> ModelProfile:
    return ModelProfile.uniform(
        count,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        output_bytes=output_bytes,
        parameter_bytes=parameter_bytes,
        microbatch_size=ROWS,
    )


def on(*nodes: int) -> Workers:
    """Workers of one device each, the first of some nodes."""
    return [[(f"node{node}/0", 1.0)] for node in nodes]


@dataclass(frozen=True)
class Case:
    """A plan to rehearse."""

    schedule: Schedule
    workers: Workers
    forward_s: float = 0.06
    output_bytes: int = 125_000
    parameter_bytes: int = 0
    speeds: Mapping[str, float] | None = None

    def plan(self) -> Plan:
        count = self.schedule.num_stages
        profile = layers(count, forward_s=self.forward_s, output_bytes=self.output_bytes, parameter_bytes=self.parameter_bytes)
        return plan_of(profile, four_nodes(self.speeds), self.schedule, self.workers, sizes=[1] * count, microbatch_size=ROWS)


CASES = {
    "the list order over ever slower wires": Case(build("list", ScheduleRequest(4, 5)), on(0, 1, 2, 3)),
    "zb-h1 on devices of unlike speed": Case(
        build("zb-h1", ScheduleRequest(3, 5)), on(0, 3, 1), forward_s=0.08, output_bytes=250_000, speeds={"node0/0": 1.5, "node3/0": 0.75}
    ),
    "a stage that three nodes share, which sum their gradients the faster way round": Case(
        build("gpipe", ScheduleRequest(2, 4)),
        [[("node2/0", 0.25), ("node1/0", 0.25), ("node0/0", 0.5)], [("node3/0", 1.0)]],
        forward_s=0.1,
        parameter_bytes=1_000_000,
    ),
    "one device before three with unlike shares, two of them on one node": Case(
        build("1f1b", ScheduleRequest(2, 5)),
        [[("node2/0", 1.0)], [("node1/0", 0.25), ("node1/1", 0.25), ("node0/1", 0.5)]],
        forward_s=0.1,
        output_bytes=400_000,
        parameter_bytes=200_000,
    ),
    "two chunks a device": Case(
        build("interleaved", ScheduleRequest(4, 4, num_chunks=2)), on(1, 3, 0, 2), forward_s=0.04, output_bytes=50_000
    ),
    "two pipelines in opposite directions": Case(
        build("chimera", ScheduleRequest(4, 4)), on(0, 1, 3, 2), forward_s=0.08, output_bytes=75_000, parameter_bytes=250_000
    ),
}

NUM_TRIES = 3
"""A pause of this machine in the middle of a rehearsal delays it, which then is not as simulated."""


def rehearsed(commands: Driver, plan: Plan, folder: Path) -> tuple[float, float]:
    """Return the seconds of an update as rehearsed, and as simulated by what Ops took there beyond their waits."""
    plan_path, trace_path = folder / "plan.json", folder / "trace.json"
    plan.save(plan_path)
    document = commands.json("rehearse", plan_path, "--updates", 2, "-o", trace_path)
    assert (document["time_scale"], document["byte_scale"]) == (1.0, 1.0)
    overheads = ops_overheads(plan, Trace.load(trace_path))
    return document["update_s"], simulate(plan.on(replace(plan.topology, overheads=overheads))).update_s


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsed_update_takes_as_long_as_a_simulated_one(four: Cluster, commands: Driver, tmp_path: Path, name: str) -> None:
    for _ in range(NUM_TRIES):
        rehearsed_s, simulated_s = rehearsed(commands, CASES[name].plan(), tmp_path)
        if rehearsed_s == pytest.approx(simulated_s, rel=0.05):
            break
    assert rehearsed_s == pytest.approx(simulated_s, rel=0.05)


@pytest.mark.slow
def test_the_planned_placement_beats_the_naive_order_by_what_was_predicted(four: Cluster, commands: Driver, tmp_path: Path) -> None:
    profile = layers(8, forward_s=0.06, output_bytes=600_000, parameter_bytes=750_000)
    problem = Problem(profile, four_nodes(devices=1), num_microbatches=4, microbatch_size=ROWS)
    naive, planned = (plan_problem(problem, name=name) for name in ("1f1b-equal", "raypipe"))
    assert naive.devices == tuple(f"node{number}/0" for number in range(4))
    for _ in range(NUM_TRIES):
        (slow_s, slow_simulated_s), (fast_s, fast_simulated_s) = (rehearsed(commands, plan, tmp_path) for plan in (naive, planned))
        if slow_s / fast_s == pytest.approx(slow_simulated_s / fast_simulated_s, rel=0.05):
            break
    assert slow_s / fast_s == pytest.approx(slow_simulated_s / fast_simulated_s, rel=0.05)
    assert slow_s > 1.5 * fast_s


PLACES = """
import json, sys, ray
from raypipe.cluster.discovery import planned_slots
from raypipe.config import ClusterConfig, ScalingConfig
from raypipe.cluster.coordinator import Coordinator
from raypipe.artifacts.plan import Plan
ray.init(log_to_driver=False, logging_level="ERROR")
plan = Plan.load(sys.argv[1])
slots = planned_slots(plan.topology, plan.devices, ScalingConfig())
stages = [(number,) for number in range(len(slots))]
with Coordinator(run="places", slots=slots, stages=stages, scaling=ScalingConfig(), cluster=ClusterConfig()) as coordinator:
    coordinator.actors.wait_until_up()
    print(json.dumps([[name, info.ip] for name, info in zip(coordinator.device_names, coordinator.actors.infos)]))
"""


def test_every_actor_is_on_the_node_that_the_plan_names(four: Cluster, tmp_path: Path) -> None:
    workers = [*on(2, 0), [("node0/1", 1.0)]]
    Case(build("gpipe", ScheduleRequest(3, 2)), workers).plan().save(tmp_path / "plan.json")
    done = four.run([sys.executable, "-c", PLACES, str(tmp_path / "plan.json")])
    expected = [(f"node{node}/{number}", four.nodes[node].ip) for node, number in ((2, 0), (0, 0), (0, 1))]
    assert [tuple(pair) for pair in json.loads(done.stdout.splitlines()[-1])] == expected
