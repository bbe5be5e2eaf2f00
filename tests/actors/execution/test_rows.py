"""Rows are read in the order that a source is told, and the wait for them is none of the time of an Op."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
import torch

from raypipe.actors.execution.batches import BatchSource, Piece
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.trace import SpanKind
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import evaluation, recompute
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomRows

NUM_MICROBATCHES = 3
ROWS_S = 0.01


class SlowRows(RandomRows):
    """Rows that take a while."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        time.sleep(ROWS_S)
        return super().batch(microbatch, rows)


class ToldRows(RandomRows):
    """Rows that note what they are told and asked for."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "told", [])
        object.__setattr__(self, "read", [])

    def expect(self, order: Sequence[Piece]) -> None:
        self.told.append(list(order))  # type: ignore[attr-defined]

    def abort(self) -> None:
        pass

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        self.read.append((microbatch, rows))  # type: ignore[attr-defined]
        return super().batch(microbatch, rows)


def pipeline(schedule: Schedule, batches: BatchSource, model: Model | None = None) -> LocalPipeline:
    model = model or mlp(num_layers=4, dtype="float64")
    return LocalPipeline(
        model,
        cut=Cut.equal(4, schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=batches,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        learning_rate=lambda _: 0.1,
    )


def test_a_wait_for_rows_is_a_span_of_its_own() -> None:
    run = pipeline(build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES)), SlowRows())
    for program, report in zip(run.programs, run.run_window(), strict=True):
        spans = report.log.spans(program)
        waits = [span for span in spans if span.kind is SpanKind.DATA]
        assert [span.name for span in waits] == [f"rows of microbatch {index}" for index in range(NUM_MICROBATCHES)]
        assert all(span.end_s - span.start_s >= ROWS_S for span in waits)
        assert report.log.seconds(program, SpanKind.DATA) == pytest.approx(sum(span.end_s - span.start_s for span in waits))
        forwards = [span for span in spans if span.kind is SpanKind.COMPUTE and "F" in span.name]
        assert [wait.end_s for wait in waits] == [forward.start_s for forward in forwards]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "recomputed", "weighted"])
def test_a_source_is_told_the_order_of_this_window_and_the_next(name: str) -> None:
    schedule = build("zb-v" if name == "zb-v" else "1f1b", ScheduleRequest(1, NUM_MICROBATCHES, 2, num_chunks=2 if name == "zb-v" else 1))
    model = mlp(num_layers=4, dtype="float64")
    if name == "recomputed":
        schedule = recompute(schedule, range(schedule.num_stages))
    if name == "weighted":
        model = dataclasses.replace(model, loss_weight=lambda batch: batch["inputs"].abs().sum())
    batches = ToldRows()
    run = pipeline(schedule, batches, model)
    for window in range(2):
        batches.read.clear()  # type: ignore[attr-defined]
        run.run_window()
        told = batches.told[window]  # type: ignore[attr-defined]
        num = len(told) // 2
        assert told[:num] == batches.read  # type: ignore[attr-defined]
        assert told[num:] == [(microbatch + 2 * NUM_MICROBATCHES, rows) for microbatch, rows in told[:num]]
    run.evaluate(evaluation(schedule, num_microbatches=2), batches=batches)
    assert {microbatch for microbatch, _ in batches.told[-1]} == {0, 1}  # type: ignore[attr-defined]


def test_a_field_that_the_data_lacks_is_named_with_those_that_it_has() -> None:
    run = pipeline(build("1f1b", ScheduleRequest(2, 2)), RandomRows(fields=("inputs", "target")))
    with pytest.raises(ConfigError, match=r"takes the field 'targets' of the batch; did you mean 'target'\?; the data has inputs, target"):
        run.run_window()
