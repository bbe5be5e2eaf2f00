"""`ray job submit --working-dir . -- python -m raypipe train ...` against a running cluster."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raypipe.data.prepare import prepare
from tests.on_ray.conftest import Brand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(frozen=True)
class Cluster:
    """A running cluster: where jobs are submitted, and the environment of its clients."""

    dashboard: str
    environment: dict[str, str]


def free_ports(count: int) -> list[int]:
    """Ports outside of the range from which Ray takes those of its workers."""
    found: list[int] = []
    for port in range(6400, 10000):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


@pytest.fixture
def cluster(brand: Brand) -> Iterator[Cluster]:
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


def test_a_submitted_job_trains_on_the_running_cluster(cluster: Cluster, tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text("she sells sea shells by the sea shore\n" * 60)
    prepare(str(source), output=tmp_path / "tokens.parquet", validation_fraction=0.3)
    settings = {
        "data.path": tmp_path / "tokens.parquet",
        "run.storage_path": tmp_path / "runs",
        "run.num_updates": 4,
        "run.evaluate_every": 0,
        "run.sample_bytes": 3,
        "data.num_validation_microbatches": 1,
        "schedule.microbatch_size": 1,
        "schedule.num_microbatches": 2,
        "scaling.num_devices": 2,
        "schedule.updates_per_window": 2,
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    submit = [*RAY, "job", "submit", f"--address={cluster.dashboard}", "--working-dir=.", "--"]
    train = ["python", "-m", "raypipe", "train", "examples/gpt_python_stdlib.yaml", *overrides]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run([*submit, *train], cwd=ROOT, env=cluster.environment, capture_output=True, timeout=200, check=False)
        # A head that has just started may have no agent yet for the job to run under.
        if b"No available agent" not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(1)
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output[-3000:]
    assert "predicted against measured" in output
    run = tmp_path / "runs" / "gpt-python-stdlib"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert json.loads((run / "checkpoints" / "update-000004" / "checkpoint.json").read_text())["update"] == 4
