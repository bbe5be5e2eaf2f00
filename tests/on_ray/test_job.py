"""`ray job submit --working-dir . -- python -m raypipe train ...` against a running cluster."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raypipe.data.prepare import prepare
from tests.marks import slow_unless
from tests.on_ray.conftest import Brand
from tests.on_ray.free_ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(frozen=True)
class Cluster:
    """A running cluster: where jobs are submitted, and the environment of its clients."""

    dashboard: str
    environment: dict[str, str]


@pytest.fixture
def stop_wait_s() -> str | None:
    """The seconds that the cluster gives a job that is stopped; None for Ray's own."""
    return None


@pytest.fixture
def cluster(brand: Brand, stop_wait_s: str | None) -> Iterator[Cluster]:
    """A head node of its own, ended by process id."""
    folder = tempfile.mkdtemp(prefix="rp")  # Ray's sockets lie in it; their paths must be short
    gcs, dashboard, agent = free_ports(3)
    token = Path(folder) / "token"
    token.write_text(secrets.token_hex(32))
    environment = brand.environment | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("RAY_ADDRESS", None)
    if stop_wait_s is not None:
        environment["RAY_JOB_STOP_WAIT_TIME_S"] = stop_wait_s
    try:
        started = subprocess.run(
            [
                *RAY,
                "start",
                "--head",
                f"--port={gcs}",
                f"--dashboard-port={dashboard}",
                f"--dashboard-agent-listen-port={agent}",
                "--num-cpus=6",
                f"--temp-dir={folder}",
                "--object-store-memory=200000000",
                "--disable-usage-stats",
            ],
            env=environment,
            capture_output=True,
            timeout=90,
            check=False,
        )
        assert started.returncode == 0, started.stderr.decode()
        yield Cluster(f"http://127.0.0.1:{dashboard}", environment)
    finally:
        brand.end_survivors()


def training(folder: Path, **settings: object) -> list[str]:
    """The command that trains a small model on a text of its own."""
    source = folder / "text"
    source.mkdir(exist_ok=True)
    for number in range(40):
        (source / f"{number}.txt").write_text("she sells sea shells by the sea shore\n" * 60)
    prepare(str(source), output=folder / "tokens.parquet", validation_fraction=0.3)
    all_settings = {
        "data.path": folder / "tokens.parquet",
        "run.storage_path": folder / "runs",
        "run.evaluate_every": 0,
        "data.num_validation_microbatches": 1,
        "schedule.microbatch_size": 1,
        "schedule.num_microbatches": 2,
        "scaling.num_devices": 2,
        "schedule.updates_per_window": 2,
    } | settings
    overrides = [part for key, value in all_settings.items() for part in ("--set", f"{key}={value}")]
    return ["python", "-m", "raypipe", "train", "examples/gpt_python_stdlib.yaml", *overrides]


def submit(cluster: Cluster, command: list[str], *options: str) -> str:
    """Submit a job, and return what was printed."""
    submission = [*RAY, "job", "submit", f"--address={cluster.dashboard}", "--working-dir=.", *options, "--"]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run([*submission, *command], cwd=ROOT, env=cluster.environment, capture_output=True, timeout=200, check=False)
        # A head that has just started may have no agent yet for the job to run under.
        if b"No available agent" not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(1)
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output[-3000:]
    return output


def of_job(cluster: Cluster, action: str, job: str) -> str:
    """Do something with a job by `ray job`, and return what was printed."""
    command = [*RAY, "job", action, f"--address={cluster.dashboard}", job]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, timeout=100, check=False)
    return done.stdout.decode() + done.stderr.decode()


def updates_done(folder: Path) -> int:
    """The updates that a run has recorded."""
    metrics = folder / "runs" / "gpt-python-stdlib" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["update"] for line in lines if line.endswith("}")), default=0)


@pytest.mark.parametrize("stop_wait_s", slow_unless({"60"}, ["60", None]))
def test_a_job_that_is_stopped_says_what_is_saved_and_goes_on_when_submitted_again(
    cluster: Cluster, tmp_path: Path, stop_wait_s: str | None
) -> None:
    num_updates = 80
    command = [*training(tmp_path, **{"run.num_updates": num_updates, "run.sample_bytes": 0}), "--resume", "auto"]
    submit(cluster, command, "--no-wait", "--submission-id=first")
    deadline = time.monotonic() + 120
    while updates_done(tmp_path) < 6:
        assert time.monotonic() < deadline, of_job(cluster, "logs", "first")[-3000:]
        time.sleep(0.2)
    assert "was stopped" in of_job(cluster, "stop", "first")
    log = of_job(cluster, "logs", "first")
    saved = re.search(r"stopped after update (\d+), saved in ", log)
    if stop_wait_s is not None:
        assert saved is not None, log[-3000:]
    # Three seconds may be too few to end the window on a busy machine.
    lost = re.search(r"goes on from update (\d+)|begins again", log)
    assert saved or lost, log[-3000:]
    output = submit(cluster, command)
    if saved:
        assert f"at update {saved[1]}" in output, output[-3000:]
    assert updates_done(tmp_path) == num_updates


@pytest.mark.slow
def test_a_submitted_job_trains_on_the_running_cluster(cluster: Cluster, tmp_path: Path) -> None:
    output = submit(cluster, training(tmp_path, **{"run.num_updates": 4, "run.sample_bytes": 3}))
    assert "predicted against measured" in output
    run = tmp_path / "runs" / "gpt-python-stdlib"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert json.loads((run / "checkpoints" / "update-000004" / "checkpoint.json").read_text())["update"] == 4
