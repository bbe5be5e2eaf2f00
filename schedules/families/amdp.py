"""AMDP: asynchronous pipelines in several directions (Chen, Wu and Yu, ICML 2026, arXiv 2605.29664).

Devices form a ring. Pipeline j places stage s on device (2j + s) mod D if j is even, on (2j + 1 - s) mod D if it is odd. With
N = D/2 pipelines each device holds D/2 stages of both ends of the model; if 4 divides D, all copies of a stage lie within one
half of the devices. A round is 2 microbatches a pipeline; an update takes the gradients of K = M/D rounds, and each Op uses
the current weights (`live`). Rounds follow without a pause; the U of an update stand within the next round. Four devices, K = 1,
from the second round on (b is the backward left over from the round before):

    device 0   F0 F2 b2 F1 B1 U F3 B3 B0        stages 0, 3
    device 1   b2 F0 F1 F2 F3 U B1 B0 B3        stages 1, 2
    device 2   b3 F1 F0 F3 F2 U B0 B1 B2        stages 2, 1
    device 3   F1 F3 b3 F0 B0 U F2 B2 B1        stages 3, 0

A round takes D(F+B) + (B-F) + max(0, B-2F) where B >= F: 3D + 1 where B = 2F. Mismatch is at most 1, only in the first
round of an update; delay is at most 1. A backward behind the reduction of an update counts for the next update.

In a round (`_one_round`, as the authors' code for D = 4 and 8) a worker takes what arrives first; ties go to a pipeline's
first microbatch, then to backwards, then to later stages.

Other sizes and limits on activations are searched (`_searched`) among two placements, four rules (`dispatch`) and periodic
orders (`cyclic`): of those within 3 % of the fastest, the one with the fewest activations. There each U stands where its
gradients have just arrived; mismatch and delay are at most 1 if an update has as many microbatches as are in flight.

`amdp-flush` drains the pipelines before each update: synchronous, for 3 units an update more (F + B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from raypipe.schedules.builders import synchronous_pipelines
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope, WeightRule
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.dispatch import Started, TimedPipelines, dispatch, with_updates
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

_TRIAL_TURNS = 24  # microbatches of each pipeline that a trial times, besides those that fill and drain
_MOST_SPARE = 4  # microbatches of each pipeline beyond the minimum; more are no faster
_NEARLY = 1.03  # times the fastest: the order with the fewest activations of these wins


def amdp(request: ScheduleRequest) -> Schedule:
    """Return rounds that follow each other without a pause."""
    form = _form("amdp", request, flushed=False)
    schedule = Schedule(
        name="amdp",
        graph=StageGraph.chain(request.num_devices),
        pipelines=ring(request.num_devices, num_pipelines(request)) if form is None else form.line.pipelines,
        programs=((),) * request.num_devices,
        num_microbatches=request.num_microbatches,
        num_updates=request.num_updates,
        weight_rule=WeightRule.LIVE,
        update_scope=request.update_scope or UpdateScope.STAGE,
    )
    programs = _stitched(request) if form is None else with_updates(schedule, form.run(_turns(request)))
    return replace(schedule, programs=tuple(map(tuple, programs)))


def amdp_flush(request: ScheduleRequest) -> Schedule:
    """Return the rounds of each update, drained before its U."""
    single = replace(request, num_updates=1)
    form = _form("amdp-flush", request, flushed=True)
    if form is None:
        pipelines = ring(request.num_devices, num_pipelines(request))
        programs = rounds(request.num_devices, request.num_microbatches // request.num_devices)
    else:
        pipelines = form.line.pipelines
        programs = [[started.op for started in row] for row in form.run(_turns(single))]
    return synchronous_pipelines("amdp-flush", request, pipelines=pipelines, one_update=programs)


def _turns(request: ScheduleRequest) -> int:
    return request.num_microbatches * request.num_updates // num_pipelines(request)


def _tabled(request: ScheduleRequest) -> bool:
    depth = request.num_devices
    return depth % 4 == 0 and num_pipelines(request) == depth // 2 and (request.max_in_flight is None or request.max_in_flight >= depth)


def _form(name: str, request: ScheduleRequest, *, flushed: bool) -> Form | None:
    """Return the chosen form; `None` where the authors' rounds serve the request."""
    request.require_one_chunk(name, instead="interleaved" if flushed else "async-interleaved")
    depth, number = request.num_devices, num_pipelines(request)
    tabled = _tabled(request)
    check_pipelines(name, request, rounds_of=depth if tabled else 0)
    if tabled:
        return None
    shape = ScheduleRequest(
        depth, 1, num_pipelines=number, times=request.times, latency_s=request.latency_s, max_in_flight=request.max_in_flight
    )
    best = _searched(shape, request.num_microbatches // number if flushed else None)
    if isinstance(best, int):
        raise too_many_activations(name, request, best)
    return best.form


# The rounds of the authors


def _one_round(depth: int) -> list[list[Op]]:
    """Return each worker's Ops of microbatches 0 to D-1 for F = 1 and B = 2."""
    line = TimedPipelines.of(ring(depth, depth // 2), ScheduleRequest(depth, 1))

    def first_come(at_s: float, op: Op) -> tuple[float, ...]:
        return at_s, op.index >= depth // 2, op.kind is not OpKind.BACKWARD, -op.stage

    return [[started.op for started in row] for row in dispatch(line, turns=2, in_flight=2, key=first_come)]


def rounds(depth: int, number: int) -> list[list[Op]]:
    """Return `number` of the authors' rounds without any U; `depth` is a multiple of 4."""
    programs = _stitched(ScheduleRequest(depth, depth * number))
    return [[op for op in program if op.kind is not OpKind.UPDATE] for program in programs]


def _stitched(request: ScheduleRequest) -> list[list[Op]]:
    """Return per round r: leading forwards where a pipeline starts, the rest of round r-1, all but the last Op."""
    depth = request.num_devices
    rounds_per_update = request.num_microbatches // depth
    num_rounds = rounds_per_update * request.num_updates
    pipelines = ring(depth, depth // 2)
    programs: list[list[Op]] = []
    for worker, ops in enumerate(_one_round(depth)):
        starts = 2 if worker % 4 in {0, 3} else 0
        lead, rest, left = ops[:starts], ops[starts:-1], ops[-1]
        last_forward = max(position for position, op in enumerate(rest) if op.kind is OpKind.FORWARD)
        # Behind the last forward. Where a pipeline starts, before it if D = 4, as the authors have it, or if all workers meet for
        # a norm: those where none starts are there a forward earlier, and have one forward's time to wait.
        before = starts and (depth == 4 or request.update_scope is UpdateScope.GLOBAL)
        updates_at = last_forward if before else last_forward + 1
        held = [(stage, pipeline) for pipeline, workers in enumerate(pipelines) for stage, at in enumerate(workers) if at == worker]
        program: list[Op] = []
        for number in range(num_rounds + 1):
            earlier = [_in_round(left, number - 1, depth)] if number else []
            if number < num_rounds:
                program += [*(_in_round(op, number, depth) for op in lead), *earlier]
                program += [_in_round(op, number, depth) for op in rest[:updates_at]]
            else:
                program += earlier
            if number and number % rounds_per_update == 0:
                update = number // rounds_per_update - 1
                program += [Op(OpKind.UPDATE, stage, update, pipeline) for stage, pipeline in sorted(held)]
            if number < num_rounds:
                program += [_in_round(op, number, depth) for op in rest[updates_at:]]
        programs.append(program)
    return programs


def _in_round(op: Op, number: int, depth: int) -> Op:
    return op._replace(index=op.index + number * depth)


# The search


@dataclass(frozen=True)
class _Timed:
    form: Form
    turn_s: float  # for a microbatch of each pipeline, far from the ends
    held: int

    def cost_s(self, turns: int | None) -> float:
        return self.turn_s if turns is None else max(started.end_s for row in self.form.run(turns) for started in row)


def _searched(shape: ScheduleRequest, turns: int | None) -> _Timed | int:
    """Return the best form for `turns`, or far from the ends; the fewest activations of any if none keeps the limit."""
    tried = _all_timed(replace(shape, max_in_flight=None), shape.max_in_flight is not None)
    possible = [form for form in tried if shape.max_in_flight is None or form.held <= shape.max_in_flight]
    if not possible:
        return min(form.held for form in tried)
    costs_s = [form.cost_s(turns) for form in possible]
    # Rounded, so that what differs by the order of sums alone is equal.
    ratios = [round(cost_s / (min(costs_s) or 1.0), 9) for cost_s in costs_s]
    good = [(form.held, ratio, number) for number, (form, ratio) in enumerate(zip(possible, ratios, strict=True)) if ratio <= _NEARLY]
    return possible[min(good)[2]]


@lru_cache(maxsize=256)
def _placement(depth: int, num_pipelines: int) -> Pipelines:
    best = _searched(ScheduleRequest(depth, 1, num_pipelines=num_pipelines), None)
    assert isinstance(best, _Timed), "there is no limit"
    return best.form.line.pipelines


@lru_cache(maxsize=256)
def _all_timed(shape: ScheduleRequest, sparing: bool) -> tuple[_Timed, ...]:
    depth, number = shape.num_devices, shape.num_pipelines
    tried: list[_Timed] = []
    for pipelines in placements(depth, number):
        if (shape.times or shape.latency_s) and pipelines != _placement(depth, number):
            continue  # the placement must not depend on times, which were measured on a placement
        line = TimedPipelines.of(pipelines, shape)
        for form in forms(line, rules(depth), spare=_MOST_SPARE, sparing=sparing):
            done = form.run(_TRIAL_TURNS + 6 * form.in_flight)
            tried.append(_Timed(form, max(*line.work_s, _turn_s(done, number, first=4 * form.in_flight)), most_held(done)))
    return tuple(tried)


def _turn_s(done: Sequence[Sequence[Started]], num_in_turn: int, *, first: int) -> float:
    ends_s: dict[int, float] = {}
    for row in done:
        for started in row:
            turn = started.op.index // num_in_turn
            ends_s[turn] = max(ends_s.get(turn, 0.0), started.end_s)
    return (ends_s[first + _TRIAL_TURNS] - ends_s[first]) / _TRIAL_TURNS


def _makespan_s(request: ScheduleRequest, times: StageTimes) -> float | None:
    forward_s, backward_s = times.forward_s, times.input_grad_s + times.weight_grad_s
    depth = request.num_devices
    if not _tabled(request) or backward_s < forward_s:
        return None
    round_s = depth * (forward_s + backward_s) + (backward_s - forward_s) + max(0.0, backward_s - 2 * forward_s)
    return request.num_microbatches // depth * round_s + forward_s + min(backward_s, 2 * forward_s)


def _peak_in_flight(build: Callable[[ScheduleRequest], Schedule], request: ScheduleRequest, worker: int) -> int:
    if _tabled(request):
        return request.num_devices - (worker % 4 in {0, 3})
    return metrics(build(request)).peak_in_flight[worker]


SPEC = ScheduleSpec(
    name="amdp",
    build=amdp,
    title="asynchronous pipelines in several directions, live weights",
    paper="Chen et al., ICML 2026, arXiv 2605.29664",
    bubble="1/(3D+1) if B = 2F",
    memory="[D-1, D] if N = D/2",
    mismatch="1 if N = D/2",
    delay="1 if N = D/2",
    makespan_s=_makespan_s,
    peak_in_flight=partial(_peak_in_flight, amdp),
    weight_rule=WeightRule.LIVE,
)

SPEC_FLUSH = replace(
    SPEC,
    name="amdp-flush",
    build=amdp_flush,
    title="amdp drained before each update",
    bubble="1-3DK/(K(3D+1)+3) if B = 2F",
    mismatch="0",
    delay="0",
    peak_in_flight=partial(_peak_in_flight, amdp_flush),
    weight_rule=WeightRule.FLUSH,
)
