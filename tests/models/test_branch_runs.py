"""Branches side by side together with low precision, recomputation, and copies that publish their weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Model
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import recompute, shard_optimizer
from raypipe.schedules.validate import validate
from tests.actors.low_precision import furthest, train_low
from tests.actors.oracles import layers_of
from tests.models.test_branches import (
    CLIP_STAGES,
    Shifted,
    glyph_batch,
    placed_order,
    question_batch,
    small_clip,
    small_vqa,
    trained_as,
)
from tests.schedules.handwritten import in_two_pipelines

Stages = tuple[tuple[int, ...], ...]

VQA_STAGES: Stages = ((0, 1), (2, 3), (4,), (5,), (6, 7, 8))
"""Two stages of images, two of questions, which read each other, and the rest."""

OPPOSITE, APART = (0, 1, 1, 0, 1), (0, 0, 1, 1, 2)

LOW_MODELS = [
    pytest.param(small_clip(dtype="float32"), Shifted(glyph_batch(), "name"), CLIP_STAGES, 1, id="clip"),
    pytest.param(small_clip(dtype="float32"), Shifted(glyph_batch(), "name"), CLIP_STAGES, 3, id="clip-in-parts"),
    pytest.param(small_vqa(dtype="float32"), Shifted(question_batch(), "image"), VQA_STAGES, 1, id="vqa"),
]


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
@pytest.mark.parametrize("form", ["split", "recomputed", "shared-rows"])
@pytest.mark.parametrize(("model", "batches", "stages", "num_parts"), LOW_MODELS)
def test_branches_in_low_precision_take_the_roundings_of_the_unsplit_model(
    model: Model, batches: Shifted, stages: Stages, num_parts: int, form: str, precision: Precision
) -> None:
    cut = Cut(stages, model.edges())
    schedule = placed_order(APART if form == "shared-rows" else OPPOSITE, cut.graph, num_parts=num_parts, split=form == "split")
    placement = None
    if form == "recomputed":
        schedule = recompute(schedule, range(schedule.num_stages))
    elif form == "shared-rows":
        placement = Placement((((0, 0.5), (1, 0.5)), ((2, 0.5), (3, 0.5)), ((4, 1.0),)))
        num_parts *= 2  # each device rounds for itself
    validate(schedule)
    run = LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=batches,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        learning_rate=lambda _: 0.1,
        precision=precision,
        placement=placement,
    )
    losses = mean_losses(run.run_window(), num_microbatches=2)
    divided = [layer for layers in stages[:-1] for layer in layers]
    train = partial(train_low, model, batches, num_updates=2, num_microbatches=2, num_parts=num_parts, divided=divided)
    expected = train(precision=precision)
    assert losses == pytest.approx(expected.losses, abs=1e-6)
    assert furthest(run, expected.layers) < 1e-6
    if form == "split":  # the other precision is another model
        (other,) = {Precision.BF16_MIXED, Precision.BF16} - {precision}
        assert furthest(run, train(precision=other).layers) > 1e-4


MODELS = [
    pytest.param(small_clip(), Shifted(glyph_batch(), "name"), CLIP_STAGES, 1, id="clip"),
    pytest.param(small_clip(), Shifted(glyph_batch(), "name"), CLIP_STAGES, 3, id="clip-in-parts"),
    pytest.param(small_vqa(), Shifted(question_batch(), "image"), VQA_STAGES, 1, id="vqa"),
]


@pytest.mark.parametrize(
    ("placed", "second", "again", "published"),
    [
        pytest.param(OPPOSITE, (2, 3), False, True, id="on-other-devices-owner-publishes"),
        pytest.param(OPPOSITE, (1, 0), False, False, id="on-the-same-devices-all-update"),
        pytest.param(OPPOSITE, (1, 0), True, True, id="on-the-same-devices-recomputed-owner-publishes"),
        pytest.param(APART, (1, 0, 2), False, True, id="with-one-loss-owner-publishes"),
    ],
)
@pytest.mark.parametrize(("model", "batches", "stages", "num_parts"), MODELS)
def test_copies_of_branches_in_two_pipelines_train_as_the_unsplit_model(
    model: Model,
    batches: Shifted,
    stages: Stages,
    num_parts: int,
    placed: tuple[int, ...],
    second: tuple[int, ...],
    again: bool,
    published: bool,
) -> None:
    cut = Cut(stages, model.edges())
    schedule = in_two_pipelines(placed_order(placed, cut.graph, num_parts=num_parts, split=not again, num_updates=3), second)
    if again:
        schedule = recompute(schedule, range(0, schedule.num_stages, 2))
    if published:
        schedule = shard_optimizer(schedule)
    run = trained_as(schedule, cut, model, batches)
    for copies in layers_of(run).values():
        assert all(torch.equal(mine, first) for copy in copies for mine, first in zip(copy, copies[0], strict=True))
