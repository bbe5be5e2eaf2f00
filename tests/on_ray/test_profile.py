"""Layers are measured by actors, which end with the measurement, however it ends."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.actors.measure.layer_costs import Effort
from raypipe.artifacts.profile import ModelProfile
from raypipe.cli import main
from raypipe.config import ClusterConfig, DataConfig, ModelConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.data.prepare import prepare
from raypipe.errors import ConfigError, PlanError
from raypipe.profiling.profiler import DeviceKind, profile_model
from tests.marks import slow_unless
from tests.on_ray.actor_pool import POOLED
from tests.on_ray.conftest import NUM_CPUS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default")]

NUM_ROWS, WIDTH = 4, 16
QUICK = Effort(repeats=3, warm_up=1)

RESTLESS = """
import time
from functools import partial

import torch
from torch import nn

from raypipe.model import Layer, Model


class Restless(nn.Module):
    '''Waits in its forwards: two short, two long, since every second one is timed.'''

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 8)
        self.num_calls = 0

    def forward(self, tokens):
        self.num_calls += 1
        time.sleep((0.01 if self.num_calls % 4 < 2 else 0.05))
        return self.table(tokens)


def restless():
    layers = (Layer("restless", Restless, inputs=(), batch=("tokens",)), Layer("quiet", partial(nn.Linear, 8, 8)))
    return Model(layers, lambda output, batch: output.mean())
"""

CONFIG = """
format: raypipe.train/1
model: {{function: "{function}"}}
data: {{path: "{tokens}", sequence_length: 32}}
schedule: {{microbatch_size: 2}}
"""


def rows(split: str) -> BatchSource:
    assert split == "train"
    return FixedBatch({"inputs": torch.zeros(NUM_ROWS, WIDTH)})


def config(**options: object) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(function="raypipe.models.waiting:waiting", options={"num_layers": 2, "width": WIDTH, **options}),
        data=DataConfig(path=""),
        schedule=ScheduleConfig(microbatch_size=NUM_ROWS),
        cluster=ClusterConfig(dashboard=False),
    )


def actors_left() -> list[str]:
    """Return the actors that live after a few seconds' grace, but for those that tests share, and Ray Data's; all of a run's have names."""
    import ray

    of_ray_data = {"AutoscalingCoordinator", "datasets_stats_actor"}  # stay behind a test that has read with it

    def left() -> list[str]:
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return [name for name in names if not name.startswith(POOLED) and name not in of_ray_data]

    deadline = time.monotonic() + 15
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    return left()


@pytest.mark.usefixtures("local_ray")
def test_layers_are_measured_on_a_device_of_the_cluster() -> None:
    notices: list[str] = []
    found = profile_model(config(forward_s=0.004, input_grad_s=0.003), effort=QUICK, batches=rows, notice=notices.append)
    profile = found.profile
    assert [layer.name for layer in profile.layers] == ["entry", "wait-0", "wait-1"]
    assert (profile.microbatch_size, profile.device_kinds) == (NUM_ROWS, {})
    assert all(layer.forward_s >= 0.004 and layer.backward_s >= 0.008 for layer in profile.layers[1:])
    assert all(layer.weight_grad_saved_bytes is not None for layer in profile.layers)
    (measured,) = found.kinds
    assert measured.kind == "cpu"
    assert measured.times == tuple(layer.times for layer in profile.layers)
    assert notices == [f"measuring 3 layers on {measured.device} (cpu)"]
    assert actors_left() == []


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("kind", slow_unless({"stream"}, ["table", "stream"]))
def test_layers_are_measured_on_rows_of_a_function(kind: str, tmp_path: Path) -> None:
    (tmp_path / "own_rows.py").write_text(
        "import torch\n\n\ndef table(number):\n    return [{'inputs': torch.zeros(16), 'targets': torch.zeros(16)}] * number\n\n\n"
        "def stream(number):\n    return iter(table(number))\n"
    )
    own = TrainConfig(
        model=ModelConfig(function="raypipe.models.mlp:mlp", options={"num_layers": 3}),
        data=DataConfig(train=f"{tmp_path / 'own_rows.py'}:{kind}", options={"number": 20}),
        schedule=ScheduleConfig(microbatch_size=NUM_ROWS),
        cluster=ClusterConfig(dashboard=False),
    )
    profile = profile_model(own, effort=QUICK).profile
    assert [layer.name for layer in profile.layers] == ["layer-0", "layer-1", "layer-2"]
    assert profile.microbatch_size == NUM_ROWS
    assert all(layer.forward_s > 0 and layer.parameter_bytes > 0 for layer in profile.layers)
    assert actors_left() == []


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_each_kind_of_device_has_its_times() -> None:
    import ray

    address = ray.nodes()[0]["NodeManagerAddress"]
    kinds = [DeviceKind("cpu"), DeviceKind("cpu-slow", address)]
    found = profile_model(config(forward_s=0.002), kinds=kinds, effort=QUICK, num_at_once=2, batches=rows)
    assert list(found.profile.device_kinds) == ["cpu", "cpu-slow"]
    assert found.profile.for_kind("cpu") == tuple(layer.times for layer in found.profile.layers) == found.kinds[0].times
    assert found.profile.for_kind("cpu-slow") == found.kinds[1].times != found.kinds[0].times
    assert found.kinds[1].device == f"{address}/0"
    assert actors_left() == []


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("kind", "num_at_once", "message"),
    [
        (DeviceKind("cpu-slow", "10.255.0.9"), 1, r"no living node is called '10.255.0.9'; .* The nodes: .*\d CPU"),
        (DeviceKind("cpu"), NUM_CPUS + 1, "devices of 1 CPU are needed, the cluster has room for"),
    ],
)
def test_a_device_that_is_not_there_is_refused(kind: DeviceKind, num_at_once: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        profile_model(config(), kinds=[kind], effort=QUICK, num_at_once=num_at_once, batches=rows)
    assert actors_left() == []


@pytest.mark.usefixtures("local_ray")
def test_more_devices_than_a_named_node_has_are_refused() -> None:
    import ray

    kind = DeviceKind("cpu", ray.nodes()[0]["NodeManagerAddress"])
    with pytest.raises(PlanError, match=rf"{NUM_CPUS + 1} devices of 1 CPU are to measure on one node, .* has fewer"):
        profile_model(config(), kinds=[kind], effort=QUICK, num_at_once=NUM_CPUS + 1, batches=rows)


@pytest.mark.usefixtures("local_ray")
def test_a_layer_that_fails_is_named_and_leaves_no_actor() -> None:
    with pytest.raises(ConfigError, match=r"a forward of stage 1 \(layers layer-1\) failed"):
        profile_model(mismatched(), effort=QUICK, batches=partial(wide_rows))
    assert actors_left() == []


def mismatched() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(function=f"{Path(__file__)}:narrowing"), data=DataConfig(path=""), scaling=ScalingConfig(num_devices=1)
    )


def wide_rows(split: str) -> BatchSource:
    return FixedBatch({"inputs": torch.zeros(NUM_ROWS, WIDTH), "targets": torch.zeros(NUM_ROWS, WIDTH)})


def narrowing() -> object:
    """A model whose second layer does not take what its first gives."""
    from torch import nn

    from raypipe.model import Layer, Model

    layers = (Layer("layer-0", partial(nn.Linear, WIDTH, 3), inputs=(), batch=("inputs",)), Layer("layer-1", partial(nn.Linear, WIDTH, 3)))
    return Model(layers, lambda output, _: output.mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("profile")
    (found / "text").mkdir()
    for number in range(20):
        (found / "text" / f"{number}.txt").write_text("she sells sea shells by the sea shore\n" * 40)
    prepare(str(found / "text"), output=found / "tokens.parquet", validation_fraction=0.3)
    (found / "restless.py").write_text(RESTLESS)
    (found / "config.yaml").write_text(CONFIG.format(function=f"{found / 'restless.py'}:restless", tokens=found / "tokens.parquet"))
    return found


@pytest.mark.usefixtures("local_ray")
def test_the_command_writes_a_profile_and_warns_of_restless_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["profile", "config.yaml", "-o", "profile.json", "--repeats", "8", "--passes", "2", "--json"]) == 0
    written = capsys.readouterr()
    document = json.loads(written.out)
    profile = ModelProfile.load(folder / "profile.json")
    assert [layer.name for layer in profile.layers] == [layer["name"] for layer in document["layers"]] == ["restless", "quiet"]
    assert profile.layers[0].forward_s == document["layers"][0]["forward_s"] >= 0.01
    assert document["layers"][0]["spread"] > 0.25
    (warning,) = document["warnings"]
    assert "most those of 'restless'" in warning
    assert "--repeats, now 8; --passes, now 2" in warning
    assert f"warning: {warning}" in written.err
    assert list(document["device_kinds"]) == ["cpu"]
    assert actors_left() == []
