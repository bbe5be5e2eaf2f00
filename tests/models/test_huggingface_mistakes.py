"""What a new user may get wrong with models of transformers is told before any actor starts, with a remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.actors.stage.layers import build_layer
from raypipe.cli import main
from raypipe.config import DataConfig, ModelConfig, TrainConfig
from raypipe.data.fields import Rows, write_rows
from raypipe.data.prepare import prepare
from raypipe.errors import ConfigError, InputError
from raypipe.model import Model
from raypipe.training.checks import check_data
from raypipe.user_code import make_model
from tests.models.transformers_models import save, small_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(small_config("llama"), tmp_path_factory.mktemp("model"))


def model(path: str, **options: Any) -> Model:
    return make_model(f"hf:{path}", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weigths": "random"}, "did you mean 'weights'"),
        ({"weights": "none"}, "choose from: pretrained, random"),
        ({"dtype": "float8"}, "choose from: auto, float32"),
        ({"head": "classifier"}, "choose from: auto, causal-lm, masked-lm"),
        ({"head": "masked-lm"}, "has no head for masked-lm"),
        ({"attention": "flashy"}, "cannot be made with this configuration"),
        ({"config": {"num_hidden_layer": 2}}, "did you mean 'num_hidden_layers'"),
        ({"config": {"hidden_size": "wide"}}, "llama refuses hidden_size='wide'"),
        ({"lora": {"rank": 2}}, "LoraConfig has no 'rank'"),
        ({"lora": {"r": 2, "target_modules": ["query"]}}, "fits no module of 'llama'; its modules are .*q_proj"),
        ({"lora": {"r": -2}}, "PEFT refuses it"),
        ({"lora": {"modules_to_save": ["norm"]}}, "changes more than adapters"),
    ],
)
def test_an_option_that_cannot_be_used_is_told(folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(folder, **options)


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "a/b/c", ""])
def test_a_folder_that_is_not_there_is_told(path: str) -> None:
    with pytest.raises(ConfigError, match="there is no such folder on this machine"):
        model(path)


def test_a_folder_without_a_configuration_or_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        model(str(tmp_path))
    small_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"set model.options.weights to random"):
        model(str(tmp_path))
    assert len(model(str(tmp_path), weights="random").layers) == 5


def test_a_name_that_the_hub_does_not_have_or_that_cannot_be_asked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cannot read its configuration .*there is no folder /.*/nobody/no-such-model; name a"):
        model("nobody/no-such-model")


def test_a_model_without_a_plan_is_told(tmp_path: Path) -> None:
    small_config("bloom", n_head=4, n_layer=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'bloom' .* has no pipeline plan .* such as llama"):
        model(str(tmp_path), weights="random")


def test_quantized_weights_are_told(tmp_path: Path) -> None:
    small_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized"):
        model(str(tmp_path), weights="random")


def test_weights_of_another_size_or_missing_ones_are_told(folder: str) -> None:
    wider = model(folder, config={"intermediate_size": 64})
    with pytest.raises(ConfigError, match=r"in the shape .* asks for .*; check model.options.config"):
        build_layer(wider.layers[1], index=1, seed=0)
    deeper = model(folder, config={"num_hidden_layers": 4})
    with pytest.raises(ConfigError, match=r"has no weights for 'model.layers.3"):
        build_layer(deeper.layers[4], index=4, seed=0)


def test_batches_without_labels_are_told(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"needs the field 'labels' or 'targets', but rows.parquet has input_ids"):
        model(folder).check_fields({"input_ids": torch.zeros(1, 2)}, where="rows.parquet")
    with pytest.raises(ConfigError, match="copy of input_ids"):
        model(folder).loss(torch.zeros(1, 2, 61), {"input_ids": torch.zeros(1, 2)})


def test_without_the_extra_its_name_is_told(folder: str) -> None:
    code = f"""
import sys
sys.modules["transformers"] = None
from raypipe.user_code import make_model
make_model("hf:{folder}", {{}})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert "pip install 'raypipe[hf]'" in result.stderr


def test_tokens_of_another_tokenizer_and_rows_without_labels_are_told_before_a_run_begins(folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Many words, and a few more of them.\n" * 200)
    tokens = prepare(str(tmp_path / "text.txt"), output=str(tmp_path / "bytes.parquet"), validation_fraction=0.1).path
    config = TrainConfig(model=ModelConfig(function=f"hf:{folder}"), data=DataConfig(path=tokens, sequence_length=8))
    with pytest.raises(ConfigError, match=r"knows 61 tokens, .* has 256 different ones; prepare it with the model's own tokenizer"):
        check_data(config, model(folder), vocabulary_size=None)
    rows = np.zeros((20, 8), dtype=np.int64)
    write_rows(tmp_path / "rows.parquet", Rows({"input_ids": rows}, ["validation" if row % 2 else "train" for row in range(20)]))
    config = TrainConfig(model=ModelConfig(function=f"hf:{folder}"), data=DataConfig(path=str(tmp_path / "rows.parquet")))
    with pytest.raises(ConfigError, match=r"needs the field 'labels' or 'targets', but .*rows.parquet has input_ids"):
        check_data(config, model(folder), vocabulary_size=None)


def test_the_command_names_another_model_and_tells_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    text = "format: raypipe.train/1\nmodel: {function: raypipe.models.gpt:gpt, options: {num_layers: 2}}\ndata: {path: rows.parquet}\n"
    config.write_text(text)
    assert main(["train", str(config), "--model", f"hf:{tmp_path}"]) == 2
    assert "the folder has no config.json" in capsys.readouterr().err
