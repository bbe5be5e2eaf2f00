"""Where time goes: cut by hand, and the laws that hold for every trace."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.analysis.idle import IDLE, Cause, Culprit, Division, Interval, Root, Wait, divide
from raypipe.artifacts.branches import stage_branches
from raypipe.artifacts.topology import Path
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Schedule, UpdateScope, ops_of
from raypipe.schedules.lower import Direction, Message, lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.text import parse_slot
from raypipe.simulation.cost import Cost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import simulate_programs
from tests import strategies
from tests.spans import ACTIVATION, GRADIENT, NORM, computed, traces

# Two devices, one microbatch; messages take half a second and a whole one, the norm two seconds from when device 0 brings its part:
#   device 0   F0 ~~~~~~~~~ : B0-- . ==== U0                     . nothing is known of half a second
#   device 1   wwww F0 B0- ~~~~~~~ ====== U0 d
HAND = Trace(
    name="by hand",
    source=Source.MEASURED,
    devices=("left", "right"),
    num_updates=1,
    spans=(
        computed(0, "0F0", 0.0, 1.0),
        Span(0, SpanKind.RECV, GRADIENT, 1.0, 5.0, 100),
        computed(0, "0B0", 5.0, 7.0),
        Span(0, SpanKind.COLLECTIVE, NORM, 7.5, 9.0, 8),
        computed(0, "0U0", 9.0, 9.5),
        Span(1, SpanKind.RECV, ACTIVATION, 0.0, 1.5, 100),
        computed(1, "1F0", 1.5, 2.5),
        computed(1, "1B0", 2.5, 4.0),
        Span(1, SpanKind.COLLECTIVE, NORM, 4.0, 9.0, 8),
        computed(1, "1U0", 9.0, 9.25),
    ),
)


def timed(schedule: Schedule, cost: Cost) -> Trace:
    return simulate_programs(lower(schedule), cost, name=schedule.name, num_updates=schedule.num_updates)


def slowed(schedule: Schedule, device: int, factor: float) -> Cost:
    cost = equal_stages(schedule, latency_s=0.01)
    stages = {
        (at, stage): replace(times, forward_s=times.forward_s * factor, backward_s=times.backward_s * factor) if at == device else times
        for (at, stage), times in cost.stages.items()
    }
    return replace(cost, stages=stages)


def tiles(division: Division) -> None:
    """Every device's intervals follow each other from 0 to the makespan, and their sums are all of it."""
    whole_s = division.trace.makespan_s
    for device, row in enumerate(division.intervals):
        ends = [0.0, *(interval.end_s for interval in row)]
        assert [interval.start_s for interval in row] == ends[:-1]
        assert ends[-1] == whole_s
        assert all(interval.end_s > interval.start_s for interval in row)
        by_cause = division.by_cause_s[device]
        assert math.fsum(by_cause.values()) == pytest.approx(whole_s, rel=1e-12)
        assert math.fsum(division.compute_s[device].values()) == pytest.approx(by_cause.get(Cause.COMPUTE, 0.0), rel=1e-12)
        assert all(interval.peer not in {device, *range(len(division.intervals), 99)} for interval in row)


def test_the_time_of_a_device_is_cut_by_cause() -> None:
    left, right = divide(HAND).intervals
    assert left == (
        Interval(Cause.COMPUTE, 0.0, 1.0, ops_of(parse_slot("0F0"))),
        Interval(Cause.GRADIENT, 1.0, 4.0, GRADIENT, 1, 100),
        Interval(Cause.GRADIENT_TRANSFER, 4.0, 5.0, GRADIENT, 1, 100, on_its_way=True),
        Interval(Cause.COMPUTE, 5.0, 7.0, ops_of(parse_slot("0B0"))),
        Interval(Cause.OVERHEAD, 7.0, 7.5),
        Interval(Cause.COLLECTIVE_TRANSFER, 7.5, 9.0, NORM, None, 8, on_its_way=True),
        Interval(Cause.COMPUTE, 9.0, 9.5, ops_of(parse_slot("0U0"))),
    )
    assert right == (
        Interval(Cause.WARM_UP, 0.0, 1.0, ACTIVATION, 0, 100),
        Interval(Cause.WARM_UP, 1.0, 1.5, ACTIVATION, 0, 100, on_its_way=True),
        Interval(Cause.COMPUTE, 1.5, 2.5, ops_of(parse_slot("1F0"))),
        Interval(Cause.COMPUTE, 2.5, 4.0, ops_of(parse_slot("1B0"))),
        Interval(Cause.COLLECTIVE, 4.0, 7.0, NORM, 0, 8),
        Interval(Cause.COLLECTIVE_TRANSFER, 7.0, 9.0, NORM, 0, 8, on_its_way=True),
        Interval(Cause.COMPUTE, 9.0, 9.25, ops_of(parse_slot("1U0"))),
        Interval(Cause.DRAIN, 9.25, 9.5),
    )
    tiles(divide(HAND))


def test_seconds_are_summed_by_kind_and_by_cause() -> None:
    division = divide(HAND)
    assert division.compute_s == ({"F": 1.0, "B": 2.0, "U": 0.5}, {"F": 1.0, "B": 1.5, "U": 0.25})
    assert division.by_cause_s[0] == {
        Cause.COMPUTE: 3.5,
        Cause.GRADIENT: 3.0,
        Cause.GRADIENT_TRANSFER: 1.0,
        Cause.OVERHEAD: 0.5,
        Cause.COLLECTIVE_TRANSFER: 1.5,
    }
    assert division.stages == ((0,), (1,))


def test_waits_are_summed_by_who_waited_for_whom() -> None:
    division = divide(HAND)
    assert division.waits == (Wait(1, 0, 5.0), Wait(0, 1, 4.0))
    assert next(wait for wait in division.waits if wait.device == 0) == Wait(0, 1, 4.0)


def test_waits_are_traced_back_to_what_was_at_work() -> None:
    # Device 0 waits from 1 to 4 for device 1, which has no input until 1.5; device 1 from 4 to 5 for a gradient on its way to 0.
    assert set(divide(HAND).culprits) == {
        Culprit(Root.COLLECTIVE, None, None, 1.5 + 2.0),
        Culprit(Root.WORK, 1, None, 2.5),
        Culprit(Root.WORK, 0, None, 2.0),
        Culprit(Root.MESSAGE, 0, 1, 1.0 + 1.0),
        Culprit(Root.MESSAGE, 1, 0, 0.5),
    }


@given(strategies.schedules(), st.sampled_from([0.0, 0.25, 3.0]), st.sampled_from([math.inf, 4.0]))
def test_causes_and_computing_are_all_of_the_time(schedule: Schedule, latency_s: float, bandwidth_bytes_per_s: float) -> None:
    cost = equal_stages(schedule)
    way = Path(latency_s, bandwidth_bytes_per_s, (("link", bandwidth_bytes_per_s),))
    none = Path(0.0, math.inf, ())
    cost = replace(cost, edge_bytes=dict.fromkeys(schedule.graph.edges, 3), path=lambda source, target: none if source == target else way)
    trace = timed(schedule, cost)
    division = divide(trace)
    tiles(division)
    for device, busy_s in enumerate(trace.busy_s):
        assert math.fsum(division.compute_s[device].values()) == pytest.approx(busy_s)
    waits_s = math.fsum(interval.duration_s for row in division.intervals for interval in row if interval.cause.is_wait)
    assert math.fsum(culprit.wait_s for culprit in division.culprits) == pytest.approx(waits_s)
    assert math.fsum(wait.wait_s for wait in division.waits) <= waits_s * (1 + 1e-9)


@pytest.mark.parametrize("name", strategies.SPEC_NAMES)
@given(data=st.data())
@settings(max_examples=20)
def test_every_family_is_divided_without_rest(name: str, data: st.DataObject) -> None:
    schedule = catalogue.build(name, data.draw(strategies.sizes(name, max_devices=5, max_microbatches=8, max_updates=2)))
    division = divide(timed(schedule, equal_stages(schedule, latency_s=0.5)))
    tiles(division)
    assert not any(row.get(Cause.OVERHEAD) for row in division.by_cause_s)


@given(strategies.family_schedules())
def test_a_message_is_on_its_way_when_the_simulator_says_so(schedule: Schedule) -> None:
    trace = timed(schedule, equal_stages(schedule, latency_s=0.75))
    sent = {(span.device, span.item): (span.start_s, span.end_s) for span in trace.spans if span.kind is SpanKind.TRANSFER}
    waited = {(span.device, span.item): span.start_s for span in trace.spans if span.kind is SpanKind.RECV}
    for device, row in enumerate(divide(trace).intervals):
        for interval in row:
            if interval.on_its_way and interval.item and (device, interval.item) in sent:
                left_s, arrived_s = sent[device, interval.item]
                assert interval.end_s == arrived_s
                assert interval.start_s == max(left_s, waited[device, interval.item])


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_slow_stage_is_what_waits_trace_back_to(name: str, slow: int) -> None:
    schedule = catalogue.build(name, ScheduleRequest(4, 24))
    longest = divide(timed(schedule, slowed(schedule, slow, 2.0))).culprits[0]
    assert (longest.root, longest.device) == (Root.WORK, slow)


def test_ramps_between_the_updates_of_a_window_are_waits() -> None:
    schedule = catalogue.build("1f1b", ScheduleRequest(4, 8, num_updates=3, update_scope=UpdateScope.GLOBAL))
    division = divide(timed(schedule, equal_stages(schedule)))
    # The last device starts 3 s late once; after that it waits for the first activation of each update.
    assert division.by_cause_s[3][Cause.WARM_UP] == 3.0
    assert division.by_cause_s[3][Cause.ACTIVATION] == 2 * 3.0
    assert division.by_cause_s[3][Cause.COLLECTIVE] == 3 * 6.0


def test_a_device_without_ops_never_warms_up() -> None:
    trace = replace(HAND, devices=("left", "right", "spare"))
    assert divide(trace).intervals[2] == (Interval(Cause.WARM_UP, 0.0, 9.5),)
    assert divide(replace(HAND, spans=())).intervals == ((), ())


def test_a_part_of_a_trace_is_divided_though_it_lacks_what_was_before() -> None:
    schedule = catalogue.build("1f1b", ScheduleRequest(4, 8, num_updates=3, update_scope=UpdateScope.STAGE))
    trace = timed(schedule, equal_stages(schedule, latency_s=0.5))
    for first, end in itertools.combinations(range(4), 2):
        tiles(divide(trace.of_updates(first, end)))


@given(traces())
def test_any_trace_is_divided(trace: Trace) -> None:
    division = divide(trace)
    tiles(division)
    assert division.culprits is not None


@pytest.mark.parametrize(("sender", "made_by", "made_s"), [(0, 0, 1.0), (1, 1, 2.0), (None, 1, 2.0)])
def test_a_wait_is_for_the_replica_that_sent_the_message(sender: int | None, made_by: int, made_s: float) -> None:
    wait = Span(2, SpanKind.RECV, ACTIVATION, 0.0, 3.0, 100, sender)
    trace = Trace("replicas", Source.MEASURED, ("a", "b", "c"), 1, (computed(0, "0F0", 0.0, 1.0), computed(1, "0F0", 0.0, 2.0), wait))
    assert divide(trace).intervals[2] == (
        Interval(Cause.WARM_UP, 0.0, made_s, ACTIVATION, made_by, 100),
        Interval(Cause.WARM_UP, made_s, 3.0, ACTIVATION, made_by, 100, on_its_way=True),
    )


def test_a_wait_for_a_sum_is_for_its_last_member() -> None:
    gradients = Collective(CollectiveKind.NORM, 0, 0, 0, (0, 2))
    spans = (
        computed(0, "0B0", 0.0, 1.0),
        Span(0, SpanKind.COLLECTIVE, gradients, 1.0, 5.0, 8),
        computed(1, "0B1", 0.0, 3.0),
        computed(2, "0B2", 0.0, 2.0),
    )
    trace = Trace("sum", Source.MEASURED, ("a", "b", "c"), 1, spans)
    assert divide(trace).intervals[0][1:3] == (
        Interval(Cause.COLLECTIVE, 1.0, 2.0, gradients, 2, 8),
        Interval(Cause.COLLECTIVE_TRANSFER, 2.0, 5.0, gradients, 2, 8, on_its_way=True),
    )


def test_clocks_that_disagree_do_no_harm() -> None:
    late = tuple(span._replace(start_s=span.start_s + 50, end_s=span.end_s + 50) if span.device else span for span in HAND.spans)
    division = divide(replace(HAND, spans=late))
    tiles(division)
    assert division.by_cause_s[0][Cause.GRADIENT] == 4.0


def test_numbers_without_limit_take_no_longer() -> None:
    huge = (computed(0, "0B999999999", 0.0, 1.0), Span(0, SpanKind.COLLECTIVE, replace(NORM, update=7), 1.0, 2.0))
    tiles(divide(replace(HAND, spans=huge)))


def test_every_cause_of_idleness_is_listed_once() -> None:
    assert set(IDLE) == set(Cause) - {Cause.COMPUTE}
    assert len(set(IDLE)) == len(IDLE)


# Image is stages 0 and 1, on devices 2 and 0, text is stage 2 on device 1; they meet in stage 3 on device 2. Messages take half a second:
#   device 0   www F1 ====== ~~~~ : B1---                   ~ its gradient was computed, : on its way, = the other branch was
#   device 1   F2---------- ~~~~ : B2----- ddd
#   device 2   F0 ~~~~ : ===== : F3 B3-- ~~~~ : B0--
BRANCHES = ("image", "image", "text", "")
FIRST, IMAGE, TEXT = (Message(Direction.ACTIVATION, source, target, 0) for source, target in ((0, 1), (1, 3), (2, 3)))
TO_FIRST, TO_IMAGE, TO_TEXT = (Message(Direction.GRADIENT, source, target, 0) for source, target in ((1, 0), (3, 1), (3, 2)))
MEETING = Trace(
    name="by hand",
    source=Source.MEASURED,
    devices=("left", "middle", "right"),
    num_updates=1,
    spans=(
        Span(0, SpanKind.RECV, FIRST, 0.0, 1.5, 100),
        computed(0, "1F0", 1.5, 3.0),
        Span(0, SpanKind.RECV, TO_IMAGE, 3.0, 8.5, 100),
        computed(0, "1B0", 8.5, 10.0),
        computed(1, "2F0", 0.0, 6.0),
        Span(1, SpanKind.RECV, TO_TEXT, 6.0, 8.5, 100),
        computed(1, "2B0", 8.5, 11.0),
        computed(2, "0F0", 0.0, 1.0),
        Span(2, SpanKind.RECV, IMAGE, 1.0, 3.5, 100),
        Span(2, SpanKind.RECV, TEXT, 3.5, 6.5, 100),
        computed(2, "3F0", 6.5, 7.0),
        computed(2, "3B0", 7.0, 8.0),
        Span(2, SpanKind.RECV, TO_FIRST, 8.0, 10.5, 100),
        computed(2, "0B0", 10.5, 11.5),
    ),
    branches=BRANCHES,
)


def waits(division: Division, device: int) -> list[tuple[Cause, float, float, int | None]]:
    return [
        (interval.cause, interval.start_s, interval.end_s, interval.peer)
        for interval in division.intervals[device]
        if interval.cause.is_wait
    ]


def test_where_branches_meet_the_wait_for_the_last_is_another_branch_s_doing() -> None:
    division = divide(MEETING)
    tiles(division)
    assert waits(division, 2) == [
        (Cause.ACTIVATION, 1.0, 3.0, 0),
        (Cause.ACTIVATION_TRANSFER, 3.0, 3.5, 0),
        (Cause.OTHER_BRANCH, 3.5, 6.0, 1),
        (Cause.ACTIVATION_TRANSFER, 6.0, 6.5, 1),
        (Cause.GRADIENT, 8.0, 10.0, 0),
        (Cause.GRADIENT_TRANSFER, 10.0, 10.5, 0),
    ]


def test_a_gradient_waits_for_another_branch_until_that_has_arrived_where_they_meet() -> None:
    division = divide(MEETING)
    assert waits(division, 0) == [
        (Cause.OTHER_BRANCH, 3.0, 6.0, 1),
        (Cause.GRADIENT, 6.0, 8.0, 2),
        (Cause.GRADIENT_TRANSFER, 8.0, 8.5, 2),
    ]
    assert waits(division, 1) == [(Cause.GRADIENT, 6.0, 8.0, 2), (Cause.GRADIENT_TRANSFER, 8.0, 8.5, 2)], "it was the last"
    assert Culprit(Root.WORK, 1, None, 3.0 + 2.5) in division.culprits


def test_the_order_in_which_branches_are_awaited_does_not_matter() -> None:
    text_first = tuple(
        span._replace(item=TEXT, start_s=1.0, end_s=6.5) if span.item == IMAGE else span for span in MEETING.spans if span.item != TEXT
    )
    assert waits(divide(replace(MEETING, spans=text_first)), 2)[:3] == [
        (Cause.ACTIVATION, 1.0, 3.0, 1),
        (Cause.OTHER_BRANCH, 3.0, 6.0, 1),
        (Cause.ACTIVATION_TRANSFER, 6.0, 6.5, 1),
    ]


def test_a_stage_that_reads_another_branch_waits_for_it() -> None:
    # Stage 3 is of the image branch, and reads the text.
    division = divide(replace(MEETING, branches=("image", "image", "text", "image")))
    assert waits(division, 2)[2:4] == [(Cause.OTHER_BRANCH, 3.5, 6.0, 1), (Cause.ACTIVATION_TRANSFER, 6.0, 6.5, 1)]
    assert waits(division, 1) == [(Cause.OTHER_BRANCH, 6.0, 8.0, 2), (Cause.GRADIENT_TRANSFER, 8.0, 8.5, 2)]
    assert waits(division, 0) == [(Cause.GRADIENT, 3.0, 8.0, 2), (Cause.GRADIENT_TRANSFER, 8.0, 8.5, 2)]


def test_without_branches_a_wait_is_the_sender_s() -> None:
    division = divide(replace(MEETING, branches=()))
    assert [row.get(Cause.OTHER_BRANCH) for row in division.by_cause_s] == [None, None, None]
    assert waits(division, 0) == [(Cause.GRADIENT, 3.0, 8.0, 2), (Cause.GRADIENT_TRANSFER, 8.0, 8.5, 2)]


def test_where_branches_begin_the_gradient_of_the_last_is_awaited() -> None:
    # Stage 0 feeds the branches of stages 1 and 2; the gradient of stage 1 is there at 3, that of stage 2 at 6.
    from_slow = Message(Direction.GRADIENT, 2, 0, 0)
    spans = (
        computed(0, "0F0", 0.0, 1.0),
        Span(0, SpanKind.RECV, from_slow, 1.0, 6.0, 100),
        computed(0, "0B0", 6.0, 7.0),
        computed(1, "1B0", 2.0, 3.0),
        computed(2, "2B0", 2.0, 6.0),
    )
    trace = Trace("by hand", Source.MEASURED, ("a", "b", "c"), 1, spans, branches=("", "branch 0", "branch 1", ""))
    assert waits(divide(trace), 0) == [(Cause.GRADIENT, 1.0, 3.0, 2), (Cause.OTHER_BRANCH, 3.0, 6.0, 2)]


def test_all_stages_of_a_branch_wait_for_the_other_while_their_gradients_need_it() -> None:
    # Device 0 holds the first stage of the image and device 1 the last; device 2 holds the text, and the stage where they meet.
    to_last, to_first = (Message(Direction.GRADIENT, *ends, 0) for ends in ((3, 1), (1, 0)))
    spans = (
        computed(0, "0F0", 0.0, 1.0),
        Span(0, SpanKind.RECV, to_first, 1.0, 9.0, 100),
        computed(1, "1F0", 1.0, 2.0),
        Span(1, SpanKind.RECV, to_last, 2.0, 7.0, 100),
        computed(1, "1B0", 7.0, 9.0),
        computed(2, "2F0", 0.0, 5.0),
        computed(2, "3F0", 5.0, 6.0),
        computed(2, "3B0", 6.0, 7.0),
    )
    division = divide(Trace("by hand", Source.MEASURED, ("a", "b", "c"), 1, spans, branches=BRANCHES))
    assert waits(division, 0) == [(Cause.GRADIENT, 1.0, 2.0, 1), (Cause.OTHER_BRANCH, 2.0, 5.0, 2), (Cause.GRADIENT, 5.0, 9.0, 1)]
    assert waits(division, 1) == [(Cause.OTHER_BRANCH, 2.0, 5.0, 2), (Cause.GRADIENT, 5.0, 7.0, 2)]


def test_what_comes_behind_the_meeting_waits_for_the_last_branch_too() -> None:
    # Branches of stages 0 and 1 meet in stage 2, which feeds stage 3; device 2 has done another microbatch before.
    onward = Message(Direction.ACTIVATION, 2, 3, 1)
    spans = (
        computed(0, "0F1", 0.0, 2.0),
        computed(1, "1F1", 0.0, 4.0),
        computed(1, "2F1", 4.0, 5.0),
        computed(2, "3F0", 0.0, 1.0),
        Span(2, SpanKind.RECV, onward, 1.0, 5.0, 100),
    )
    trace = Trace("by hand", Source.MEASURED, ("a", "b", "c"), 1, spans, branches=("image", "text", "", ""))
    assert waits(divide(trace), 2) == [(Cause.ACTIVATION, 1.0, 2.0, 1), (Cause.OTHER_BRANCH, 2.0, 4.0, 1), (Cause.ACTIVATION, 4.0, 5.0, 1)]


def test_a_loss_over_parts_needs_all_parts_of_the_other_branch() -> None:
    # Stage 2 takes both parts of both branches at once; the last part of the other branch ends at 5.
    gradient = Message(Direction.GRADIENT, 2, 0, 0)
    spans = (
        computed(0, "0F0.1", 0.0, 1.0),
        computed(0, "0F0.2", 1.0, 2.0),
        Span(0, SpanKind.RECV, gradient, 2.0, 7.0, 100),
        computed(0, "0B0.1", 7.0, 8.0),
        computed(1, "1F0.1", 0.0, 2.5),
        computed(1, "1F0.2", 2.5, 5.0),
        computed(1, "2F0", 5.0, 6.0),
        computed(1, "2B0", 6.0, 7.0),
    )
    trace = Trace("by hand", Source.MEASURED, ("a", "b"), 1, spans, branches=("image", "text", ""))
    assert waits(divide(trace), 0) == [(Cause.OTHER_BRANCH, 2.0, 5.0, 1), (Cause.GRADIENT, 5.0, 7.0, 1)]


@given(strategies.schedules(), st.sampled_from([0.0, 0.25, 3.0]))
def test_another_branch_takes_its_time_from_activations_and_gradients_alone(schedule: Schedule, latency_s: float) -> None:
    trace = timed(schedule, equal_stages(schedule, latency_s=latency_s))
    plain, branched = divide(trace), divide(replace(trace, branches=stage_branches(schedule.graph)))
    tiles(branched)
    mixed = {Cause.ACTIVATION, Cause.GRADIENT, Cause.OTHER_BRANCH}
    for before, behind in zip(plain.by_cause_s, branched.by_cause_s, strict=True):
        assert {cause: wait_s for cause, wait_s in before.items() if cause not in mixed} == {
            cause: wait_s for cause, wait_s in behind.items() if cause not in mixed
        }
        sums = [math.fsum(row.get(cause, 0.0) for cause in mixed) for row in (before, behind)]
        assert sums[0] == pytest.approx(sums[1])
    if not stage_branches(schedule.graph):
        assert plain.intervals == branched.intervals
