"""Exported models are those that were trained, as transformers and PEFT read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import raypipe.hf
from raypipe.errors import ConfigError, FormatError, InputError
from raypipe.user_code import make_model
from tests.hf.runs import trained_run
from tests.hf.words import write_tokenizer
from tests.models.transformers_models import TextRows, logits_by_layers, save, small_config

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # PEFT calls what transformers has renamed

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
BATCH = {name: tensor for name, tensor in TextRows().batch(99, (0.0, 1.0)).items() if name != "labels"}


def logits(folder: Path | str, kind: Any = transformers.AutoModelForCausalLM) -> Tensor:
    with torch.inference_mode():
        found: Tensor = kind.from_pretrained(folder, dtype=torch.float64).eval()(**BATCH).logits
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_what_from_pretrained_loads_has_the_logits_of_the_trained_layers(family: str, tied: bool, tmp_path: Path) -> None:
    source = save(small_config(family, tie_word_embeddings=tied), tmp_path / "model")
    run = trained_run(tmp_path, source, dtype="float64")
    exported = raypipe.hf.export(run, tmp_path / "exported")
    # An exported model is again one that raypipe reads: its layers have the logits of the whole.
    again = logits_by_layers(make_model(f"hf:{exported}", {"dtype": "float64"}), BATCH)
    torch.testing.assert_close(logits(exported), again, rtol=0, atol=1e-12)
    assert not torch.allclose(logits(exported), logits(source), atol=1e-3)  # it was trained
    with torch.inference_mode():
        torch.testing.assert_close(raypipe.hf.load(run)(**BATCH).logits, logits(exported), rtol=0, atol=1e-12)
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == json.loads((Path(source) / "config.json").read_text())["architectures"]
    assert config["tie_word_embeddings"] is tied
    assert config["use_cache"] is True
    assert (exported / "generation_config.json").exists()


def test_weights_keep_their_names_and_are_written_in_shards(tmp_path: Path) -> None:
    source = save(small_config("llama", tie_word_embeddings=False), tmp_path / "model")
    exported = raypipe.hf.export(trained_run(tmp_path, source), tmp_path / "exported", max_shard_size="20KB")
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    names = set()
    for file in files:
        with safe_open(exported / file, framework="pt") as opened:
            names |= set(opened.keys())
            assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.float32}  # noqa: SIM118  # no mapping
    with safe_open(f"{source}/model.safetensors", framework="pt") as opened:
        assert names == set(opened.keys())
    assert torch.isfinite(logits(exported)).all()


def test_a_checkpoint_is_chosen_by_its_update(tmp_path: Path) -> None:
    source = save(small_config("llama"), tmp_path / "model")
    run = trained_run(tmp_path, source, num_updates=1, windows=2, dtype="float64")
    first = raypipe.hf.export(run, tmp_path / "first", checkpoint=1)
    last = raypipe.hf.export(run, tmp_path / "last")
    assert not torch.equal(logits(first), logits(last))
    torch.testing.assert_close(logits(last), logits(raypipe.hf.export(run, tmp_path / "second", checkpoint=2)))
    with pytest.raises(ConfigError, match="no checkpoint after update 7; it has 1, 2"):
        raypipe.hf.export(run, tmp_path / "none", checkpoint=7)


def test_another_type_of_weights_is_written_if_asked(tmp_path: Path) -> None:
    run = trained_run(tmp_path, save(small_config("llama"), tmp_path / "model"))
    exported = raypipe.hf.export(run, tmp_path / "exported", dtype="bfloat16")
    assert transformers.AutoModelForCausalLM.from_pretrained(exported).dtype == torch.bfloat16


def test_tokenizer_and_generation_settings_go_with_the_model(tmp_path: Path) -> None:
    source = save(small_config("llama"), tmp_path / "model")
    write_tokenizer(source)
    transformers.GenerationConfig(max_new_tokens=7, eos_token_id=2, temperature=0.5, do_sample=True).save_pretrained(source)
    run = trained_run(tmp_path, source)
    exported = raypipe.hf.export(run, tmp_path / "exported")
    assert transformers.AutoTokenizer.from_pretrained(exported)("w5 w6")["input_ids"] == [5, 6]
    settings = transformers.GenerationConfig.from_pretrained(exported)
    assert (settings.max_new_tokens, settings.temperature) == (7, 0.5)


def test_text_and_perplexity_are_those_of_the_exported_model(tmp_path: Path) -> None:
    source = save(small_config("llama"), tmp_path / "model")
    write_tokenizer(source)
    run = trained_run(tmp_path, source)
    text = raypipe.hf.generate(run, "w5 w6 w7", max_new_tokens=4, do_sample=False)
    exported = transformers.AutoModelForCausalLM.from_pretrained(raypipe.hf.export(run, tmp_path / "exported"), dtype=torch.float32)
    tokens = exported.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert text == transformers.AutoTokenizer.from_pretrained(source).decode(tokens[0], skip_special_tokens=True)
    texts = [" ".join(f"w{token}" for token in row) for row in TextRows().batch(0, (0.0, 1.0))["input_ids"].tolist()]
    rows = TextRows().batch(0, (0.0, 1.0))
    with torch.inference_mode():
        loss = exported(input_ids=rows["input_ids"], labels=rows["labels"]).loss
    assert raypipe.hf.perplexity(run, texts) == pytest.approx(float(loss.exp()), rel=1e-5)
    # In pieces of two tokens, each token but the first is predicted once, from the one before it.
    with torch.inference_mode():
        rows_of_two = rows["input_ids"].unfold(1, 2, 1).flatten(0, 1)
        loss = exported(input_ids=rows_of_two, labels=rows_of_two).loss
    assert raypipe.hf.perplexity(run, texts, max_length=2) == pytest.approx(float(loss.exp()), rel=1e-5)


def test_adapters_are_exported_alone_or_merged(tmp_path: Path) -> None:
    source = save(small_config("llama"), tmp_path / "model")
    run = trained_run(tmp_path, source, dtype="float64", lora=LORA)
    merged = raypipe.hf.export(run, tmp_path / "merged")
    alone = raypipe.hf.export(run, tmp_path / "alone", adapters="adapters")
    with torch.inference_mode():
        base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
        both = peft.PeftModel.from_pretrained(base, alone).eval()
        torch.testing.assert_close(both(**BATCH).logits, logits(merged), rtol=0, atol=1e-10)
    assert not torch.allclose(logits(merged), logits(source), atol=1e-4)
    with safe_open(alone / "adapter_model.safetensors", framework="pt") as opened:
        assert len(opened.keys()) == 3 * 2 * 2  # blocks, modules, matrices


def test_runs_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    source = save(small_config("llama"), tmp_path / "model")
    run = trained_run(tmp_path, source)
    with pytest.raises(InputError, match="is no folder of a run"):
        raypipe.hf.export(tmp_path, tmp_path / "exported")
    with pytest.raises(InputError, match="is there already and not empty"):
        raypipe.hf.export(run, tmp_path / "model")
    with pytest.raises(InputError, match="no tokenizer"):
        raypipe.hf.generate(run, "w5")
    with pytest.raises(InputError, match="no form of adapters is called 'merge'; did you mean 'merged'"):
        raypipe.hf.export(run, tmp_path / "exported", adapters="merge")
    shutil.rmtree(source)
    save(small_config("qwen3"), Path(source))
    with pytest.raises(FormatError, match="is it another model by now"):
        raypipe.hf.export(run, tmp_path / "exported")


def test_a_run_is_exported_into_the_empty_folder_that_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained_run(tmp_path, save(small_config("llama"), tmp_path / "model"))
    folder, others = tmp_path / "here", tmp_path / "here.partial"
    folder.mkdir()
    others.mkdir()
    (others / "notes.txt").write_text("of the user")
    monkeypatch.chdir(folder)
    assert raypipe.hf.export(run, ".") == Path()
    assert torch.isfinite(logits(".")).all()
    assert (others / "notes.txt").read_text() == "of the user"
    assert {path.name for path in tmp_path.glob("here*")} == {"here", "here.partial"}
