"""AMDP's pipelines in an order that is nearly the fastest found and, among those, the least stale.

The orders of AMDP's authors (`amdp`) leave a bubble of 1/(3D+1), and nearly all forwards of the first round of an update read
weights that are about to change. On 4 devices with F = 1, B = 2 and 16 microbatches an update, another order has no bubble and
as many activations, and 1 of 8 microbatches is late instead of 7 of 32. On 8 devices with 32 microbatches the authors' rounds
are the best, with each U where its gradients have arrived: 1 of 32 is late instead of 8.

Candidates are orders by rules (`ring`; also the earlier update first), periodic orders and the authors' rounds on two
placements, each U where its gradients have just arrived. Mismatch and delay are at most 1 if any candidate allows it. Within
`max_in_flight` activations (3D/2 by default), the least stale on average among those within 5 % of the fastest wins; with
`max_mean_staleness`, the fastest that keeps this limit.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from raypipe.errors import ScheduleError
from raypipe.schedules.families import amdp
from raypipe.schedules.ir import OpKind, Schedule, StageGraph, UpdateScope, WeightRule, ops_of
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.search.dispatch import Key, Started, TimedPipelines, timed, with_updates
from raypipe.schedules.search.ring import (
    Form,
    Pipelines,
    check_pipelines,
    forms,
    most_held,
    num_pipelines,
    placements,
    ring,
    rules,
    too_many_activations,
)
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.staleness import rounded_up

_NEARLY = 1.05  # times the fastest order's update: the least stale of these orders wins
_ACTIVATIONS = 1.5  # default limit on those of a device, times the number of devices
_MOST_SPARE = 3  # microbatches of each pipeline beyond the minimum; more are staler and no faster
_LEAST_STALE = 3  # orders tried although they seem staler than the limit: a whole window has ends, their measurement has not
_IN_ROUNDS = 3  # microbatches of each pipeline in flight in the authors' rounds: two, and one left of the round before
_NOTHING = 1e-9  # relative difference of times that counts as none
_FEW_TURNS = 24  # microbatches of each pipeline over which all orders are measured, at least
_MANY_TURNS = 96  # the same for the best orders: some repeat only after several updates, so that few turns mislead
_MOST_WRONG = 1.1  # factor by which the time over few turns may differ from that over many
_FASTEST = 4  # orders timed over many turns


@dataclass(frozen=True)
class _Tried:
    form: Form
    update_s: float
    held: int
    max_delay: int  # updates between the weights of a forward and those that its gradient changes
    mean_delay: float


def amdp_auto(request: ScheduleRequest) -> Schedule:
    """Return the chosen order for the requested updates."""
    request.require_one_chunk("amdp-auto", instead="async-interleaved")
    check_pipelines("amdp-auto", request)
    request = replace(request, num_pipelines=num_pipelines(request))
    limit = request.max_mean_staleness
    means: list[float] = []
    for form in _ranked(replace(request, num_updates=1)):
        schedule = _filled(
            _frame(form.line.pipelines, request), form.run(request.num_microbatches * request.num_updates // request.num_pipelines)
        )
        # In a whole window, which begins with nothing late and ends with nothing under way.
        if limit is None or (mean := metrics(schedule).mean_delay) <= limit:
            return schedule
        means.append(mean)
    least = rounded_up(min(means))
    raise ScheduleError(
        f"amdp-auto with {request.num_pipelines} pipelines on {request.num_devices} devices reads weights that are at least "
        f"{least:g} updates old on average, max_mean_staleness allows {limit:g}; "
        f"use --max-mean-staleness {least:g}, more microbatches, or amdp-flush"
    )


def _frame(pipelines: Pipelines, request: ScheduleRequest) -> Schedule:
    return Schedule(
        name="amdp-auto",
        graph=StageGraph.chain(request.num_devices),
        pipelines=pipelines,
        programs=((),) * request.num_devices,
        num_microbatches=request.num_microbatches,
        num_updates=request.num_updates,
        weight_rule=WeightRule.LIVE,
        update_scope=request.update_scope or UpdateScope.STAGE,
    )


def _filled(frame: Schedule, done: Sequence[Sequence[Started]]) -> Schedule:
    return replace(frame, programs=tuple(map(tuple, with_updates(frame, done))))


@lru_cache(maxsize=256)
def _ranked(request: ScheduleRequest) -> tuple[Form, ...]:
    """Return the best order, or those that may keep the limit on staleness, best first; all of one placement."""
    tried = _all_tried(replace(request, max_in_flight=None, max_mean_staleness=None), request.max_in_flight is not None)
    if request.times or request.latency_s:
        # The placement must not depend on times, which were measured on a placement.
        placement = _ranked(replace(request, times=(), latency_s=0.0))[0].line.pipelines
        tried = tuple(each for each in tried if each.form.line.pipelines == placement)
    least = min(each.held for each in tried)
    most = max(least, _ACTIVATIONS * request.num_devices) if request.max_in_flight is None else request.max_in_flight
    small = [each for each in tried if each.held <= most]
    if not small:
        raise too_many_activations("amdp-auto", request, least)
    bound = max(1, min(each.max_delay for each in small))
    bounded = sorted((each for each in small if each.max_delay <= bound), key=_staleness)
    if request.max_mean_staleness is None:
        fastest = sorted(bounded, key=_time)[:_FASTEST]
        allowed_s = (_NEARLY + _NOTHING) * min(_update_s(each.form, request) for each in fastest)
        # Those are looked at in any case: one of them is fast enough.
        worth_a_look = (each for each in bounded if each in fastest or each.update_s <= _MOST_WRONG * allowed_s)
        return (next(each.form for each in worth_a_look if _update_s(each.form, request) <= allowed_s),)
    within = sorted((each for each in bounded if each.mean_delay <= request.max_mean_staleness), key=_time)
    within[:_FASTEST] = sorted(within[:_FASTEST], key=lambda each: _update_s(each.form, request))
    best = [*within, *(each for each in bounded[:_LEAST_STALE] if each not in within)]
    return tuple(each.form for each in best if each.form.line.pipelines == best[0].form.line.pipelines)


def _time(tried: _Tried) -> float:
    return tried.update_s


def _staleness(tried: _Tried) -> tuple[float, ...]:
    return round(tried.mean_delay, 9), tried.held, tried.update_s


@lru_cache(maxsize=256)
def _all_tried(request: ScheduleRequest, sparing: bool) -> tuple[_Tried, ...]:
    depth = request.num_devices
    keys = [*rules(depth), *_update_rules(request.num_microbatches)]
    tried: list[_Tried] = []
    for pipelines in placements(depth, request.num_pipelines):
        line = TimedPipelines.of(pipelines, request)
        tried += [_measured(form, request) for form in forms(line, keys, spare=_MOST_SPARE, sparing=sparing)]
        if pipelines == ring(depth, depth // 2) and depth % 4 == 0 and request.num_microbatches % depth == 0:
            tried.append(_measured(Form(line, _IN_ROUNDS, partial(_authors, line)), request))
    return tuple(tried)


def _authors(line: TimedPipelines, turns: int) -> list[list[Started]]:
    return timed(line, amdp.rounds(line.num_workers, turns // 2))


def _update_rules(num_microbatches: int) -> list[Key]:
    return [
        lambda at_s, op: (op.index // num_microbatches, op.kind is not OpKind.FORWARD, op.stage, at_s, op.index),
        lambda at_s, op: (op.index // num_microbatches, op.kind is not OpKind.FORWARD, -op.stage, at_s, op.index),
    ]


def _measured(form: Form, request: ScheduleRequest) -> _Tried:
    schedule, done, first, count = _run(form, request, _FEW_TURNS)
    delays = []
    for program in _filled(schedule, done).programs:
        version: Counter[tuple[int, int]] = Counter()
        for op in itertools.chain.from_iterable(map(ops_of, program)):
            if op.kind is OpKind.UPDATE:
                version[op.stage, op.pipeline] += 1
            elif op.kind is OpKind.FORWARD and first <= (update := schedule.update(op)) < first + count:
                delays.append(update - version[op.stage, op.pipeline])
    return _Tried(
        form=form,
        update_s=_steady_s(form, schedule, done, first, count),
        held=most_held(done),
        max_delay=max(delays),
        mean_delay=statistics.fmean(delays),
    )


def _update_s(form: Form, request: ScheduleRequest) -> float:
    return _steady_s(form, *_run(form, request, _MANY_TURNS))


def _run(form: Form, request: ScheduleRequest, num_turns: int) -> tuple[Schedule, list[list[Started]], int, int]:
    """Return an order, its first update far from the ends, and how many there are."""
    turns = request.num_microbatches // request.num_pipelines
    filling = -(-form.in_flight // turns)
    first, count = 1 + filling, max(2, -(-num_turns // turns))
    schedule = replace(_frame(form.line.pipelines, request), num_updates=first + count + filling)
    return schedule, form.run(turns * schedule.num_updates), first, count


def _steady_s(form: Form, schedule: Schedule, done: Sequence[Sequence[Started]], first: int, count: int) -> float:
    ends_s = [0.0] * schedule.num_updates
    for started in itertools.chain.from_iterable(done):
        if started.op.stage == 0 and started.op.kind is OpKind.BACKWARD:  # a microbatch ends there
            update = schedule.update(started.op)
            ends_s[update] = max(ends_s[update], started.end_s)
    turns = schedule.num_microbatches // len(schedule.pipelines)
    return max(max(form.line.work_s) * turns, (ends_s[first + count - 1] - ends_s[first - 1]) / count)


def _peak_in_flight(request: ScheduleRequest, worker: int) -> int:
    return metrics(amdp_auto(request)).peak_in_flight[worker]


SPEC = ScheduleSpec(
    name="amdp-auto",
    build=amdp_auto,
    title="AMDP's pipelines in the least stale of the fastest orders found",
    paper="the pipelines of Chen et al., ICML 2026, arXiv 2605.29664; orders by search",
    bubble="searched: 0 where one is found",
    memory="3D/2, or --max-in-flight",
    mismatch="1 where an order is found",
    delay="1 where an order is found",
    makespan_s=lambda request, times: None,
    peak_in_flight=_peak_in_flight,
    weight_rule=WeightRule.LIVE,
)
