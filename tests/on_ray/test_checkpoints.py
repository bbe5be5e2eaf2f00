"""Runs that go on from checkpoints: altered ones, those at a URI, and those that have nothing left to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.trace import Trace
from raypipe.config import CheckpointMetric, FailureConfig, OnNonFinite, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import RunError, StageFailedError
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows
from tests.told import Told, telling

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("local_ray", "shared_actors"),
]

PER_WINDOW = 3


def rows(split: str) -> RandomRows:
    assert split in {"train", "validation"}
    return RandomRows()


def trainer(storage: Path | str, *, num_updates: int, rate: float = 0.01, faults: FaultScript | None = None) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 4, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=PER_WINDOW),
        # Of one rate, so that the number of updates changes no update.
        optimizer_config=OptimizerConfig(learning_rate=rate, final_learning_rate=rate, warmup_updates=0),
        scaling_config=ScalingConfig(num_devices=2, layers_per_stage=(2, 2)),
        run_config=RunConfig(
            name="run",
            on_nonfinite=OnNonFinite.CONTINUE,
            storage_path=str(storage),
            num_updates=num_updates,
            checkpoint_every=3,
            keep_best_by=CheckpointMetric.LOSS,
        ),
        failure_config=FailureConfig(max_failures=0),
        faults=faults,
    )


def test_an_altered_checkpoint_is_left_for_the_one_before_and_said(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "straight", num_updates=12).fit()
    first = trainer(tmp_path, num_updates=9).fit()
    newest = Path(first.checkpoint.path)
    altered = next(newest.glob("layer-0001-*"))
    content = bytearray(altered.read_bytes())
    content[-3] ^= 4
    altered.write_bytes(content)
    told = Told()
    second = telling(trainer(tmp_path, num_updates=12), told).fit(resume="auto")
    assert told.has(f"{newest} is left out: {altered}: ")
    assert told.has(f"resumed from {newest.with_name('update-000006')} at update 6")
    assert not told.has("update 0")
    assert first.losses[:6] + second.losses == straight.losses, "to the last bit"
    assert second.path == first.path
    assert Checkpoint.latest(second.path) == second.checkpoint


def test_a_run_with_all_updates_ends_at_once_with_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer(tmp_path, num_updates=6).fit(resume="auto")
    monkeypatch.setattr("raypipe.training.fit.stage_actors", None)  # no actor is started
    told = Told()
    again = telling(trainer(tmp_path, num_updates=6), told).fit(resume="auto")
    assert told.has("has all of its 6 updates already")
    assert (again.path, again.losses, again.checkpoint) == (first.path, first.losses, first.checkpoint)
    assert again.metrics["updates"] == 6


def test_a_run_that_failed_leaves_its_reason_and_its_trace_and_goes_on(tmp_path: Path) -> None:
    faults = FaultScript().fail_at(device=1, before="1F0", kind=FaultKind.RAISE, window=2)
    with pytest.raises(StageFailedError):
        trainer(tmp_path, num_updates=9, faults=faults).fit(resume="auto")
    folder = tmp_path / "run"
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["updates"] == 6
    assert "scripted fault before 1F0" in failure["problem"]
    assert Trace.load(folder / "trace.json").num_updates == PER_WINDOW
    assert (folder / "timeline.html").is_file()
    assert not (folder / "run.lock").exists()
    result = trainer(tmp_path, num_updates=9).fit(resume="auto")
    assert len(result.losses) == 3
    assert not (folder / "failure.json").exists()
    assert (folder / "failure-until-update-000006.json").exists()


def test_weights_that_became_no_numbers_are_not_the_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"update 6 was not saved \(.* is infinite or no number"):
        trainer(tmp_path, num_updates=6, rate=1e200).fit()
    assert not list(tmp_path.glob("run/checkpoints/*/checkpoint.json"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A URI of a bucket that a server on this machine keeps in memory."""
    fs = pytest.importorskip("pyarrow.fs")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1"}
        store = fs.S3FileSystem(access_key="id", secret_key="secret", allow_bucket_creation=True, **options)
        store.create_dir("bucket")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield "s3://id:secret@bucket/runs?" + "&".join(f"{key}={value}" for key, value in options.items())
    finally:
        server.stop()


def test_a_run_at_a_uri_goes_on_on_another_machine(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = trainer(tmp_path / "straight", num_updates=9).fit()
    first = trainer(bucket, num_updates=6).fit(resume="auto")
    assert first.path.startswith("s3://")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    second = trainer(bucket, num_updates=9).fit(resume="auto")
    assert first.losses + second.losses == straight.losses
    lines = [json.loads(line) for line in next((tmp_path / "another").rglob("metrics.jsonl")).read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == list(range(1, 10)), "the records came along"
    found = Checkpoint.latest(second.path)
    assert found == second.checkpoint
