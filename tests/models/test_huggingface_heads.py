"""Classifiers, image models and pairs of towers of transformers train as transformers' own models do in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError
from raypipe.model import Batch
from raypipe.schedules.catalogue import build
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest
from raypipe.user_code import make_model
from tests.models.transformers_models import IGNORED, LENGTH, VOCABULARY, keep_float64, save, small_config, weights_of

transformers = pytest.importorskip("transformers")

RATE = 1e-2
NUM_UPDATES, NUM_MICROBATCHES, ROWS, CLASSES, SIZE = 10, 4, 4, 5, 8
SCHEDULES = (("1f1b", 3), ("zb-h1", 2), ("amdp-flush", 4))
END = 2
"""Token that ends a text of CLIP."""


@dataclass(frozen=True)
class Examples:
    """Rows of random texts and images, with a class for each row or position, a function of the microbatch's number.

    Attributes:
        fields: What rows have of `input_ids`, `pixel_values`, `labels` (of rows) and `classes` (labels of positions).
    """

    fields: tuple[str, ...]

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        generator = torch.Generator().manual_seed(100 + microbatch)
        ends = torch.randint(LENGTH // 2, LENGTH, (ROWS, 1), generator=generator)
        there = torch.arange(LENGTH) <= ends
        tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        tokens.scatter_(1, ends, END)
        tokens[~there] = 0
        classes = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
        made = {
            "input_ids": tokens,
            "attention_mask": there.long(),
            "pixel_values": torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64),
            "labels": classes[:, 0],
        }
        if "classes" in self.fields:
            made["labels"] = classes.masked_fill(~there, IGNORED)
        first, end = (round(share * ROWS) for share in rows)
        names = {"attention_mask", *self.fields} if "input_ids" in self.fields else set(self.fields)
        return {name: tensor[first:end] for name, tensor in made.items() if name in names or (name == "labels" and "classes" in names)}


TEXTS, POSITIONS = Examples(("input_ids", "labels")), Examples(("input_ids", "classes"))
IMAGES, PAIRS = Examples(("pixel_values", "labels")), Examples(("input_ids", "pixel_values"))
VIT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": SIZE, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 16}


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)


def adamw(weights: list[nn.Parameter] | NamedWeights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=RATE)


def clip_config() -> Any:
    text = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": END, "bos_token_id": 1, "pad_token_id": 0}
    image = {**TOWER, "hidden_size": 24, "num_hidden_layers": 3, "image_size": SIZE, "patch_size": 4}
    return transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)


def config_of(kind: str) -> Any:
    """Return the configuration of a small model of a class of transformers."""
    if kind == "CLIPModel":
        return clip_config()
    if kind == "ViTForImageClassification":
        return transformers.ViTConfig(**VIT, num_labels=CLASSES)
    family = getattr(transformers, kind).config_class.model_type
    return small_config(family, num_labels=CLASSES, classifier_dropout=0.0)


def own_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a microbatch's labels by transformers' own forward, and their number."""
    rows = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if "labels" not in batch:
        return model(**rows, return_loss=True).loss, torch.tensor(1)
    logits = model(**rows).logits
    labels = batch["labels"]
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def train_whole(kind: str, folder: str, rows: Examples) -> tuple[list[float], dict[str, Tensor]]:
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for update in range(NUM_UPDATES):
        parts = [own_loss(model, rows.batch(update * NUM_MICROBATCHES + number, (0.0, 1.0))) for number in range(NUM_MICROBATCHES)]
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(loss.detach()))  # type: ignore[union-attr]
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.combined
@pytest.mark.parametrize("schedule", SCHEDULES, ids=[name for name, _ in SCHEDULES])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("ViTForImageClassification", IMAGES),
        ("CLIPModel", PAIRS),
        ("BertForSequenceClassification", TEXTS),
        ("RobertaForTokenClassification", POSITIONS),
        ("LlamaForSequenceClassification", TEXTS),
        ("GPT2ForSequenceClassification", TEXTS),
        ("Qwen3ForTokenClassification", POSITIONS),
    ],
    ids=["vit", "clip", "bert-rows", "roberta-positions", "llama-rows", "gpt2-rows", "qwen3-positions"],
)
def test_ten_updates_equal_those_of_transformers(kind: str, rows: Examples, schedule: tuple[str, int], tmp_path: Path) -> None:
    folder = save(config_of(kind), tmp_path, kind=getattr(transformers, kind))
    model = make_model(f"hf:{folder}", {"dtype": "float64"})
    model.check_fields(rows.batch(0, (0.0, 1.0)), where="rows")
    name, num_devices = schedule
    order = build(name, ScheduleRequest(num_devices, NUM_MICROBATCHES, NUM_UPDATES))
    cut = Cut.equal(len(model.layers), order.num_stages, model.edges(), model.tied_layers())
    pipeline = LocalPipeline(
        model, cut=cut, schedule=over_graph(order, cut.graph), batches=rows, optimizer=adamw, learning_rate=lambda _: RATE
    )
    losses = mean_losses(pipeline.run_window(), num_microbatches=NUM_MICROBATCHES)
    expected, weights = train_whole(kind, folder, rows)
    if kind == "CLIPModel":  # whose loss is the mean over microbatches
        assert expected[0] == pytest.approx(losses[0], abs=1e-10)
    assert losses == pytest.approx(expected, abs=1e-10)
    assert max(losses) - min(losses) > 1e-3
    found = weights_of(pipeline)
    assert found.keys() == weights.keys()
    assert max(float((found[weight] - weights[weight]).abs().max()) for weight in weights) < 1e-8


def test_the_towers_of_clip_are_branches_that_meet_in_the_head(tmp_path: Path) -> None:
    clip_config().save_pretrained(tmp_path)
    model = make_model(f"hf:{tmp_path}", {"weights": "random"})
    assert list(model.branches()) == ["text", "image"]
    assert [layer.name for layer in model.layers] == [
        *("text-embedding", "text-block-0", "text-block-1"),
        *("image-embedding", "image-block-0", "image-block-1", "image-block-2"),
        "head",
    ]
    assert model.loss_couples_rows
    assert all(isinstance(layer.build(), nn.Module) for layer in model.layers)


def test_a_regression_is_refused(tmp_path: Path) -> None:
    save(small_config("bert", num_labels=1, problem_type="regression"), tmp_path, kind=transformers.BertForSequenceClassification)
    with pytest.raises(ConfigError, match="one label of several, not regression"):
        make_model(f"hf:{tmp_path}", {})


def test_labels_of_positions_are_refused_for_classes_of_rows(tmp_path: Path) -> None:
    path = save(small_config("llama", num_labels=3, pad_token_id=0), tmp_path, kind=transformers.LlamaForSequenceClassification)
    loss = make_model(f"hf:{path}", {}).loss
    assert loss(torch.zeros(4, 3), {"labels": torch.zeros(4, dtype=torch.long)}).isfinite()
    with pytest.raises(ConfigError, match=r"labels have the shape \[4, 12\], but the head of the model predicts \[4\]; .*causal-lm"):
        loss(torch.zeros(4, 3), {"labels": torch.zeros(4, 12, dtype=torch.long)})


def test_a_head_for_one_class_is_refused(tmp_path: Path) -> None:
    path = save(small_config("bert", num_labels=1), tmp_path, kind=transformers.BertForSequenceClassification)
    with pytest.raises(ConfigError, match=r"num_labels 1 for a regression.*model\.options\.config\.id2label"):
        make_model(f"hf:{path}", {})
    random = {"weights": "random", "config": {"id2label": {0: "no", 1: "yes"}}}
    assert make_model(f"hf:{path}", random).layers
