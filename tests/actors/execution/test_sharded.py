"""Workers of several devices and several stages that divide the optimizer's state, with tensors."""

from __future__ import annotations

import pytest
import torch

from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.oracles import RandomRows, largest_difference, layers_of

COPIES = Placement((((0, 0.5), (1, 0.5)), ((2, 1.0),)))
"""Worker 0 is two devices."""


def run(schedule: Schedule) -> tuple[LocalPipeline, list[float]]:
    """Two windows, and the losses of their microbatches."""
    torch.set_num_threads(1)
    validate(schedule)
    model = mlp(num_layers=8, dtype="float64")
    pipeline = LocalPipeline(
        model,
        cut=Cut.equal(8, schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=RandomRows(),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        max_grad_norm=0.05,
        placement=COPIES,
    )
    return pipeline, [loss for _ in range(2) for report in pipeline.run_window() for loss in report.losses.values()]


@pytest.mark.parametrize("scope", UpdateScope)
@pytest.mark.parametrize(
    ("name", "num_microbatches"), [("interleaved", 2), ("async-interleaved", 1), ("async-interleaved", 4), ("zb-v", 4)]
)
def test_stages_of_one_worker_train_alike_whether_its_devices_divide_the_state_or_not(
    name: str, num_microbatches: int, scope: UpdateScope
) -> None:
    order = build(name, ScheduleRequest(2, num_microbatches, 3, num_chunks=2, update_scope=scope))
    (whole, expected), (sharded, losses) = run(order), run(shard_optimizer(order, replicated_workers=COPIES.replicated_workers))
    assert losses == pytest.approx(expected, abs=1e-12)
    for index, copies in layers_of(sharded).items():
        assert all(torch.equal(mine, first) for copy in copies for mine, first in zip(copy, copies[0], strict=True))
        assert largest_difference(copies[0], layers_of(whole)[index][0]) < 1e-12
