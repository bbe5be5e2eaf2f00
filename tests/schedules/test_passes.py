from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Await, CollectiveKind, Start
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, StageGraph, StageReplica, UpdateScope, WeightRule, ops_of, reads
from raypipe.schedules.lower import Compute, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import (
    divide_stages,
    division_of_stages,
    first_update,
    forwards_ahead,
    late_updates,
    one_of_repeated,
    over_graph,
    recompute,
    recomputed_stages,
    repeated,
    shard_optimizer,
)
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate, simulate_programs
from tests.schedules import handwritten, reference
from tests.strategies import AMDPS, ASYNCHRONOUS, BIDIRECTIONAL, SPEC_NAMES, near


@pytest.mark.parametrize("name", [name for name in SPEC_NAMES if name not in ASYNCHRONOUS])
@given(num_devices=st.integers(1, 5), num_microbatches=st.integers(1, 6), num_updates=st.integers(1, 3))
def test_an_order_of_one_update_repeated_is_what_the_generator_gives_for_several(
    name: str, num_devices: int, num_microbatches: int, num_updates: int
) -> None:
    one = catalogue.build(name, near(name, num_devices, num_microbatches))
    several = catalogue.build(name, near(name, num_devices, num_microbatches, num_updates))
    assert several.weight_rule is WeightRule.FLUSH
    assert repeated(one, num_updates=num_updates) == several
    assert one_of_repeated(several) == one


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: handwritten.two_branches(4), id="branches"),
        pytest.param(handwritten.opposite_pipelines, id="two-pipelines"),
        pytest.param(lambda: handwritten.halved(catalogue.build("1f1b", near("1f1b", 3, 4))), id="halves"),
        pytest.param(lambda: catalogue.build("dualpipe", near("dualpipe", 4, 8)), id="slots-of-two"),
    ],
)
def test_an_order_stays_valid_when_it_is_repeated_and_holds_no_more(make: Callable[[], Schedule]) -> None:
    one = make()
    several = repeated(one, num_updates=3)
    validate(several)
    assert metrics(several).peak_in_flight == metrics(one).peak_in_flight
    assert metrics(several).max_mismatch == metrics(several).max_delay == 0


def test_ops_that_overlap_still_do() -> None:
    one = catalogue.build("dualpipe", near("dualpipe", 4, 8))
    count = sum(isinstance(slot, Overlap) for program in one.programs for slot in program)
    several = repeated(one, num_updates=2)
    assert count
    assert sum(isinstance(slot, Overlap) for program in several.programs for slot in program) == 2 * count


@pytest.mark.parametrize("schedule", [handwritten.pipedream_2bw(3, 4, 3), handwritten.async_one_f_one_b(3, 2, 4)], ids=["2bw", "live"])
def test_updates_that_overlap_are_no_update_repeated(schedule: Schedule) -> None:
    assert one_of_repeated(schedule) is None


@pytest.mark.parametrize("name", SPEC_NAMES)
@given(num_devices=st.integers(1, 5), num_microbatches=st.integers(1, 6))
def test_the_first_update_of_an_order_runs_alone_with_nothing_late(name: str, num_devices: int, num_microbatches: int) -> None:
    several = catalogue.build(name, near(name, num_devices, num_microbatches, 3))
    alone = first_update(several)
    validate(alone)
    assert alone.num_updates == 1
    assert {op for op, _ in alone.ops()} == {op for op, _ in several.ops() if several.update(op) == 0}
    assert metrics(alone).max_delay == metrics(alone).max_mismatch == 0


def test_the_first_update_keeps_what_overlaps_within_it() -> None:
    one = catalogue.build("dualpipe", near("dualpipe", 4, 8))
    assert first_update(repeated(one, num_updates=2)) == one


def test_updates_that_differ_are_no_update_repeated() -> None:
    one_f_one_b, gpipe = (catalogue.build(name, near(name, 2, 4, 2)) for name in ("1f1b", "gpipe"))
    halves = [len(program) // 2 for program in gpipe.programs]
    programs = tuple(first[:half] + second[half:] for first, second, half in zip(one_f_one_b.programs, gpipe.programs, halves, strict=True))
    mixed = replace(gpipe, programs=programs)
    validate(mixed)
    assert one_of_repeated(mixed) is None


@pytest.mark.parametrize("name", SPEC_NAMES)
def test_a_forward_that_runs_again_does_so_right_before_its_backward(name: str) -> None:
    one = catalogue.build(name, near(name, 4, 8))
    again = recompute(one, range(one.num_stages))
    validate(again)
    assert recompute(again, range(one.num_stages)) == again
    assert recomputed_stages(one) == ()
    assert recomputed_stages(again) == tuple(range(one.num_stages))
    for program in again.programs:
        slots = [ops_of(slot) for slot in program]
        for slot, following in itertools.pairwise(slots):
            if slot[0].kind is OpKind.RECOMPUTE:
                assert any(op.kind.gives_input_gradient and op.stage == slot[0].stage and op.index == slot[0].index for op in following)


def test_recomputation_trades_time_for_memory() -> None:
    one = catalogue.build("gpipe", ScheduleRequest(2, 6))
    profile = ModelProfile.uniform(4, output_bytes=10, saved_bytes=100)
    found = []
    for schedule in (one, recompute(one, (0, 1)), recompute(one, (1,))):
        plan = make_plan(
            name="m",
            planner="test",
            cut=Cut.equal(4, 2, ((0, 1), (1, 2), (2, 3))),
            schedule=schedule,
            profile=profile,
            topology=ClusterTopology.uniform(2),
            devices=("device0", "device1"),
            microbatch_size=1,
        )
        timing = simulate(plan)
        found.append((timing.update_s, *timing.peak_memory_bytes))
    (all_s, *all_bytes), (again_s, *again_bytes), (some_s, *some_bytes) = found
    assert all_bytes == [6 * 200, 6 * 200]
    assert again_bytes == [200, 6 * 10 + 200 - 10]  # The first stage's input is the batch.
    assert some_bytes == [all_bytes[0], again_bytes[1]]
    assert all_s < some_s <= again_s  # The first stage runs its forward again while it would wait.


# One optimizer's state, divided among the copies of a stage


@pytest.mark.combined
@pytest.mark.parametrize("scope", UpdateScope)
@pytest.mark.parametrize("name", [*BIDIRECTIONAL, *AMDPS])
def test_all_copies_of_a_stage_update_and_publish_to_the_others(name: str, scope: UpdateScope) -> None:
    for num_devices in (2, 3, 4, 5, 6, 7, 8):
        if name in BIDIRECTIONAL and num_devices % 2:
            continue
        plain = catalogue.build(name, replace(near(name, num_devices, 2 * num_devices, 3), update_scope=scope))
        schedule = shard_optimizer(plain)
        validate(schedule)
        for replicas in schedule.replicas:
            for update in range(3):
                made = [schedule.find(Op(OpKind.UPDATE, replica.stage, update, schedule.first_pipeline[replica])) for replica in replicas]
                given = [schedule.find(Op(OpKind.PUBLISH, replica.stage, update, schedule.first_pipeline[replica])) for replica in replicas]
                assert all(made)
                assert all(given) or len(replicas) == 1
        assert metrics(schedule).max_mismatch <= metrics(plain).max_mismatch + 1
        assert metrics(schedule).max_delay <= metrics(plain).max_delay + 1
        owners = {replicas[0].stage: {replica.worker for replica in replicas} for replicas in schedule.replicas if len(replicas) > 1}
        for item in (item for program in lower(schedule) for item in program.items if isinstance(item, Start)):
            if item.collective.kind in {CollectiveKind.GRADIENTS, CollectiveKind.WEIGHTS}:
                assert set(item.collective.owners) == owners[item.collective.stage]
        for seed in range(2):
            reference.check_one_order(reference.run(schedule, lower(schedule), seed).starts)


def test_published_weights_are_awaited_where_they_are_next_used() -> None:
    schedule = shard_optimizer(catalogue.build("amdp", ScheduleRequest(4, 4, 2)))
    for program in lower(schedule):
        pending: set[int] = set()
        for item in program.items:
            if isinstance(item, Start) and item.collective.kind is CollectiveKind.WEIGHTS:
                pending.add(item.collective.stage)
            elif isinstance(item, Await) and item.collective.kind is CollectiveKind.WEIGHTS:
                pending.remove(item.collective.stage)
            elif isinstance(item, Compute):
                assert not pending & {op.stage for op in item.ops}
        assert not pending


def test_a_schedule_without_copies_stays_as_it_is() -> None:
    schedule = catalogue.build("async-1f1b", ScheduleRequest(4, 4, 3))
    assert shard_optimizer(schedule) == schedule


@given(
    num_devices=st.integers(1, 6),
    more_microbatches=st.integers(0, 4),
    num_updates=st.integers(1, 5),
    scope=st.sampled_from(UpdateScope),
    is_tied=st.booleans(),
)
def test_late_updates_wait_for_the_first_reader_of_their_version(
    num_devices: int, more_microbatches: int, num_updates: int, scope: UpdateScope, is_tied: bool
) -> None:
    request = ScheduleRequest(num_devices, max(num_devices - 1, 1) + more_microbatches, num_updates, update_scope=scope)
    schedule = catalogue.build("pipedream-2bw", request)
    if is_tied and num_devices > 1:
        schedule = over_graph(schedule, StageGraph(num_devices, schedule.graph.edges, ((0, num_devices - 1),)))
    late = late_updates(schedule)
    validate(late)
    computed = [op for op, _ in schedule.ops() if not op.kind.per_update]
    assert [reads(late, op) for op in computed] == [reads(schedule, op) for op in computed]
    now, before = metrics(late), metrics(schedule)
    assert replace(now, weight_copies=before.weight_copies) == before
    assert all(copies <= most for copies, most in zip(now.weight_copies, before.weight_copies, strict=True))
    for program in late.programs:
        order = [op for slot in program for op in ops_of(slot)]
        for position, op in enumerate(order):
            if op.kind is OpKind.UPDATE:
                last = late.gradient_ops(StageReplica(late.worker(op), op.stage), op.index + 1)[-1:]
                if scope is UpdateScope.TIED and op.stage in late.graph.tie_of and order[position + 1 : position + 2] == last:
                    continue  # their norms take turns
                behind = [later for later in order[position:] if later.kind is not OpKind.UPDATE]
                assert not behind or behind[0] == Op(OpKind.FORWARD, op.stage, (op.index + 2) * schedule.num_microbatches)


@pytest.mark.parametrize("name", ["async-1f1b", "amdp", "amdp-auto"])
@given(slots=st.integers(1, 9), scope=st.sampled_from(UpdateScope))
def test_updates_of_a_rule_that_fixes_no_versions_are_late_by_the_slots_that_are_asked_for(
    name: str, slots: int, scope: UpdateScope
) -> None:
    schedule = catalogue.build(name, ScheduleRequest(4, 8, 4, update_scope=scope))
    assert late_updates(schedule) == late_updates(schedule, 0) == schedule
    late = late_updates(schedule, slots)
    validate(late)
    assert metrics(late).mean_delay >= metrics(schedule).mean_delay
    for program, before in zip(late.programs, schedule.programs, strict=True):
        computed = [slot for slot in before if slot not in _updates(before)]
        assert [slot for slot in program if slot not in _updates(program)] == computed
        for op in _updates(before):
            behind = [_computed_before(slots_of, op) for slots_of in (before, program)]
            assert behind[1] == min(behind[0] + slots, len(computed))


def _updates(program: Sequence[Slot]) -> list[Slot]:
    return [slot for slot in program if isinstance(slot, Op) and slot.kind is OpKind.UPDATE]


def _computed_before(program: Sequence[Slot], op: Slot) -> int:
    return sum(slot not in _updates(program) for slot in program[: program.index(op)])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "pipedream-2bw", "async-1f1b", "list"])
@given(ahead=st.lists(st.integers(0, 3), min_size=0, max_size=4), num_microbatches=st.integers(1, 9), num_updates=st.integers(1, 3))
def test_forwards_ahead_of_hops_are_valid_and_hold_as_much_more(
    name: str, ahead: list[int], num_microbatches: int, num_updates: int
) -> None:
    num_devices = len(ahead) + 1
    schedule = catalogue.build(name, ScheduleRequest(num_devices, max(num_microbatches, num_devices), num_updates))
    more = [sum(ahead[worker:]) for worker in range(num_devices)]
    found = forwards_ahead(schedule, more)
    validate(found)
    for worker, (program, before) in enumerate(zip(found.programs, schedule.programs, strict=True)):
        assert sorted(map(str, program)) == sorted(map(str, before))
        others = [[slot for slot in slots if not _is_forward(slot)] for slots in (program, before)]
        forwards = [[slot for slot in slots if _is_forward(slot)] for slots in (program, before)]
        assert others[0] == others[1]
        assert forwards[0] == forwards[1]
        assert metrics(found).peak_in_flight[worker] <= metrics(schedule).peak_in_flight[worker] + more[worker]
    if schedule.weight_rule is not WeightRule.LIVE:
        computed = [op for op, _ in schedule.ops() if not op.kind.per_update]
        assert [reads(found, op) for op in computed] == [reads(schedule, op) for op in computed]


def _is_forward(slot: Op | Overlap) -> bool:
    return isinstance(slot, Op) and slot.kind is OpKind.FORWARD


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "list", "gpipe"])
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), num_microbatches=st.integers(1, 9), late=st.integers(0, 10))
def test_divided_stages_compute_the_last_weight_gradients_last_and_from_the_last_stage(
    name: str, counts: list[int], num_microbatches: int, late: int
) -> None:
    whole = catalogue.build(name, ScheduleRequest(len(counts), max(num_microbatches, len(counts)), 2))
    graph = StageGraph.chain(sum(counts))
    found = divide_stages(whole, counts, graph=graph, late_weight_grads=late)
    validate(found)
    assert found.graph == graph
    num_late = min(late, whole.num_microbatches)
    for worker, count in enumerate(counts):
        first = sum(counts[:worker])
        for update in range(2):
            ops = [op for slot in found.programs[worker] for op in ops_of(slot) if found.update(op) == update]
            end = next(position for position, op in enumerate(ops) if op.kind is OpKind.UPDATE)
            last = [op for op in ops[end - count * num_late : end]]
            assert [op.kind for op in last] == [OpKind.WEIGHT_GRADIENT] * (count * num_late)
            assert [op.stage for op in last] == [stage for stage in reversed(range(first, first + count)) for _ in range(num_late)]
    of_divided, num_last = division_of_stages(found)
    assert of_divided == (tuple(counts) if max(counts) > 1 else ())
    assert num_last >= num_late or not of_divided, "the order may have had some last anyway"


def test_forwards_ahead_of_a_worker_alone_deadlock_and_are_refused() -> None:
    schedule = catalogue.build("1f1b", ScheduleRequest(2, 4))
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(forwards_ahead(schedule, (0, 2)))


def test_one_forward_ahead_at_a_hop_hides_a_forward_and_a_backward() -> None:
    schedule = catalogue.build("pipedream-2bw", ScheduleRequest(2, 4, 12))
    slow = equal_stages(schedule, latency_s=1.5)
    without_s = simulate_programs(lower(schedule), slow, name="", num_updates=12).steady_update_s
    assert without_s == pytest.approx(18), "two microbatches in flight in 3 + 3 + 2 x 1.5 seconds"
    ahead = forwards_ahead(schedule, (1, 0))
    assert simulate_programs(lower(ahead), slow, name="", num_updates=12).steady_update_s == pytest.approx(12)
