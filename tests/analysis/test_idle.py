"""Where time goes: cut by hand, and the laws that hold for every trace."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.analysis.idle import IDLE, Cause, Culprit, Division, Interval, Root, Wait, divide
from raypipe.artifacts.topology import Path
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace
from raypipe.schedules import catalogue
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Schedule, UpdateScope, ops_of
from raypipe.schedules.lower import lower
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
