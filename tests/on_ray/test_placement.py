"""Stage actors of a plan on the nodes and devices that it names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import pytest
import ray

from raypipe.actors.cores import NodePosition, num_usable, share, usable
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import cluster_nodes, planned_slots
from raypipe.config import ClusterConfig, ScalingConfig
from raypipe.errors import PlanError
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.rehearsal import rehearse
from tests.on_ray.plans import Workers, lab, plan_of, this_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]


def plan(workers: Workers, nodes: dict[str, int]) -> Plan:
    profile = ModelProfile.uniform(len(workers), forward_s=0.001, backward_s=0.002, output_bytes=100)
    return plan_of(
        profile, lab(nodes), build("1f1b", ScheduleRequest(len(workers), 2)), workers, sizes=[1] * len(workers), microbatch_size=1
    )


def start(plan: Plan, stages: Sequence[tuple[int, ...]], *, cpus: float = 1.0) -> Coordinator:
    scaling = ScalingConfig(cpus_per_device=cpus)
    slots = planned_slots(plan.topology, plan.devices, scaling)
    return Coordinator(run="placement", slots=slots, stages=stages, scaling=scaling, cluster=ClusterConfig())


def test_actors_are_named_after_the_plans_devices_and_found_where_it_says() -> None:
    node = this_node()
    chosen = plan([[(f"{node}/2", 1.0)], [(f"{node}/0", 1.0)]], {node: 3})
    with start(chosen, [(0,), (1,)]) as coordinator:
        coordinator.actors.wait_until_up()
        assert coordinator.device_names == (f"{node}/2", f"{node}/0")
        assert {place.node_id for place in coordinator.actors.infos} == {ray.nodes()[0]["NodeID"]}
        assert len({place.pid for place in coordinator.actors.infos}) == 2
        assert all(place.gpus == () for place in coordinator.actors.infos)


def test_actors_keep_to_cores_where_they_are_told_to_and_tell_of_all() -> None:
    node, cores = this_node(), usable()
    workers: Workers = [[(f"{node}/{number}", 1.0)] for number in range(min(len(cores), 3))]
    chosen = plan(workers, {node: len(workers)})
    scaling = ScalingConfig(bind_cores=True)
    slots = planned_slots(chosen.topology, chosen.devices, scaling)
    with Coordinator(
        run="bound", slots=slots, stages=[(stage,) for stage in range(len(workers))], scaling=scaling, cluster=ClusterConfig()
    ) as coordinator:
        coordinator.actors.wait_until_up()
        for number, place in enumerate(coordinator.actors.infos):
            expected = set(share(cores, NodePosition(number, len(workers)), num_threads=1))
            assert all(os.sched_getaffinity(int(thread)) == expected for thread in os.listdir(f"/proc/{place.pid}/task"))
            assert place.num_cores == num_usable()


def test_the_cluster_tells_of_its_nodes() -> None:
    (node,) = cluster_nodes()
    assert (node.address, node.alive, node.num_cpus, node.num_gpus) == (this_node(), True, 9.0, 0.0)
    assert node.hostname


def test_a_plan_for_a_node_that_is_not_there_is_refused_by_name() -> None:
    gone = plan([[("10.9.9.9/0", 1.0)], [(f"{this_node()}/0", 1.0)]], {"10.9.9.9": 1, this_node(): 1})
    with pytest.raises(PlanError, match=r"node '10\.9\.9\.9' \(device 10\.9\.9\.9/0\) is not there.* with 9 CPU"):
        rehearse(gone)


def test_a_plan_that_uses_more_slots_than_the_node_has_is_refused() -> None:
    node = this_node()
    with pytest.raises(PlanError, match=rf"device '{node}/9' is slot of 1 CPU number 10 of its node, node {node} has 9"):
        rehearse(plan([[(f"{node}/9", 1.0)], [(f"{node}/0", 1.0)]], {node: 10}))


def test_a_cluster_that_was_started_for_the_run_stands_for_the_only_node_of_a_plan() -> None:
    workers: Workers = [[("lab/1", 1.0)], [("lab/0", 1.0)]]
    chosen = plan(workers, {"lab": 2})
    slots = planned_slots(chosen.topology, chosen.devices, ScalingConfig(), local=True)
    assert [(slot.name, slot.node.address) for slot in slots] == [("lab/1", this_node()), ("lab/0", this_node())]
    with pytest.raises(PlanError, match=r"node 'lab' .* is not there"):
        planned_slots(chosen.topology, chosen.devices, ScalingConfig())
    apart = plan([[("lab/0", 1.0)], [("elsewhere/0", 1.0)]], {"lab": 1, "elsewhere": 1})
    with pytest.raises(PlanError, match=r"node 'lab' .* is not there"):
        planned_slots(apart.topology, apart.devices, ScalingConfig(), local=True)


def test_slots_that_others_hold_are_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.cluster.discovery._RELEASE_S", 0.5)
    node = this_node()
    chosen = plan([[(f"{node}/{number}", 1.0)] for number in range(2)], {node: 2})
    with start(chosen, [(0,), (1,)], cpus=4.0) as coordinator:
        coordinator.actors.wait_until_up()
        with pytest.raises(PlanError, match="2 CPU are needed, of the cluster's only 1 CPU are free"):
            rehearse(chosen)


@pytest.mark.usefixtures("shared_actors")
def test_devices_of_another_kind_are_refused_and_can_be_stood_in_for() -> None:
    node = this_node()
    chosen = plan([[(f"{node}/0", 1.0)], [(f"{node}/1", 1.0)]], {node: 2})
    gpus = tuple(dataclasses.replace(device, kind="h200") for device in chosen.topology.devices)
    topology = dataclasses.replace(chosen.topology, nodes=(dataclasses.replace(chosen.topology.nodes[0], devices=gpus),))
    chosen = dataclasses.replace(chosen, topology=topology, topology_digest=topology.digest)
    with pytest.raises(PlanError, match=r"is GPU \(kind 'h200'\) number 1 of its node"):
        rehearse(chosen)
    assert rehearse(chosen, num_updates=1, num_windows=1, stand_ins=True).trace.devices == (f"{node}/0", f"{node}/1")
