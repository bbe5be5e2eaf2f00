"""The Ray cluster on the network: its nodes, what travels between them, and how Ray learns that one is gone."""

from __future__ import annotations

import json
import sys

import pytest

from tests.multinode.cluster import Cluster, cluster
from tests.multinode.network import MARK, NetworkError
from tests.on_ray.conftest import Brand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MBIT = 1e6 / 8
RATES = {(0, 1): 50.0, (1, 2): 100.0, (2, 3): 250.0, (3, 0): 500.0, (0, 2): 1000.0, (1, 0): 500.0}
"""Megabits per second."""


@pytest.fixture(scope="module")
def four(machines: Cluster) -> Cluster:
    """Four nodes with different rates between them."""
    machines.set_rates({pair: megabits * MBIT for pair, megabits in RATES.items()})
    return machines


def test_each_machine_is_a_node_of_ray_with_its_address_cpus_and_labels(four: Cluster) -> None:
    code = """
        import json, ray
        ray.init()
        print(json.dumps([
            [node["NodeManagerAddress"], node["Resources"]["CPU"], node["Labels"]["raypipe.io/node"], node["Labels"].get("zone")]
            for node in ray.nodes() if node["Alive"]
        ]))
        """
    seen = {tuple(node) for node in json.loads(four.run(code).stdout)}
    zones = [None, None, None, "far"]
    assert seen == {(node.ip, cpus, f"node{node.number}", zone) for node, cpus, zone in zip(four.nodes, (2, 2, 2, 3), zones, strict=True)}
    assert four.alive() == {0, 1, 2, 3}


@pytest.mark.parametrize("node", [0, 2])
def test_a_driver_belongs_to_the_node_that_it_runs_on(four: Cluster, node: int) -> None:
    code = """
        import ray
        ray.init()
        here = ray.get_runtime_context().get_node_id()
        print(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here))
        """
    assert four.run(code, node=node).stdout.split() == [four.nodes[node].ip]


# An actor a node; each pair in turn sends messages over gloo, after one that grows the windows of TCP.
GLOO = """
import json, sys, time
import ray, torch
from datetime import timedelta
from torch.distributed import FileStore, ProcessGroupGloo
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote
class End:
    def where(self):
        return ray.util.get_node_ip_address()

    def join(self, file, rank):
        self.group = ProcessGroupGloo(FileStore(file, 2), rank, 2, timedelta(seconds=30))

    def transfer(self, rank, sizes):
        seconds = []
        for size in sizes:
            data = torch.zeros(size, dtype=torch.uint8)
            self.group.barrier().wait()
            since = time.monotonic()
            (self.group.send([data], 1, 0) if rank == 0 else self.group.recv([data], 0, 0)).wait()
            if rank == 1:
                seconds.append(time.monotonic() - since)
        return seconds

ray.init(log_to_driver=False, logging_level="ERROR")
nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
ends = [End.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote() for node in nodes]
assert ray.get([end.where.remote() for end in ends]) == [node["NodeManagerAddress"] for node in nodes]
found = []
for number, (source, target, rate) in enumerate(json.loads(sys.argv[2])):
    pair = [ends[source], ends[target]]
    ray.get([end.join.remote(f"{sys.argv[1]}/store{number}", rank) for rank, end in enumerate(pair)])
    size = int(rate / 4)  # a quarter of a second
    times = ray.get([end.transfer.remote(rank, [size // 4] + 4 * [size]) for rank, end in enumerate(pair)])[1]
    found.append(size / min(times[1:]))  # other work on the machine makes it slower, nothing makes it faster
print(json.dumps(found))
"""


def test_gloo_between_actors_on_different_nodes_gets_the_set_rates(four: Cluster) -> None:
    wanted = [(source, target, megabits * MBIT) for (source, target), megabits in RATES.items()]
    done = four.run([sys.executable, "-c", GLOO, str(four.folder), json.dumps(wanted)], timeout_s=90)
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx([rate for _, _, rate in wanted], rel=0.1)


def test_nodes_that_are_cut_off_or_killed_are_named_by_a_probe_and_given_up_by_ray_and_nothing_is_left() -> None:
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
