"""Branches side by side together with low precision, recomputation, and copies that publish their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Model
from raypipe.models.towers import two_towers
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule, WeightRule
from raypipe.schedules.lower import Placement
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import over_graph, recompute, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.low_precision import furthest, train_low
from tests.actors.oracles import LowHandPipeline, RandomRows, layers_of, run_beside_hand
from tests.models.test_branches import (
    CLIP_STAGES,
    VQA_STAGES,
    Shifted,
    glyph_batch,
    placed_order,
    question_batch,
    small_clip,
    small_vqa,
    trained_as,
)
from tests.schedules.handwritten import branches_without_flush, in_two_pipelines

Stages = tuple[tuple[int, ...], ...]
Towers = tuple[Model, Cut, Schedule]

OPPOSITE, APART = (0, 1, 1, 0, 1), (0, 0, 1, 1, 2)

LOW_MODELS = [
    pytest.param(small_clip(dtype="float32"), Shifted(glyph_batch(), "name"), CLIP_STAGES, 1, id="clip"),
    pytest.param(small_clip(dtype="float32"), Shifted(glyph_batch(), "name"), CLIP_STAGES, 3, id="clip-in-parts"),
    pytest.param(small_vqa(dtype="float32"), Shifted(question_batch(), "image"), VQA_STAGES, 1, id="vqa"),
]


@pytest.mark.combined
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
@pytest.mark.parametrize("form", ["split", "recomputed", "shared-rows"])
@pytest.mark.parametrize(("model", "batches", "stages", "num_parts"), LOW_MODELS)
def test_branches_in_low_precision_take_the_roundings_of_the_unsplit_model(
    model: Model, batches: Shifted, stages: Stages, num_parts: int, form: str, precision: Precision
) -> None:
    cut = Cut(stages, model.edges())
    schedule = placed_order(APART if form == "shared-rows" else OPPOSITE, cut.graph, num_parts=num_parts, split=form != "recomputed")
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


@pytest.mark.combined
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
    schedule = in_two_pipelines(placed_order(placed, cut.graph, num_parts=num_parts, split=True, num_updates=3), second)
    if again:
        schedule = recompute(schedule, range(0, schedule.num_stages, 2))
    if published:
        schedule = shard_optimizer(schedule)
    run = trained_as(schedule, cut, model, batches)
    for copies in layers_of(run).values():
        assert all(torch.equal(mine, first) for copy in copies for mine, first in zip(copy, copies[0], strict=True))


def towers_in_turn(name: str, request: ScheduleRequest) -> Towers:
    """Two towers of one layer a stage, listed one behind the other, in an order of a chain of stages; the owner of copies publishes."""
    chain = build(name, request)
    num_left = (chain.num_stages - 1) // 2
    model = two_towers(num_left_layers=num_left, num_right_layers=chain.num_stages - 1 - num_left, dtype="float64")
    cut = Cut.equal(chain.num_stages, chain.num_stages, model.edges())
    return model, cut, shard_optimizer(over_graph(chain, cut.graph))


def towers_side_by_side(rule: WeightRule, num_microbatches: int, num_updates: int) -> Towers:
    model = two_towers(num_left_layers=2, num_right_layers=2, dtype="float64")
    cut = Cut(((0,), (2,), (1,), (3,), (4,)), model.edges())
    schedule = branches_without_flush(num_microbatches, num_updates, weight_rule=rule)
    return model, cut, replace(schedule, graph=cut.graph)


ASYNCHRONOUS = [
    pytest.param(partial(towers_side_by_side, WeightRule.STASH, 1, 9), id="side-by-side-stash"),
    pytest.param(partial(towers_side_by_side, WeightRule.DOUBLE_BUFFER, 4, 3), id="side-by-side-double-buffer"),
    pytest.param(partial(towers_side_by_side, WeightRule.LIVE, 2, 6), id="side-by-side-live"),
    pytest.param(partial(towers_in_turn, "async-1f1b", ScheduleRequest(4, 4, 4)), id="async-1f1b"),
    pytest.param(partial(towers_in_turn, "amdp", ScheduleRequest(4, 4, 6)), id="amdp-owner-publishes"),
    pytest.param(partial(towers_in_turn, "amdp-auto", ScheduleRequest(8, 16, 3)), id="amdp-auto-owner-publishes"),
]


@pytest.mark.combined
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("towers", ASYNCHRONOUS)
def test_branches_under_asynchronous_rules_equal_their_rule_done_by_hand(towers: Callable[[], Towers], again: bool) -> None:
    model, cut, schedule = towers()
    if again:
        schedule = recompute(schedule, range(0, schedule.num_stages, 2))
    validate(schedule)
    run, by_hand = run_beside_hand(model, cut, schedule)
    for copies in layers_of(run).values():
        assert all(torch.equal(mine, first) for copy in copies for mine, first in zip(copy, copies[0], strict=True))
    assert again or max(by_hand.mismatches.values()) == metrics(schedule).max_mismatch


@pytest.mark.combined
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
@pytest.mark.parametrize("towers", ASYNCHRONOUS)
def test_branches_under_asynchronous_rules_in_low_precision_equal_their_rule_done_by_hand(
    towers: Callable[[], Towers], precision: Precision
) -> None:
    model, cut, schedule = towers()
    model = two_towers(num_left_layers=len(model.branches()["left"]), num_right_layers=len(model.branches()["right"]))
    batches = RandomRows(("left", "right", "targets"), dtype=torch.float32)
    run = LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=batches,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        learning_rate=lambda _: 1.0,
        precision=precision,
    )
    run.run_window()
    by_hand = LowHandPipeline(model, schedule, batches, learning_rate=1.0, cut=cut)
    by_hand.run()
    expected = [by_hand.history[cut.stage_of[layer]][-1] for layer in range(len(model.layers))]
    assert furthest(run, [[dense.weight, dense.bias] for dense in expected]) < 1e-6
