"""How runs end that somebody stops: nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raypipe.data.prepare import prepare
from tests.on_ray.conftest import Brand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

CONFIG = """
format: raypipe.train/1
model: {{function: "raypipe.models.gpt:gpt", options: {{num_layers: 2, d_model: 32, num_heads: 2, sequence_length: 32}}}}
data: {{path: "{tokens}", sequence_length: 32, num_validation_microbatches: 1}}
schedule: {{num_microbatches: 2, microbatch_size: 2, updates_per_window: 5}}
scaling: {{num_devices: 2}}
cluster: {{dashboard: false}}
run: {{name: stopped, storage_path: "{runs}", num_updates: 100000}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("how much wood would a woodchuck chuck\n" * 40)
    prepare(str(source), output=tmp_path / "tokens.parquet", validation_fraction=0.3)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(tokens=tmp_path / "tokens.parquet", runs=tmp_path / "runs"))
    return path


def start(brand: Brand, command: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    environment = brand.environment
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "raypipe", command, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Read stderr until a line has the text."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"the run ended before it said {text!r}")


def none_left(brand: Brand) -> dict[int, str]:
    """Return what still runs after a few seconds' grace."""
    deadline = time.monotonic() + 15
    while (left := brand.survivors()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize("moment", ["importing", "starting-ray", "launching", "training"])
@pytest.mark.parametrize("to", ["process", "group"])
def test_ctrl_c_at_any_moment_leaves_no_process(config: Path, brand: Brand, moment: str, to: str) -> None:
    process = start(brand, "train", config)
    try:
        if moment == "importing":
            time.sleep(0.6)
        elif moment == "starting-ray":
            wait_for(process, b"run folder")
            time.sleep(1.0)
        elif moment == "launching":
            wait_for(process, b"run folder")
            time.sleep(4.0)
        else:
            wait_for(process, b"update 10/")
        if to == "group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert none_left(brand) == {}
        if moment != "importing":
            assert process.returncode == 130, stderr.decode()[-2000:]
            assert b"Traceback" not in stderr
        if moment == "training":
            assert re.search(rb"interrupted after update \d*[05]; it wrote no checkpoint \(run.checkpoint_every is 0\)", stderr)
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_a_run_as_ctrl_c_does(config: Path, brand: Brand) -> None:
    process = start(brand, "train", config)
    try:
        wait_for(process, b"update 10/")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert none_left(brand) == {}
    finally:
        process.kill()
        process.communicate()


def test_a_driver_that_is_killed_leaves_no_actor(config: Path, brand: Brand) -> None:
    process = start(brand, "train", config)
    try:
        wait_for(process, b"update 10/")
    finally:
        process.kill()
        process.communicate()
    # Ray's own agents notice the end of their node only after a while.
    deadline = time.monotonic() + 15
    while (actors := [line for line in brand.survivors().values() if "Stage" in line]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert actors == []


def test_an_interrupted_probe_leaves_no_process(brand: Brand) -> None:
    process = start(brand, "probe", "--devices-per-node", "2")
    try:
        wait_for(process, b"starting 2 probe actors")
        interrupted(process, brand)
    finally:
        process.kill()
        process.communicate()


def test_an_interrupted_measurement_of_layers_leaves_no_process_and_no_file(config: Path, brand: Brand) -> None:
    output = config.with_name("never.json")
    process = start(brand, "profile", config, "--passes", "100000", "-o", output)
    try:
        wait_for(process, b"measuring 4 layers")
        interrupted(process, brand)
        assert not output.exists()
    finally:
        process.kill()
        process.communicate()


def interrupted(process: subprocess.Popen[bytes], brand: Brand) -> None:
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()[-2000:]
    assert b"Traceback" not in stderr
    assert none_left(brand) == {}
