"""Where sums of late rows start and are awaited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Await, Start, SumRows
from raypipe.schedules.ir import OpKind, Schedule, StageGraph, UpdateScope, WeightRule
from raypipe.schedules.lower import Compute, DeviceProgram, Placement, lower
from raypipe.schedules.passes import late_updates, over_graph, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from tests.schedules import reference

NUM_UPDATES = 5
COPIES = Placement.even(2, replicas=2)


def schedule_of(name: str = "pipedream-2bw", *, num_stages: int = 2, num_microbatches: int = 4) -> Schedule:
    return build(name, ScheduleRequest(num_stages, num_microbatches, NUM_UPDATES))


def rows_of(programs: tuple[DeviceProgram, ...]) -> set[SumRows]:
    return {item.collective.rows for program in programs for item in program.items if isinstance(item, Start)}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("buckets", [(), (3, 3)])
def test_late_rows_are_awaited_right_before_the_next_update(late: bool, buckets: tuple[int, ...]) -> None:
    schedule = late_updates(schedule_of()) if late else schedule_of()
    programs = lower(schedule, COPIES, buckets=buckets, late_rows=(0,))
    reference.check_one_order(reference.run(schedule, programs).starts)
    for program in programs[:2]:
        items = program.items
        for update in range(NUM_UPDATES):
            starts = [at for at, item in enumerate(items) if isinstance(item, Start) and item.collective.update == update]
            sums = [items[at].collective for at in starts]  # type: ignore[union-attr]
            if update >= NUM_UPDATES - 2:
                assert {each.rows for each in sums} == {SumRows.ALL}, "no microbatch of the window reads what it makes"
                continue
            *others, due, rest = sums
            assert (due.rows, rest.rows, rest.part) == (SumRows.DUE, SumRows.LATE, due.part)
            assert len(others) == (2 if buckets else 0)
            assert all(each.rows is SumRows.ALL for each in others)
            assert starts == list(range(starts[0], starts[0] + len(starts)))
            awaited = items.index(Await(rest))
            behind = next(at for at, item in enumerate(items) if at > awaited and not isinstance(item, Await))
            item = items[behind]
            assert isinstance(item, Compute)
            assert [(op.kind, op.index) for op in item.ops] == [(OpKind.UPDATE, update + 1)]
            assert items.index(Await(due)) < awaited
    assert rows_of(programs[2:]) == {SumRows.ALL}


@pytest.mark.parametrize("num_pipelines", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_programs_with_late_rows_run_to_the_end(num_pipelines: int, seed: int) -> None:
    schedule = late_updates(schedule_of(num_stages=3, num_microbatches=6))
    programs = lower(schedule, Placement.even(3, replicas=num_pipelines + 1), late_rows=(0, 1, 2))
    reference.check_one_order(reference.run(schedule, programs, seed).starts)
    assert rows_of(programs) == set(SumRows)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule_of("1f1b"), id="a-flush"),
        pytest.param(schedule_of("async-1f1b"), id="live"),
        pytest.param(replace(schedule_of(), update_scope=UpdateScope.GLOBAL), id="a-norm-of-all-stages"),
        pytest.param(shard_optimizer(schedule_of(), replicated_workers=range(2)), id="owners-publish"),
        pytest.param(over_graph(schedule_of(), StageGraph(2, ((0, 1),), ties=((0, 1),))), id="tied-stages"),
        pytest.param(build("pipedream-2bw", ScheduleRequest(2, 4, 2)), id="no-reader-in-the-window"),
    ],
)
def test_all_rows_are_due_where_they_cannot_be_told_apart(schedule: Schedule) -> None:
    assert rows_of(lower(schedule, COPIES, late_rows=(0, 1))) == {SumRows.ALL}


def test_one_device_sums_nothing() -> None:
    assert not rows_of(lower(schedule_of(), late_rows=(0, 1)))


@pytest.mark.parametrize("rule", WeightRule)
def test_the_only_reader_of_a_version_is_the_update_that_has_it(rule: WeightRule) -> None:
    for version in range(1, 6):
        readers = [update for update in range(9) if rule.fixed_version(update) == version]
        assert rule.only_reader(version) == (readers[0] if readers else None)
        assert len(readers) <= 1
