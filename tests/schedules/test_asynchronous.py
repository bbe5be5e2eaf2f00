"""What the asynchronous schedules promise: AMDP's own orders and times, versions, mismatch and delay, and what searched orders reach."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, Schedule, StageReplica, UpdateScope, WeightRule, reads
from raypipe.schedules.lower import lower
from raypipe.schedules.metrics import mean_delays, metrics
from raypipe.schedules.reductions import add_reductions
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.dispatch import TimedPipelines, defer_updates, timed
from raypipe.schedules.validate import validate
from tests import strategies
from tests.marks import slow_unless
from tests.schedules import reference

AMDP_ROUNDS = {
    4: """
        F0 F2 b2 F1 B1 U F3 B3 B0
        b2 F0 F1 F2 F3 U B1 B0 B3
        b3 F1 F0 F3 F2 U B0 B1 B2
        F1 F3 b3 F0 B0 U F2 B2 B1
    """,
    8: """
        F0 F4 b4 F1 F2 F5 F6 F3 B3 F7 U B7 B2 B1 B6 B5 B0
        b4 F0 F1 F4 F5 F2 F3 F6 F7 U B3 B2 B7 B6 B1 B0 B5
        b5 F1 F0 F5 F4 F3 F2 F7 F6 U B2 B3 B6 B7 B0 B1 B4
        F1 F5 b5 F0 F3 F4 F7 F2 B2 F6 U B6 B3 B0 B7 B4 B1
        F2 F6 b6 F3 F0 F7 F4 F1 B1 F5 U B5 B0 B3 B4 B7 B2
        b6 F2 F3 F6 F7 F0 F1 F4 F5 U B1 B0 B5 B4 B3 B2 B7
        b7 F3 F2 F7 F6 F1 F0 F5 F4 U B0 B1 B4 B5 B2 B3 B6
        F3 F7 b7 F2 F1 F6 F5 F0 B0 F4 U B4 B1 B2 B5 B6 B3
    """,
}
"""A round as the authors' code runs it, by depth (https://github.com/Vinsmoke86/AMDP, async_schedules.py): a line a device, b of the round
before."""

ROUND = pytest.mark.parametrize("depth", [4, 8, 12, 16])


def amdp(depth: int, rounds: int, num_updates: int, **changed: object) -> Schedule:
    return catalogue.build("amdp", replace(ScheduleRequest(depth, depth * rounds, num_updates), **changed))  # type: ignore[arg-type]


def steady(schedule: Schedule, times: tuple[float, float, float] = (1, 1, 1), latency: float = 0.0) -> float:
    """Seconds of an update, from the end of the first third of them to the end of the second."""
    ends = reference.asap(schedule, reference.durations(*times), latency).update_ends_s()
    third = len(ends) // 3
    return (ends[2 * third] - ends[third]) / third


# AMDP as published


@pytest.mark.parametrize("depth", AMDP_ROUNDS)
def test_amdp_runs_the_rounds_of_its_authors(depth: int) -> None:
    for number, rounds in ((2, 1), (2, 2), (3, 2), (4, 2)):  # rounds of one update each, and of two
        check_round(depth, number, rounds)


def check_round(depth: int, number: int, rounds: int) -> None:
    schedule = amdp(depth, rounds, 6)
    first = number * depth  # its first microbatch
    for program, line in zip(schedule.programs, AMDP_ROUNDS[depth].strip().splitlines(), strict=True):
        expected: list[tuple[str, int]] = []
        for word in line.split():
            if word != "U":
                expected.append((word[0].upper(), int(word[1:]) + first - depth * word.startswith("b")))
        ops = [op for op in program if isinstance(op, Op)]
        found = [(str(op.kind), op.index) for op in ops]
        computed = [item for item in found if item[0] != "U"]
        start = computed.index(expected[0])
        assert computed[start : start + len(expected)] == expected
        # The updates stand at one place, once for each stage held.
        before = line.split().index("U") - 1
        at = found.index(expected[before])
        behind = found[at + 1 : at + 1 + depth // 2]
        if number % rounds == 0:
            assert behind == [("U", number // rounds - 1)] * (depth // 2)
        else:
            assert "U" not in {kind for kind, _ in behind}


@pytest.mark.combined
@ROUND
@pytest.mark.parametrize("scope", [UpdateScope.STAGE, UpdateScope.GLOBAL])
def test_a_round_of_amdp_takes_3d_plus_1(depth: int, scope: UpdateScope) -> None:
    for rounds in (1, 3):
        schedule = amdp(depth, rounds, 9, update_scope=scope)
        validate(schedule)
        assert steady(schedule) == rounds * (3 * depth + 1)


@ROUND
def test_hops_make_a_round_of_amdp_2d_minus_3_of_them_longer(depth: int) -> None:
    for latency in (0.0, 0.1, 0.25, 0.5, 1.0):
        assert steady(amdp(depth, 1, 9), latency=latency) == pytest.approx(3 * depth + 1 + (2 * depth - 3) * latency)


@pytest.mark.parametrize(
    "times", [(1, 0.5, 0.5), (1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 3, 2)], ids=lambda times: f"f{times[0]}-b{sum(times[1:])}"
)
def test_the_round_of_amdp_for_other_times(times: tuple[float, float, float]) -> None:
    forward, backward = times[0], times[1] + times[2]
    for depth in (4, 8):
        expected = depth * (forward + backward) + (backward - forward) + max(0.0, backward - 2 * forward)
        assert steady(amdp(depth, 2, 9), times) == pytest.approx(2 * expected)


@ROUND
def test_a_flush_costs_three_units_an_update(depth: int) -> None:
    for rounds in (1, 4):
        schedule = catalogue.build("amdp-flush", ScheduleRequest(depth, depth * rounds, 6))
        assert steady(schedule) == rounds * (3 * depth + 1) + 3


def test_copies_of_a_stage_lie_in_one_half_of_the_devices() -> None:
    for depth in (4, 8, 16):
        for replicas in amdp(depth, 1, 1).replicas:
            assert len(replicas) == depth // 2
            assert {replica.worker % 4 in {0, 3} for replica in replicas} == {replicas[0].stage % 4 in {0, 3}}


def test_messages_of_amdp_go_to_neighbors_on_the_ring() -> None:
    for workers in amdp(8, 1, 1).pipelines:
        assert {(after - before) % 8 for before, after in itertools.pairwise(workers)} in ({1}, {7})


@ROUND
def test_only_the_first_round_of_an_update_is_mismatched(depth: int) -> None:
    rounds = 3
    schedule = amdp(depth, rounds, 4)
    for op, _ in schedule.ops():
        if op.kind is OpKind.BACKWARD:
            gap = reads(schedule, op) - reads(schedule, op._replace(kind=OpKind.FORWARD))
            number = op.index // depth
            assert gap == 0 or (gap == 1 and number % rounds == 0 and number > 0)
    assert (metrics(schedule).max_mismatch, metrics(schedule).max_delay) == (1, 1)


def test_a_backward_behind_the_reduction_of_an_update_counts_for_the_next() -> None:
    schedule = add_reductions(amdp(8, 1, 3))
    early = 0
    for op, place in schedule.ops():
        if op.kind is OpKind.BACKWARD:
            update = schedule.update(op)
            before = Op(OpKind.REDUCE, op.stage, update - 1, schedule.first_pipeline[schedule.replica(op)])
            if update and schedule.places[before].position < place.position < schedule.places[before._replace(kind=OpKind.UPDATE)].position:
                early += 1
    assert early == 4 * 2  # B3 on device 0 and its like, in the second and the third update


# Versions


def test_2bw_reads_the_version_of_its_formula() -> None:
    for depth, size in ((4, 4), (4, 3), (3, 7)):
        schedule = catalogue.build("pipedream-2bw", ScheduleRequest(depth, size, 4))
        for op, _ in schedule.ops():
            if not op.kind.per_update:
                number = op.index + 1  # the paper counts from 1
                assert reads(schedule, op) == max((number - 1) // size - 1, 0)
        assert (metrics(schedule).max_mismatch, metrics(schedule).max_delay, set(metrics(schedule).weight_copies)) == (0, 1, {2})


@pytest.mark.parametrize("depth", range(2, 9))
def test_pipedream_stashes_a_version_for_each_microbatch_under_way(depth: int) -> None:
    found = metrics(catalogue.build("pipedream", ScheduleRequest(depth, 1, 4 * depth)))
    assert (found.max_mismatch, found.max_delay) == (0, depth - 1)
    assert found.weight_copies == tuple(depth - stage for stage in range(depth))


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("depth", [4, 8])
def test_the_delay_on_average_falls_with_the_microbatches_of_an_update(depth: int, rounds: int) -> None:
    size = depth * rounds
    expected = {"pipedream-2bw": 1, "async-1f1b": (depth - 1) / (2 * size), "amdp": (7 / 8 if depth == 4 else 1) / rounds, "1f1b": 0}
    for name, of_update in expected.items():
        # The first updates of a window are less late: what the next ones add is that of updates far from its beginning.
        short, long = (metrics(catalogue.build(name, ScheduleRequest(depth, size, count))).mean_delay * count for count in (12, 16))
        assert (long - short) / 4 == pytest.approx(of_update)


@pytest.mark.parametrize("depth", range(2, 9))
def test_async_1f1b_is_one_version_off_exactly_from_one_microbatch_less_than_devices(depth: int) -> None:
    for size in range(1, 2 * depth + 1):
        found = metrics(catalogue.build("async-1f1b", ScheduleRequest(depth, size, 4 * depth)))
        assert found.max_mismatch == found.max_delay == math.ceil((depth - 1) / size)
        assert (found.max_mismatch <= 1) == (size >= depth - 1)
        assert set(found.weight_copies) == {1}


@pytest.mark.parametrize("seconds", [(0, 0, 0), (1, 0, 0), (0, 1, 1)], ids=["none", "forward-alone", "backward-alone"])
def test_stages_that_take_no_time_are_ordered_all_the_same(seconds: tuple[float, float, float]) -> None:
    for depth, pipelines, size in ((1, 1, 4), (6, 3, 12), (8, 1, 8), (5, 2, 10)):
        for scope in UpdateScope:
            validate(
                catalogue.build(
                    "amdp",
                    ScheduleRequest(
                        depth, size, 3, num_pipelines=pipelines, update_scope=scope, times=(StageTimes(*seconds),), latency_s=0.1
                    ),
                )
            )


def test_where_stages_lie_does_not_depend_on_how_long_they_take() -> None:
    chance = random.Random(0)
    for depth, pipelines in ((5, 2), (6, 2), (6, 3), (7, 3), (12, 2)):
        equal = catalogue.build("amdp", ScheduleRequest(depth, 4 * pipelines, 2, num_pipelines=pipelines)).pipelines
        for _ in range(3):
            times = tuple(StageTimes(chance.uniform(0.7, 1.3), 1, chance.uniform(0.7, 1.3)) for _ in range(depth))
            unequal = catalogue.build(
                "amdp", ScheduleRequest(depth, 4 * pipelines, 2, num_pipelines=pipelines, times=times, latency_s=0.05)
            )
            assert unequal.pipelines == equal


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_async_interleaved_is_one_version_off_from_twice_as_many_microbatches_as_devices(chunks: int) -> None:
    for depth in range(2, 7):
        for size in range(2 * depth, 4 * depth):
            found = metrics(catalogue.build("async-interleaved", ScheduleRequest(depth, size, 5, chunks)))
            assert max(found.max_mismatch, found.max_delay) <= 1


@pytest.mark.parametrize("name", strategies.ASYNCHRONOUS)
def test_each_microbatch_counts_for_one_update_once(name: str) -> None:
    schedule = catalogue.build(name, strategies.near(name, 4, 8, 3))
    counted: Counter[tuple[int, int]] = Counter()
    for replica in schedule.first_pipeline:
        for update in range(schedule.num_updates):
            for op in schedule.gradient_ops(replica, update):
                counted[op.stage, op.index] += 1
                assert op.index // schedule.num_microbatches == update
    assert set(counted.values()) == {1}
    assert len(counted) == schedule.num_stages * schedule.num_microbatches * schedule.num_updates


@pytest.mark.combined
@pytest.mark.parametrize("name", strategies.ASYNCHRONOUS)
@pytest.mark.parametrize("scope", UpdateScope)
def test_every_scope_is_valid_and_runs(name: str, scope: UpdateScope) -> None:
    for num_devices in (1, 2, 3, 4, 6, 8):
        schedule = catalogue.build(name, replace(strategies.near(name, num_devices, 8, 4), update_scope=scope))
        validate(schedule)
        for seed in range(3):
            reference.check_one_order(reference.run(schedule, lower(schedule), seed).starts)


# Time


@pytest.mark.parametrize(("scope", "seconds"), [(UpdateScope.STAGE, 24), (UpdateScope.GLOBAL, 38), (UpdateScope.TIED, 24)])
def test_async_1f1b_pays_for_its_scope(scope: UpdateScope, seconds: float) -> None:
    # Without ties, the scope `tied` is that of the stage.
    assert steady(catalogue.build("async-1f1b", ScheduleRequest(8, 8, 9, update_scope=scope))) == seconds


@pytest.mark.parametrize("name", ["async-1f1b", "pipedream-2bw"])
def test_an_update_that_is_deferred_until_all_gradients_are_there_keeps_nobody_waiting(name: str) -> None:
    size = ScheduleRequest(8, 8, 12, update_scope=UpdateScope.GLOBAL)
    at_once = catalogue.build(name, size)
    deferred = defer_updates(at_once, TimedPipelines.of(at_once.pipelines, size))
    validate(deferred)
    assert steady(at_once) == 38
    assert steady(deferred) == 24
    assert metrics(deferred).max_delay == 1
    assert metrics(deferred).max_mismatch == metrics(at_once).max_mismatch
    assert metrics(deferred).peak_in_flight == metrics(at_once).peak_in_flight


def test_async_interleaved_has_no_bubble() -> None:
    for chunks in (1, 2, 3):
        assert steady(catalogue.build("async-interleaved", ScheduleRequest(4, 8, 12, chunks))) == 3 * 8 * chunks
        assert (
            steady(catalogue.build("async-interleaved", ScheduleRequest(4, 8, 12, chunks, update_scope=UpdateScope.GLOBAL)))
            == 3 * 8 * chunks
        )


# Other numbers of devices and pipelines


@pytest.mark.parametrize(
    ("depth", "pipelines", "busy"),
    slow_unless(
        {(2, 1, 1.0), (4, 1, 1.0), (5, 2, 1.0), (6, 3, 0.99), (8, 2, 1.0)},
        [
            *[(2, 1, 1.0), (3, 1, 1.0), (4, 1, 1.0), (5, 2, 1.0), (6, 2, 1.0), (6, 3, 0.99), (7, 3, 0.95), (8, 1, 1.0), (8, 2, 1.0)],
            *[(8, 3, 0.9), (10, 5, 0.9), (12, 2, 1.0), (12, 3, 0.9), (12, 4, 0.99), (16, 2, 1.0), (16, 4, 0.85)],
        ],
    ),
)
def test_searched_orders_keep_devices_busy(depth: int, pipelines: int, busy: float) -> None:
    size = pipelines * -(-4 * depth // pipelines)
    schedule = catalogue.build("amdp", ScheduleRequest(depth, size, 9, num_pipelines=pipelines))
    validate(schedule)
    assert len(set(schedule.pipelines)) == pipelines
    assert 3 * size / steady(schedule) >= busy - 1e-9
    found = metrics(schedule)
    assert (found.max_mismatch, found.max_delay) == (1, 1)
    assert max(found.weight_copies) <= pipelines


def test_fewer_pipelines_hold_fewer_weights_and_more_activations_each() -> None:
    found = [metrics(catalogue.build("amdp", ScheduleRequest(16, 64, 4, num_pipelines=pipelines))) for pipelines in (1, 2, 4, 8)]
    assert [max(each.weight_copies) for each in found] == [1, 2, 4, 8]


@pytest.mark.parametrize("limit", [4, 5, 6])
def test_a_limit_on_activations_is_kept(limit: int) -> None:
    schedule = catalogue.build("amdp", ScheduleRequest(8, 16, 6, max_in_flight=limit))
    validate(schedule)
    assert max(metrics(schedule).peak_in_flight) <= limit


def test_a_limit_that_nothing_keeps_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ScheduleError, match="use --max-in-flight 4") as refusal:
        catalogue.build("amdp", ScheduleRequest(8, 16, max_in_flight=1))
    assert "amdp with 4 pipelines on 8 devices holds at least 4" in refusal.value.problem
    catalogue.build("amdp", ScheduleRequest(8, 16, max_in_flight=4))


def test_a_searched_order_suits_the_times_of_its_stages() -> None:
    times = tuple(StageTimes(1 + stage % 3, 1, 1 + stage % 2) for stage in range(6))
    size = ScheduleRequest(6, 24, 9, num_pipelines=2, times=times)
    line = TimedPipelines.of(catalogue.build("amdp", size).pipelines, size)

    def turn_s(schedule: Schedule) -> float:
        programs = [[op for op in program if isinstance(op, Op) and op.kind is not OpKind.UPDATE] for program in schedule.programs]
        rows = timed(replace(line, pipelines=schedule.pipelines), programs)
        return max(row[-1].end_s for row in rows)

    assert turn_s(catalogue.build("amdp", size)) <= turn_s(catalogue.build("amdp", replace(size, times=())))


# Orders of AMDP's pipelines that are less stale


@pytest.mark.parametrize(
    ("depth", "rounds", "time", "stale"),  # at most, over those of the authors' orders
    slow_unless(
        {(4, 1, 0.97, 0.5), (4, 4, 0.97, 0.2), (8, 4, 1.0, 0.15)},
        [(4, 1, 0.97, 0.5), (4, 4, 0.97, 0.2), (8, 1, 1.0, 0.15), (8, 4, 1.0, 0.15), (12, 2, 1.0, 0.1), (16, 1, 1.03, 0.05)],
    ),
)
def test_amdp_auto_is_about_as_fast_as_amdp_and_far_less_stale(depth: int, rounds: int, time: float, stale: float) -> None:
    schedules = [catalogue.build(name, ScheduleRequest(depth, depth * rounds, max(9, 96 // depth))) for name in ("amdp-auto", "amdp")]
    validate(schedules[0])
    found, published = map(metrics, schedules)
    assert steady(schedules[0]) <= time * steady(schedules[1])
    assert found.mean_delay <= stale * published.mean_delay
    assert max(found.max_mismatch, found.max_delay) <= 1
    assert max(found.peak_in_flight) <= 1.5 * depth
    assert max(found.weight_copies) <= max(published.weight_copies)


def test_amdp_auto_finds_four_devices_an_order_without_a_bubble() -> None:
    schedule = catalogue.build("amdp-auto", ScheduleRequest(4, 16, 9, max_in_flight=4, max_mean_staleness=0.15))
    validate(schedule)
    assert steady(schedule) == pytest.approx(4 * 3 * 4)


@pytest.mark.parametrize(
    ("depth", "pipelines", "number"),
    slow_unless(
        {(4, 2, 2), (6, 3, 6), (5, 3, 6), (3, 2, 4)},
        [(4, 2, 2), (6, 2, 4), (6, 3, 6), (6, 3, 15), (8, 2, 6), (8, 4, 4), (5, 3, 6), (6, 2, 8), (3, 2, 4)],
    ),
)
def test_amdp_auto_keeps_its_limit_in_whole_windows_and_lays_stages_alike(depth: int, pipelines: int, number: int) -> None:
    for scope in (UpdateScope.STAGE, UpdateScope.GLOBAL):
        size = ScheduleRequest(depth, number, 10, num_pipelines=pipelines, update_scope=scope)
        needed = 0.05
        try:
            assert metrics(catalogue.build("amdp-auto", replace(size, max_mean_staleness=0.0))).mean_delay == 0
        except ScheduleError as refusal:
            needed = float(refusal.problem.split("--max-mean-staleness ")[1].split(",")[0])
        for limit in (needed, 1.5 * needed):
            found = catalogue.build("amdp-auto", replace(size, max_mean_staleness=limit))
            validate(found)
            assert metrics(found).mean_delay <= limit
            of_one = catalogue.build("amdp-auto", replace(size, num_updates=1, max_mean_staleness=limit))
            assert of_one.pipelines == found.pipelines
        timed_size = replace(size, times=(StageTimes(1, 1, 1.0001),), latency_s=0.01)
        assert catalogue.build("amdp-auto", timed_size).pipelines == catalogue.build("amdp-auto", size).pipelines


@pytest.mark.parametrize("scope", [UpdateScope.STAGE, UpdateScope.GLOBAL])
def test_amdp_auto_keeps_a_limit_on_the_mean_staleness(scope: UpdateScope) -> None:
    size = ScheduleRequest(4, 4, 12, update_scope=scope)
    loosely = catalogue.build("amdp-auto", size)
    strictly = catalogue.build("amdp-auto", replace(size, max_mean_staleness=0.4))
    validate(strictly)
    assert metrics(strictly).mean_delay <= 0.4 < metrics(catalogue.build("amdp", size)).mean_delay
    assert steady(loosely) <= steady(strictly)
    with pytest.raises(ScheduleError, match=r"at least 0\.\d+ updates old on average.* use --max-mean-staleness 0\.(\d+), more") as refusal:
        catalogue.build("amdp-auto", replace(size, max_mean_staleness=0.01))
    needed = float(refusal.value.problem.split("--max-mean-staleness ")[1].split(",")[0])
    assert metrics(catalogue.build("amdp-auto", replace(size, max_mean_staleness=needed))).mean_delay <= needed
    with pytest.raises(ScheduleError, match="use --max-in-flight 4, or fewer pipelines"):
        catalogue.build("amdp-auto", ScheduleRequest(8, 16, max_in_flight=1))


def test_amdp_auto_is_nearly_as_fast_as_amdp_over_many_updates_of_unequal_stages() -> None:
    # Six blocks a stage, an embedding and a head: some orders by rules go round in several updates, and a few of these say little.
    times = (StageTimes(13.386, 14.657, 12.106), *[StageTimes(13.368, 14.657, 12.08)] * 6, StageTimes(18.643, 19.931, 17.354))
    size = ScheduleRequest(8, 32, 12, num_pipelines=2, times=times, latency_s=0.01)
    seconds = {
        OpKind.FORWARD: [each.forward_s for each in times],
        OpKind.BACKWARD: [each.input_grad_s + each.weight_grad_s for each in times],
    }
    taken_s = {}
    for name in ("amdp", "amdp-auto"):
        ends_s = reference.asap(
            catalogue.build(name, size), lambda op: seconds[op.kind][op.stage] if op.kind in seconds else 0.0, size.latency_s
        ).update_ends_s()
        taken_s[name] = (ends_s[10] - ends_s[1]) / 9
    assert taken_s["amdp-auto"] <= 1.05 * taken_s["amdp"]


def test_amdp_auto_suits_the_times_of_its_stages() -> None:
    times = tuple(StageTimes(1 + stage % 2, 1, 1 + stage % 3) for stage in range(4))
    size = ScheduleRequest(4, 16, 6)
    seconds = {
        OpKind.FORWARD: [each.forward_s for each in times],
        OpKind.BACKWARD: [each.input_grad_s + each.weight_grad_s for each in times],
    }

    def duration_s(op: Op) -> float:
        return seconds[op.kind][op.stage] if op.kind in seconds else 0.0

    schedules = [catalogue.build("amdp-auto", replace(size, times=given)) for given in (times, ())]
    assert schedules[0].pipelines == schedules[1].pipelines
    ends = [reference.asap(schedule, duration_s).makespan_s for schedule in schedules]
    assert ends[0] <= 1.05 * ends[1]


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        ("amdp", ScheduleRequest(8, 12), "rounds of 8 microbatches, got 12 an update; use --microbatches 8 or --microbatches 16"),
        (
            "amdp",
            ScheduleRequest(6, 7),
            "as many microbatches for each of its 3 pipelines, got 7 an update; use --microbatches 6 or --microbatches 9",
        ),
        ("amdp", ScheduleRequest(4, 8, num_pipelines=5), "at most one pipeline on each of 4 devices, got 5; use --pipelines 4"),
        ("amdp-flush", ScheduleRequest(4, 6), "rounds of 4 microbatches"),
        (
            "amdp-auto",
            ScheduleRequest(6, 7),
            "as many microbatches for each of its 3 pipelines, got 7 an update; use --microbatches 6 or --microbatches 9",
        ),
        ("amdp-auto", ScheduleRequest(4, 8, num_pipelines=5), "at most one pipeline on each of 4 devices, got 5; use --pipelines 4"),
        ("pipedream", ScheduleRequest(4, 2), "use --microbatches 1, or the schedule 'pipedream-2bw'"),
        ("pipedream-2bw", ScheduleRequest(8, 4), "at least 7 microbatches an update on 8 devices, got 4; use --microbatches 7"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused_with_the_nearest_that_can(name: str, size: ScheduleRequest, problem: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        catalogue.build(name, size)
    assert problem in refusal.value.problem


def test_deferring_leaves_the_order_of_computation_alone() -> None:
    size = ScheduleRequest(4, 4, 5, update_scope=UpdateScope.GLOBAL)
    schedule = catalogue.build("async-1f1b", size)
    deferred = defer_updates(schedule, TimedPipelines.of(schedule.pipelines, size))
    for before, after in zip(schedule.programs, deferred.programs, strict=True):
        assert [op for op in before if isinstance(op, Op) and op.kind is not OpKind.UPDATE] == [
            op for op in after if isinstance(op, Op) and op.kind is not OpKind.UPDATE
        ]
        assert Counter(before) == Counter(after)
    assert deferred.weight_rule is WeightRule.LIVE
    assert StageReplica(0, 0) in deferred.first_pipeline


@pytest.mark.parametrize(("name", "late"), [("pipedream-2bw", [1.0, 1.0, 1.0, 1.0]), ("async-1f1b", [0.75, 0.5, 0.25, 0.0])])
def test_the_mean_delay_of_each_stage_and_update(name: str, late: list[float]) -> None:
    found = mean_delays(catalogue.build(name, ScheduleRequest(4, 4, 3)))
    assert [found.get((stage, 1), 0.0) for stage in range(4)] == late
    assert not any(update == 0 for _, update in found), "a window begins with nothing late"


def test_stages_that_share_a_weight_have_the_mean_of_their_delays() -> None:
    schedule = catalogue.build("async-1f1b", ScheduleRequest(4, 4, 3))
    alone = mean_delays(schedule)
    together = mean_delays(replace(schedule, graph=replace(schedule.graph, ties=((0, 3),))))
    assert together[0, 1] == together[3, 1] == (alone[0, 1] + 0.0) / 2
    assert together[1, 1] == alone[1, 1]


def test_synchronous_orders_have_no_delays() -> None:
    assert mean_delays(catalogue.build("1f1b", ScheduleRequest(4, 4, 3))) == {}
