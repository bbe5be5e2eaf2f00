"""Losses that count for what the rows say: the loss of an update is that of the unsplit model, however its rows are divided."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.actors.execution.batches import BatchSource, KeptBatches
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, Schedule, UpdateScope
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import evaluation, recompute, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import NUM_ROWS, HandPipeline, RandomRows, largest_difference, layers_of, run_beside_hand, train_unsplit
from tests.schedules.handwritten import divided

NUM_MICROBATCHES = 4
NUM_UPDATES = 6
LEARNING_RATE = 1e-2
EMPTY = frozenset({2, 8, 9})
"""Microbatches none of whose rows counts; also 5, but for one row."""


class CountedRows(RandomRows):
    """Rows of which some count, and of some microbatches none."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        first, end = (round(share * NUM_ROWS) for share in rows)
        drawn = torch.rand(NUM_ROWS, generator=torch.Generator().manual_seed(77 + microbatch), dtype=torch.float64)
        counts = (drawn * 4).floor()
        if microbatch in EMPTY:
            counts.zero_()
        if microbatch == 5:
            counts[:-1] = 0
            counts[-1] = 3
        return {**super().batch(microbatch, rows), "counts": counts[first:end]}


def weighted_mean(output: Tensor, batch: Batch) -> Tensor:
    """Not a number where nothing counts, as the cross entropy of targets that are all ignored."""
    return (((output - batch["targets"]) ** 2).mean(dim=1) * batch["counts"]).sum() / batch["counts"].sum()


def weighted(num_layers: int = 8) -> Model:
    return dataclasses.replace(
        mlp(num_layers=num_layers, dtype="float64"), loss=weighted_mean, loss_weight=lambda batch: batch["counts"].sum()
    )


def pipeline(model: Model, schedule: Schedule, batches: BatchSource, placement: Placement | None = None) -> LocalPipeline:
    return LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=batches,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=LEARNING_RATE),
        learning_rate=lambda _: LEARNING_RATE,
        max_grad_norm=0.5,
        placement=placement,
    )


def check_as_unsplit(schedule: Schedule, placement: Placement | None = None) -> None:
    model, batches = weighted(), CountedRows()
    run = pipeline(model, schedule, batches, placement)
    windows = [run.run_window() for _ in range(NUM_UPDATES // schedule.num_updates)]
    losses = [loss for reports in windows for loss in mean_losses(reports, num_microbatches=NUM_MICROBATCHES)]
    expected = train_unsplit(
        model,
        batches,
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.5,
    )
    assert losses == pytest.approx(expected.losses, abs=1e-12)
    for index, copies in layers_of(run).items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-12 for copy in copies)


SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "chimera", "chimera-halving", "chimera-doubling", "amdp-flush"]


@pytest.mark.parametrize("updates_per_window", [1, 3])
@pytest.mark.parametrize(("name", "devices", "chunks"), [*((name, 4, 1) for name in SCHEDULES), ("zb-v", 2, 2), ("dualpipe-v", 2, 2)])
def test_a_weighted_loss_trains_as_that_of_the_unsplit_model(name: str, devices: int, chunks: int, updates_per_window: int) -> None:
    check_as_unsplit(build(name, ScheduleRequest(devices, NUM_MICROBATCHES, updates_per_window, chunks)))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_weighted_loss_in_parts_and_on_replicas_trains_as_that_of_the_unsplit_model(again: bool) -> None:
    order = build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES, 2))
    order = recompute(order, range(2)) if again else order
    check_as_unsplit(divided(order, {0: 3, 1: 3}))
    replicas = Placement((((0, 1 / 3), (1, 2 / 3)), ((2, 0.5), (3, 0.5))))
    check_as_unsplit(order, replicas)
    check_as_unsplit(shard_optimizer(order, replicated_workers=replicas.replicated_workers), replicas)


class WeightedByHand(HandPipeline):
    """The same pipeline with the weights of the rows written out."""

    def _counts(self, index: int) -> Any:
        return self.batches.batch(index, (0.0, 1.0))["counts"].numpy()

    def _loss(self, op: Op, y: Any) -> float:
        counts = self._counts(op.index)
        losses = ((y - self._batch(op, "targets")) ** 2).mean(axis=1)
        return float((losses * counts).sum() / counts.sum()) if counts.sum() else 0.0

    def _loss_gradient(self, op: Op, y: Any) -> Any:
        count = self.schedule.num_microbatches
        first = op.index // count * count
        total = sum(self._counts(index).sum() for index in range(first, first + count))
        targets = self._batch(op, "targets")
        return 2 * (y - targets) / targets.shape[1] * self._counts(op.index)[:, None] / total


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        pytest.param("pipedream-2bw", ScheduleRequest(4, 4, 4), id="2bw"),
        pytest.param("async-1f1b", ScheduleRequest(4, 4, 4), id="async-1f1b"),
        pytest.param("async-1f1b", ScheduleRequest(4, 4, 4, update_scope=UpdateScope.GLOBAL), id="async-1f1b-global"),
        pytest.param("amdp", ScheduleRequest(4, 4, 4), id="amdp"),
        pytest.param("amdp-auto", ScheduleRequest(4, 4, 4), id="amdp-auto"),
    ],
)
def test_an_asynchronous_weighted_loss_trains_as_by_hand(name: str, request_: ScheduleRequest) -> None:
    model = weighted(num_layers=4)
    run_beside_hand(model, Cut.equal(4, 4, model.edges()), build(name, request_), batches=CountedRows(), kind=WeightedByHand)


def test_a_validation_loss_is_weighted_however_its_rows_are_divided() -> None:
    order = build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES))
    check = evaluation(order, num_microbatches=NUM_MICROBATCHES)
    expected = train_unsplit(
        weighted(), CountedRows(), num_updates=1, num_microbatches=NUM_MICROBATCHES, learning_rate=0.0, max_grad_norm=1.0
    )
    for placement in (None, Placement((((0, 0.5), (1, 0.5)), ((2, 1 / 3), (3, 2 / 3))))):
        run = pipeline(weighted(), order, CountedRows(), placement)
        for each in (check, divided(check, {0: 2, 1: 2})) if placement is None else (check,):
            reports = run.evaluate(each, batches=CountedRows())
            assert mean_losses(reports, num_microbatches=NUM_MICROBATCHES) == pytest.approx(expected.losses, abs=1e-12)


class OneMicrobatch(CountedRows):
    """The rows of microbatch 2, of which none counts."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        return super().batch(2, rows)


def test_an_update_without_a_row_that_counts_has_no_loss_and_no_gradient() -> None:
    run = pipeline(weighted(), build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)), OneMicrobatch())
    reports = run.run_window()
    (loss,) = mean_losses(reports, num_microbatches=NUM_MICROBATCHES)
    assert math.isnan(loss)
    assert [report.norms[0] for report in reports] == [0.0, 0.0]


class Counting(CountedRows):
    """Rows that count how often each microbatch is read, on any device."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "read", Counter[int]())

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        self.read[microbatch] += 1  # type: ignore[attr-defined]
        return super().batch(microbatch, rows)


def test_counting_ahead_reads_no_microbatch_twice() -> None:
    order = recompute(build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES, 3)), range(2))
    batches = Counting()
    run = pipeline(weighted(), order, batches)
    batches.read.clear()  # type: ignore[attr-defined]
    run.run_window()
    assert batches.read == {number: 2 for number in range(3 * NUM_MICROBATCHES)}, "once on each device"  # type: ignore[attr-defined]


def test_only_the_newest_microbatches_are_kept() -> None:
    source = Counting()
    kept = KeptBatches(source, num_kept=2)
    whole = source.batch(0, (0.0, 1.0))
    source.read.clear()  # type: ignore[attr-defined]
    for number in (0, 1, 0, 2, 0):
        kept.batch(number, (0.5, 1.0))
    assert source.read == {0: 2, 1: 1, 2: 1}  # type: ignore[attr-defined]
    assert torch.equal(kept.batch(0, (0.5, 1.0))["inputs"], whole["inputs"][3:])


@pytest.mark.parametrize(
    ("value", "problem"),
    [(torch.tensor(-1.0), r"loss_weight is -1.0"), (torch.tensor(math.nan), r"loss_weight is nan"), (torch.ones(2), r"gives no number")],
)
def test_a_weight_that_is_none_is_refused(value: Tensor, problem: str) -> None:
    model = dataclasses.replace(weighted(), loss_weight=lambda batch: value)
    with pytest.raises(ConfigError, match=problem):
        pipeline(model, build("1f1b", ScheduleRequest(2, 2)), CountedRows()).run_window()


def test_a_loss_that_couples_rows_has_no_weights() -> None:
    with pytest.raises(ConfigError, match=r"both loss_couples_rows and loss_weight"):
        dataclasses.replace(weighted(), loss_couples_rows=True)
