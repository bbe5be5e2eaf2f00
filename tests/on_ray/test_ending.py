"""How runs end that somebody stops: nothing hangs, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.data.prepare import prepare
from tests.marks import slow_unless
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


def wait_for(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """Read stderr until a line has the text, and return that line."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    pytest.fail(f"the run ended before it said {text!r}")


def none_left(brand: Brand) -> dict[int, str]:
    """Return what still runs after a few seconds' grace."""
    deadline = time.monotonic() + 15
    while (left := brand.survivors()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize(
    ("moment", "number"),
    slow_unless(
        {("importing", signal.SIGINT), ("starting-ray", signal.SIGTERM), ("launching", signal.SIGINT)},
        list(product(("importing", "starting-ray", "launching"), (signal.SIGINT, signal.SIGTERM))),
    ),
)
def test_a_signal_before_the_first_update_ends_the_run_and_leaves_no_process(
    config: Path, brand: Brand, moment: str, number: signal.Signals
) -> None:
    process = start(brand, "train", config)
    try:
        if moment == "importing":
            time.sleep(0.6)
        else:
            wait_for(process, b"run folder")
            time.sleep(1.0 if moment == "starting-ray" else 4.0)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, stderr = process.communicate(timeout=90)
        assert none_left(brand) == {}
        if moment != "importing":
            assert process.returncode == 130, stderr.decode()[-2000:]
            assert b"Traceback" not in stderr
            assert b"interrupted before the first update was done: `--resume auto` begins again" in stderr
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", slow_unless({signal.SIGINT}, [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_while_training_ends_the_window_and_saves_and_the_same_command_goes_on(
    config: Path, brand: Brand, number: signal.Signals
) -> None:
    before = 0
    for _ in range(2):
        process = start(brand, "train", config, "--resume", "auto")
        try:
            first = wait_for(process, b"training updates")
            wait_for(process, b"/100000")
            if number is signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does: to the actors, too
            else:
                process.send_signal(number)
            _, stderr = process.communicate(timeout=90)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 130, stderr.decode()[-2000:]
        assert b"Traceback" not in stderr
        assert none_left(brand) == {}
        stopped = re.search(rb"stopped after update (\d+), saved in (\S+); `--resume auto` goes on from there", stderr)
        assert stopped, stderr.decode()[-2000:]
        saved = Checkpoint.open(stopped[2].decode())
        saved.check()
        assert saved.index.update == int(stopped[1])
        assert saved.index.update % 5 == 0
        assert Path(saved.path).parents[1].name == "stopped", "the second command goes on in the folder of the first"
        assert f"training updates {before + 1} to" in first.decode(), "the second goes on where the first ended"
        before = saved.index.update
    folder = config.parent / "runs" / "stopped"
    assert json.loads((folder / "failure.json").read_text()) == {"problem": "stopped on request", "kind": "StoppedRun", "updates": before}
    assert (folder / "timeline.html").is_file()
    assert not (folder / "run.lock").exists()


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once_and_says_what_is_lost(config: Path, brand: Brand) -> None:
    process = start(brand, "train", config, "--set", "schedule.updates_per_window=3000")
    try:
        wait_for(process, b"training updates")
        time.sleep(2)
        process.terminate()
        wait_for(process, b"ending the window")
        since_s = time.monotonic()
        process.terminate()
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - since_s < 20
        assert process.returncode == 130
        assert b"interrupted before the first update was done: `--resume auto` begins again" in stderr
        assert b"Traceback" not in stderr
        assert none_left(brand) == {}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_end_of_the_grace_ends_a_run(config: Path, brand: Brand) -> None:
    process = start(brand, "train", config, "--set", "schedule.updates_per_window=3000", "--set", "run.grace_s=1")
    try:
        wait_for(process, b"training updates")
        time.sleep(2)
        process.terminate()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert b"begins again" in stderr
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
