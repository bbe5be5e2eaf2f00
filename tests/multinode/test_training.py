"""Training over four nodes, whose losses are those of one process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.data.prepare import prepare
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from tests.marks import slow_unless
from tests.multinode.cluster import Cluster
from tests.multinode.driver import Driver
from tests.multinode.network import NetworkError
from tests.on_ray.plans import lab, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

CONFIG = """
format: raypipe.train/1
model:
  function: raypipe.models.gpt:gpt
  options: {{num_layers: 4, d_model: 128, num_heads: 2, sequence_length: 32}}
data: {{path: "{tokens}", sequence_length: 32, num_validation_microbatches: 1}}
schedule: {{num_microbatches: 4, microbatch_size: 4, updates_per_window: 3}}
cluster: {{address: "{address}"}}
run: {{name: four, storage_path: "{runs}", num_updates: 6}}
"""


@pytest.fixture(scope="module")
def four(machines: Cluster) -> Cluster:
    """Four nodes, 200 Mbit/s from each to each."""
    machines.set_rates(200e6 / 8)
    return machines


@pytest.fixture(scope="module")
def config(four: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    source = folder / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("many hands make light work\n" * 40)
    prepare(str(source), output=folder / "tokens.parquet", validation_fraction=0.3)
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(tokens=folder / "tokens.parquet", address=four.address, runs=folder / "runs"))
    return path


@pytest.fixture(scope="module")
def one_process(four: Cluster, config: Path) -> dict[str, Any]:
    """The run on one device, by a command of its own."""
    command = [sys.executable, "-m", "raypipe", "train", str(config), "--json", "--set", "scaling.num_devices=1"]
    document: dict[str, Any] = json.loads(four.run(command, timeout_s=120).stdout)
    assert len(document["losses"]) == 6
    return document


@pytest.fixture(scope="module")
def profile(commands: Driver, config: Path) -> Path:
    """What the model's layers cost, measured on a node."""
    path = config.with_name("profile.json")
    commands.run("profile", config, "--repeats", "3", "--passes", "1", "-o", path)
    return path


def train(commands: Driver, config: Path, **settings: object) -> tuple[dict[str, Any], str]:
    """Return the document that a run prints, and what it says meanwhile."""
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
    done = commands.run("train", config, "--json", *overrides)
    return json.loads(done.stdout), done.stderr


def check_losses(run: dict[str, Any], one_process: dict[str, Any], *, to: float = 1e-5) -> None:
    assert run["losses"] == pytest.approx(one_process["losses"], abs=to)
    ours, theirs = ([loss for _, loss in document["validation_losses"]] for document in (run, one_process))
    assert ours == pytest.approx(theirs, abs=to)


@pytest.mark.parametrize("schedule", slow_unless({"zb-h1"}, ["1f1b", "zb-h1"]))
def test_four_stages_on_four_nodes_give_the_losses_of_one_process(
    commands: Driver, config: Path, one_process: dict[str, Any], schedule: str
) -> None:
    document, said = train(commands, config, scaling__num_devices=4, scaling__cpus_per_device=2, schedule__name=schedule)
    assert "messages between devices: 6 channels over tcp" in said  # there and back between neighbors; none shares memory
    check_losses(document, one_process)


ROWS = """
import torch


def rows():
    tokens = torch.randint(256, (48, 33), generator=torch.Generator().manual_seed(0))
    return [{"tokens": row[:-1], "targets": row[1:]} for row in tokens]
"""


def test_readers_on_one_node_give_rows_to_stages_on_others(commands: Driver, config: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    of_rows = {"data__path": '""', "data__train": f"{tmp_path / 'rows.py'}:rows", "data__num_readers": 2}
    one, _ = train(commands, config, scaling__num_devices=1, **of_rows)
    four, _ = train(commands, config, scaling__num_devices=4, scaling__cpus_per_device=2, schedule__name="zb-h1", **of_rows)
    assert four["losses"] == pytest.approx(one["losses"], abs=1e-5)


def test_only_devices_of_one_ray_node_share_memory_though_all_nodes_have_one_host(
    commands: Driver, config: Path, one_process: dict[str, Any]
) -> None:
    # Two devices a node: 0 and 1 on the first, 2 and 3 on the second.
    document, said = train(commands, config, scaling__num_devices=4)
    assert "messages between devices: 4 channels through shared memory, 2 channels over tcp" in said
    check_losses(document, one_process)


def test_shared_memory_between_nodes_is_refused(commands: Driver, config: Path) -> None:
    with pytest.raises(NetworkError, match=r"ended with 2:[\s\S]*exchange messages; choose auto, tcp or gloo"):
        train(commands, config, scaling__num_devices=2, scaling__cpus_per_device=2, scaling__transport="shm")


def test_a_gpt_trains_over_four_nodes_with_a_plan_made_from_the_probe(
    commands: Driver, tmp_path: Path, config: Path, profile: Path, one_process: dict[str, Any]
) -> None:
    probed, plan = tmp_path / "topology.yaml", tmp_path / "plan.json"
    commands.run("probe", "--devices-per-node", "1", "--budget-s", "5", "-o", probed)
    # So little memory that no device can have two blocks with gradients and optimizer state.
    measured = ModelProfile.load(profile)
    room = 2 * 4 * measured.layers[1].parameter_bytes - 1
    topology = ClusterTopology.load(probed)
    nodes = tuple(replace(node, devices=tuple(replace(device, memory_bytes=room) for device in node.devices)) for node in topology.nodes)
    replace(topology, nodes=nodes).save(probed)
    commands.run("plan", "--profile", profile, "--topology", probed, "--microbatches", "4", "-o", plan)
    assert {Plan.load(plan).topology.node_of(device).name for device in Plan.load(plan).devices} == {f"node{number}" for number in range(4)}
    check_losses(train(commands, config, plan=plan)[0], one_process, to=1e-4)


def test_a_gpt_trains_with_stages_that_nodes_share(
    commands: Driver, tmp_path: Path, config: Path, profile: Path, one_process: dict[str, Any]
) -> None:
    workers = [[("node2/0", 1.0)], [("node0/0", 0.25), ("node3/1", 0.75)], [("node1/1", 0.5), ("node1/0", 0.5)]]
    topology = lab({f"node{number}": 2 for number in range(4)})
    plan = tmp_path / "plan.json"
    schedule = build("1f1b", ScheduleRequest(3, 4))
    plan_of(ModelProfile.load(profile), topology, schedule, workers, sizes=[1, 2, 3], microbatch_size=4).save(plan)
    check_losses(train(commands, config, plan=plan)[0], one_process, to=1e-4)
