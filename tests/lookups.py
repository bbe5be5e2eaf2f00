"""Pipelines of a small GPT with n-gram tables, whose copies exchange rows of gradients or whole ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.weights import Optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Model
from raypipe.models.gpt import gpt
from raypipe.models.ngram_gpt import ngram_gpt
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.oracles import RandomTokens, layers_of
from tests.marks import slow_unless

LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.5
NUM_MICROBATCHES = 4
NUM_UPDATES = 3
NUM_WINDOWS = 2
ADAMW: Optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1, fused=True)
COPIES = slow_unless(
    {("1f1b", 1, 2), ("zb-h1", 1, 3), ("pipedream-2bw", 1, 4), ("async-1f1b", 1, 2), ("chimera", 2, 4), ("amdp", 2, 2)},
    [
        *((name, 1, copies) for name in ("1f1b", "zb-h1", "pipedream-2bw", "async-1f1b") for copies in (2, 3, 4)),
        *((name, 2, copies) for name in ("chimera", "amdp") for copies in (2, 4)),
    ],
)
"""Schedules, their pipelines, and the copies of each stage in all of them."""


def table_gpt(*, dtype: str = "float32") -> Model:
    return ngram_gpt(num_layers=1, d_model=12, num_heads=2, sequence_length=16, table_rows=1009, dtype=dtype)


def tied_gpt() -> Model:
    return gpt(num_layers=1, d_model=12, num_heads=2, sequence_length=16, tie_embeddings=True)


def dense(model: Model) -> Model:
    """The model without what it says of rows, so that whole gradients are exchanged."""
    return dataclasses.replace(model, layers=tuple(dataclasses.replace(layer, looked_up={}) for layer in model.layers))


def pipeline(
    model: Model,
    name: str,
    *,
    num_pipelines: int,
    copies: int,
    num_stages: int = 2,
    buckets: int = 1,
    late_rows: Collection[int] = (),
    max_grad_norm: float | None = MAX_GRAD_NORM,
    optimizer: Optimizer = ADAMW,
    num_updates: int = NUM_UPDATES,
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    precision: Precision = Precision.FLOAT32,
) -> LocalPipeline:
    """Workers of `copies / num_pipelines` devices, which share the rows of microbatches."""
    cut = Cut.equal(len(model.layers), num_stages, model.edges(), model.tied_layers())
    request = ScheduleRequest(num_stages, NUM_MICROBATCHES, num_updates, num_pipelines=num_pipelines if num_pipelines > 1 else 0)
    schedule = change(over_graph(build(name, request), cut.graph))
    validate(schedule)
    each = copies // num_pipelines
    members = [tuple((worker * each + number, 1 / each) for number in range(each)) for worker in range(num_stages)]
    return LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=RandomTokens(num_rows=12),
        optimizer=optimizer,
        learning_rate=lambda _: LEARNING_RATE,
        max_grad_norm=max_grad_norm,
        placement=Placement(tuple(members)),
        buckets=[buckets] * num_stages,
        late_rows=late_rows,
        precision=precision,
    )


@dataclass(frozen=True)
class Outcome:
    """Losses, the weights of all copies of all layers, and the bytes of each sum of the first stage's gradients."""

    losses: list[float]
    layers: dict[int, list[list[Tensor]]]
    sum_bytes: list[int]


def outcome(run: LocalPipeline) -> Outcome:
    windows = [run.run_window() for _ in range(NUM_WINDOWS)]
    losses = [loss for reports in windows for loss in mean_losses(reports, num_microbatches=NUM_MICROBATCHES)]
    spans = [
        span
        for reports in windows
        for report, program in zip(reports, run.programs, strict=True)
        for span in report.log.spans(program)
        if isinstance(span.item, Collective) and span.item.kind is CollectiveKind.GRADIENTS and span.item.stage == 0
    ]
    return Outcome(losses, layers_of(run), [span.bytes for span in spans])


def check_same_bits(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    for index, copies in one.layers.items():
        for copy, expected in zip(copies, other.layers[index], strict=True):
            assert all(torch.equal(weight, as_before) for weight, as_before in zip(copy, expected, strict=True))
