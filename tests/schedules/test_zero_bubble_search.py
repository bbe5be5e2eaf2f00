"""The zero-bubble schedules that are made for a V, and for given times: published figures, bounds, and all orders of small sizes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.builders import synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search import dispatch
from raypipe.schedules.search.dispatch import TimedPipelines
from raypipe.schedules.validate import validate
from tests.schedules import reference

ROOT = Path(__file__).resolve().parents[2]
EQUAL = StageTimes(1, 1, 1)
SCOPES = pytest.mark.parametrize("scope", [UpdateScope.STAGE, UpdateScope.GLOBAL])


def durations(times: Sequence[StageTimes]) -> Callable[[Op], float]:
    """One for all stages, or one a stage."""
    of_stage = [reference.durations(stage.forward_s, stage.input_grad_s, stage.weight_grad_s) for stage in times]
    return lambda op: of_stage[op.stage if len(of_stage) > 1 else 0](op)


def timed(schedule: Schedule, size: ScheduleRequest) -> reference.Timing:
    return reference.asap(schedule, durations(size.times or (EQUAL,)), size.latency_s)


def figures(schedule: Schedule, size: ScheduleRequest) -> tuple[float, float]:
    """The longest span and the makespan, the one that counts for the scope in front."""
    timing = timed(schedule, size)
    span_s = max(map(timing.span_s, range(size.num_devices)))
    found = (span_s, timing.makespan_s)
    return found if size.update_scope is UpdateScope.STAGE else (found[1], found[0])


# ZB-V


@pytest.mark.parametrize("num_devices", range(1, 9))
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(num_devices: int) -> None:
    for num_microbatches in (2 * num_devices - 1, 2 * num_devices, 3 * num_devices + 1):
        schedule = catalogue.build("zb-v", ScheduleRequest(num_devices, num_microbatches, num_chunks=2))
        timing = reference.asap(schedule, reference.durations(1, 1, 1))
        assert [timing.idle_s(worker) for worker in range(num_devices)] == [0] * num_devices
        # Two of them are what 1F1B, with stages twice as long, holds as one.
        assert max(metrics(schedule).peak_in_flight) == 2 * num_devices
        assert max(metrics(catalogue.build("1f1b", ScheduleRequest(num_devices, num_microbatches))).peak_in_flight) == num_devices


@pytest.mark.parametrize("times", [StageTimes(2, 2, 1), StageTimes(3, 4, 2), StageTimes(1, 3, 1), StageTimes(1, 1, 0)])
def test_the_devices_of_zb_v_are_idle_as_stated(times: StageTimes) -> None:
    forward_s, input_grad_s, weight_grad_s = times.forward_s, times.input_grad_s, times.weight_grad_s
    for num_devices in range(1, 7):
        schedule = catalogue.build("zb-v", ScheduleRequest(num_devices, 2 * num_devices + 1, num_chunks=2))
        timing = reference.asap(schedule, durations([times]))
        for worker in range(num_devices):
            idle_s = 2 * (num_devices - 1) * (input_grad_s - weight_grad_s) - worker * (forward_s + input_grad_s - 2 * weight_grad_s)
            assert timing.idle_s(worker) == idle_s


@pytest.mark.parametrize("num_devices", range(1, 10))
def test_zb_v_takes_any_number_of_microbatches_without_delay(num_devices: int) -> None:
    for num_microbatches in range(1, 2 * num_devices):
        size = ScheduleRequest(num_devices, num_microbatches, num_chunks=2)
        schedule = catalogue.build("zb-v", size)
        makespan_s = reference.asap(schedule, reference.durations(1, 1, 1)).makespan_s
        if num_microbatches >= num_devices:
            # The way to the last device, and its work: none can be faster.
            assert makespan_s == 6 * num_microbatches + num_devices - 1
        assert makespan_s == catalogue.spec("zb-v").makespan_s(size, EQUAL)
        assert max(metrics(schedule).peak_in_flight) == 2 * min(num_devices, num_microbatches)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_zb_v_wants_two_chunks(num_chunks: int) -> None:
    with pytest.raises(ScheduleError, match=f"zb-v holds two stages a device, got {num_chunks} chunks; use --chunks 2"):
        catalogue.build("zb-v", ScheduleRequest(4, 8, num_chunks=num_chunks))


# ZB-auto: published figures

# Qi et al., ICLR 2024, arXiv 2401.10241, tables 5 and 9, in ms: devices, microbatches, T_F, T_B (our I), T_W, T_comm and the rate of ZB-2p.
PAPER = [
    pytest.param(8, 24, StageTimes(18.522, 18.086, 9.337), 0.601, 0.0433, id="1.5B"),
    pytest.param(32, 96, StageTimes(10.419, 10.207, 7.715), 0.408, 0.0038, id="28.3B"),
]


def paper_size(num_devices: int, num_microbatches: int, times: StageTimes, latency_s: float) -> ScheduleRequest:
    return ScheduleRequest(num_devices, num_microbatches, update_scope=UpdateScope.STAGE, times=(times,), latency_s=latency_s)


@pytest.mark.parametrize(("num_devices", "num_microbatches", "times", "latency_s", "rate"), PAPER)
def test_bubble_rates_of_zb_2p_are_those_of_the_paper(
    num_devices: int, num_microbatches: int, times: StageTimes, latency_s: float, rate: float
) -> None:
    # Behind I the paper counts 32h of the 34h + 5as bytes of an activation, less than half in its models.
    size = replace(paper_size(num_devices, num_microbatches, times, latency_s), weight_grad_share=0.5)
    schedule = catalogue.build("zb-auto", size)
    assert round(timed(schedule, size).bubble_rate, 4) <= rate
    assert max(held(schedule, 0.5)) <= 2 * num_devices


@pytest.mark.parametrize(("num_devices", "num_microbatches", "times", "latency_s", "rate"), PAPER)
def test_where_activations_are_kept_until_w_zb_2p_is_as_good_as_it_can_be(
    num_devices: int, num_microbatches: int, times: StageTimes, latency_s: float, rate: float
) -> None:
    """The last device must run W to have room for its last F; from the first F of device 0 to its last W leads one path."""
    size = paper_size(num_devices, num_microbatches, times, latency_s)
    timing = timed(catalogue.build("zb-auto", size), size)
    way_s = (num_devices - 1) * (times.forward_s + times.input_grad_s + 2 * latency_s)
    last_s = num_microbatches * (times.forward_s + times.input_grad_s) + (num_microbatches - 2 * num_devices) * times.weight_grad_s
    assert max(map(timing.span_s, range(num_devices))) == pytest.approx(way_s + last_s + times.weight_grad_s)
    assert timing.bubble_rate > rate


@pytest.mark.parametrize("num_devices", range(1, 7))
def test_with_equal_times_devices_wait_for_nothing_where_there_is_room(num_devices: int) -> None:
    for max_in_flight in (2 * num_devices - 1, None):
        for num_microbatches in (2 * num_devices - 1, 3 * num_devices):
            size = ScheduleRequest(num_devices, num_microbatches, max_in_flight=max_in_flight, update_scope=UpdateScope.STAGE)
            timing = timed(catalogue.build("zb-auto", size), size)
            assert [timing.idle_s(worker) for worker in range(num_devices)] == [0] * num_devices
            assert timing.makespan_s == 3 * num_microbatches + num_devices - 1


# ZB-auto: against other orders

SKEWED = (StageTimes(1, 2, 5), StageTimes(5, 2, 1), StageTimes(2, 5, 1), StageTimes(3, 3, 2))
TASKS = [
    pytest.param(ScheduleRequest(4, 12, times=(StageTimes(3, 4, 2),)), id="equal"),
    pytest.param(ScheduleRequest(4, 10, times=(StageTimes(2, 3, 1),), latency_s=2.0), id="latency"),
    pytest.param(ScheduleRequest(4, 9, times=SKEWED), id="skewed"),
    pytest.param(ScheduleRequest(5, 3, times=(StageTimes(2, 2, 3),)), id="few"),
]


@SCOPES
@pytest.mark.parametrize("size", TASKS)
def test_no_known_order_within_the_limit_is_better(size: ScheduleRequest, scope: UpdateScope) -> None:
    for name, max_in_flight in (("1f1b", size.num_devices), ("zb-h1", size.num_devices), ("zb-h2", 2 * size.num_devices - 1)):
        limited = replace(size, update_scope=scope, max_in_flight=max_in_flight)
        known = catalogue.build(name, size)
        assert max(metrics(known).peak_in_flight) <= max_in_flight
        found, best = figures(catalogue.build("zb-auto", limited), limited), figures(known, limited)
        assert found <= best or found == pytest.approx(best)


@SCOPES
def test_the_times_of_each_stage_are_honoured(scope: UpdateScope) -> None:
    size = ScheduleRequest(4, 12, update_scope=scope, times=SKEWED)
    blind = catalogue.build("zb-auto", replace(size, times=()))
    assert figures(catalogue.build("zb-auto", size), size)[0] == 109
    assert figures(blind, size)[0] >= 113


def test_of_equally_fast_orders_the_one_that_holds_the_least_is_taken() -> None:
    # ZB-H1 ends as early as anything can where all updates wait for each other.
    assert metrics(catalogue.build("zb-auto", ScheduleRequest(8, 32))).peak_in_flight == (8,) * 8


def test_latency_is_honoured() -> None:
    size = ScheduleRequest(4, 16, times=(EQUAL,), latency_s=1.5)
    blind = catalogue.build("zb-auto", replace(size, latency_s=0.0))
    assert figures(catalogue.build("zb-auto", size), size)[0] < figures(blind, size)[0] - 1


def test_each_scope_is_given_what_it_needs() -> None:
    size = ScheduleRequest(4, 10, times=(StageTimes(2, 3, 1),), max_in_flight=8)
    by_stage, by_all = (replace(size, update_scope=scope) for scope in (UpdateScope.STAGE, UpdateScope.GLOBAL))
    first, second = catalogue.build("zb-auto", by_stage), catalogue.build("zb-auto", by_all)
    assert figures(first, by_stage)[0] <= figures(second, by_stage)[0]
    assert figures(second, by_all)[0] <= figures(first, by_all)[0]


@cache
def programs(num_microbatches: int, max_in_flight: int) -> tuple[tuple[OpKind, ...], ...]:
    """All orders of a worker's Ops: F, I and W of each microbatch, microbatches in their order."""

    def longer(kinds: tuple[OpKind, ...]) -> Iterator[tuple[OpKind, ...]]:
        forwards, inputs, weights = map(kinds.count, (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT))
        if weights == num_microbatches:
            yield kinds
        if forwards < num_microbatches and forwards - weights < max_in_flight:
            yield from longer((*kinds, OpKind.FORWARD))
        if inputs < forwards:
            yield from longer((*kinds, OpKind.INPUT_GRADIENT))
        if weights < inputs:
            yield from longer((*kinds, OpKind.WEIGHT_GRADIENT))

    return tuple(longer(()))


@SCOPES
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize(
    ("times", "latency_s"),
    [((EQUAL,), 0), ((StageTimes(2, 3, 1),), 0.5), ((StageTimes(1, 4, 2), StageTimes(3, 1, 2)), 0), ((StageTimes(3, 1, 1), EQUAL), 1)],
)
def test_of_all_orders_of_two_devices_and_three_microbatches_none_is_better(
    times: tuple[StageTimes, ...], latency_s: float, max_in_flight: int, scope: UpdateScope
) -> None:
    size = ScheduleRequest(2, 3, times=times, latency_s=latency_s, max_in_flight=max_in_flight, update_scope=scope)
    best = min(figures(schedule, size) for schedule in all_orders(size, programs(3, max_in_flight)))
    assert figures(catalogue.build("zb-auto", size), size)[0] == best[0]


def end_with_sums_s(schedule: Schedule, size: ScheduleRequest) -> float:
    """The end of the last sum, each behind its worker's last gradient; with the latency of the only hop."""
    timing = reference.asap(schedule, durations(size.times or (EQUAL,)), sum(size.hops_s))
    ends_s = [0.0] * size.num_devices
    for op, (_, end_s) in timing.spans.items():
        if not op.kind.per_update:
            ends_s[timing.workers[op]] = max(ends_s[timing.workers[op]], end_s)
    return max(end_s + sum_s for end_s, sum_s in zip(ends_s, size.sums_s, strict=True))


@pytest.mark.combined
@pytest.mark.parametrize("sums_s", [(0, 0), (0, 2.5), (2, 0), (1, 7)])
@pytest.mark.parametrize(
    ("times", "hop_s"), [((EQUAL,), 0.5), ((StageTimes(1, 4, 2), StageTimes(3, 1, 2)), 0), ((StageTimes(2, 3, 1),), 2)]
)
def test_of_all_orders_none_ends_its_sums_earlier(times: tuple[StageTimes, ...], hop_s: float, sums_s: tuple[float, float]) -> None:
    size = ScheduleRequest(2, 3, times=times, hops_s=(hop_s,), sums_s=sums_s, max_in_flight=3)
    best_s = min(end_with_sums_s(schedule, size) for schedule in all_orders(size, programs(3, 3)))
    assert end_with_sums_s(catalogue.build("zb-auto", size), size) == pytest.approx(best_s)


def end_with_queues_s(schedule: Schedule, size: ScheduleRequest) -> float:
    """The end of the last Op of two workers whose messages leave one behind the other; all times anew until none changes."""
    seconds = durations(size.times or (EQUAL,))
    ends_s: dict[Op, float] = {}
    while True:
        arrivals_s = {}
        for kind, source, target in ((OpKind.FORWARD, 0, 1), (OpKind.INPUT_GRADIENT, 1, 0)):
            free_s = 0.0
            for index in range(size.num_microbatches):
                departure_s = max(ends_s.get(Op(kind, source, index), 0.0), free_s)
                free_s = departure_s + size.queues_s[0]
                arrivals_s[Op(kind, target, index)] = departure_s + size.hops_s[0]
        found_s: dict[Op, float] = {}
        for program in schedule.programs:
            now_s = 0.0
            for op in (slot for slot in program if isinstance(slot, Op) and not slot.kind.per_update):
                now_s = max(now_s, arrivals_s.get(op, 0.0)) + seconds(op)
                found_s[op] = now_s
        if found_s == ends_s:
            return max(ends_s.values())
        ends_s = found_s


@pytest.mark.combined
@pytest.mark.parametrize(("hop_s", "queue_s"), [(3, 3), (4, 2), (5, 5), (1, 0)])
@pytest.mark.parametrize("times", [(EQUAL,), (StageTimes(1, 4, 2), StageTimes(3, 1, 2)), (StageTimes(2, 3, 1),)])
def test_of_all_orders_none_ends_earlier_where_messages_wait_for_each_other(
    times: tuple[StageTimes, ...], hop_s: float, queue_s: float
) -> None:
    size = ScheduleRequest(2, 3, times=times, hops_s=(hop_s,), queues_s=(queue_s,), max_in_flight=3)
    best_s = min(end_with_queues_s(schedule, size) for schedule in all_orders(size, programs(3, 3)))
    assert end_with_queues_s(catalogue.build("zb-auto", size), size) == pytest.approx(best_s)


def test_each_hop_has_its_own_seconds() -> None:
    size = ScheduleRequest(4, 12, hops_s=(0.0, 3.0, 0.0), max_in_flight=12)
    same = replace(size, hops_s=(), latency_s=3.0)
    found, blind = (catalogue.build("zb-auto", each) for each in (size, replace(size, hops_s=())))

    def end_s(schedule: Schedule) -> float:
        line = TimedPipelines(
            schedule.graph,
            schedule.pipelines,
            (EQUAL,) * 4,
            splits=True,
            hops_s=(((0, 1), 0.0), ((1, 2), 3.0), ((2, 3), 0.0), ((2, 1), 3.0)),
        )
        programs = [[slot for slot in program if isinstance(slot, Op) and not slot.kind.per_update] for program in schedule.programs]
        return max(row[-1].end_s for row in dispatch.timed(line, programs))

    assert end_s(found) == 42  # The way to the last worker, 3 F and 3 s, and 12 F, I and W.
    assert end_s(blind) > 42
    assert catalogue.build("zb-auto", replace(same, latency_s=0.0, hops_s=(3.0,) * 3)).programs == catalogue.build("zb-auto", same).programs


def all_orders(size: ScheduleRequest, of_worker: Sequence[Sequence[OpKind]]) -> Iterator[Schedule]:
    """All schedules that do not hang."""
    for choice in itertools.product(of_worker, repeat=size.num_devices):
        one_update = []
        for stage, kinds in enumerate(choice):
            microbatches = {kind: itertools.count() for kind in kinds}
            one_update.append([Op(kind, stage, next(microbatches[kind])) for kind in kinds])
        schedule = synchronous("any", size, workers=range(size.num_devices), one_update=one_update)
        try:
            reference.asap(schedule, reference.durations(1, 1, 1))
        except reference.WrongRunError:
            continue
        yield schedule


# ZB-auto: what it is given


def held(schedule: Schedule, share: float) -> list[float]:
    """The most that each worker holds, with a share of an activation from I to W."""
    peak = []
    step = {OpKind.FORWARD: 1.0, OpKind.INPUT_GRADIENT: share - 1, OpKind.WEIGHT_GRADIENT: -share}
    for program in schedule.programs:
        steps = [step.get(slot.kind, 0.0) for slot in program if isinstance(slot, Op)]
        peak.append(max(itertools.accumulate(steps)))
    return peak


@pytest.mark.parametrize("max_in_flight", [1, 1.5, 2, 3, 4, 5.9, 7, 100])
def test_the_limit_on_activations_is_kept(max_in_flight: float) -> None:
    for num_devices, num_microbatches in ((1, 3), (3, 2), (4, 9)):
        for times in ((), SKEWED[:num_devices]):
            size = ScheduleRequest(num_devices, num_microbatches, max_in_flight=max_in_flight, times=times)
            schedule = catalogue.build("zb-auto", size)
            validate(schedule)
            assert max(metrics(schedule).peak_in_flight) <= max_in_flight
            part = catalogue.build("zb-auto", replace(size, weight_grad_share=0.4))
            assert max(held(part, 0.4)) <= max_in_flight + 1e-9


stage_times = st.builds(StageTimes, *[st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, 100.0])] * 3)


@given(st.data())
@settings(max_examples=40)
def test_any_times_and_limits_make_a_valid_order(data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(1, 5))
    size = ScheduleRequest(
        num_devices,
        data.draw(st.integers(1, 8)),
        update_scope=data.draw(st.sampled_from([None, *UpdateScope])),
        times=tuple(data.draw(stage_times) for _ in range(data.draw(st.sampled_from([0, 1, num_devices])))),
        latency_s=data.draw(st.sampled_from([0.0, 0.1, 5.0])),
        max_in_flight=data.draw(st.sampled_from([None, 1.0, 2.0, 3.5])),
        weight_grad_share=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    schedule = catalogue.build("zb-auto", size)
    validate(schedule)
    for worker, peak in enumerate(metrics(schedule).peak_in_flight):
        assert peak <= catalogue.spec("zb-auto").peak_in_flight(size, worker)


def test_the_same_task_has_the_same_order_in_every_process() -> None:
    code = (
        "from raypipe.schedules import catalogue; from raypipe.schedules.request import ScheduleRequest, StageTimes; "
        "print(catalogue.build('zb-auto', ScheduleRequest(4, 9, times=(StageTimes(2, 3, 1),), latency_s=0.3)).programs)"
    )
    printed = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        printed.add(found.stdout)
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"max_in_flight": 0.9}, r"room for one stage activation a device, got 0\.9; use --max-in-flight 1 or more"),
        ({"max_in_flight": float("nan")}, "got nan; use --max-in-flight 1 or more"),
        ({"weight_grad_share": 1.5}, r"got 1\.5; use --weight-grad-share 0 to 1"),
        ({"hops_s": (1.0,) * 4}, "zb-auto has 4 stages, got seconds of 4 hops, 0 queues and 0 sums"),
        ({"queues_s": (1.0,) * 2}, "zb-auto has 4 stages, got seconds of 0 hops, 2 queues and 0 sums"),
        ({"sums_s": (1.0,) * 3}, "zb-auto has 4 stages, got seconds of 0 hops, 0 queues and 3 sums"),
        ({"times": (EQUAL,) * 3}, "zb-auto has 4 stages, got times of 3; use those of each, or one for all"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(more: dict[str, object], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        catalogue.build("zb-auto", replace(ScheduleRequest(4, 8), **more))  # type: ignore[arg-type]
