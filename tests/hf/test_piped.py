"""Text and perplexity come from the stages of a run while it goes on, by transformers' own rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raypipe.hf
from raypipe.callbacks.events import Run
from raypipe.config import DataConfig, ModelConfig, TrainConfig
from raypipe.errors import ConfigError
from raypipe.user_code import make_model
from tests.actors.oracles import unsplit
from tests.hf.words import write_tokenizer
from tests.models.transformers_models import LENGTH, TextRows, save, small_config

transformers = pytest.importorskip("transformers")


@dataclass
class Layers:
    """The layers of a model one after another, as stages that take rows of one length only."""

    layers: nn.ModuleList
    num_calls: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"input_ids": (LENGTH,), "labels": (LENGTH,)})

    def __call__(self, fields: Mapping[str, Tensor]) -> Tensor:
        self.num_calls += 1
        assert fields["input_ids"].shape[1:] == (LENGTH,)
        hidden: tuple[Tensor, ...] = ()
        for layer in self.layers:
            hidden = (layer(*hidden, **fields),)
        return hidden[0]


def run_of(source: str, forward: Any, tmp_path: Path) -> Run:
    config = TrainConfig(model=ModelConfig(function=f"hf:{source}"), data=DataConfig(path=""))
    return Run(name="run", path=str(tmp_path), records=tmp_path, config=config, first_update=0, forward=forward)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = save(small_config("llama"), tmp_path / "model", dtype=torch.float32)
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "top_k": 5, "temperature": 0.7}], ids=["greedy", "sampled"])
def test_text_is_that_of_the_whole_model(source: str, settings: dict[str, Any], tmp_path: Path) -> None:
    layers = Layers(unsplit(make_model(f"hf:{source}", {})).eval())
    torch.manual_seed(3)
    text = raypipe.hf.generate(run_of(source, layers, tmp_path), "w5 w6 w7", max_new_tokens=6, **settings)
    whole = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(3)
    tokens = whole.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, **settings)
    assert text == transformers.AutoTokenizer.from_pretrained(source).decode(tokens[0], skip_special_tokens=True)
    assert 1 <= layers.num_calls <= 6


def test_messages_get_the_answer_alone(source: str, tmp_path: Path) -> None:
    run = run_of(source, Layers(unsplit(make_model(f"hf:{source}", {})).eval()), tmp_path)
    messages = [{"role": "user", "content": "w5 w6 w7"}]
    with pytest.raises(ConfigError, match=r"hf:.* has no chat template"):
        raypipe.hf.generate(run, messages, max_new_tokens=6)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}{{ ' w8' }}{% endif %}"
    Path(source, "chat_template.jinja").write_text(template, encoding="utf-8")
    whole = raypipe.hf.generate(run, "w5 w6 w7 w8", max_new_tokens=6)
    assert whole == f"w5 w6 w7 w8 {raypipe.hf.generate(run, messages, max_new_tokens=6)}"


def test_a_text_longer_than_the_rows_goes_on_from_its_last_tokens(source: str, tmp_path: Path) -> None:
    layers = Layers(unsplit(make_model(f"hf:{source}", {})).eval())
    tokens = [5 + at % 7 for at in range(LENGTH + 3)]
    prompt = " ".join(f"w{token}" for token in tokens)
    text = raypipe.hf.generate(run_of(source, layers, tmp_path), prompt, max_new_tokens=3, do_sample=False)
    whole = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    end = whole.generation_config.eos_token_id
    for _ in range(3):
        with torch.inference_mode():
            tokens.append(int(whole(torch.tensor([tokens[-LENGTH:]])).logits[0, -1].argmax()))
        if tokens[-1] == end:
            break
    assert text == transformers.AutoTokenizer.from_pretrained(source).decode(tokens, skip_special_tokens=True)
    assert layers.num_calls == len(tokens) - (LENGTH + 3) > 0


def test_perplexity_is_that_of_the_whole_model(source: str, tmp_path: Path) -> None:
    layers = Layers(unsplit(make_model(f"hf:{source}", {})).eval())
    rows = TextRows().batch(0, (0.0, 1.0))
    texts = [" ".join(f"w{token}" for token in row) for row in rows["input_ids"].tolist()]
    whole = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.inference_mode():
        loss = whole(input_ids=rows["input_ids"], labels=rows["labels"]).loss
    assert raypipe.hf.perplexity(run_of(source, layers, tmp_path), texts) == pytest.approx(float(loss.exp()), rel=1e-5)


def test_what_cannot_write_text_is_refused(source: str, tmp_path: Path) -> None:
    layers = Layers(nn.ModuleList(), shapes={"pixel_values": (3, 8, 8)})
    with pytest.raises(ConfigError, match=r"have no tokens \('input_ids'\); they have pixel_values"):
        raypipe.hf.generate(run_of(source, layers, tmp_path), "w5")
    with pytest.raises(ConfigError, match="the run has not begun"):
        raypipe.hf.generate(run_of(source, None, tmp_path), "w5")
