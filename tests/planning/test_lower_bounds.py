"""No order takes less than the bound, and some reach it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.planning.lower_bounds import Block, lower_bound
from raypipe.schedules import catalogue
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import StageCost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import time_order
from tests import strategies

SECONDS = st.floats(0.0, 4.0).map(lambda value: round(value, 2))
BLOCKS = st.builds(Block, SECONDS, SECONDS, SECONDS, SECONDS)


def chain(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks one behind the other."""
    return tuple(replace(block, sources=(index - 1,) if index else ()) for index, block in enumerate(blocks))


def equal(num_stages: int) -> tuple[Block, ...]:
    return chain([Block(1.0, 1.0, 1.0)] * num_stages)


@given(st.data())
def test_no_bundled_order_takes_less(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(catalogue.SPECS))
    size = replace(data.draw(strategies.sizes(spec.name)), num_updates=1)
    schedule = catalogue.build(spec.name, size)
    drawn = data.draw(st.lists(BLOCKS, min_size=schedule.num_stages, max_size=schedule.num_stages))
    blocks = tuple(replace(block, sources=sources) for block, sources in zip(drawn, schedule.graph.predecessors, strict=True))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=size.num_devices, max_size=size.num_devices))
    latency_s = data.draw(st.sampled_from([0.0, 0.3, 2.0]))
    cost = equal_stages(schedule, latency_s=latency_s)
    stages = {
        (worker, stage): StageCost(
            blocks[stage].forward_s / speeds[worker],
            (blocks[stage].input_grad_s + blocks[stage].weight_grad_s) / speeds[worker],
            blocks[stage].weight_grad_s / speeds[worker],
            blocks[stage].update_s / speeds[worker],
        )
        for worker, stage in cost.stages
    }
    taken_s = time_order(CompiledOrder(lower(schedule)), replace(cost, stages=stages)).makespan_s
    divided = any(op.part for op in schedule.places)
    if divided:  # the bound is for whole microbatches: halves are microbatches of their own
        halves = tuple(
            Block(block.forward_s / 2, block.input_grad_s / 2, block.weight_grad_s / 2, block.update_s, block.sources) for block in blocks
        )
        blocks = halves
    bound = lower_bound(
        blocks,
        num_microbatches=size.num_microbatches * (2 if divided else 1),
        speeds=speeds,
        num_copies=len(schedule.pipelines),
        latency_s=latency_s,
    )
    assert taken_s >= bound.update_s - 1e-9


@pytest.mark.parametrize("num_devices", [1, 2, 4, 7])
def test_zero_bubble_reaches_it_where_all_ops_take_equally_long(num_devices: int) -> None:
    schedule = catalogue.build("zb-h2", ScheduleRequest(num_devices, 4 * num_devices))
    taken_s = time_order(CompiledOrder(lower(schedule)), equal_stages(schedule)).makespan_s
    assert lower_bound(equal(num_devices), num_microbatches=4 * num_devices, speeds=[1.0] * num_devices).update_s == taken_s


def test_a_stream_of_updates_that_do_not_wait_reaches_the_work_alone() -> None:
    schedule = catalogue.build("zb-h2", ScheduleRequest(4, 12, 9, update_scope=UpdateScope.STAGE))
    timing = time_order(CompiledOrder(lower(schedule)), equal_stages(schedule))
    assert timing.update_s == lower_bound(equal(4), num_microbatches=12, speeds=[1.0] * 4).work_s == 36


def test_each_bound_can_be_the_one_that_binds() -> None:
    bound = lower_bound(equal(4), num_microbatches=1, speeds=[1.0] * 4)
    assert bound.update_s == bound.path_s == 8
    uneven = chain([Block(1.0, 1.0, 1.0), Block(9.0, 9.0, 9.0)])
    bound = lower_bound(uneven, num_microbatches=5, speeds=[1.0] * 2)
    assert bound.update_s == bound.block_s == 1 + 5 * 27
    # Eight layers on four devices: the best cut begins with the first four layers on different devices.
    bound = lower_bound(equal(8), num_microbatches=16, speeds=[1.0] * 4)
    assert bound.update_s == bound.ramp_s == (16 * 24 + 0 + 1 + 2 + 3) / 4


def test_copies_let_several_devices_begin_at_once() -> None:
    assert lower_bound(equal(4), num_microbatches=8, speeds=[1.0] * 4, num_copies=4).ramp_s == 8 * 12 / 4
    assert lower_bound(equal(4), num_microbatches=8, speeds=[1.0] * 4, num_copies=2).ramp_s == (8 * 12 + 0 + 0 + 1 + 1) / 4


def test_a_device_that_would_start_after_the_end_does_nothing() -> None:
    late = chain([Block(100.0, 0.0, 0.0), Block(1.0, 0.0, 0.0)])
    assert lower_bound(late, num_microbatches=1, speeds=[1.0, 1.0], latency_s=50.0).ramp_s == 101


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 6))
def test_more_devices_or_fewer_microbatches_never_raise_it(layers: list[Block], num_microbatches: int, num_devices: int) -> None:
    blocks = chain(layers)
    few = lower_bound(blocks, num_microbatches=num_microbatches, speeds=[1.0] * num_devices)
    assert few.work_s <= few.ramp_s + 1e-9 <= few.update_s + 2e-9
    assert lower_bound(blocks, num_microbatches=num_microbatches, speeds=[1.0] * (num_devices + 1)).update_s <= few.update_s + 1e-9
    assert lower_bound(blocks, num_microbatches=num_microbatches + 1, speeds=[1.0] * num_devices).update_s >= few.update_s - 1e-9


def test_branches_run_side_by_side() -> None:
    blocks = [Block(1.0, 2.0, 1.0, 0.5, sources) for sources in ((), (), (0, 1))]
    bound = lower_bound(blocks, num_microbatches=2, speeds=[1.0] * 3)
    assert bound.ramp_s == pytest.approx((2 * 12 + 1.5 + 0 + 0 + 1) / 3)
    assert bound.path_s == 2 * 1 + 1 + 2 + 2
    assert math.isclose(bound.block_s, 1 + 2 * 4 + 0.5)
