"""Orders with equal delays give equal losses: those of `benchmarks/time_to_loss.py`, and the one worker that stands for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from in_turn import in_turn
from same_delays import Delays
from time_to_loss_runs import window_ends

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from raypipe.model import Batch
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope, reads
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.window_sizes import window_size
from tests.marks import slow_unless

NUM_DEVICES, NUM_ROWS, NUM_UPDATES, WIDTH = 8, 16, 9, 8
OPTIMIZER = OptimizerConfig(name="muon", gradient_correction=0.5, learning_rate=2e-2, warmup_updates=2, max_grad_norm=0.5)
CASES = [("pipedream-2bw", 8), ("async-1f1b", 8), ("async-1f1b", 16), ("amdp", 8), ("amdp", 16), ("amdp-auto", 8), ("amdp-auto", 16)]


@dataclass(frozen=True)
class Rows:
    """The same rows of an update for all numbers of microbatches."""

    num_microbatches: int

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        update, number = divmod(microbatch, self.num_microbatches)
        generator = torch.Generator().manual_seed(update)
        inputs = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
        size = NUM_ROWS // self.num_microbatches
        first, end = (round(number * size + share * size) for share in rows)
        return {"inputs": inputs[first:end], "targets": inputs.flip(1)[first:end]}


def pipeline_of(schedule: Schedule, cut: Cut) -> LocalPipeline:
    model = mlp(num_layers=len([layer for layers in cut.stages for layer in layers]), width=WIDTH, dtype="float64")
    pipeline = LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=Rows(schedule.num_microbatches),
        optimizer=partial(build_optimizer, OPTIMIZER),
        learning_rate=partial(OPTIMIZER.rate, num_updates=NUM_UPDATES),
        seed=0,
        max_grad_norm=OPTIMIZER.max_grad_norm,
    )
    return in_turn(pipeline)


def losses(schedule: Schedule, cut: Cut) -> list[float]:
    return mean_losses(pipeline_of(schedule, cut).run_window(), num_microbatches=schedule.num_microbatches)


def losses_by_window(build_window: Callable[[int], Schedule], cut: Cut, sizes: Sequence[int]) -> list[float]:
    pipeline = pipeline_of(build_window(sizes[-1]), cut)
    windows = [build_window(size) for size in sizes]
    return [loss for window in windows for loss in mean_losses(pipeline.run_window(window), num_microbatches=window.num_microbatches)]


def order(name: str, num_microbatches: int, num_updates: int = NUM_UPDATES) -> Schedule:
    return build(name, ScheduleRequest(NUM_DEVICES, num_microbatches, num_updates, update_scope=UpdateScope.GLOBAL))


def chain(sizes: list[int]) -> Cut:
    return Cut.of_sizes(sizes, tuple((layer, layer + 1) for layer in range(sum(sizes) - 1)))


@pytest.mark.parametrize(("name", "num_microbatches"), slow_unless({("async-1f1b", 8), ("amdp", 8), ("amdp-auto", 16)}, CASES))
def test_one_worker_has_the_losses_of_eight_devices(name: str, num_microbatches: int) -> None:
    cut = chain([2, 1, 1, 1, 1, 1, 1, 2])
    delays = Delays.of(order(name, num_microbatches), cut)
    there = losses(order(name, num_microbatches), cut)
    assert delays.num_microbatches <= num_microbatches
    assert there == pytest.approx(losses(delays.schedule(NUM_UPDATES), delays.cut), rel=1e-9)
    assert there != pytest.approx(losses(order("1f1b", 8), cut), rel=1e-6), "delays change the losses, or the test says nothing"


@pytest.mark.parametrize(("name", "num_microbatches"), slow_unless({("pipedream-2bw", 8), ("amdp", 16)}, CASES))
def test_one_worker_has_the_losses_of_eight_devices_behind_a_start_on_time(name: str, num_microbatches: int) -> None:
    """Each of the first updates is a window, as `schedule.synchronous_updates` makes it."""
    cut, start = chain([2, 1, 1, 1, 1, 1, 1, 2]), 3
    delays = Delays.of(order(name, num_microbatches), cut)
    sizes = [1] * start + [NUM_UPDATES - start]
    there = losses_by_window(partial(order, name, num_microbatches), cut, sizes)
    assert there == pytest.approx(losses_by_window(delays.schedule, delays.cut, sizes), rel=1e-9)
    on_time = losses(order("1f1b", 8), cut)
    # The first update of the window behind them has nothing late either.
    assert there[: start + 1] == pytest.approx(on_time[: start + 1], rel=1e-9)
    assert there[start + 2 :] != pytest.approx(on_time[start + 2 :], rel=1e-6)


@pytest.mark.parametrize("synchronous_updates", [0, 1, 5, 30, 60, 70, 120])
def test_curves_drain_where_a_run_drains(synchronous_updates: int) -> None:
    schedule = ScheduleConfig(updates_per_window=60, synchronous_updates=synchronous_updates)
    config = TrainConfig(
        model=ModelConfig(function="raypipe.models.gpt:gpt"),
        data=DataConfig(path="tokens.parquet"),
        run=RunConfig(num_updates=120, evaluate_every=60),
        schedule=schedule,
    )
    ends = [0]
    while ends[-1] < 120:
        ends.append(ends[-1] + window_size(config, ends[-1]))
    assert window_ends(120, synchronous_updates) == ends[1:]


def test_synchronous_orders_have_one_table_and_one_curve() -> None:
    cut = chain([1, 1, 1, 1, 1, 1, 2, 2])
    tables = {Delays.of(order(name, number), cut).digest for name, number in [("1f1b", 8), ("zb-h1", 16), ("gpipe", 8)]}
    assert len(tables) == 1
    curves = [losses(order(name, number), cut) for name, number in [("1f1b", 8), ("zb-h1", 16)]]
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


def test_two_orders_with_equal_tables_have_equal_losses() -> None:
    """PipeDream-2BW is one update late however many microbatches there are, and wherever the stages are cut."""
    first, second = chain([2, 1, 1, 1, 1, 1, 1, 2]), chain([1, 1, 1, 1, 1, 1, 2, 2])
    orders = order("pipedream-2bw", 8), order("pipedream-2bw", 16)
    assert Delays.of(orders[0], first).digest == Delays.of(orders[1], second).digest
    assert losses(orders[0], first) == pytest.approx(losses(orders[1], second), rel=1e-9)


def test_other_delays_have_another_digest() -> None:
    cut = chain([1, 1, 1, 1, 1, 1, 2, 2])
    found = {Delays.of(order(name, number), cut).digest for name, number in [("1f1b", 8), *CASES]}
    assert len(found) == 1 + len(CASES)


def test_delays_that_repeat_after_several_updates() -> None:
    """A schedule with global norms may be late by turns; the one worker repeats that."""
    table = (((0, 0),),), (((1, 0),),), (((0, 0),),)
    delays = Delays(((0,),), table, 2, keeps_versions=False)
    again = delays.schedule(6)
    forwards = [reads(again, Op(OpKind.FORWARD, 0, update)) for update in range(6)]
    assert forwards == [0, 0, 2, 2, 4, 4]
    assert delays.mean_delay == 0.5
