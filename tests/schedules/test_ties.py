"""What holds for every bundled schedule whose first and last stage share a weight."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Await, CollectiveKind, Start
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope, WeightRule, dependencies
from raypipe.schedules.lower import Compute, Placement, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import late_updates, over_graph, shard_optimizer
from raypipe.schedules.reductions import add_reductions
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests import strategies
from tests.marks import slow_unless
from tests.schedules import reference

ONE_OF_EACH_KIND = ("1f1b", "interleaved", "zb-v", "zb-auto", "chimera", "dualpipe-v", "pipedream-2bw", "async-1f1b", "amdp", "amdp-flush")
SPECS = pytest.mark.parametrize("name", strategies.SPEC_NAMES)


def tied(schedule: Schedule, *ties: tuple[int, ...]) -> Schedule:
    graph = schedule.graph
    return over_graph(schedule, StageGraph(graph.num_stages, graph.edges, ties or ((0, graph.num_stages - 1),)))


@pytest.mark.parametrize("name", slow_unless(ONE_OF_EACH_KIND, strategies.SPEC_NAMES))
@given(data=st.data())
@settings(max_examples=20)
def test_every_schedule_stays_valid_and_runs_in_one_order(name: str, data: st.DataObject) -> None:
    schedule = catalogue.build(name, data.draw(strategies.sizes(name, max_updates=3)))
    if schedule.num_stages == 1:
        return
    last = schedule.num_stages - 1
    ties: list[list[tuple[int, ...]]] = [[(0, last)], [tuple(sorted({0, schedule.num_stages // 2, last}))]]
    # Where updates overlap, one tie's norm may be due on a worker before another's sum, and behind it on the next: this is refused.
    takes_turns = schedule.weight_rule.overlaps_updates and schedule.update_scope is UpdateScope.TIED
    if schedule.num_stages >= 4 and (len(schedule.pipelines) > 1 or schedule.num_stages == schedule.num_workers or not takes_turns):
        ties += [[(0, last), (1, last - 1)], [(0, last - 1), (1, last)]]
    schedule = tied(schedule, *data.draw(st.sampled_from(ties)))
    counts = [data.draw(st.integers(1, 2)) for _ in range(schedule.num_workers)]
    replicated = [worker for worker, count in enumerate(counts) if count > 1]
    if data.draw(st.booleans()):
        schedule = shard_optimizer(schedule, replicated_workers=replicated)
    elif data.draw(st.booleans()):
        schedule = late_updates(schedule, data.draw(st.sampled_from([None, 1, 3, 9])))
    validate(schedule)
    workers = tuple(tuple((2 * worker + number, 1 / count) for number in range(count)) for worker, count in enumerate(counts))
    numbers = {device: number for number, (device, _) in enumerate(member for members in workers for member in members)}
    placement = Placement(tuple(tuple((numbers[device], share) for device, share in members) for members in workers))
    for programs in (lower(schedule), lower(schedule, placement)):
        reference.check_one_order(reference.run(schedule, programs).starts)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("ties", [((0, 2), (1, 3)), ((0, 3), (1, 2))])
@pytest.mark.parametrize(
    ("name", "scope"),
    [
        *itertools.product(["zb-v", "dualpipe-v", "interleaved"], UpdateScope),
        *itertools.product(["async-interleaved"], [UpdateScope.STAGE, UpdateScope.GLOBAL]),
    ],
)
def test_workers_that_update_tied_stages_in_different_orders_take_their_sums_and_norms_in_one(
    name: str, scope: UpdateScope, ties: tuple[tuple[int, int], ...], is_sharded: bool
) -> None:
    """Of two workers with two stages each, one has first the update that the other has last."""
    for num_microbatches in (1, 4):
        schedule = tied(catalogue.build(name, ScheduleRequest(2, num_microbatches, 3, num_chunks=2, update_scope=scope)), *ties)
        schedule = shard_optimizer(schedule, replicated_workers=[0, 1]) if is_sharded else schedule
        validate(schedule)
        for programs in (lower(schedule), lower(schedule, Placement.even(2, 2))):
            reference.check_one_order(reference.run(schedule, programs).starts)


@pytest.mark.parametrize("scope", UpdateScope)
@pytest.mark.parametrize(("name", "num_microbatches"), [("interleaved", 1), ("interleaved", 2), ("pipedream-2bw", 3), ("1f1b", 4)])
def test_the_norm_of_a_tie_starts_before_what_reads_the_next_version(name: str, num_microbatches: int, scope: UpdateScope) -> None:
    """Updates of sharded stages stand halfway to their reader, on some workers behind readers of other stages."""
    num_chunks = 3 if name == "interleaved" else 1
    schedule = tied(catalogue.build(name, ScheduleRequest(4, num_microbatches, 4, num_chunks=num_chunks, update_scope=scope)))
    schedule = shard_optimizer(schedule, replicated_workers=range(4))
    validate(schedule)
    reference.check_one_order(reference.run(schedule, lower(schedule, Placement.even(4, 2))).starts)


def test_norms_of_ties_that_fit_in_no_one_order_are_refused_with_a_scope_that_does() -> None:
    def schedule(scope: UpdateScope) -> Schedule:
        return tied(catalogue.build("async-interleaved", ScheduleRequest(2, 1, 3, num_chunks=2, update_scope=scope)), (0, 3), (1, 2))

    with pytest.raises(ScheduleError, match="the scope stage or global"):
        validate(schedule(UpdateScope.TIED))
    for scope in (UpdateScope.STAGE, UpdateScope.GLOBAL):
        validate(schedule(scope))


def test_the_sum_of_a_tie_starts_behind_the_norm_of_the_update_before() -> None:
    schedule = tied(catalogue.build("async-interleaved", ScheduleRequest(2, 1, 2, num_chunks=2, update_scope=UpdateScope.GLOBAL)))
    validate(schedule)
    for program in lower(schedule):
        starts = [item.collective for item in program.items if isinstance(item, Start)]
        assert [(each.update, each.kind) for each in starts] == [
            (update, kind) for update in (0, 1) for kind in (CollectiveKind.TIED, CollectiveKind.NORM)
        ]


@SPECS
@pytest.mark.parametrize("scope", UpdateScope)
def test_every_update_of_a_tied_stage_waits_for_the_gradients_of_all_of_them(name: str, scope: UpdateScope) -> None:
    schedule = tied(catalogue.build(name, replace(strategies.near(name, 4, 8, 2), update_scope=scope)))
    last = schedule.num_stages - 1
    for replica, pipeline in schedule.first_pipeline.items():
        if replica.stage in {0, last}:
            needed = dependencies(schedule, Op(OpKind.UPDATE, replica.stage, 1, pipeline))
            for stage in (0, last):
                for other in schedule.replicas[stage]:
                    assert set(schedule.gradient_ops(other, 1)[-1:]) <= set(needed)


def test_the_sum_of_a_tie_is_made_of_sums_of_replicas_and_the_norm_of_both() -> None:
    schedule = tied(catalogue.build("1f1b", ScheduleRequest(3, 2)))
    program = lower(schedule, Placement((((0, 0.5), (1, 0.5)), ((2, 1.0),), ((3, 1.0),))))[0]
    at = next(position for position, item in enumerate(program.items) if isinstance(item, Compute) and item.ops[0].kind is OpKind.UPDATE)
    kinds = [(type(item), item.collective.kind) for item in program.items[:at] if isinstance(item, Start | Await)]
    in_turn = (CollectiveKind.GRADIENTS, CollectiveKind.TIED, CollectiveKind.NORM)
    assert kinds == [(what, kind) for what in (Start, Await) for kind in in_turn]
    _, tied_sum, norm = (item for item in program.items if isinstance(item, Start))
    assert [each.kind for each in tied_sum.after] == [CollectiveKind.GRADIENTS]
    assert {each.kind for each in norm.after} == {CollectiveKind.GRADIENTS, CollectiveKind.TIED}


@pytest.mark.parametrize(("scope", "norms"), [(UpdateScope.STAGE, set()), (UpdateScope.TIED, {CollectiveKind.TIED_NORM})])
def test_a_norm_over_tied_stages_is_taken_for_their_scope_only(scope: UpdateScope, norms: set[CollectiveKind]) -> None:
    schedule = tied(catalogue.build("1f1b", ScheduleRequest(4, 4, update_scope=scope)))
    starts = {program.device: [item.collective for item in program.items if isinstance(item, Start)] for program in lower(schedule)}
    assert {collective.kind for collective in starts[0]} == {CollectiveKind.TIED} | norms
    assert starts[0] == starts[3]
    assert not starts[1]
    assert not starts[2]
    assert {collective.devices for collective in starts[0]} == {(0, 3)}


@pytest.mark.parametrize("num_copies", [1, 2])
def test_the_norm_of_a_tie_starts_when_the_sums_are_there_and_not_at_its_update(num_copies: int) -> None:
    request = ScheduleRequest(4, 4, 4, update_scope=UpdateScope.TIED)
    schedule = tied(catalogue.build("async-1f1b", request))
    validate(schedule)
    *_, last = lower(schedule, Placement.even(4, num_copies))
    kinds = [CollectiveKind.TIED] if num_copies == 1 else [CollectiveKind.GRADIENTS, CollectiveKind.TIED]
    for update in range(request.num_updates - 1):
        norm = next(
            item
            for item in last.items
            if isinstance(item, Start) and (item.collective.kind, item.collective.update) == (CollectiveKind.TIED_NORM, update)
        )
        assert [each.kind for each in norm.after] == kinds
        between = last.items[last.items.index(norm) : last.items.index(Await(norm.collective))]
        # The first stage's gradients come later: meanwhile the last one computes, and starts nothing that the norm could hold up.
        assert sum(isinstance(item, Compute) for item in between) >= 2
        assert not [item for item in between[1:] if isinstance(item, Start)]


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_devices_that_hold_all_tied_stages_add_them_up_by_themselves(name: str) -> None:
    schedule = tied(catalogue.build(name, ScheduleRequest(4, 8)))
    kinds = {item.collective.kind for program in lower(schedule) for item in program.items if isinstance(item, Start)}
    assert kinds == {CollectiveKind.GRADIENTS, CollectiveKind.NORM}
    # Tied weights stay whole where the others have owners.
    shared = lower(shard_optimizer(schedule))
    kinds = {item.collective.kind for program in shared for item in program.items if isinstance(item, Start)}
    assert kinds == {CollectiveKind.GRADIENTS, CollectiveKind.WEIGHTS, CollectiveKind.NORM}


@pytest.mark.parametrize("name", ["async-1f1b", "pipedream-2bw"])
def test_an_asynchronous_pipeline_does_not_wait_for_a_tie(name: str) -> None:
    size = ScheduleRequest(8, 8, 12)
    schedule = tied(catalogue.build(name, size))
    ends = reference.asap(schedule, reference.durations(1, 1, 1)).update_ends_s()
    assert ends[6] - ends[5] == 24
    assert metrics(schedule).max_delay == 1
    assert metrics(schedule).peak_in_flight == metrics(catalogue.build(name, size)).peak_in_flight


def test_pipedream_updates_a_tied_last_stage_when_the_first_has_its_gradient() -> None:
    schedule = tied(catalogue.build("pipedream", ScheduleRequest(4, 1, 12)))
    validate(schedule)
    assert metrics(schedule).max_mismatch == 0
    assert metrics(schedule).max_delay == 3
    ends = reference.asap(schedule, reference.durations(1, 1, 1)).update_ends_s()
    assert ends[7] - ends[6] == 3


def test_reductions_stand_before_the_first_update_of_what_is_tied() -> None:
    schedule = add_reductions(tied(catalogue.build("chimera", ScheduleRequest(4, 8, update_scope=UpdateScope.STAGE))))
    for program in schedule.programs:
        kinds = [slot.kind for slot in program if isinstance(slot, Op) and slot.kind.per_update]
        assert kinds == sorted(kinds)  # G before U


def gs_behind_who_awaits_them(schedule: Schedule) -> list[tuple[Op, Op]]:
    """Return each G that does not stand before an Op of its worker that waits for it, with that Op."""
    return [
        (needed, op)
        for op, place in schedule.places.items()
        for needed in dependencies(schedule, op)
        if needed.kind is OpKind.REDUCE
        and schedule.places[needed].worker == place.worker
        and schedule.places[needed].position >= place.position
    ]


@given(schedule=strategies.random_schedules(), data=st.data())
def test_every_g_stands_before_what_awaits_it(schedule: Schedule, data: st.DataObject) -> None:
    replicated = data.draw(st.sets(st.integers(0, schedule.num_workers - 1)))
    assert gs_behind_who_awaits_them(add_reductions(schedule, replicated_workers=replicated)) == []


def test_a_g_does_not_wait_for_an_earlier_update_of_a_tied_stage_that_comes_late() -> None:
    """Stage 0 makes both updates before its tied stage 1 makes the first: its second G must stand before that."""
    passes = [
        Op(kind, stage, index)
        for index in range(2)
        for kind, stages in ((OpKind.FORWARD, (0, 1)), (OpKind.BACKWARD, (1, 0)))
        for stage in stages
    ]
    updates = [Op(OpKind.UPDATE, stage, index) for stage in range(2) for index in range(2)]
    schedule = Schedule(
        name="late",
        graph=StageGraph(2, StageGraph.chain(2).edges, ((0, 1),)),
        pipelines=((0, 0),),
        programs=((*passes, *updates),),
        num_microbatches=1,
        num_updates=2,
        weight_rule=WeightRule.STASH,
        update_scope=UpdateScope.STAGE,
    )
    validate(schedule)
    reduced = add_reductions(schedule, replicated_workers=[0])
    assert sum(op.kind is OpKind.REDUCE for op in reduced.places) == 4
    assert gs_behind_who_awaits_them(reduced) == []


def test_a_stage_in_two_ties_is_refused() -> None:
    with pytest.raises(ScheduleError, match="join them in one"):
        StageGraph(4, StageGraph.chain(4).edges, ((0, 3), (1, 3)))
