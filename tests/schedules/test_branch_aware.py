"""Branch-aware orders: bubbles, activations and refusals. One stage of a branch of work 1 takes F = 1 and B = 2, or F = I = W = 1."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from raypipe.analysis.schedule_figures import ScheduleFigures, StageSeconds, figures_of, simulated
from raypipe.artifacts.trace import SpanKind
from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, ops_of
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.marks import slow_unless

SPEC = catalogue.spec("branch-aware")
SLOW = pytest.mark.slow
pytestmark = pytest.mark.timeout(300)  # searches take seconds, and many more where cores are shared


@cache
def figures(request: ScheduleRequest) -> ScheduleFigures:
    schedule = catalogue.build("branch-aware", request)
    validate(schedule)
    return figures_of(SPEC, schedule, request, StageSeconds(latency_s=request.latency_s))


def bubble(request: ScheduleRequest) -> float:
    trace = figures(request).trace
    return trace.makespan_s - sum(trace.busy_s) / len(trace.busy_s)


def most_held(request: ScheduleRequest) -> int:
    return max(figures(request).metrics.peak_in_flight)


def equal(num_devices: int, num_microbatches: int, max_in_flight: float | None = None, **options: bool) -> ScheduleRequest:
    return ScheduleRequest(num_devices, num_microbatches, max_in_flight=max_in_flight, branches=(1, 1), **options)  # type: ignore[arg-type]


DEPTHS = pytest.mark.parametrize("depth", [4, 8, pytest.param(16, marks=SLOW)])


@pytest.mark.parametrize("depth", [2, 4, 6])
def test_some_device_holds_two_stages_in_the_second_half_of_their_branches(depth: int) -> None:
    # Why no bubble is below (D/2-1)(F+B): that device starts D/2-1 forwards late, and has nothing left to do during the last D/2-1
    # backwards. A W may come last, so that split backwards leave only the start.
    for placement in itertools.permutations(range(depth)):
        assert max(min(stages) for stages in zip(range(depth), placement, strict=True)) >= depth // 2 - 1


@pytest.mark.parametrize(("depth", "times"), slow_unless({(4, 1), (4, 2), (8, 1)}, [(4, 1), (4, 2), (8, 1), (8, 2), (16, 1)]))
def test_two_equal_branches_have_the_least_bubble(depth: int, times: int) -> None:
    least = depth // 2 - 1
    whole = equal(depth, times * depth, 2 * depth)
    assert bubble(whole) == pytest.approx(3 * least)
    assert most_held(whole) <= 2 * depth
    small = equal(depth, times * depth, depth + 1)
    assert bubble(small) <= (depth - 2) * 2 + 1e-9
    assert most_held(small) <= depth + 1
    split = equal(depth, times * depth, depth, split=True)
    assert bubble(split) == pytest.approx(least)
    assert most_held(split) <= depth


def in_slots_of_chimera(depth: int, num_microbatches: int) -> Schedule:
    """Two branches, one in place of each of Chimera's pipelines, that meet in a loss behind the last stage of the first."""
    chimera = catalogue.build("chimera", ScheduleRequest(depth, 2 * num_microbatches, num_pipelines=2))
    loss = 2 * depth
    edges = [(stage, stage + 1) for branch in (0, depth) for stage in range(branch, branch + depth - 1)]
    programs: list[tuple[Op, ...]] = []
    for program in chimera.programs:
        ops: list[Op] = []
        for op in itertools.chain.from_iterable(map(ops_of, program)):
            index = op.index if op.kind.per_update else op.index // 2
            at = Op(op.kind, op.stage + depth * op.pipeline, index)
            at_loss = [at._replace(stage=loss)] if at.stage == depth - 1 else []
            ops += [*at_loss, at] if op.kind is OpKind.BACKWARD else [at, *at_loss]
        programs.append(tuple(ops))
    down, up = chimera.pipelines
    graph = StageGraph(loss + 1, (*edges, (depth - 1, loss), (loss - 1, loss)))
    return Schedule("slots", graph, ((*down, *up, down[-1]),), tuple(programs), num_microbatches)


@pytest.mark.parametrize(
    ("num_microbatches", "backward_s", "work", "bubble_s"),
    [(4, 1, 1, 6), (16, 1, 1, 6), (4, 2, 1, 12), (16, 2, 1, 30), (32, 2, 1, 54), (16, 2, 2, 81)],
)
def test_in_the_slots_of_chimera_branches_wait_longer(num_microbatches: int, backward_s: float, work: float, bubble_s: float) -> None:
    schedule = in_slots_of_chimera(8, num_microbatches)
    validate(schedule)
    trace = simulated(schedule, StageSeconds(backward_s=backward_s), (*[1.0] * 8, *[work] * 8, 0.0))
    assert trace.makespan_s - sum(trace.busy_s) / len(trace.busy_s) == pytest.approx(bubble_s)


@DEPTHS
def test_one_loss_for_all_microbatches_costs_two_equal_branches_no_more(depth: int) -> None:
    assert bubble(equal(depth, depth, coupled=True)) == pytest.approx(3 * (depth // 2 - 1))
    assert bubble(equal(depth, depth, coupled=True, split=True)) == pytest.approx(2 * (depth // 2 - 1))


@pytest.mark.parametrize(
    ("branches", "whole", "split"),
    slow_unless({((1, 1, 1), 6, 2)}, [((1, 2), 13, 3), ((1, 4), 34, 4), ((1, 1, 1), 6, 2)]),
)
def test_unequal_and_three_branches(branches: tuple[float, ...], whole: float, split: float) -> None:
    request = ScheduleRequest(8, 16, branches=branches, max_in_flight=8 * sum(branches))
    assert bubble(request) <= whole + 1e-9
    assert bubble(replace(request, split=True)) <= split + 1e-9
    assert most_held(request) <= 8 * sum(branches)


@pytest.mark.parametrize("branches", [(1, 1), (1, 2), (1, 1, 1)])
def test_no_device_holds_weights_twice_and_all_hold_as_many_stages(branches: tuple[float, ...]) -> None:
    schedule = catalogue.build("branch-aware", ScheduleRequest(3, 4, branches=branches))
    assert len(schedule.pipelines) == 1
    loss = schedule.num_stages - 1
    held = Counter(worker for stage, worker in enumerate(schedule.pipelines[0]) if stage != loss)
    assert set(held.values()) == {sum(branches)}


def test_the_loss_of_coupled_microbatches_takes_all_of_them_at_once() -> None:
    schedule = catalogue.build("branch-aware", equal(2, 3, coupled=True))
    loss = schedule.num_stages - 1
    forwards = Counter(op.stage for op, _ in schedule.ops() if op.kind is OpKind.FORWARD)
    assert forwards == {**dict.fromkeys(range(loss), 3), loss: 1}
    computed = [span for span in figures(equal(2, 3, coupled=True)).trace.spans if span.kind is SpanKind.COMPUTE]
    starts_s = {op: span.start_s for span in computed if isinstance(span.item, tuple) for op in span.item if isinstance(op, Op)}
    loss_s = starts_s[Op(OpKind.FORWARD, loss, 0)]
    assert all(start_s <= loss_s for op, start_s in starts_s.items() if op.kind is OpKind.FORWARD)
    assert all(start_s >= loss_s for op, start_s in starts_s.items() if op.kind is OpKind.BACKWARD)


def test_latency_is_hidden_by_more_microbatches_in_flight() -> None:
    request = replace(equal(4, 16, split=True), latency_s=0.25)
    # Each of the D/2-1 forwards that a device waits for comes over one link.
    assert bubble(request) <= 1 * (1 + 0.25) + 1.0


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ScheduleRequest(4, 4), "of two or more; use --branches 1,1"),
        (ScheduleRequest(4, 4, branches=(1,)), "of two or more; use --branches 1,1"),
        (ScheduleRequest(4, 4, branches=(1, 0)), "work above 0, got 1, 0"),
        (ScheduleRequest(4, 4, branches=(1, 1), max_in_flight=1), "at least 2 activations a device.*use --max-in-flight 2"),
        (ScheduleRequest(4, 4, branches=(1, 1), num_chunks=2), "one stage a device"),
        (ScheduleRequest(4, 4, branches=(1, 1), num_pipelines=2), "one pipeline"),
    ],
)
def test_what_it_cannot_take_is_refused_with_a_remedy(request_: ScheduleRequest, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        catalogue.build("branch-aware", request_)
