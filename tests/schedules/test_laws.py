"""What holds for every registered schedule, at every size that it accepts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError, UnknownNameError
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import CollectiveKind
from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope, WeightRule, dependencies, ops_of
from raypipe.schedules.lower import lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import evaluation
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.validate import validate
from tests import strategies
from tests.marks import slow_unless
from tests.schedules import reference

TIMES = [StageTimes(1, 1, 1), StageTimes(1, 1, 0.5), StageTimes(2, 2, 1), StageTimes(3, 4, 2), StageTimes(1, 3, 1), StageTimes(2, 1, 3)]
SPECS = pytest.mark.parametrize("spec", [pytest.param(spec, id=spec.name) for spec in catalogue.SPECS])
SIZE_FIELDS = ("num_devices", "num_microbatches", "num_updates", "num_chunks")
SYNCHRONOUS = pytest.mark.parametrize(
    "spec", [pytest.param(spec, id=spec.name) for spec in catalogue.SPECS if spec.weight_rule is WeightRule.FLUSH]
)
DEVICES = pytest.mark.parametrize("num_devices", slow_unless({1, 2, 3, 4, 6}, range(1, 9)))


def all_sizes(spec: ScheduleSpec, num_devices: int) -> Iterator[ScheduleRequest]:
    """Sizes that the family takes and some that it does not, with 1 to 3 updates."""
    most = sorted({1, 2, 3, 5, num_devices - 1, num_devices, num_devices + 1, 13, 2 * num_devices, 20})
    for num_chunks in (1, 2, 3) if num_devices <= 4 else (1, 3):
        for num_microbatches in range(1, 21) if num_devices <= 4 else most:
            yield ScheduleRequest(num_devices, num_microbatches, 1 + num_microbatches % 3, num_chunks)
    for num_pipelines in range(1, num_devices + 2):
        for num_microbatches in (1, num_devices + 1, 4 * num_devices, 2 * num_pipelines):
            yield ScheduleRequest(num_devices, num_microbatches, 1 + num_microbatches % 3, spec.default_chunks, num_pipelines)


@cache
def built(spec: ScheduleSpec, size: ScheduleRequest) -> Schedule:
    """Made once for all tests: searches take seconds."""
    return catalogue.build(spec.name, size)


def accepted(spec: ScheduleSpec, num_devices: int) -> Iterator[tuple[ScheduleRequest, Schedule]]:
    for size in all_sizes(spec, num_devices):
        if strategies.takes(spec.name, size):
            yield size, built(spec, size)


def one_update(schedule: Schedule, update: int) -> list[list[tuple[Op, ...]]]:
    """The slots of an update, with its indices counted from 0."""
    size = schedule.num_microbatches
    return [
        [
            tuple(op._replace(index=op.index - update * (1 if op.kind.per_update else size)) for op in ops_of(slot))
            for slot in program
            if schedule.update(ops_of(slot)[0]) == update
        ]
        for program in schedule.programs
    ]


@SPECS
@DEVICES
def test_every_size_is_valid_or_refused_with_what_would_work(spec: ScheduleSpec, num_devices: int) -> None:
    for size in all_sizes(spec, num_devices):
        if strategies.takes(spec.name, size):
            validate(built(spec, size))
        else:
            with pytest.raises(ScheduleError, match=r"use |leave ") as refusal:
                catalogue.build(spec.name, size)
            assert spec.name in refusal.value.problem


@SPECS
@pytest.mark.parametrize("what", SIZE_FIELDS)
def test_a_size_of_zero_is_refused(spec: ScheduleSpec, what: str) -> None:
    with pytest.raises(ScheduleError, match=f"{what} must be at least 1, got 0"):
        catalogue.build(spec.name, replace(ScheduleRequest(2, 2), **{what: 0}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(strategies.SPEC_NAMES) - {*strategies.BIDIRECTIONAL, *strategies.AMDPS}))
def test_several_pipelines_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="leave --pipelines out"):
        catalogue.build(name, replace(strategies.near(name, 4, 4), num_pipelines=2))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean '1f1b'"):
        catalogue.build("1f1", ScheduleRequest(2, 2))


def test_names_are_unique() -> None:
    assert len({spec.name for spec in catalogue.SPECS}) == len(catalogue.SPECS)


@SPECS
@DEVICES
def test_each_stage_and_microbatch_is_computed_exactly_once(spec: ScheduleSpec, num_devices: int) -> None:
    for size, schedule in accepted(spec, num_devices):
        counts = Counter(op for op, _ in schedule.ops())
        assert set(counts.values()) == {1}
        assert schedule.num_stages == size.num_devices * size.num_chunks
        assert len(schedule.pipelines) == strategies.num_pipelines(spec.name, size)
        work = {(stage, index) for stage in range(schedule.num_stages) for index in range(size.num_microbatches * size.num_updates)}
        copies: dict[tuple[int, int], int] = {}  # pipelines that lay a stage on the same worker share its copy there
        for pipeline, workers in enumerate(schedule.pipelines):
            for stage, worker in enumerate(workers):
                copies.setdefault((stage, worker), pipeline)
        assert spec.name in strategies.AMDPS or len(copies) == schedule.num_stages * len(schedule.pipelines)
        parts: dict[tuple[OpKind, int, int], set[int]] = {}
        pipelines_of: dict[int, set[int]] = {}
        updates: set[tuple[int, int, int]] = set()
        for op in counts:
            if op.kind is OpKind.UPDATE:
                updates.add((op.stage, op.pipeline, op.index))
                assert not op.part
            else:
                parts.setdefault(op[:3], set()).add(op.part)
                pipelines_of.setdefault(op.index, set()).add(op.pipeline)
        assert updates == {(stage, first, update) for (stage, _), first in copies.items() for update in range(size.num_updates)}
        assert set(map(frozenset, parts.values())) == {frozenset({1, 2} if spec.name in strategies.DIVIDED else {0})}
        assert all(len(passed) == 1 for passed in pipelines_of.values())
        kinds: dict[OpKind, set[tuple[int, int]]] = {}
        for kind, stage, index in parts:
            kinds.setdefault(kind, set()).add((stage, index))
        assert kinds.keys() <= {OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT}
        assert kinds[OpKind.FORWARD] == work
        backward = kinds.get(OpKind.BACKWARD, set())
        assert kinds.get(OpKind.INPUT_GRADIENT, set()) == kinds.get(OpKind.WEIGHT_GRADIENT, set()) == work - backward


@SPECS
@DEVICES
def test_pipelines_share_the_microbatches_and_the_devices_evenly(spec: ScheduleSpec, num_devices: int) -> None:
    for size, schedule in accepted(spec, num_devices):
        passed = Counter(op.pipeline for op, _ in schedule.ops() if op.kind is OpKind.FORWARD and op.stage == 0 and op.part <= 1)
        shares = [passed[pipeline] / size.num_updates for pipeline in range(len(schedule.pipelines))]
        assert max(shares) - min(shares) <= 1
        for workers in schedule.pipelines:
            assert set(Counter(workers).values()) == {size.num_chunks}


@SPECS
@DEVICES
def test_no_worker_holds_more_activations_than_stated(spec: ScheduleSpec, num_devices: int) -> None:
    for size, schedule in accepted(spec, num_devices):
        peak = [Fraction(0)] * num_devices
        for worker, program in enumerate(schedule.programs):
            held = Fraction(0)
            for slot in program:
                held += sum(share(spec) for op in ops_of(slot) if op.kind is OpKind.FORWARD)
                peak[worker] = max(peak[worker], held)
                held -= sum(share(spec) for op in ops_of(slot) if op.kind in reference.GRADIENTS)
        assert metrics(schedule).peak_in_flight == tuple(map(math.ceil, peak))
        for worker, most in enumerate(peak):
            assert most <= spec.peak_in_flight(size, worker)


def share(spec: ScheduleSpec) -> Fraction:
    """How much of its microbatch an Op of a family works on."""
    return Fraction(1, 2 if spec.name in strategies.DIVIDED else 1)


@SPECS
def test_the_stated_bound_on_activations_is_reached_with_many_microbatches(spec: ScheduleSpec) -> None:
    for num_devices in range(1, 7):
        for num_pipelines in strategies.pipelines(spec.name, num_devices):
            size = replace(strategies.near(spec.name, num_devices, 4 * num_devices), num_pipelines=num_pipelines)
            # As much as devices without bubbles need: an order that is searched for their sake uses it up.
            size = replace(size, max_in_flight=2 * num_devices - 1, update_scope=UpdateScope.STAGE)
            if strategies.takes(spec.name, size) and spec.name != strategies.BRANCHED:  # counts no activations of the loss
                bound = [spec.peak_in_flight(size, worker) for worker in range(num_devices)]
                assert max(metrics(catalogue.build(spec.name, size)).peak_in_flight) == max(bound)


@SYNCHRONOUS
@DEVICES
def test_synchronous_families_are_never_stale_and_hold_one_version(spec: ScheduleSpec, num_devices: int) -> None:
    for size, schedule in accepted(spec, num_devices):
        found = metrics(schedule)
        assert (found.max_mismatch, found.max_delay) == (0, 0)
        copies = size.num_chunks * strategies.num_pipelines(spec.name, size)
        assert all(held == copies or (held < copies and spec.name in strategies.AMDPS) for held in found.weight_copies)
        assert (spec.mismatch, spec.delay) == ("0", "0")


@SYNCHRONOUS
@DEVICES
def test_every_update_has_the_same_order(spec: ScheduleSpec, num_devices: int) -> None:
    for size, schedule in accepted(spec, num_devices):
        for update in range(1, size.num_updates):
            assert one_update(schedule, update) == one_update(schedule, 0)


@SPECS
@pytest.mark.parametrize("num_devices", slow_unless({4}, range(1, 9)))
@pytest.mark.parametrize("scope", [UpdateScope.GLOBAL, UpdateScope.STAGE])
def test_lowered_programs_run_to_the_end_however_devices_interleave(spec: ScheduleSpec, num_devices: int, scope: UpdateScope) -> None:
    for size in all_sizes(spec, num_devices):
        if size.num_microbatches % 2 == (scope is UpdateScope.GLOBAL) and strategies.takes(spec.name, size):
            scoped = built(spec, replace(size, update_scope=scope))
            programs = lower(scoped)
            for seed in (size.num_microbatches, 1000 + size.num_chunks):
                reference.check_one_order(reference.run(scoped, programs, seed).starts)


@SPECS
def test_only_a_global_scope_meets_for_a_norm(spec: ScheduleSpec) -> None:
    for scope in UpdateScope:
        schedule = catalogue.build(spec.name, replace(strategies.near(spec.name, 3, 6, 2), update_scope=scope))
        starts = reference.run(schedule, lower(schedule)).starts
        # Where pipelines give stages several copies, these sum their gradients first.
        sums = [(CollectiveKind.GRADIENTS, update) for update in range(2) for _ in range(len(schedule.pipelines))]
        norms = [(CollectiveKind.NORM, 0), (CollectiveKind.NORM, 1)] if scope is UpdateScope.GLOBAL else []
        expected = sorted(norms + (sums if len(schedule.pipelines) > 1 else []), key=lambda met: (met[1], met[0] is CollectiveKind.NORM))
        for started in starts.values():
            assert [(collective.kind, collective.update) for collective in started] == expected


@SPECS
@DEVICES
def test_the_makespan_is_its_closed_form(spec: ScheduleSpec, num_devices: int) -> None:
    for size in all_sizes(spec, num_devices):
        for times in TIMES[size.num_microbatches % 2 :: 2]:
            single = replace(size, num_updates=1, times=(times,))
            if strategies.takes(spec.name, size) and (stated := spec.makespan_s(single, times)) is not None:
                schedule = catalogue.build(spec.name, single)
                timing = reference.asap(schedule, reference.durations(times.forward_s, times.input_grad_s, times.weight_grad_s))
                assert timing.makespan_s == pytest.approx(stated), (size, times)


@SPECS
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_closed_form_is_stated_for_usual_sizes(spec: ScheduleSpec, num_devices: int) -> None:
    if spec.name in {"amdp-auto", strategies.BRANCHED} or (spec.name in strategies.AMDPS and num_devices % 4):
        pytest.skip("orders that are searched for have none")
    size = strategies.near(spec.name, num_devices, 4 * num_devices)
    for times in TIMES[:4]:
        assert spec.makespan_s(replace(size, times=(times,)), times) is not None


@SPECS
def test_no_makespan_is_below_what_the_busiest_device_and_the_way_there_need(spec: ScheduleSpec) -> None:
    for num_devices in (1, 3, 4):
        for size, schedule in accepted(spec, num_devices):
            if size.num_updates == 1:
                makespan_s = reference.asap(schedule, reference.durations(1, 1, 1)).makespan_s
                work_s = 3 * size.num_microbatches * size.num_chunks
                ways = [min(workers.index(worker) for workers in schedule.pipelines) for worker in range(num_devices)]
                assert makespan_s >= work_s + max(ways)
                if len(schedule.pipelines) == 1:
                    assert max(ways) == num_devices - 1


@SPECS
@given(data=st.data())
@settings(max_examples=25)
def test_what_each_op_depends_on_stands_before_it_in_time(spec: ScheduleSpec, data: st.DataObject) -> None:
    size = data.draw(strategies.sizes(spec.name, max_devices=5, max_microbatches=8))
    schedule = catalogue.build(spec.name, size)
    timing = reference.asap(schedule, reference.durations(1, 1, 1))
    for op, _ in schedule.ops():
        assert all(timing.spans[needed][1] <= timing.spans[op][0] for needed in dependencies(schedule, op))


@SPECS
@DEVICES
def test_evaluation_is_forward_only_valid_and_runs(spec: ScheduleSpec, num_devices: int) -> None:
    for size, schedule in accepted(spec, num_devices):
        if size.num_microbatches % 3 == 0:
            forward = evaluation(schedule, num_microbatches=size.num_microbatches + 1)
            assert forward.forward_only
            assert not schedule.forward_only
            validate(forward)
            programs = lower(forward)
            reference.run(forward, programs, seed=size.num_microbatches)
            assert metrics(forward).peak_in_flight == (1,) * num_devices


@given(schedule=strategies.random_schedules(), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_schedules_by_chance_are_valid_and_run_once_lowered(schedule: Schedule, seed: int) -> None:
    validate(schedule)
    metrics(schedule)
    reference.check_one_order(reference.run(schedule, lower(schedule), seed).starts)


@pytest.mark.parametrize("name", sorted(strategies.HANDWRITTEN))
@pytest.mark.parametrize("scope", UpdateScope)
def test_schedules_by_hand_are_valid_and_run_once_lowered(name: str, scope: UpdateScope) -> None:
    schedule = replace(strategies.HANDWRITTEN[name](), update_scope=scope)
    validate(schedule)
    for seed in range(5):
        reference.check_one_order(reference.run(schedule, lower(schedule), seed).starts)


# Bubble rates of the zero-bubble paper (Qi et al., ICLR 2024, arXiv 2401.10241, tables 5 and 9), in ms: model, devices,
# microbatches, T_F, T_B, T_W, T_comm and the rates of 1F1B, ZB-H1 and ZB-H2.
PAPER = [
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), {"1f1b": 0.2646, "zb-h1": 0.1421, "zb-h2": 0.0641}),
]


@pytest.mark.parametrize(("num_devices", "num_microbatches", "times", "rates"), [pytest.param(*row[1:], id=row[0]) for row in PAPER])
def test_bubble_rates_are_those_of_the_zero_bubble_paper(
    num_devices: int, num_microbatches: int, times: tuple[float, ...], rates: dict[str, float]
) -> None:
    forward, input_grad, weight_grad, latency = times
    for name, rate in rates.items():
        schedule = catalogue.build(name, ScheduleRequest(num_devices, num_microbatches, update_scope=UpdateScope.STAGE))
        timing = reference.asap(schedule, reference.durations(forward, input_grad, weight_grad), latency)
        assert round(timing.bubble_rate, 4) == rate, name


@pytest.mark.parametrize(
    ("name", "times", "idle"),
    [
        ("zb-h1", (1, 1, 1), [3, 2, 1, 0]),
        ("zb-h1", (2, 2, 1), [9, 6, 3, 0]),
        ("zb-h1", (3, 4, 2), [15, 10, 5, 0]),
        ("zb-h2", (1, 1, 1), [0, 0, 0, 0]),
        ("zb-h2", (2, 2, 1), [6, 4, 2, 0]),
        ("zb-h2", (3, 4, 2), [9, 6, 3, 0]),
    ],
)
def test_zero_bubble_devices_are_idle_as_the_paper_says(name: str, times: tuple[int, int, int], idle: list[int]) -> None:
    timing = reference.asap(catalogue.build(name, ScheduleRequest(4, 12)), reference.durations(*times))
    assert [timing.idle_s(worker) for worker in range(4)] == idle


@pytest.mark.parametrize(
    ("name", "num_chunks", "makespan_s", "busy_s"), [("1f1b", 1, 33, 24), ("gpipe", 1, 33, 24), ("interleaved", 2, 57, 48)]
)
def test_makespans_are_the_known_ones_for_four_devices_and_eight_microbatches(
    name: str, num_chunks: int, makespan_s: int, busy_s: int
) -> None:
    timing = reference.asap(catalogue.build(name, ScheduleRequest(4, 8, num_chunks=num_chunks)), reference.durations(1, 1, 1))
    assert timing.makespan_s == makespan_s
    assert [timing.busy_s(worker) for worker in range(4)] == [busy_s] * 4


def test_interleaving_four_devices_and_two_chunks_holds_11_9_7_and_5_activations() -> None:
    assert metrics(catalogue.build("interleaved", ScheduleRequest(4, 8, num_chunks=2))).peak_in_flight == (11, 9, 7, 5)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 4), (4, 8), (4, 12), (6, 12)])
def test_zb_h2_loses_no_time_between_updates_of_scope_stage(num_devices: int, num_microbatches: int) -> None:
    schedule = catalogue.build("zb-h2", ScheduleRequest(num_devices, num_microbatches, 6, update_scope=UpdateScope.STAGE))
    ends = reference.asap(schedule, reference.durations(1, 1, 1)).update_ends_s()
    assert [later - end for end, later in itertools.pairwise(ends)] == [3 * num_microbatches] * 5


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_updates_of_scope_global_cost_a_whole_makespan_each(name: str) -> None:
    single = reference.asap(catalogue.build(name, ScheduleRequest(4, 12)), reference.durations(1, 1, 1)).makespan_s
    ends = reference.asap(catalogue.build(name, ScheduleRequest(4, 12, 6)), reference.durations(1, 1, 1)).update_ends_s()
    assert ends == [single * (update + 1) for update in range(6)]


def test_the_bubble_of_1f1b_is_that_of_its_formula() -> None:
    for num_devices in range(1, 9):
        for num_microbatches in (num_devices, 3 * num_devices):
            timing = reference.asap(catalogue.build("1f1b", ScheduleRequest(num_devices, num_microbatches)), reference.durations(1, 1, 1))
            assert math.isclose(timing.bubble_rate, (num_devices - 1) / (num_microbatches + num_devices - 1), abs_tol=1e-12)
