"""The prober on one node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.actors.cores import num_usable
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli import main
from raypipe.cluster.prober import probe
from raypipe.config import ClusterConfig
from raypipe.errors import InputError
from raypipe.network.probe_budget import Budget
from tests.on_ray.conftest import NUM_CPUS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def actors() -> list[str]:
    """The probe actors of the connected cluster that live."""
    import ray
    from ray.util.state import list_actors

    # The address: there may be other clusters on this machine.
    address = ray.get_runtime_context().gcs_address
    found = list_actors(address=address, filters=[("state", "!=", "DEAD"), ("class_name", "=", "ProbeActor")])
    return [actor.actor_id for actor in found]


def test_one_node_is_described_and_measured(local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "topology.yaml"
    assert main(["probe", "--devices-per-node", "3", "--budget-s", "10", "-o", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    topology = ClusterTopology.load(path)
    (node,) = topology.nodes
    assert [device.name for device in node.devices] == [f"{node.name}/{number}" for number in range(3)]
    assert node.cores == num_usable()
    assert all(device.memory_bytes for device in node.devices)
    assert node.link is not None
    assert node.link.bandwidth_bytes_per_s is not None
    assert 1e7 < node.link.bandwidth_bytes_per_s < 1e12
    assert 0 < node.link.latency_s < 0.01
    assert figures["digest"] == topology.digest
    assert figures["nodes"][0]["inside"]["bandwidth_bytes_per_s"] == node.link.bandwidth_bytes_per_s
    assert figures["links"] == []
    assert figures["num_bytes"] > 0
    assert actors() == []


@pytest.mark.slow
def test_all_slots_are_described_though_a_few_measure(local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--budget-s", "10"]) == 0
    out = capsys.readouterr().out
    assert f"1 node, {NUM_CPUS} devices" in out
    assert "measurements 3," in out
    assert actors() == []


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_and_leaves_nothing(local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--budget-bytes", "1000"]) == 2
    assert "a budget of 1 kB is too small: 3 directed links take at least" in capsys.readouterr().err
    with pytest.raises(InputError, match="raise --budget-s to"):
        probe(ClusterConfig(), budget=Budget(seconds=0.01))
    assert actors() == []
