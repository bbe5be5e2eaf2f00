"""The Ray cluster on the network: its nodes, and how Ray learns that one is gone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.network import MARK, NetworkError
from tests.on_ray.conftest import Brand
from tests.on_ray.plans import lab, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_each_machine_is_a_node_of_ray_with_its_address_cpus_and_labels(machines: Cluster) -> None:
    code = """
        import json, ray
        ray.init()
        print(json.dumps([
            [node["NodeManagerAddress"], node["Resources"]["CPU"], node["Labels"]["raypipe.io/node"], node["Labels"].get("zone")]
            for node in ray.nodes() if node["Alive"]
        ]))
        """
    seen = {tuple(node) for node in json.loads(machines.run(code).stdout)}
    zones = [None, None, None, "far"]
    assert seen == {
        (node.ip, cpus, f"node{node.number}", zone) for node, cpus, zone in zip(machines.nodes, (2, 2, 2, 3), zones, strict=True)
    }
    assert machines.alive() == {0, 1, 2, 3}


@pytest.mark.parametrize("node", [0, 2])
def test_a_driver_belongs_to_the_node_that_it_runs_on(machines: Cluster, node: int) -> None:
    code = """
        import ray
        ray.init()
        here = ray.get_runtime_context().get_node_id()
        print(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here))
        """
    assert machines.run(code, node=node).stdout.split() == [machines.nodes[node].ip]


def test_nodes_that_are_cut_off_or_killed_are_named_and_given_up_by_ray_and_nothing_is_left(tmp_path: Path) -> None:
    with cluster(nodes=3, cpus_per_node=1) as three:
        three.cut(2)
        # Sooner or later than the limit, Ray may give the node up: then its actor died.
        named = r"error: starting: .*device node2/0 \(node node2\)"
        with pytest.raises(NetworkError, match=named) as caught:
            three.run([sys.executable, "-m", "raypipe", "probe", "--timeout-s", "8"])
        assert "Traceback" not in str(caught.value)
        three.kill(1)
        assert three.pids(1) == []
        three.wait_for_alive({0}, timeout_s=40)
        profile = ModelProfile.uniform(2, forward_s=0.03, backward_s=0.06, output_bytes=250_000, microbatch_size=4)
        workers = [[(f"node{number}/0", 1.0)] for number in range(2)]
        plan = plan_of(
            profile, lab({"node0": 1, "node1": 1}), build("1f1b", ScheduleRequest(2, 2)), workers, sizes=[1, 1], microbatch_size=4
        )
        plan.save(tmp_path / "plan.json")
        is_gone = r"ended with 2:[\s\S]*error: the cluster is not .*node 'node1' \(device node1/0\) is no longer"
        with pytest.raises(NetworkError, match=is_gone):
            three.run([sys.executable, "-m", "raypipe", "rehearse", str(tmp_path / "plan.json")])
    assert Brand(f"{MARK}={three.name}\0").survivors() == {}
    assert not three.folder.exists()


def test_a_node_that_cannot_start_is_named_and_nothing_is_left() -> None:
    with (
        pytest.raises(NetworkError, match=r"node 1 of (\S+): ray start.* ended with \d") as caught,
        cluster(nodes=2, labels={1: {"bad key": "x"}}),
    ):
        pass
    name = str(caught.value).split()[3].rstrip(":")
    assert Brand(f"{MARK}={name}\0").survivors() == {}
