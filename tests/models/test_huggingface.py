"""Models of transformers as pipelines train as transformers' own models do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest
from raypipe.user_code import make_model
from tests.actors.oracles import unsplit
from tests.models.transformers_models import (
    LENGTH,
    TextRows,
    keep_float64,
    logits_by_layers,
    save,
    small_config,
    train_whole,
    train_with_transformers,
    weights_of,
)
from tests.snippets import ROOT

transformers = pytest.importorskip("transformers")

LEARNING_RATE = 1e-2
NUM_UPDATES, NUM_MICROBATCHES = 10, 4

# Windows shorter than the rows, and scalings that differ from 1.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "phi": {},
    "phi3": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
}
SCHEDULES = (("1f1b", 4, 1), ("zb-h1", 3, 1), ("interleaved", 2, 2), ("amdp-flush", 4, 1))


def train_pipeline(
    model: Model, batches: TextRows, *, schedule: str, num_devices: int, num_chunks: int
) -> tuple[list[float], LocalPipeline]:
    order = build(schedule, ScheduleRequest(num_devices, NUM_MICROBATCHES, NUM_UPDATES, num_chunks=num_chunks))
    cut = Cut.equal(len(model.layers), order.num_stages, model.edges(), model.tied_layers())
    pipeline = LocalPipeline(
        model,
        cut=cut,
        schedule=over_graph(order, cut.graph),
        batches=batches,
        optimizer=adamw,
        learning_rate=lambda _: LEARNING_RATE,
    )
    return mean_losses(pipeline.run_window(), num_microbatches=NUM_MICROBATCHES), pipeline


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)


def adamw(weights: list[nn.Parameter] | NamedWeights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=LEARNING_RATE)


def check_equal_training(folder: str, batches: TextRows, schedule: tuple[str, int, int], *, kind: Any = None, ahead: int = 1) -> None:
    name, num_devices, num_chunks = schedule
    model = make_model(f"hf:{folder}", {"dtype": "float64"})
    losses, pipeline = train_pipeline(model, batches, schedule=name, num_devices=num_devices, num_chunks=num_chunks)
    expected, weights = train_with_transformers(
        folder,
        batches,
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        kind=kind,
        ahead=ahead,
    )
    assert losses == pytest.approx(expected, abs=1e-10)
    assert max(losses) - min(losses) > 1e-3
    found = weights_of(pipeline)
    assert found.keys() == weights.keys()
    assert max(float((found[weight] - weights[weight]).abs().max()) for weight in weights) < 1e-8


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_updates_equal_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    folder = save(small_config(family, tie_word_embeddings=tied, **FAMILIES[family]), tmp_path)
    schedule = SCHEDULES[(list(FAMILIES).index(family) + tied) % len(SCHEDULES)]
    check_equal_training(folder, TextRows(padded=True), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=[name for name, _, _ in SCHEDULES])
def test_every_schedule_trains_a_tied_model_as_transformers_does(schedule: tuple[str, int, int], tmp_path: Path) -> None:
    folder = save(small_config("gemma2", tie_word_embeddings=True, **FAMILIES["gemma2"]), tmp_path)
    check_equal_training(folder, TextRows(padded=True), schedule)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "electra"])
def test_masked_language_models_train_as_transformers_does(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    kind = transformers.MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    folder = save(config, tmp_path, kind=kind)
    check_equal_training(folder, TextRows(padded=True, masked=True), ("1f1b", 3, 1), kind=transformers.AutoModelForMaskedLM, ahead=0)


def test_packed_rows_are_told_apart_by_their_positions(tmp_path: Path) -> None:
    folder = save(small_config("llama"), tmp_path)
    check_equal_training(folder, TextRows(packed=True), ("zb-h1", 3, 1))
    model = make_model(f"hf:{folder}", {"dtype": "float64"})
    packed = dict(TextRows(packed=True).batch(0, (0.0, 1.0)))
    together = logits_by_layers(model, packed)
    del packed["position_ids"]
    assert not torch.allclose(together[:, LENGTH - 1], logits_by_layers(model, packed)[:, LENGTH - 1])


@pytest.mark.parametrize("family", ["apertus", "helium"])
def test_a_family_that_raypipe_does_not_name_needs_no_code(family: str, tmp_path: Path) -> None:
    sources = (ROOT / "raypipe").rglob("*.py")
    assert not any(family in path.read_text().lower() for path in sources)
    folder = save(small_config(family, tie_word_embeddings=True), tmp_path)
    check_equal_training(folder, TextRows(padded=True), ("zb-h1", 4, 1))


@pytest.mark.filterwarnings("default::FutureWarning")  # PEFT calls what transformers has renamed
@pytest.mark.parametrize("schedule", [("zb-h1", 3, 1), ("amdp-flush", 4, 1)], ids=["zb-h1", "amdp-flush"])
def test_adapters_train_as_peft_trains_them(schedule: tuple[str, int, int], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    folder = save(small_config("qwen3", tie_word_embeddings=True), tmp_path)
    model = make_model(f"hf:{folder}", {"dtype": "float64", "lora": lora})
    name, num_devices, num_chunks = schedule
    losses, _ = train_pipeline(model, TextRows(padded=True), schedule=name, num_devices=num_devices, num_chunks=num_chunks)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    whole = peft.get_peft_model(base, peft.LoraConfig(**lora))
    for module in unsplit(model):
        begun = {weight: tensor for weight, tensor in module.state_dict().items() if "lora_" in weight}
        whole.base_model.model.load_state_dict(begun, strict=False)
    expected = train_whole(
        whole, TextRows(padded=True), num_updates=NUM_UPDATES, num_microbatches=NUM_MICROBATCHES, learning_rate=LEARNING_RATE
    )
    assert losses == pytest.approx(expected, abs=1e-10)
    assert max(losses) - min(losses) > 1e-3


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize(("targets", "adapted"), [("all-linear", 7), (None, 2)])
def test_adapters_go_where_peft_puts_them(targets: str | None, adapted: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = save(small_config("llama"), tmp_path)
    model = make_model(f"hf:{folder}", {"lora": {"target_modules": targets}})
    trained = [[name for name, weight in module.named_parameters() if weight.requires_grad] for module in unsplit(model)]
    assert [len(names) for names in trained] == [0, *[2 * adapted] * 3, 0]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_MIXED])
def test_rotary_frequencies_stay_exact_in_low_precision(precision: Precision, tmp_path: Path) -> None:
    folder = save(small_config("llama"), tmp_path, dtype=torch.float32)
    model = make_model(f"hf:{folder}", {})
    cut = Cut.equal(len(model.layers), 2, model.edges(), model.tied_layers())
    order = over_graph(build("1f1b", ScheduleRequest(2, 2, 2)), cut.graph)
    run = LocalPipeline(
        model, cut=cut, schedule=order, batches=TextRows(), optimizer=adamw, learning_rate=lambda _: LEARNING_RATE, precision=precision
    )
    assert all(torch.isfinite(torch.tensor(mean_losses(run.run_window(), num_microbatches=2))))
    (layer, *_) = [layer for on_device in run.weights for stage in on_device.values() for layer in stage.module.layers.values()]
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    assert torch.equal(layer.get_buffer("model.rotary_emb.inv_freq"), expected)
    assert expected.dtype == torch.float32
