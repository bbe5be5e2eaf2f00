"""The examples train: a few updates of each, with data that their own scripts make."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from raypipe.cli import main
from raypipe.config import TrainConfig
from raypipe.training.trainer import Trainer
from tests.snippets import ROOT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("local_ray", "shared_actors"),
]


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples and some texts, in which the test runs."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"the quick brown fox {number} jumps over the lazy dog\n" * 40)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.slow
def test_a_cnn_learns_from_the_shapes_that_its_script_draws(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, "shapes.py", "data/shapes.parquet", "--num-images", "400")
    config = TrainConfig.load(
        "examples/cnn.yaml", overrides=("run.num_updates=6", "schedule.updates_per_window=3", "data.num_validation_microbatches=2")
    )
    result = Trainer.of(config).fit()
    assert len(result.losses) == 6
    assert result.losses[-1] < 1.6, "four classes: 1.386 is guessing"
    assert (Path(result.path) / "metrics.csv").exists()


def test_bert_trains_on_masked_bytes(texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "texts", "-o", "bytes.parquet", "--validation-fraction", "0.2"]) == 0
    capsys.readouterr()
    run_script(monkeypatch, "bert.py", "--data", "bytes.parquet", "--num-updates", "10", "--num-layers", "2", "--d-model", "32")
    found = re.search(r"masked bytes ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert found
    assert float(found[2]) < float(found[1])


def test_a_llama_trains_from_scratch_with_a_tokenizer_of_its_own(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    run_script(monkeypatch, "tokenizer.py", "texts", "--vocabulary-size", "300", "-o", "data/tokenizer.json")
    prepare = ("texts", "--tokenizer", "data/tokenizer.json", "-o", "data/docs.parquet", "--validation-fraction", "0.2")
    assert main(["data", "prepare", *prepare]) == 0
    size = re.search(r"json: (\d+) tokens", capsys.readouterr().out)
    assert size
    config = TrainConfig.load(
        "examples/llama.yaml",
        overrides=(
            f"model.options={{vocabulary_size: {size[1]}, num_layers: 4, d_model: 32, num_heads: 4, num_groups: 2, d_hidden: 64}}",
            "data.sequence_length=16",
            "run.num_updates=10",
            "run.evaluate_every=5",
            "scaling.num_devices=2",
        ),
    )
    result = Trainer.of(config).fit()
    assert len(result.losses) == 10
    assert result.losses[-1] < result.losses[0]
    assert len({layer.forward_s for layer in result.plan.profile.layers if layer.name.startswith("block")}) == 1, "measured once"


def test_what_init_writes_trains_as_it_is(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "texts", "-o", "bytes.parquet", "--validation-fraction", "0.2"]) == 0
    small = ("num_layers=2", "d_model=32", "sequence_length=32")
    assert main(["init", "gpt", "--data", "bytes.parquet", *(part for one in small for part in ("--option", one))]) == 0
    config = TrainConfig.load("gpt.yaml", overrides=("run.num_updates=4", "data.sequence_length=32"))
    assert len(Trainer.of(config).fit().losses) == 4
