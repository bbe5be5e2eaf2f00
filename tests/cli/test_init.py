"""`raypipe init` writes what `raypipe train` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.cli import main
from raypipe.cli.templates import TEMPLATES
from raypipe.config import TrainConfig
from raypipe.training.strategy import NamedStrategy
from raypipe.user_code import make_model

OWN = """
from torch import nn
from raypipe import Layer, Model

def mine(width):
    first = Layer("first", lambda: nn.Linear(16, width), batch=("inputs",))
    second = Layer("second", lambda: nn.Linear(width, 16))
    return Model(layers=(first, second), loss=lambda output, batch: (output - batch["targets"]).mean())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_configuration_of_a_bundled_model_can_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 0
    assert f"raypipe train {name}.yaml" in capsys.readouterr().out
    config = TrainConfig.load(f"{name}.yaml")
    model = make_model(config.model.function, config.model.options)
    assert config.scaling.num_devices <= len(model.layers)
    assert TEMPLATES[name].num_layers <= len(model.layers), "so many devices are allowed"
    if config.schedule.name != "branch-aware":
        NamedStrategy(config, model, window_sizes={10})


def test_a_function_of_ones_own_is_built_and_its_fields_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(OWN)
    assert main(["init", "mine.py:mine"]) == 2
    assert "missing 1 required positional argument: 'width'" in capsys.readouterr().err
    assert main(["init", "mine.py:mine", "--option", "width=8", "-o", "own.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "own.yaml", "model": "mine.py:mine", "prepare": []}
    config = TrainConfig.load("own.yaml")
    assert (config.model.options, config.scaling.num_devices) == ({"width": 8}, 2)
    assert "the fields inputs" in (folder / "own.yaml").read_text()


def test_a_model_of_hugging_face_gets_its_own_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "hf:models/SmolLM-135M"]) == 0
    assert "--tokenizer models/SmolLM-135M/tokenizer.json" in capsys.readouterr().out
    assert TrainConfig.load("SmolLM-135M.yaml").model.function == "hf:models/SmolLM-135M"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["gtp"], "no bundled model is called 'gtp'; did you mean 'gpt'"),
        (["gpt", "--devices", "7"], "the model has 6 layers"),
        (["gpt", "--option", "num_layers"], "expected KEY=VALUE"),
        (["gpt", "--option", "num_heads=3"], "num_heads must divide d_model"),
        (["no_such_module:model"], "no module 'no_such_module'"),
    ],
)
def test_what_cannot_be_written_is_one_clear_message(
    folder: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "Traceback" not in error
    assert not list(folder.iterdir())


def test_a_file_that_exists_stays_unless_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "gpt.yaml").write_text("mine")
    assert main(["init", "gpt"]) == 2
    assert "exists; give another name" in capsys.readouterr().err
    assert (folder / "gpt.yaml").read_text() == "mine"
    assert main(["init", "gpt", "--force", "--data", "tokens.parquet", "--devices", "6"]) == 0
    config = TrainConfig.load("gpt.yaml")
    assert (config.data.path, config.scaling.num_devices) == ("tokens.parquet", 6)


def test_without_a_model_the_bundled_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    listed = capsys.readouterr().out
    assert all(template.about in listed for template in TEMPLATES.values())
