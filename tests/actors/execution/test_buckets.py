"""Gradients summed in buckets, whose sums start while the last backward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.local import LocalPipeline
from raypipe.actors.transport.local import LocalTransport
from raypipe.artifacts.cut import Cut
from raypipe.model import Layer, Model
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import late_updates, recompute, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.oracles import RandomRows, layers_of

COPIES = Placement((((0, 0.5), (1, 0.5)), ((2, 1 / 3), (3, 2 / 3))))


def run(
    schedule: Schedule, *, buckets: tuple[int, ...], model: Model | None = None, placement: Placement | None = COPIES, batches: BatchSource
) -> tuple[LocalPipeline, list[float]]:
    """Two windows, and the losses of their microbatches."""
    torch.set_num_threads(1)
    model = mlp(num_layers=8) if model is None else model
    validate(schedule)
    pipeline = LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges(), model.tied_layers()),
        schedule=schedule,
        batches=batches,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        max_grad_norm=0.5,
        placement=placement,
        buckets=buckets,
    )
    reports = [report for _ in range(2) for report in pipeline.run_window()]
    return pipeline, [loss for report in reports for loss in report.losses.values()]


def schedule_of(name: str) -> tuple[Schedule, Placement | None]:
    match name:
        case "late 2bw":
            return late_updates(build("pipedream-2bw", ScheduleRequest(2, 4, 3))), COPIES
        case "recomputed":
            return recompute(build("1f1b", ScheduleRequest(2, 4, 2)), [0, 1]), COPIES
        case "chimera" | "amdp":
            return build(name, ScheduleRequest(2, 4, 2)), None
        case "sharded":
            return shard_optimizer(build("chimera", ScheduleRequest(2, 4, 2))), None
        case "pipedream":
            return build(name, ScheduleRequest(2, 1, 6)), COPIES
        case _:
            return build(name, ScheduleRequest(2, 4, 2, num_chunks=2 if name == "zb-v" else 1)), COPIES


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "zb-h1", "zb-v", "async-1f1b", "pipedream", "late 2bw", "recomputed", "chimera", "amdp", "sharded"]
)
def test_buckets_change_no_bit(name: str) -> None:
    schedule, placement = schedule_of(name)
    wholes, parts = (
        run(schedule, buckets=(count,) * schedule.num_stages, placement=placement, batches=RandomRows(dtype=torch.float32))
        for count in (1, 3)
    )
    assert parts[1] == wholes[1]
    for index, copies in layers_of(wholes[0]).items():
        for mine, other in zip(copies, layers_of(parts[0])[index], strict=True):
            assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


class _Some(nn.Module):
    """Leaves its weight alone in odd microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x[0, 0] > 0 else x


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Collective, str]]:
    """The sums of gradients that devices start, with what they do then."""
    found: list[tuple[Collective, str]] = []
    executors: dict[int, Any] = {}
    start, window = LocalTransport.start, LocalPipeline.run_window

    def noted(self: LocalTransport, collective: Collective, *args: Any, **options: Any) -> Any:
        if collective.kind is CollectiveKind.GRADIENTS:
            found.append((collective, executors[id(self)].doing))
        return start(self, collective, *args, **options)

    def run_window(self: LocalPipeline) -> Any:
        executors.update({id(executor.transport): executor for executor in self.executors})
        return window(self)

    monkeypatch.setattr(LocalTransport, "start", noted)
    monkeypatch.setattr(LocalPipeline, "run_window", run_window)
    return found


@pytest.mark.parametrize(("name", "last"), [("1f1b", "0B3"), ("zb-h1", "0W3")])
def test_all_buckets_but_the_last_start_while_the_last_gradient_is_computed(
    started: list[tuple[Collective, str]], name: str, last: str
) -> None:
    run(build(name, ScheduleRequest(2, 4)), buckets=(3, 3), batches=RandomRows(dtype=torch.float32))
    of_stage = [(collective, doing) for collective, doing in started if collective.stage == 0]
    assert {doing for collective, doing in of_stage if collective.part < 3} == {last}
    assert last not in {doing for collective, doing in of_stage if collective.part == 3}
    assert [collective.part for collective, _ in of_stage if collective.devices == (0, 1)].count(1) == 4


def test_a_bucket_with_a_weight_that_has_no_gradient_waits_for_the_end_of_the_backward(started: list[tuple[Collective, str]]) -> None:
    model = mlp(num_layers=6)
    layers = list(model.layers)
    layers[4] = Layer("some", _Some, inputs=(layers[3].name,))
    layers[5] = Layer(layers[5].name, layers[5].build, inputs=("some",))
    model = Model(tuple(layers), model.loss)
    schedule = build("1f1b", ScheduleRequest(1, 4, 2))
    placement = Placement((((0, 0.5), (1, 0.5)),))
    outcomes = [
        run(schedule, buckets=(count,), model=model, placement=placement, batches=RandomRows(dtype=torch.float32))[1] for count in (1, 6)
    ]
    assert outcomes[0] == outcomes[1]
    assert {doing for collective, doing in started if collective.part == 1} == {"0B3", "0B7"}
    assert "waiting to go on after 0B7" in {doing for collective, doing in started if 1 < collective.part < 6}
