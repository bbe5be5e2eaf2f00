"""Copies of a stage that exchange the rows of gradients which the data says, and not whole tables."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.actors.stage.gradients import GradientBuffers
from raypipe.config import Precision
from raypipe.errors import ConfigError
from raypipe.model import Layer, Model
from raypipe.models.gpt import Embedding, gpt
from raypipe.schedules.passes import late_updates, recompute, shard_optimizer
from tests.actors.oracles import RandomTokens, largest_difference, train_unsplit
from tests.lookups import (
    COPIES,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NUM_MICROBATCHES,
    NUM_UPDATES,
    NUM_WINDOWS,
    check_same_bits,
    dense,
    outcome,
    pipeline,
    table_gpt,
)


def same(tokens: Tensor) -> Tensor:
    return tokens


@pytest.mark.parametrize(("name", "num_pipelines", "copies"), COPIES)
def test_rows_give_the_bits_of_whole_gradients_and_send_less(name: str, num_pipelines: int, copies: int) -> None:
    model = table_gpt()
    rows, whole = (outcome(pipeline(each, name, num_pipelines=num_pipelines, copies=copies)) for each in (model, dense(model)))
    check_same_bits(rows, whole)
    assert len(rows.sum_bytes) == len(whole.sum_bytes) == copies * NUM_UPDATES * NUM_WINDOWS
    assert max(rows.sum_bytes) < min(whole.sum_bytes)


@pytest.mark.parametrize(
    ("name", "num_pipelines", "options"),
    [
        pytest.param("chimera", 2, {"change": shard_optimizer}, id="an-owner-publishes"),
        pytest.param("chimera-halving", 2, {}, id="halves-of-microbatches"),
        pytest.param("zb-h1", 1, {"change": partial(recompute, stages=(0, 1))}, id="forwards-run-again"),
        pytest.param("pipedream-2bw", 1, {"change": late_updates}, id="late-updates"),
        pytest.param("1f1b", 1, {"precision": Precision.BF16}, id="bf16"),
        pytest.param("async-1f1b", 1, {"precision": Precision.BF16_MIXED}, id="bf16-mixed"),
    ],
)
def test_rows_give_the_bits_of_whole_gradients_in_other_ways_to_run(name: str, num_pipelines: int, options: dict[str, Any]) -> None:
    model = table_gpt()
    rows, whole = (outcome(pipeline(each, name, num_pipelines=num_pipelines, copies=2, **options)) for each in (model, dense(model)))
    check_same_bits(rows, whole)
    assert max(rows.sum_bytes) < min(whole.sum_bytes)


def test_rows_equal_the_unsplit_model() -> None:
    model = table_gpt(dtype="float64")
    expected = train_unsplit(
        model,
        RandomTokens(num_rows=12),
        num_updates=NUM_UPDATES * NUM_WINDOWS,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1, fused=True),
    )
    run = outcome(pipeline(model, "1f1b", num_pipelines=1, copies=3))
    assert run.losses == pytest.approx(expected.losses, abs=1e-10)
    for index, copies in run.layers.items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-10 for copy in copies)


def test_a_vector_has_the_rows_of_some_weights_and_knows_their_places() -> None:
    masters = [torch.zeros(2), torch.zeros(5, 3), torch.zeros(4)]
    buffers = GradientBuffers(masters, on=torch.device("cpu"))
    table = torch.arange(15.0).view(5, 3) * torch.tensor([[0.0], [1.0], [0.0], [0.0], [1.0]])
    buffers.of(0)[:] = [torch.tensor([7.0, 8.0]), table, None]
    vector = buffers.flatten(0, {1: torch.tensor([1, 4])})
    assert vector.tolist() == [7, 8, 3, 4, 5, 12, 13, 14, 0, 0, 0, 0, 1, 1, 0]
    places = buffers.places(0)
    assert places is not None
    assert places.numel == 2 + 15 + 4 + 3
    # The rows begin at places 5 and 14 of the whole vector.
    assert [places.num_before(place) for place in (0, 2, 4, 5, 7, 8, 13, 15, 17, 24)] == [0, 2, 2, 2, 4, 5, 5, 6, 8, 15]
    buffers.set_flat(0, 2 * vector)
    gradients = buffers.of(0)
    assert gradients[1] is not None
    assert gradients[1].tolist() == [[0] * 3, [6, 8, 10], [0] * 3, [0] * 3, [24, 26, 28]]
    assert gradients[2] is None


def test_a_copy_without_a_gradient_takes_the_rows_of_the_others() -> None:
    buffers = GradientBuffers([torch.zeros(3, 2)], on=torch.device("cpu"))
    vector = buffers.flatten(0, {0: torch.tensor([2])})
    buffers.set_flat(0, vector + 1)
    (gradient,) = buffers.of(0)
    assert gradient is not None
    assert gradient.tolist() == [[0, 0], [0, 0], [1, 1]]


def tied_gpt(vocabulary_size: int = 1009) -> Model:
    model = gpt(num_layers=1, d_model=12, num_heads=2, sequence_length=16, vocabulary_size=vocabulary_size, tie_embeddings=True)
    embedding = dataclasses.replace(model.layers[0], looked_up={"token.weight": same})
    return dataclasses.replace(model, layers=(embedding, *model.layers[1:]))


def test_a_table_that_is_tied_to_a_head_of_its_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"also the weight 'logits.weight' of layer 'head'.*Leave 'token.weight' out") as refused:
        pipeline_of_one_stage(tied_gpt())
    assert "cut the model between" in str(refused.value)


def pipeline_of_one_stage(model: Model) -> None:
    pipeline(model, "1f1b", num_pipelines=1, copies=2, num_stages=1).run_window()


def test_a_device_that_exchanges_nothing_takes_a_tied_table() -> None:
    pipeline(tied_gpt(), "1f1b", num_pipelines=1, copies=1, num_stages=1).run_window()


def test_the_first_stage_s_part_of_a_tie_goes_as_rows() -> None:
    model = tied_gpt()
    rows, whole = (outcome(pipeline(each, "1f1b", num_pipelines=1, copies=2)) for each in (model, dense(model)))
    check_same_bits(rows, whole)
    assert max(rows.sum_bytes) < min(whole.sum_bytes)


def test_a_table_of_which_all_rows_are_read_goes_whole() -> None:
    model = gpt(num_layers=1, d_model=12, num_heads=2, sequence_length=16)
    declared = dataclasses.replace(
        model, layers=(dataclasses.replace(model.layers[0], looked_up={"token.weight": all_rows}), *model.layers[1:])
    )
    rows, whole = (outcome(pipeline(each, "1f1b", num_pipelines=1, copies=2)) for each in (declared, model))
    assert rows.sum_bytes == whole.sum_bytes
    check_same_bits(rows, whole)


def all_rows(_: Tensor) -> Tensor:
    return torch.arange(256)


def test_rows_that_leave_some_out_are_refused() -> None:
    model = gpt(num_layers=1, d_model=12, num_heads=2, sequence_length=16)
    wrong = dataclasses.replace(
        model, layers=(dataclasses.replace(model.layers[0], looked_up={"token.weight": first_column}), *model.layers[1:])
    )
    with pytest.raises(ConfigError, match=r"`looked_up` of 'layers.0.token.weight' leaves out rows that have a gradient"):
        pipeline(wrong, "1f1b", num_pipelines=1, copies=2).run_window()


def first_column(tokens: Tensor) -> Tensor:
    return tokens[:, :1]


def embedding(*, looked_up: str, batch: tuple[str, ...] = ("tokens",)) -> Layer:
    build = partial(Embedding, vocabulary_size=8, sequence_length=4, d_model=2, dropout=0.0, dtype=torch.float32)
    return Layer("embedding", build, inputs=(), batch=batch, looked_up={looked_up: same})


def test_a_weight_that_the_layer_has_not_is_refused() -> None:
    model = gpt(num_layers=1, d_model=12, num_heads=2)
    wrong = dataclasses.replace(model, layers=(dataclasses.replace(model.layers[0], looked_up={"tokens.weight": same}), *model.layers[1:]))
    with pytest.raises(ConfigError, match=r"looks up its weight 'tokens.weight', but has no such weight; did you mean 'token.weight'"):
        pipeline(wrong, "1f1b", num_pipelines=1, copies=2)


def test_rows_without_a_field_of_the_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes no field of the batch"):
        Model((embedding(looked_up="token.weight", batch=()),), loss=lambda output, _: output.mean())
