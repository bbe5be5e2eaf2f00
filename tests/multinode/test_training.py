"""Training over four nodes, whose losses are those of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from raypipe.data.prepare import prepare
from tests.multinode.cluster import Cluster
from tests.multinode.network import NetworkError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

CONFIG = """
format: raypipe.train/1
model:
  function: raypipe.models.gpt:gpt
  options: {{num_layers: 4, d_model: 32, num_heads: 2, sequence_length: 32}}
data: {{path: "{tokens}", sequence_length: 32, num_validation_microbatches: 1}}
schedule: {{num_microbatches: 4, microbatch_size: 2, updates_per_window: 3}}
run: {{name: four, storage_path: "{runs}", num_updates: 6}}
"""


@pytest.fixture(scope="module")
def four(machines: Cluster) -> Cluster:
    """Four nodes, 200 Mbit/s from each to each."""
    machines.set_rates(200e6 / 8)
    return machines


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    source = folder / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("many hands make light work\n" * 40)
    prepare(str(source), output=folder / "tokens.parquet", validation_fraction=0.3)
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(tokens=folder / "tokens.parquet", runs=folder / "runs"))
    return path


def train(four: Cluster, config: Path, **settings: object) -> tuple[dict[str, Any], str]:
    """The document that a run prints, and what it says meanwhile."""
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
    command = [sys.executable, "-m", "raypipe", "train", str(config), "--json", "--set", f"cluster.address={four.address}", *overrides]
    done = four.run(command, timeout_s=120)
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def one_process(four: Cluster, config: Path) -> dict[str, Any]:
    return train(four, config, scaling__num_devices=1)[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_four_stages_on_four_nodes_give_the_losses_of_one_process(
    four: Cluster, config: Path, one_process: dict[str, Any], schedule: str
) -> None:
    document, said = train(four, config, scaling__num_devices=4, scaling__cpus_per_device=2, schedule__name=schedule)
    assert "messages between devices: 6 channels over gloo" in said  # there and back between neighbours; none shares memory
    assert len(document["losses"]) == 6
    assert document["losses"] == pytest.approx(one_process["losses"], abs=1e-5)
    assert [loss for _, loss in document["validation_losses"]] == pytest.approx(
        [loss for _, loss in one_process["validation_losses"]], abs=1e-5
    )


def test_only_devices_of_one_ray_node_share_memory_though_all_nodes_have_one_host(
    four: Cluster, config: Path, one_process: dict[str, Any]
) -> None:
    # Two devices a node: 0 and 1 on the first, 2 and 3 on the second.
    document, said = train(four, config, scaling__num_devices=4)
    assert "messages between devices: 4 channels through shared memory, 2 channels over gloo" in said
    assert document["losses"] == pytest.approx(one_process["losses"], abs=1e-5)


def test_shared_memory_between_nodes_is_refused(four: Cluster, config: Path) -> None:
    with pytest.raises(NetworkError, match=r"ended with 2:[\s\S]*exchange messages; choose auto or gloo"):
        train(four, config, scaling__num_devices=2, scaling__cpus_per_device=2, scaling__transport="shm")
