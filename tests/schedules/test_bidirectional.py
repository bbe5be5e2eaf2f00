"""Chimera and DualPipe against their papers' figures, against schedules by hand, and against each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from raypipe.artifacts.trace import SpanKind, Trace
from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, ops_of
from raypipe.schedules.lower import lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.reductions import add_reductions
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs
from tests import strategies
from tests.schedules import handwritten, reference


def build(name: str, num_devices: int, num_microbatches: int, num_pipelines: int = 0, num_updates: int = 1) -> Schedule:
    chunks = catalogue.spec(name).default_chunks
    return catalogue.build(name, ScheduleRequest(num_devices, num_microbatches, num_updates, chunks, num_pipelines))


def run(schedule: Schedule, forward_s: float, backward_s: float, weight_grad_s: float = 0.5, *, overlapped_s: float | None = None) -> Trace:
    cost = equal_stages(schedule, forward_s=forward_s, backward_s=backward_s, weight_grad_s=weight_grad_s)
    if overlapped_s is not None:
        cost = replace(cost, overlap_s=lambda _: overlapped_s)
    return simulate_programs(lower(schedule), cost, name=schedule.name)


def makespan_s(name: str, num_devices: int, num_microbatches: int, num_pipelines: int = 0, *, backward_s: float = 2) -> float:
    return run(build(name, num_devices, num_microbatches, num_pipelines), 1, backward_s).makespan_s


# Chimera


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "num_pipelines", "with_equal_s", "with_double_s"),
    [
        (4, 4, 2, 10, 16),
        (8, 8, 2, 22, 36),
        (16, 16, 2, 46, 76),
        (4, 8, 2, 18, 30),
        (4, 16, 2, 34, 58),
        (8, 16, 2, 38, 66),
        (8, 32, 2, 70, 126),
        (8, 8, 4, 18, 28),
        (8, 8, 8, 16, 24),
        (16, 16, 4, 38, 60),
        (16, 16, 8, 34, 52),
    ],
)
def test_chimera_takes_the_time_of_its_slots(
    num_devices: int, num_microbatches: int, num_pipelines: int, with_equal_s: int, with_double_s: int
) -> None:
    for backward_s, expected_s in ((1, with_equal_s), (2, with_double_s)):
        assert makespan_s("chimera", num_devices, num_microbatches, num_pipelines, backward_s=backward_s) == expected_s


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8, 12])
def test_the_bubble_of_chimera_is_the_papers(num_devices: int) -> None:
    """(D - 2f) / (2fN + D - 2f) for f pairs of pipelines and F = B; and D F + (2D - 2) B for two pipelines and N = D."""
    for pairs, units in itertools.product(range(1, num_devices // 2 + 1), (1, 3)):
        if num_devices // 2 % pairs == 0:
            trace = run(build("chimera", num_devices, units * num_devices, 2 * pairs), 1, 1)
            outside = num_devices - 2 * pairs
            ratio = outside / (2 * pairs * units * num_devices + outside)
            assert 1 - min(trace.busy_s) / trace.makespan_s == pytest.approx(ratio, abs=1e-12)
    for backward_s in (1, 1.5, 2, 3):
        assert makespan_s("chimera", num_devices, num_devices, backward_s=backward_s) == num_devices + (2 * num_devices - 2) * backward_s


def test_chimera_with_as_many_pipelines_as_devices_has_no_bubbles() -> None:
    for name, num_devices, units in itertools.product(strategies.CHIMERAS, (2, 4, 6, 8), (1, 2)):
        trace = run(build(name, num_devices, 2 * units * num_devices, num_devices), 1, 2)
        assert trace.busy_s == (trace.makespan_s,) * num_devices


def test_chimera_holds_the_activations_of_its_paper() -> None:
    """Between D/2 + 1 and D with two pipelines, between D - D/(2f) + 1 and D with 2f."""
    for num_microbatches in (8, 24):
        assert metrics(build("chimera", 8, num_microbatches)).peak_in_flight == (5, 6, 7, 8, 8, 7, 6, 5)
        assert metrics(build("chimera", 8, num_microbatches, 4)).peak_in_flight == (7, 8, 8, 7, 7, 8, 8, 7)
        assert metrics(build("chimera-halving", 8, num_microbatches)).peak_in_flight == (7, 7, 8, 8, 8, 8, 7, 7)
    assert metrics(build("chimera-doubling", 8, 32)).peak_in_flight == (13, 14, 15, 16, 16, 15, 14, 13)


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8])
def test_a_unit_of_chimera_is_the_order_written_by_hand(num_devices: int) -> None:
    """Which counts the microbatches of one pipeline first and then those of the other."""
    schedule = build("chimera", num_devices, num_devices)
    expected = handwritten.opposite_pipelines(num_devices)
    numbers = {2 * k + pipeline: pipeline * num_devices // 2 + k for pipeline in range(2) for k in range(num_devices // 2)}

    def computed(programs: Sequence[Sequence[Slot]]) -> list[list[Op]]:
        return [[op for slot in program for op in ops_of(slot) if op.kind is not OpKind.UPDATE] for program in programs]

    ours = [[op._replace(index=numbers[op.index]) for op in row] for row in computed(schedule.programs)]
    assert schedule.pipelines == expected.pipelines
    assert ours == computed(expected.programs)


def test_pairs_of_pipelines_start_evenly_spread_over_the_devices() -> None:
    assert build("chimera", 8, 8, 4).pipelines == (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (7, 6, 5, 4, 3, 2, 1, 0),
        (4, 5, 6, 7, 0, 1, 2, 3),
        (3, 2, 1, 0, 7, 6, 5, 4),
    )
    assert [workers[0] for workers in build("chimera", 6, 6, 6).pipelines] == [0, 5, 2, 3, 4, 1]


@pytest.mark.parametrize("num_devices", [4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_doubled_forwards_and_halved_backwards_leave_no_bubbles_between_units(num_devices: int, units: int) -> None:
    """With B = 2F: as much idle time for any number of units, and less than 1F1B; direct concatenation has D - 2 more for each."""
    num_microbatches = 2 * num_devices * units
    idle_s = {name: makespan_s(name, num_devices, num_microbatches) - 3 * num_microbatches for name in (*strategies.CHIMERAS, "1f1b")}
    assert idle_s == {
        "chimera": (num_devices - 2) * (2 * units + 1),
        "chimera-doubling": 2 * (num_devices - 2),
        "chimera-halving": num_devices - 2,
        "1f1b": 3 * (num_devices - 1),
    }


@pytest.mark.parametrize("name", strategies.CHIMERAS)
@pytest.mark.parametrize("num_pipelines", [2, 4, 8])
def test_slots_of_equal_length_run_in_step(name: str, num_pipelines: int) -> None:
    """Each starts at a whole number, and there are 2D/P - 2 of these at which a device has nothing to do, for any number of units."""
    forward_s, backward_s = {"chimera": (1, 1), "chimera-doubling": (0.5, 1), "chimera-halving": (1, 2)}[name]
    for units in (1, 2, 3):
        trace = run(build(name, 8, 16 * units, num_pipelines), forward_s, backward_s)
        for row in trace.by_device:
            spans = [span for span in row if span.kind is SpanKind.COMPUTE and span.end_s > span.start_s]
            assert all(span.start_s.is_integer() and span.end_s == span.start_s + 1 for span in spans)
            assert trace.makespan_s == len(spans) + 16 // num_pipelines - 2


def test_doubled_forwards_are_of_two_microbatches_and_halves_of_one() -> None:
    def forwards(name: str) -> list[str]:
        return [str(slot) for slot in build(name, 4, 5).programs[0] if ops_of(slot)[0].kind is OpKind.FORWARD]

    assert forwards("chimera-doubling") == ["(0F0;0F2)", "0F4", "(3F1@1;3F3@1)"]
    assert forwards("chimera-halving")[:2] == ["(0F0.1;0F0.2)", "(0F2.1;0F2.2)"]


@pytest.mark.parametrize(
    ("name", "full"), [("chimera", 16), ("chimera-doubling", 16), ("chimera-halving", 16), ("dualpipe", 8), ("dualpipe-v", 8)]
)
def test_fewer_microbatches_are_the_order_of_more_without_the_last(name: str, full: int) -> None:
    for num_microbatches in range(1, full):
        programs: Sequence[Sequence[Slot]] = build(name, 4, full).programs
        for op in build(name, 4, full).places:
            if op.kind is not OpKind.UPDATE and op.index >= num_microbatches:
                programs = strategies.without(programs, op)
        assert build(name, 4, num_microbatches).programs == tuple(map(tuple, programs))


# DualPipe


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches", "expected_s", "busy_s"),
    [("dualpipe", 8, 20, 132, 120), ("dualpipe", 16, 40, 268, 240), ("dualpipe-v", 4, 10, 132, 120), ("dualpipe-v", 8, 20, 268, 240)],
)
def test_dualpipe_takes_the_published_time(name: str, num_devices: int, num_microbatches: int, expected_s: int, busy_s: int) -> None:
    """F, B, W and F&B are 2, 4, 2 and 6."""
    trace = run(build(name, num_devices, num_microbatches), 2, 4, 2)
    assert trace.makespan_s == expected_s
    assert trace.busy_s == (busy_s,) * num_devices


@pytest.mark.parametrize(("name", "num_devices", "num_microbatches"), [("dualpipe", 8, 20), ("dualpipe-v", 4, 10)])
def test_dualpipe_gains_where_ops_that_overlap_take_less_time(name: str, num_devices: int, num_microbatches: int) -> None:
    """F, B, W and F&B are 2, 4, 2 and 5: the bubble is (D/2 - 1)(F&B + B - 3W) = 9."""
    trace = run(build(name, num_devices, num_microbatches), 2, 4, 2, overlapped_s=5)
    assert trace.makespan_s == 118
    assert trace.makespan_s - min(trace.busy_s) == 9


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8, 12])
@pytest.mark.parametrize(("forward_s", "backward_s", "weight_grad_s"), [(1, 2, 1), (2, 4, 2), (2, 3, 1), (1, 1.5, 0.5)])
def test_the_bubble_of_dualpipe_is_the_published_one(num_devices: int, forward_s: float, backward_s: float, weight_grad_s: float) -> None:
    """(D/2 - 1)(F&B + B - 3W), where F takes as long as I."""
    for num_microbatches in (2 * num_devices, 2 * num_devices + 6):
        trace = run(build("dualpipe", num_devices, num_microbatches), forward_s, backward_s, weight_grad_s)
        bubble_s = (num_devices / 2 - 1) * (forward_s + 2 * backward_s - 3 * weight_grad_s)
        assert trace.makespan_s - trace.busy_s[0] == pytest.approx(bubble_s)


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8, 10])
def test_both_dualpipes_hold_one_activation_more_than_there_are_stages(num_devices: int) -> None:
    assert metrics(build("dualpipe", num_devices, 2 * num_devices)).peak_in_flight == (num_devices + 1,) * num_devices
    assert metrics(build("dualpipe-v", num_devices // 2, num_devices)).peak_in_flight == (num_devices + 1,) * (num_devices // 2)


@pytest.mark.parametrize("half", [1, 2, 3, 4])
def test_dualpipe_v_is_the_first_half_of_dualpipe(half: int) -> None:
    """Its two passes of a device are what DualPipe's device runs in each direction."""
    whole = build("dualpipe", 2 * half, 4 * half + 2)
    folded = build("dualpipe-v", half, 2 * half + 1)
    for worker in range(half):
        alike = [tuple(op._replace(index=op.index // 2, pipeline=0) for op in ops_of(slot)) for slot in whole.programs[worker]]
        expected = [ops for ops in alike if ops[0].kind is not OpKind.UPDATE]
        assert [ops_of(slot) for slot in folded.programs[worker] if ops_of(slot)[0].kind is not OpKind.UPDATE] == expected


def test_forwards_and_backwards_that_overlap_are_of_different_microbatches() -> None:
    for name, num_devices in (("dualpipe", 8), ("dualpipe-v", 4)):
        schedule = build(name, num_devices, 20)
        shared = [slot.ops for program in schedule.programs for slot in program if isinstance(slot, Overlap)]
        assert shared
        for forward, backward in shared:
            assert (forward.kind, backward.kind) == (OpKind.FORWARD, OpKind.BACKWARD)
            assert (forward.stage, forward.index) != (backward.stage, backward.index)


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8])
def test_dualpipe_with_few_microbatches_is_no_slower_than_1f1b_and_chimera(num_devices: int) -> None:
    for num_microbatches in range(1, 2 * num_devices + 2):
        found_s = {name: makespan_s_of_thirds(name, num_devices, num_microbatches) for name in ("dualpipe", "1f1b", "chimera")}
        assert found_s["dualpipe"] == min(found_s.values())


def makespan_s_of_thirds(name: str, num_devices: int, num_microbatches: int) -> float:
    """With F = I = W."""
    return reference.asap(build(name, num_devices, num_microbatches), reference.durations(1, 1, 1)).makespan_s


# Copies of a stage


def reductions(schedule: Schedule) -> list[list[int]]:
    """The stages that each worker reduces, in order."""
    return [
        [op.stage for slot in program for op in ops_of(slot) if op.kind is OpKind.REDUCE] for program in add_reductions(schedule).programs
    ]


@pytest.mark.parametrize("name", strategies.BIDIRECTIONAL)
def test_copies_are_reduced_right_behind_their_last_gradient_where_pipelines_have_equally_many_microbatches(name: str) -> None:
    for num_devices in (2, 4, 8):
        schedule = add_reductions(build(name, num_devices, 4 * num_devices))
        for program in schedule.programs:
            for before, slot in itertools.pairwise(program):
                if isinstance(slot, Op) and slot.kind is OpKind.REDUCE:
                    gradient = ops_of(before)[-1]
                    assert gradient.kind in reference.GRADIENTS
                    assert (gradient.stage, gradient.pipeline) == (slot.stage, slot.pipeline)


def test_copies_whose_last_gradients_come_in_different_orders_are_reduced_in_one() -> None:
    """The fifth microbatch runs down: worker 0 ends with stage 0, worker 3 with stage 3, and both hold both."""
    schedule = build("chimera", 4, 5)
    last = [
        [
            max(schedule.places[op].position for op in schedule.gradient_ops(replica, 0))
            for replica in schedule.first_pipeline
            if replica.worker == at
        ]
        for at in (0, 3)
    ]
    assert last[0][0] > last[0][1]
    assert last[1][0] > last[1][1]
    orders = reductions(schedule)
    assert orders[0] == orders[3]
    assert orders[1] == orders[2]
    assert [sorted(order) for order in orders] == [[0, 3], [1, 2], [1, 2], [0, 3]]


def test_a_pipeline_without_microbatches_takes_part_in_the_reductions() -> None:
    for name, num_devices in itertools.product(strategies.BIDIRECTIONAL, (2, 4)):
        schedule = build(name, num_devices, 1, num_updates=2)
        validate(schedule)
        assert all(len(row) == 4 for row in reductions(schedule))


# Refusals


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        (
            "chimera",
            ScheduleRequest(3, 4),
            "chimera has pipelines in opposite directions on an even number of devices, got 3; use --devices 2 or --devices 4",
        ),
        ("chimera-halving", ScheduleRequest(1, 4), "got 1; use --devices 2$"),
        ("chimera", ScheduleRequest(4, 4, num_pipelines=1), "divides the 4 devices, got 1; use --pipelines 2 or --pipelines 4"),
        ("chimera-doubling", ScheduleRequest(6, 4, num_pipelines=4), "got 4; use --pipelines 2 or --pipelines 6"),
        ("chimera", ScheduleRequest(4, 4, num_chunks=2), "chimera holds one stage a device, got 2 chunks; use --chunks 1"),
        ("dualpipe", ScheduleRequest(5, 4), "got 5; use --devices 4 or --devices 6"),
        ("dualpipe", ScheduleRequest(4, 4, num_pipelines=4), "dualpipe has two pipelines, got 4; use --pipelines 2"),
        ("dualpipe-v", ScheduleRequest(4, 4), "dualpipe-v holds two stages a device, got 1 chunks; use --chunks 2"),
        ("dualpipe-v", ScheduleRequest(4, 4, num_chunks=2, num_pipelines=2), "dualpipe-v has one pipeline, got 2; leave --pipelines out"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(name: str, size: ScheduleRequest, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        catalogue.build(name, size)
