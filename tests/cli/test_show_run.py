"""`raypipe show RUN`: what a folder tells of a run, whatever became of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.artifacts.trace import Source
from raypipe.cli import main
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.simulation.simulator import simulate
from raypipe.training.run_folder import RunFolder
from tests.callbacks.events import PLAN


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose plan is made, without a window."""
    made = RunFolder.create(str(tmp_path), "gpt")
    made.begin(TrainConfig(model=ModelConfig(function="models:gpt"), data=DataConfig(path=""), run=RunConfig(name="gpt")))
    PLAN.save(made.file("plan.json"))
    return made


def finish(folder: RunFolder) -> None:
    predicted = simulate(PLAN)
    predicted.save(folder.file("predicted.json"))
    replace(predicted, source=Source.MEASURED).save(folder.file("trace.json"))
    for update in range(1, 5):
        folder.add_metrics({"update": update, "loss": 5.0 - update, "samples_per_s": 64.0})


def test_a_finished_run_is_summed_up(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    finish(folder)
    assert main(["show", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("run gpt", "updates 4, first loss 4, last loss 1, speed 64 rows/s", "layer0", "predicted and measured", "where the"):
        assert expected in shown
    assert main(["show", str(folder.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["updates"], document["loss"], len(document["traces"])) == ("gpt", 4, 1.0, 2)


def test_its_page_holds_both_windows_and_the_run(folder: RunFolder, tmp_path: Path) -> None:
    finish(folder)
    assert main(["show", str(folder.path), "-o", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert all(part in page for part in ('id="stages"', 'id="training"', "models:gpt", "predicted above measured"))
    assert main(["show", str(folder.path), "-o", str(tmp_path / "run.svg")]) == 0
    assert (tmp_path / "run.svg").read_text().startswith("<svg")


def test_a_run_without_a_window_shows_its_plan_and_why_it_ended(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_json("failure.json", {"problem": "no room", "kind": "RunError", "updates": 0})
    assert main(["show", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    assert "it ended after update 0: no room" in shown
    assert "simulated" in shown


@pytest.mark.parametrize(("missing", "problem"), [("config.yaml", "no folder of a run"), ("plan.json", "has no plan.json yet")])
def test_other_folders_are_refused_in_a_sentence(folder: RunFolder, missing: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder.file(missing).unlink()
    assert main(["show", str(folder.path)]) == 2
    assert problem in capsys.readouterr().err
