"""The examples: what their comments say is what they need, and the scripts print what the rows say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.checkpoint_files import CheckpointIndex, layer_file
from raypipe.cli import main
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.data.fields import FieldDataset, Rows, write_rows
from raypipe.model import Model
from raypipe.training.run_folder import RunFolder
from raypipe.user_code import make_model
from tests.models.layers import build, forward
from tests.snippets import ROOT

# A model of Hugging Face is described by files of its own, which its example unpacks first.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if "function: hf:" not in path.read_text())
NUM_ROWS = 26
CLIP: dict[str, Any] = {"num_image_layers": 1, "num_text_layers": 1, "image_width": 16, "text_width": 16, "head_size": 8}
VQA: dict[str, Any] = {"num_co_layers": 1, "width": 16, "head_size": 8, "num_answers": 3}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
class TestConfiguration:
    def test_it_describes_a_model(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        config = TrainConfig.load(path)
        assert make_model(config.model.function, config.model.options).layers

    def test_its_comment_says_how_to_train(self, path: Path) -> None:
        assert f"#   raypipe train examples/{path.name}\n" in path.read_text()

    def test_without_its_data_the_command_of_its_comment_is_named(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if path.stem == "llama":  # its model is a file of the examples
            (tmp_path / "examples").symlink_to(ROOT / "examples")
        monkeypatch.chdir(tmp_path)
        commands = [line.removeprefix("#   ") for line in path.read_text().splitlines() if "raypipe data prepare" in line]
        remedies = {
            "cnn": "write the fields pixels with raypipe.data.fields.write_rows",
            "llama": "make it with `raypipe data prepare python-stdlib -o data/docs.parquet`",
        }
        remedy = remedies.get(path.stem) or f"make it with `{commands[0]}`"
        for arguments in (("train", path), ("profile", path, "-o", "profile.json")):
            assert main([str(argument) for argument in arguments]) == 2
            error = capsys.readouterr().err.removeprefix("loading torch and Ray\n")
            assert error.startswith("error: ")
            assert f"there is no such file; {remedy}" in error.replace(f"{tmp_path}/", "")
        assert [one.name for one in tmp_path.iterdir()] == (["examples"] if path.stem == "llama" else [])


@pytest.mark.parametrize(("source", "package"), [("easy-vqa", "easy_vqa"), ("glyphs", "matplotlib")])
def test_without_a_package_the_command_says_what_installs_it(
    source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["data", "prepare", source, "-o", str(tmp_path / "rows.parquet")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "pip install 'raypipe[branches]'" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


Folder = Callable[[str, Mapping[str, Any], Rows], tuple[Path, Model, FieldDataset]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Makes the folder of a run that ended with random weights; returns it with its model and its test rows."""
    monkeypatch.syspath_prepend(ROOT / "examples")

    def make(function: str, options: Mapping[str, Any], rows: Rows) -> tuple[Path, Model, FieldDataset]:
        write_rows(tmp_path / "rows.parquet", rows)
        model = make_model(function, options)
        run = RunFolder.create(str(tmp_path), "run")
        run.begin(
            TrainConfig(
                model=ModelConfig(function=function, options=dict(options)),
                data=DataConfig(path=str(tmp_path / "rows.parquet")),
                run=RunConfig(),
            )
        )
        checkpoint = run.new_checkpoint(1)
        for index, (name, module) in enumerate(build(model, seed=7).items()):
            save_file(module.state_dict(), Path(checkpoint.path) / layer_file(index, name))
        Checkpoint.finish(checkpoint, CheckpointIndex(update=1, layers=tuple(build(model)), model=function, seed=0))
        return run.path, model, FieldDataset(tmp_path / "rows.parquet", seed=0, split="test")

    return make


def split_rows() -> list[str]:
    return ["test" if row < NUM_ROWS else "train" for row in range(2 * NUM_ROWS)]


def outputs(model: Model, dataset: FieldDataset, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    batch = {name: torch.from_numpy(values) for name, values in dataset.rows(0, count).items()}
    with torch.no_grad():
        return batch, forward(model, build(model, seed=7), batch)


def test_retrieval_counts_own_names_within_groups(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    fields = {
        "glyph": random.integers(256, size=(2 * NUM_ROWS, 32, 32), dtype=np.uint8),
        "name": random.integers(128, size=(2 * NUM_ROWS, 80), dtype=np.uint8),
    }
    path, model, dataset = folder("raypipe.models.clip:clip", CLIP, Rows(fields, split_rows()))
    retrieval = importlib.import_module("retrieval")
    monkeypatch.setattr(retrieval, "NUM_NAMES", 8)
    monkeypatch.setattr(sys, "argv", ["retrieval.py", str(path)])
    retrieval.main()
    _, embeddings = outputs(model, dataset, 24)
    ranks = [
        sum(bool(image @ other > image @ group[own, 1]) for other in group[:, 1])
        for group in embeddings.reshape(3, 8, 2, -1)
        for own, image in enumerate(group[:, 0])
    ]
    firsts, among_five = (sum(rank < most for rank in ranks) / 24 for most in (1, 5))
    assert 0 < firsts < among_five < 1
    assert capsys.readouterr().out.splitlines() == [
        "24 glyphs, each with 8 names to choose from",
        f"own name first: {firsts:.1%} (by chance 12.5%)",
        f"own name among the first five: {among_five:.1%} (by chance 62.5%)",
    ]


def test_answers_counts_right_ones_beside_guesses(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    kinds = np.arange(2 * NUM_ROWS) % 2  # two questions; the training rows answer them with 0 and 1
    answers = np.where(np.arange(2 * NUM_ROWS) < NUM_ROWS, random.integers(3, size=2 * NUM_ROWS), kinds)
    fields = {
        "image": random.integers(256, size=(2 * NUM_ROWS, 64, 64, 3), dtype=np.uint8),
        "question": np.repeat(kinds[:, None], 9, axis=1).astype(np.uint8),
        "answer": answers,
    }
    labels = {"answer": ["no", "yes", "red"]}
    path, model, dataset = folder("raypipe.models.vqa:vqa", VQA, Rows(fields, split_rows(), labels=labels))
    monkeypatch.setattr(sys, "argv", ["answers.py", str(path)])
    importlib.import_module("answers").main()
    batch, logits = outputs(model, dataset, NUM_ROWS)
    right = sum(max(range(3), key=lambda answer: scores[answer]) == own for scores, own in zip(logits, batch["answer"], strict=True))
    guessed = int((answers == kinds)[:NUM_ROWS].sum())
    assert 0 < right < NUM_ROWS
    assert capsys.readouterr().out.splitlines() == [
        f"{NUM_ROWS} questions, 3 answers to choose from",
        f"right: {right / NUM_ROWS:.1%} (by chance 33.3%)",
        f"without the image, by the most frequent answer to the same question: {guessed / NUM_ROWS:.1%}",
    ]


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("raypipe.models.clip:clip_vit_b_32", (), "is a run of raypipe.models.clip:clip, expected one of"),
        ("raypipe.models.clip:clip", ("--split", "tset"), "holds no row of 'tset'; did you mean 'test'?"),
    ],
)
def test_scripts_refuse_what_they_cannot_measure(
    folder: Folder,
    function: str,
    arguments: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {"glyph": np.zeros((2 * NUM_ROWS, 32, 32), np.uint8), "name": np.zeros((2 * NUM_ROWS, 80), np.uint8)}
    path, _, _ = folder("raypipe.models.clip:clip", CLIP, Rows(fields, split_rows()))
    monkeypatch.setattr(sys, "argv", ["retrieval.py", str(path), *arguments])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("trained").from_command_line("", function=function)
    assert problem in capsys.readouterr().err
