"""Models of transformers under asynchronous orders, with divided optimizers and in low precision."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Batch
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import over_graph, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.user_code import make_model
from tests.models.transformers_models import IGNORED, TextRows, keep_float64, save, small_config, train_with_transformers

transformers = pytest.importorskip("transformers")

RATE = 1e-2
NUM_UPDATES, NUM_MICROBATCHES = 10, 4
ROWS = TextRows(padded=True)
FAMILIES = ("phi", "gpt2")
"""One with rotary embeddings, one with learned ones and tied ends."""


def adamw(weights: list[nn.Parameter] | NamedWeights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=RATE)


def folder_of(family: str, tmp_path: Path, dtype: torch.dtype = torch.float64) -> str:
    return save(small_config(family, tie_word_embeddings=family == "gpt2"), tmp_path, dtype=dtype)


@dataclass(frozen=True)
class Again:
    """The rows of a few microbatches, again in every update, so that a model can learn them."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        return ROWS.batch(microbatch % NUM_MICROBATCHES, rows)


def pipeline(
    folder: str, order: Schedule, *, is_divided: bool = False, batches: BatchSource = ROWS, rate: float = RATE, **given: Any
) -> LocalPipeline:
    """Return a pipeline of the stages that an order has, in float64 unless `precision` is given."""
    model = make_model(f"hf:{folder}", {} if "precision" in given else {"dtype": "float64"})
    cut = Cut.equal(len(model.layers), order.num_stages, model.edges(), model.tied_layers())
    order = over_graph(order, cut.graph)
    order = shard_optimizer(order) if is_divided else order
    return LocalPipeline(model, cut=cut, schedule=order, batches=batches, optimizer=adamw, learning_rate=lambda _: rate, **given)


def losses_of(run: LocalPipeline) -> list[float]:
    return mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)


def request(num_devices: int) -> ScheduleRequest:
    return ScheduleRequest(num_devices, NUM_MICROBATCHES, NUM_UPDATES)


def weights_of(run: LocalPipeline) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for on_device in run.weights
        for stage in on_device.values()
        for layer in stage.module.layers.values()
        for name, tensor in layer.state_dict().items()
    }


def train_a_version_late(folder: str) -> list[float]:
    """Train transformers' own model by the rule of PipeDream-2BW: the gradients of an update are those of the weights before the last."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    before = copy.deepcopy(model.state_dict())
    losses = []
    for update in range(NUM_UPDATES):
        now = copy.deepcopy(model.state_dict())
        model.load_state_dict(before)
        parts = [ROWS.batch(update * NUM_MICROBATCHES + number, (0.0, 1.0)) for number in range(NUM_MICROBATCHES)]
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        labels = functional.pad(rows.pop("labels"), (0, 1), value=IGNORED)[:, 1:]
        logits = model(**rows, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        model.load_state_dict(now)
        optimizer.step()
        before = now
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_pipedream_2bw_trains_with_weights_a_version_late(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)
    folder = folder_of(family, tmp_path)
    losses = losses_of(pipeline(folder, build("pipedream-2bw", request(4))))
    late = train_a_version_late(folder)
    assert losses == pytest.approx(late, abs=1e-10)
    prompt, _ = train_with_transformers(folder, ROWS, num_updates=NUM_UPDATES, num_microbatches=NUM_MICROBATCHES, learning_rate=RATE)
    assert max(abs(one - other) for one, other in zip(losses, prompt, strict=True)) > 1e-3, "a version late is not in time"


@pytest.mark.combined
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["amdp", "async-1f1b"])
def test_live_orders_begin_with_the_loss_of_the_whole_model_and_learn(
    schedule: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_float64(monkeypatch)
    folder = folder_of(family, tmp_path)
    losses = losses_of(pipeline(folder, build(schedule, request(4)), batches=Again(), rate=3e-3))
    expected, _ = train_with_transformers(folder, ROWS, num_updates=1, num_microbatches=NUM_MICROBATCHES, learning_rate=RATE)
    # Later microbatches of the first update may read what earlier ones have changed.
    assert losses[0] == pytest.approx(expected[0], abs=0.1)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("schedule", ["amdp", "async-1f1b"])
def test_live_orders_with_a_still_optimizer_equal_the_whole_model(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever versions a live order reads, they are one where the rate is 0."""
    keep_float64(monkeypatch)
    folder = folder_of("gpt2", tmp_path)
    losses = losses_of(pipeline(folder, build(schedule, request(4)), rate=0.0))
    expected, _ = train_with_transformers(
        folder, ROWS, num_updates=NUM_UPDATES, num_microbatches=NUM_MICROBATCHES, learning_rate=0.0, weight_decay=0.0
    )
    assert losses == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_divided_optimizer_trains_as_transformers_does(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)
    folder = folder_of(family, tmp_path)
    run = pipeline(folder, build("chimera", request(2)), is_divided=True)
    losses = losses_of(run)
    assert all(weights.shards is not None for on_device in run.weights for weights in on_device.values())
    expected, weights = train_with_transformers(
        folder, ROWS, num_updates=NUM_UPDATES, num_microbatches=NUM_MICROBATCHES, learning_rate=RATE
    )
    assert losses == pytest.approx(expected, abs=1e-10)
    assert max(float((tensor - weights[name]).abs().max()) for name, tensor in weights_of(run).items()) < 1e-8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_divided_optimizer_changes_no_bit_of_an_asynchronous_run(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    order = build("amdp", request(4))
    whole, divided = pipeline(folder, order), pipeline(folder, order, is_divided=True)
    assert losses_of(whole) == losses_of(divided)
    assert any(weights.shards is not None for on_device in divided.weights for weights in on_device.values())
    found = weights_of(divided)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights_of(whole).items())


@pytest.mark.combined
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_under_autocast_a_pipeline_trains_as_the_whole_model(schedule: str, family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path, torch.float32)
    losses = losses_of(pipeline(folder, build(schedule, request(3)), precision=Precision.BF16_MIXED))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    expected = []
    for update in range(NUM_UPDATES):
        parts = [ROWS.batch(update * NUM_MICROBATCHES + number, (0.0, 1.0)) for number in range(NUM_MICROBATCHES)]
        counts = [int((part["labels"][:, 1:] != IGNORED).sum()) for part in parts]
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            rows = {name: tensor for name, tensor in part.items() if name != "labels"}
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                logits = model(**rows, use_cache=False).logits
            labels = functional.pad(part["labels"], (0, 1), value=IGNORED)[:, 1:]
            loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            (loss * count / sum(counts)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * count / sum(counts)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert losses == pytest.approx(expected, abs=2e-3)
    assert max(losses) - min(losses) > 0.02


@pytest.mark.combined
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "amdp"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_MIXED])
def test_asynchronous_orders_train_in_low_precision(precision: Precision, schedule: str, family: str, tmp_path: Path) -> None:
    order = build(schedule, request(4))
    exact = losses_of(pipeline(folder_of(family, tmp_path / "exact", torch.float32), order, precision=Precision.FLOAT32))
    low = losses_of(pipeline(folder_of(family, tmp_path / "low", torch.float32), order, precision=precision))
    assert low == pytest.approx(exact, abs=0.1)
    assert low != exact
