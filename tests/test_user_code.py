"""The names by which configurations record what a program gives."""

from __future__ import annotations

import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from raypipe.actors.data.source import data_name
from raypipe.cli import main
from raypipe.errors import ConfigError
from raypipe.models.mlp import mlp
from raypipe.optimizer_config import OptimizerConfig
from raypipe.training.trainer import Trainer
from raypipe.user_code import IN_PYTHON, named, recorded_name

ROWS = [{"inputs": [0.0] * 16, "targets": [0.0] * 16} for _ in range(8)]


class Lion(torch.optim.SGD):
    """An optimizer that a name stands for."""


def open_rows(split: str) -> Any:
    raise AssertionError(f"nobody reads {split}")


def test_what_a_name_stands_for_is_recorded_by_it() -> None:
    for given in (mlp, Lion, open_rows):
        name = recorded_name(given)
        assert named(name, what="it", such_as="m:f") is given
    assert recorded_name("file.py:rows") == "file.py:rows"
    assert data_name(None) == ""


def test_what_no_name_stands_for_is_marked() -> None:
    in_main = types.FunctionType(mlp.__code__, mlp.__globals__, "mlp")
    in_main.__module__ = "__main__"
    for given, name in (
        (in_main, "__main__:mlp"),
        (partial(mlp, width=8), "raypipe.models.mlp:mlp"),
        (lambda: None, f"{__name__}:test_what_no_name_stands_for_is_marked.<locals>.<lambda>"),
        (DataLoader(ROWS), "torch.utils.data.dataloader:DataLoader"),  # type: ignore[arg-type]
        (ROWS, "builtins:list"),
    ):
        assert data_name(given) == IN_PYTHON + name
        with pytest.raises(ConfigError, match=r"start the run from there, or put a name in its place, such as my\.py:rows"):
            named(data_name(given), what="data.train", such_as="my.py:rows")


def test_a_mark_does_not_keep_a_run_from_going_on() -> None:
    assert OptimizerConfig(name=f"{IN_PYTHON}m:Lion").state_kind == OptimizerConfig(name="m:Lion").state_kind


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"model": mlp, "batches": partial(open_rows)}, "data.train"),
        ({"model": mlp, "train_data": DataLoader(ROWS)}, "data.train"),  # type: ignore[arg-type]
        ({"model": partial(mlp, width=8), "train_data": ROWS}, "model.function"),
        ({"model": mlp, "train_data": ROWS, "optimizer": partial(Lion, momentum=0.5)}, "optimizer.name"),
    ],
)
def test_the_command_line_says_what_only_the_program_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], key: str
) -> None:
    model = arguments.pop("model")
    Trainer(model, **arguments).config.save(tmp_path / "config.yaml")
    assert main(["train", str(tmp_path / "config.yaml"), "--set", f"run.storage_path={tmp_path / 'runs'}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {key} '{IN_PYTHON}")
    assert "only the program that gave it has it; start the run from there" in error
    assert not (tmp_path / "runs").exists()
