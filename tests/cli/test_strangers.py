"""Files and names from strangers: nothing in them reaches the terminal as an order to it, and nothing keeps a command busy for long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.artifacts import files
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli import main
from raypipe.cli.screen import console, notice
from raypipe.config import RunConfig, TrainConfig
from raypipe.errors import FormatError, InputError, PlanError, ScheduleError, visible
from raypipe.planning.problem import Problem
from raypipe.schedules import catalogue
from raypipe.schedules.request import ScheduleRequest

RED = "\x1b[31m"
UNSEEN = (RED, "\x9b31m", "\x07", "\r", "\x7f", "\u202e")
SECONDS = 20.0  # of a slow machine; an order of a billion microbatches takes for ever

pytestmark = pytest.mark.timeout(SECONDS)


def profile() -> ModelProfile:
    return ModelProfile.uniform(4, forward_s=1.0, backward_s=2.0, output_bytes=1, saved_bytes=1, parameter_bytes=1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    profile().save(tmp_path / "profile.json")
    ClusterTopology.uniform(4, bandwidth_bytes_per_s=1e9, latency_s=0.0).save(tmp_path / "topology.yaml")
    return tmp_path


@pytest.mark.parametrize("character", UNSEEN)
def test_names_with_control_characters_are_refused_in_json_and_yaml(saved: Path, character: str) -> None:
    path = saved / "profile.json"
    tree = json.loads(path.read_text())
    tree["layers"][1]["name"] = f"evil{character}name"
    path.write_text(json.dumps(tree))
    with pytest.raises(FormatError) as caught:
        ModelProfile.load(path)
    assert caught.value.where == "layers[1].name"
    assert visible(str(caught.value)) == str(caught.value)
    path = saved / "topology.yaml"
    escape = json.dumps(f"evil{character}name")
    path.write_text(path.read_text().replace("name: uniform", f"name: {escape}", 1))
    with pytest.raises(FormatError):
        ClusterTopology.load(path)


def test_a_name_of_a_run_with_control_characters_is_refused() -> None:
    for name in (f"run{RED}", "run\n", "run\t1"):
        with pytest.raises(FormatError):
            RunConfig(name=name)


def test_text_that_a_terminal_obeys_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(f"a {RED}name\nand \u202emore")
    notice(f"about {RED}it")
    assert main(["show", f"no{RED}file"]) == 2
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\u202e" not in shown.out
    assert r"a \x1b[31mname" in shown.out
    assert r"about \x1b[31mit" in shown.err


def test_json_text_keeps_its_line_feeds_and_letters(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    tree = json.loads(json.dumps({"format": "raypipe.model_profile/1"}))
    profile().save(path)
    tree = json.loads(path.read_text())
    tree["name"] = "gr\u00f6\u00dfer\tand\nlonger"
    path.write_text(json.dumps(tree))
    assert ModelProfile.load(path).name == tree["name"]


# Sizes


@pytest.mark.parametrize("size", [(10**9, 8, 1), (4, 10**9, 1), (4, 8, 10**9), (10**6, 10**6, 1)])
def test_an_order_of_an_absurd_size_is_refused_before_it_is_built(size: tuple[int, int, int]) -> None:
    for spec in catalogue.SPECS:
        with pytest.raises(ScheduleError):
            catalogue.build(spec.name, ScheduleRequest(*size))


def test_absurd_numbers_of_chunks_and_pipelines_are_refused() -> None:
    for request in (ScheduleRequest(4, 8, num_chunks=10**9), ScheduleRequest(4, 8, num_pipelines=10**9)):
        with pytest.raises(ScheduleError):
            catalogue.build("interleaved", request)


def test_a_problem_of_an_absurd_size_is_refused(saved: Path) -> None:
    topology = ClusterTopology.load(saved / "topology.yaml")
    with pytest.raises(PlanError):
        Problem(profile(), topology, 10**9, 1)
    command = ["plan", "--profile", str(saved / "profile.json"), "--topology", str(saved / "topology.yaml"), "--microbatches", str(10**9)]
    assert main(command) == 2


@pytest.mark.parametrize(
    "override",
    ["schedule.num_microbatches=1000000000", "scaling.num_devices=1000000000", "schedule.num_chunks=1000000000"],
)
def test_a_configuration_of_an_absurd_size_is_refused_as_it_is_read(tmp_path: Path, override: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("format: raypipe.train/1\nmodel: {function: m:f}\ndata: {path: x}\n")
    TrainConfig.load(path)
    with pytest.raises(InputError):
        TrainConfig.load(path, overrides=[override])


# Files


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    for command in (["show", "/dev/zero"], ["simulate", "/dev/zero"], ["train", "/dev/zero"]):
        assert main(command) == 2
    with pytest.raises(FormatError):
        files.read_bytes("/dev/urandom")
