"""Training on real Ray actors, which talk through shared memory unless a test says otherwise."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Source, Trace
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Run, Window
from raypipe.config import (
    ClusterConfig,
    DataConfig,
    FailureConfig,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    Transport,
)
from raypipe.data.prepare import prepare
from raypipe.errors import ConfigError, PlanError, StageFailedError
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows, Trained, train_unsplit
from tests.marks import slow_unless
from tests.told import Told, telling

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]

NUM_UPDATES = 20
NUM_MICROBATCHES = 4
LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.5


def rows(split: str) -> RandomRows:
    assert split in {"train", "validation"}
    return RandomRows()


def adamw_settings(*, max_grad_norm: float | None) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=LEARNING_RATE,
        final_learning_rate=LEARNING_RATE,
        warmup_updates=0,
        beta2=0.999,
        weight_decay=0.01,
        max_grad_norm=max_grad_norm,
    )


def trainer(
    folder: Path,
    *,
    schedule: str = "1f1b",
    devices: int = 4,
    chunks: int = 1,
    num_updates: int = NUM_UPDATES,
    checkpoint_every: int = 0,
    faults: FaultScript | None = None,
    message_timeout_s: float = 60.0,
    transport: Transport = Transport.AUTO,
    max_grad_norm: float | None = MAX_GRAD_NORM,
    shard_optimizer: bool = False,
    replicas: int = 1,
    optimizer: OptimizerName = OptimizerName.ADAMW,
    synchronous_updates: int = 0,
) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 8, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(
            name=schedule,
            num_microbatches=NUM_MICROBATCHES,
            microbatch_size=NUM_ROWS,
            num_chunks=chunks,
            updates_per_window=7,
            synchronous_updates=synchronous_updates,
        ),
        optimizer_config=dataclasses.replace(adamw_settings(max_grad_norm=max_grad_norm), name=optimizer),
        scaling_config=ScalingConfig(num_devices=devices, transport=transport, shard_optimizer=shard_optimizer, replicas=replicas),
        cluster_config=ClusterConfig(message_timeout_s=message_timeout_s),
        run_config=RunConfig(name="test", storage_path=str(folder), num_updates=num_updates, checkpoint_every=checkpoint_every),
        failure_config=FailureConfig(max_failures=0),
        faults=faults,
    )


@pytest.fixture(scope="module")
def unsplit() -> Trained:
    torch.set_num_threads(1)
    return train_unsplit(
        mlp(num_layers=8, dtype="float64"),
        RandomRows(),
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        decay_matrices_only=0.01,
    )


@pytest.mark.usefixtures("shared_actors")
@pytest.mark.parametrize(
    ("schedule", "devices", "chunks"),
    [
        ("gpipe", 4, 1),
        pytest.param("1f1b", 4, 1, marks=pytest.mark.smoke),
        ("interleaved", 4, 2),
        ("zb-h1", 4, 1),
        ("zb-h2", 4, 1),
        ("zb-v", 4, 2),
        ("zb-auto", 4, 1),
        ("1f1b", 1, 1),
    ],
)
def test_twenty_updates_on_ray_actors_equal_the_unsplit_model(
    tmp_path: Path, unsplit: Trained, schedule: str, devices: int, chunks: int
) -> None:
    result = trainer(tmp_path, schedule=schedule, devices=devices, chunks=chunks).fit()
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    for index, weights in enumerate(unsplit.layers):
        saved = result.checkpoint.load_layer(index)
        assert torch.allclose(saved["linear.weight"], weights[0], rtol=0, atol=1e-10)
        assert torch.allclose(saved["linear.bias"], weights[1], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("shared_actors")
@pytest.mark.parametrize("sharded", [False, True])
def test_asynchronous_pipelines_in_two_directions_train_and_copies_may_be_published(tmp_path: Path, sharded: bool) -> None:
    """Seven updates a window, drained between them; the losses are those of one process that follows the same rule.

    The cut, which follows layer times measured here and now, decides how stale which layer's weights are.
    """
    found = trainer(tmp_path, schedule="amdp", num_updates=14, max_grad_norm=None, shard_optimizer=sharded).fit()
    config = adamw_settings(max_grad_norm=None)
    here = LocalPipeline(
        mlp(num_layers=8, dtype="float64"),
        cut=found.plan.cut,
        schedule=build("amdp", ScheduleRequest(4, NUM_MICROBATCHES, 7)),
        batches=RandomRows(),
        optimizer=lambda weights: build_optimizer(config, weights),
        learning_rate=lambda _: LEARNING_RATE,
    )
    losses = [loss for _ in range(2) for loss in mean_losses(here.run_window(), num_microbatches=NUM_MICROBATCHES)]
    assert found.losses == pytest.approx(losses, abs=1e-12)
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("shared_actors")
@pytest.mark.parametrize("schedule", ["amdp", "pipedream-2bw"])
def test_nothing_is_late_in_the_synchronous_updates_of_an_asynchronous_schedule(tmp_path: Path, schedule: str) -> None:
    found = trainer(tmp_path, schedule=schedule, num_updates=14, max_grad_norm=None, synchronous_updates=4).fit()
    optimizer = partial(build_optimizer, adamw_settings(max_grad_norm=None))
    on_time = train_unsplit(
        mlp(num_layers=8, dtype="float64"),
        RandomRows(),
        num_updates=14,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=math.inf,
        optimizer=optimizer,
    ).losses
    # The first update of the window that follows has nothing late either.
    assert found.losses[:5] == pytest.approx(on_time[:5], abs=1e-10)
    late = [ours - theirs for ours, theirs in zip(found.losses, on_time, strict=True)]
    assert max(map(abs, late)) > 1e-4


@pytest.mark.usefixtures("shared_actors")
def test_shared_memory_and_gloo_give_the_same_losses_to_the_last_bit(tmp_path: Path) -> None:
    files = set(os.listdir("/dev/shm"))
    losses = {}
    for transport, way in ((Transport.SHM, "through shared memory"), (Transport.GLOO, "over gloo")):
        notices = Told()
        losses[transport] = telling(trainer(tmp_path, num_updates=8, transport=transport), notices).fit().losses
        assert f"messages between devices: 6 channels {way}" in notices.texts
    assert losses[Transport.SHM] == losses[Transport.GLOO]
    assert {file for file in set(os.listdir("/dev/shm")) - files if "raypipe" in file} == set()


@pytest.mark.usefixtures("shared_actors")
@pytest.mark.parametrize(("schedule", "has_copies"), [("1f1b", False), ("chimera", True)])
def test_a_run_says_if_it_has_no_copies_of_stages_to_share_the_optimizer(tmp_path: Path, schedule: str, has_copies: bool) -> None:
    notices = Told()
    telling(trainer(tmp_path, schedule=schedule, devices=2, num_updates=2, shard_optimizer=True), notices).fit()
    assert any("shard_optimizer changes nothing" in text for text in notices.texts) == (not has_copies)


@pytest.mark.usefixtures("shared_actors")
def test_a_run_resumes_at_another_number_of_stages_as_if_it_had_never_stopped(tmp_path: Path, unsplit: Trained) -> None:
    first = trainer(tmp_path, devices=4, num_updates=12).fit()
    second = trainer(tmp_path, schedule="zb-h1", devices=2).fit(resume=True)
    assert first.losses + second.losses == pytest.approx(unsplit.losses, abs=1e-10)
    assert second.path == first.path
    with pytest.raises(ConfigError, match=r"has the state of optimizer\.name=adamw, which nadamw cannot go on from; set it to adamw"):
        trainer(tmp_path, devices=2, num_updates=40, optimizer=OptimizerName.NADAMW).fit(resume=True)


@pytest.mark.usefixtures("shared_actors")
def test_a_divided_optimizer_is_saved_as_a_whole_one_and_resumes_at_another_number_of_copies(tmp_path: Path, unsplit: Trained) -> None:
    """Three copies of one stage, then two of each of two, then one."""
    runs = [(8, 3, 3, True), (14, 4, 2, True), (NUM_UPDATES, 2, 1, False)]
    found = [
        trainer(tmp_path, devices=devices, replicas=replicas, num_updates=num_updates, shard_optimizer=sharded).fit(resume=number > 0)
        for number, (num_updates, devices, replicas, sharded) in enumerate(runs)
    ]
    assert [loss for each in found for loss in each.losses] == pytest.approx(unsplit.losses, abs=1e-10)
    states = [each.checkpoint.load_layer(3).keys() for each in found]
    assert states[0] == states[1] == states[2]


@pytest.mark.usefixtures("shared_actors")
def test_a_run_resumes_at_an_update_where_no_window_of_a_fresh_run_would_begin(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", devices=2, num_updates=18).fit()
    first = trainer(tmp_path / "halves", devices=2, num_updates=9).fit()
    second = trainer(tmp_path / "halves", devices=2, num_updates=18).fit(resume=True)
    assert first.losses + second.losses == pytest.approx(whole.losses, abs=1e-12)
    lines = [json.loads(line) for line in (Path(second.path) / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == list(range(1, 19))


@pytest.mark.usefixtures("shared_actors")
def test_batches_of_another_size_than_configured_are_refused(tmp_path: Path) -> None:
    wrong = Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 2, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(microbatch_size=NUM_ROWS + 1),
        scaling_config=ScalingConfig(num_devices=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(ConfigError, match=r"'inputs' has the shape \(6, 16\); expected 7 rows"):
        wrong.fit()


class Watcher(Callback):
    required = True

    """Looks at Ray while a run goes on."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seen: list[Window] = []
        self.metrics = ""

    def on_window(self, run: Run, window: Window) -> None:
        import ray
        from ray.util.state import list_actors

        address = ray.get_runtime_context().gcs_address  # there may be other clusters on this machine
        self.seen.append(window)
        if window.update == run.num_updates:
            alive = list_actors(address=address, filters=[("state", "=", "ALIVE")])
            self.names = [actor.name for actor in alive]
            node = ray.nodes()[0]
            address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            deadline = time.monotonic() + 40
            while time.monotonic() < deadline and not all(name in self.metrics for name in METRICS):
                with urllib.request.urlopen(address, timeout=10) as answer:
                    self.metrics = answer.read().decode()


TELLS_MEMORY = os.access("/proc/self/clear_refs", os.W_OK)
METRICS = (
    "ray_raypipe_loss",
    "ray_raypipe_samples_per_second",
    "ray_raypipe_gradient_norm",
    "ray_raypipe_learning_rate",
    "ray_raypipe_busy_seconds_total",
    "ray_raypipe_wait_seconds_total",
    *(["ray_raypipe_peak_memory_bytes"] if TELLS_MEMORY else []),
)


def test_metrics_and_names_of_stages_are_there_while_a_run_goes_on(tmp_path: Path) -> None:
    watcher = Watcher()
    telling(trainer(tmp_path, devices=2), watcher).fit()
    assert [window.update for window in watcher.seen] == [7, 14, 20]
    assert any("stage 0 on device" in name for name in watcher.names)
    assert any("stage 1 on device" in name for name in watcher.names)
    for name in METRICS:
        assert name in watcher.metrics
    assert 'stages="1"' in watcher.metrics


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    source = folder / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    path = folder / "tokens.parquet"
    prepare(str(source), output=path, validation_fraction=0.2)
    return path


def gpt_run(folder: Path, tokens: Path, devices: int, layers: tuple[int, ...] | None = None) -> Result:
    return Trainer(
        "raypipe.models.gpt:gpt",
        model_options={"num_layers": 4, "d_model": 64, "num_heads": 2, "sequence_length": 64},
        data_config=DataConfig(path=str(tokens), sequence_length=64, num_validation_microbatches=2),
        schedule_config=ScheduleConfig(num_microbatches=2, microbatch_size=2, updates_per_window=2),
        scaling_config=ScalingConfig(num_devices=devices, layers_per_stage=layers),
        run_config=RunConfig(name="gpt", storage_path=str(folder), num_updates=4, sample_bytes=4, sample_prompt="the "),
    ).fit()


@pytest.mark.usefixtures("shared_actors")
def test_a_gpt_gives_the_same_first_losses_with_1_2_and_4_stages_and_any_cut(tmp_path: Path, tokens: Path) -> None:
    one = gpt_run(tmp_path, tokens, 1)
    for devices, layers in ((2, None), (2, (1, 5)), (4, None)):
        other = gpt_run(tmp_path, tokens, devices, layers)
        assert other.losses == pytest.approx(one.losses, abs=1e-4)
        assert [loss for _, loss in other.validation_losses] == pytest.approx([loss for _, loss in one.validation_losses], abs=1e-4)
        assert other.sample == one.sample


def test_the_folder_of_a_run_holds_what_is_needed_to_know_it(tmp_path: Path, tokens: Path) -> None:
    result = gpt_run(tmp_path, tokens, 2)
    folder = Path(result.path)
    assert Trace.load(folder / "trace.json").source is Source.MEASURED
    assert Trace.load(folder / "predicted.json").source is Source.SIMULATED
    assert Plan.load(folder / "plan.json").predicted is not None
    assert json.loads((folder / "trace.perfetto.json").read_text())["traceEvents"]
    assert (folder / "timeline.svg").read_text().startswith("<svg")
    assert (folder / "timeline.html").read_text().startswith("<!doctype html>")
    assert {"torch", "ray", "python"} <= json.loads((folder / "versions.json").read_text()).keys()
    assert "seed: 0" in (folder / "config.yaml").read_text()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    checkpoint = Checkpoint.open(folder / "checkpoints" / "update-000004")
    assert checkpoint.index.layers[0] == "embedding"
    assert {figure.name for figure in result.figures} >= {"update time", "bubble"}
    peaks = [figure.measured for figure in result.figures if figure.name.startswith("memory of device ")]
    assert len(peaks) == (2 if TELLS_MEMORY else 0)
    assert all(0 < peak < 1e9 for peak in peaks)


@pytest.mark.parametrize("transport", slow_unless({Transport.SHM}, [Transport.SHM, Transport.GLOO]))
def test_a_killed_actor_ends_the_run_within_seconds_and_is_named(tmp_path: Path, transport: Transport) -> None:
    faults = FaultScript().fail_at(device=1, before="1B1", kind=FaultKind.KILL)
    since = time.monotonic()
    with pytest.raises(StageFailedError, match=r"stage 1 .*device .*/1, node .*its process died") as caught:
        trainer(tmp_path, devices=3, faults=faults, transport=transport).fit()
    assert time.monotonic() - since < 40
    assert caught.value.stages == "1"
    # Device 1 has ended 1F2, after which it began 1B1.
    assert re.search(r"device .*/0 waited for its gradient 1->0 of microbatch 1;", str(caught.value))
    assert re.search(r"device .*/2 waited for its activation 1->2 of microbatch 3;", str(caught.value))


@pytest.mark.smoke
def test_an_op_that_raises_is_named_with_its_stage(tmp_path: Path) -> None:
    faults = FaultScript().fail_at(device=1, before="1F3")
    with pytest.raises(StageFailedError, match=r"stage 1 .*1F3.*scripted fault"):
        trainer(tmp_path, devices=2, faults=faults).fit()


def test_a_stage_that_hangs_is_named_and_not_the_neighbors_that_wait_for_it(tmp_path: Path) -> None:
    faults = FaultScript().fail_at(device=1, before="1B2", kind=FaultKind.HANG, hang_s=100.0)
    with pytest.raises(StageFailedError, match=r"stage 1 .*1B2.* still at it .*within 3 s.*message_timeout_s") as caught:
        trainer(tmp_path, devices=3, faults=faults, message_timeout_s=3.0).fit()
    assert caught.value.stages == "1"


def test_more_devices_than_the_cluster_has_are_refused(tmp_path: Path) -> None:
    big = Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 16},
        batches=rows,
        scaling_config=ScalingConfig(num_devices=16),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    for _ in range(2):
        with pytest.raises(PlanError, match=r"16 devices of 1 CPU are needed, the cluster has room for 9"):
            big.fit()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("shared_actors")
def test_more_stages_than_layers_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="8 stages, the model only 4 layers"):
        Trainer(
            "raypipe.models.mlp:mlp",
            model_options={"num_layers": 4},
            batches=rows,
            scaling_config=ScalingConfig(num_devices=8),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("shared_actors")
def test_a_layer_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        Trainer(
            "raypipe.models.gpt:gpt", model_options={"num_heads": 3}, batches=rows, run_config=RunConfig(storage_path=str(tmp_path))
        ).fit()


@pytest.mark.usefixtures("shared_actors")
def test_evaluations_with_batches_of_ones_own_are_as_long_as_said(tmp_path: Path) -> None:
    given = trainer(tmp_path, num_updates=1)
    told = Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 2, "dtype": "float64"},
        batches=rows,
        data_config=DataConfig(path="", num_validation_microbatches=0),
        schedule_config=ScheduleConfig(num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS),
        optimizer_config=adamw_settings(max_grad_norm=None),
        scaling_config=ScalingConfig(num_devices=1),
        run_config=RunConfig(name="test", storage_path=str(tmp_path), num_updates=2),
    )
    assert (given.config.data.num_validation_microbatches, told.config.data.num_validation_microbatches) == (8, 0)
    assert told.fit().validation_losses == []
    with pytest.raises(ConfigError, match="one of train_data, batches, and a data_config with a path or functions"):
        Trainer("raypipe.models.mlp:mlp", batches=rows, data_config=DataConfig(path="tokens.parquet"))
    with pytest.raises(ConfigError, match=r"data.path names no file"):
        Trainer("raypipe.models.mlp:mlp", data_config=DataConfig(path=""))
