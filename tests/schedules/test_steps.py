"""Running orders: starts, causes and hangs; searches over stage graphs that are no chains."""

import random
from dataclasses import replace

import pytest

from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, ops_of
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.cyclic import cycle
from raypipe.schedules.search.dispatch import Started, TimedPipelines, defer_updates, dispatch, timed
from raypipe.schedules.steps import run_steps
from raypipe.schedules.validate import validate

# Two branches of two stages that read each other, and the stage where they meet.
BRANCHES = StageGraph(5, ((0, 2), (1, 3), (0, 3), (1, 2), (2, 4), (3, 4)))
WORKERS = (0, 1, 1, 0, 2)


def test_a_step_starts_when_the_last_that_it_needs_has_ended() -> None:
    needs = {"c": [("a", 0.5), ("b", 0.0)]}
    seconds = {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0}
    run = run_steps([["a", "d"], ["b", "c"]], seconds=seconds.__getitem__, needs=lambda step: needs.get(step, ()))
    assert run.starts_s == [[0.0, 2.0], [0.0, 2.5]]
    assert run.ends_s == [3.0, 3.5]
    assert run.causes == [[None, "a"], [None, "a"]]
    assert not run.stuck


def test_a_circle_leaves_each_worker_stuck_at_what_it_waits_for() -> None:
    needs = {"a": [("b", 0.0)], "b": [("a", 0.0)]}
    run = run_steps([["x", "a"], ["b"], ["y"]], seconds=lambda _: 1.0, needs=lambda step: needs.get(step, ()))
    assert run.stuck == {0: "b", 1: "a"}
    assert [len(starts) for starts in run.starts_s] == [1, 0, 1]


def _line() -> TimedPipelines:
    chance = random.Random(3)
    times = tuple(StageTimes(*(chance.uniform(0.5, 2.0) for _ in range(3))) for _ in range(BRANCHES.num_stages))
    return TimedPipelines.of((WORKERS,), ScheduleRequest(3, 1, times=times, latency_s=0.3), BRANCHES)


def _schedule(done: list[list[Started]], num_microbatches: int) -> Schedule:
    programs = tuple(tuple(started.op for started in row) for row in done)
    bare = Schedule("found", BRANCHES, (WORKERS,), programs, num_microbatches)
    return defer_updates(bare, _line())


@pytest.mark.parametrize("in_flight", [1, 6])
def test_branches_are_dispatched_in_an_order_that_is_valid_and_runs_as_found(in_flight: int) -> None:
    line = _line()
    done = dispatch(line, turns=6, in_flight=in_flight, key=lambda at_s, op: (op.kind is not OpKind.BACKWARD, op.index, at_s))
    schedule = _schedule(done, 6)
    validate(schedule)
    again = timed(line, [[started.op for started in row] for row in done])
    for row, again_row in zip(done, again, strict=True):
        delays_s = [started.start_s - earliest.start_s for started, earliest in zip(row, again_row, strict=True)]
        assert min(delays_s) >= -1e-9
        assert in_flight == 1 or max(delays_s) <= 1e-9  # only who waits to be admitted could start earlier
    forwards = [op for op in map(_only, schedule.programs[2]) if op.kind is OpKind.FORWARD]
    assert len(forwards) == 6


def test_an_order_of_branches_repeats_every_period() -> None:
    line = _line()
    found = cycle(line, period_s=1.5 * max(line.work_s), starts_s=[0.0])
    assert found is not None
    schedule = _schedule(found.unrolled(5), 5)
    validate(schedule)


def test_updates_of_tied_branches_stand_where_all_their_gradients_are() -> None:
    tied = replace(BRANCHES, ties=((0, 1),))
    line = replace(_line(), graph=tied)
    done = dispatch(line, turns=4, in_flight=2, key=lambda at_s, op: (at_s, op.index))
    programs = tuple(tuple(started.op for started in row) for row in done)
    deferred = defer_updates(Schedule("found", tied, (WORKERS,), programs, 2, num_updates=2), line)
    validate(deferred)
    for worker in (0, 1):
        ops = [_only(slot) for slot in deferred.programs[worker]]
        first_update = ops.index(Op(OpKind.UPDATE, worker, 0))
        assert sum(op.kind is OpKind.BACKWARD and op.index < 2 for op in ops[:first_update]) == 4


def _only(slot: object) -> Op:
    (op,) = ops_of(slot)  # type: ignore[arg-type]
    return op
