"""One device of each kind is measured, each on the node that was named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.data.prepare import prepare
from tests.multinode.cluster import Cluster
from tests.multinode.driver import Driver

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

CONFIG = """
format: raypipe.train/1
model:
  function: raypipe.models.gpt:gpt
  options: {{num_layers: 1, d_model: 32, num_heads: 2, sequence_length: 32}}
data: {{path: "{tokens}", sequence_length: 32}}
schedule: {{microbatch_size: 2}}
"""


def profile(commands: Driver, folder: Path, *options: str) -> tuple[dict[str, Any], ModelProfile]:
    """Return what `raypipe profile` says of a small model, and the file that it writes."""
    source = folder / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("a stitch in time saves nine\n" * 40)
    prepare(str(source), output=folder / "tokens.parquet", validation_fraction=0.3)
    config, output = folder / "config.yaml", folder / "profile.json"
    config.write_text(CONFIG.format(tokens=folder / "tokens.parquet"))
    document = commands.json("profile", config, "--repeats", "3", "--passes", "1", *options, "-o", output)
    return document, ModelProfile.load(output)


def test_kinds_are_measured_on_the_nodes_that_have_them(machines: Cluster, commands: Driver, tmp_path: Path) -> None:
    document, found = profile(commands, tmp_path, "--device-kinds", f"cpu-fast=node1,cpu-slow={machines.nodes[0].ip}")
    devices = {kind: of_kind["device"] for kind, of_kind in document["device_kinds"].items()}
    assert devices == {"cpu-fast": "node1/0", "cpu-slow": "node0/0"}
    assert list(found.device_kinds) == ["cpu-fast", "cpu-slow"]
    assert found.for_kind("cpu-fast") == tuple(layer.times for layer in found.layers) != found.for_kind("cpu-slow")


def test_devices_that_measure_at_once_are_on_the_first_node_with_room_for_all(commands: Driver, tmp_path: Path) -> None:
    # The first three nodes have two CPUs each, the last has three.
    document, _ = profile(commands, tmp_path, "--device-kinds", "cpu", "--at-once", "3")
    assert document["device_kinds"]["cpu"]["device"] == "node3/0"
