"""Pipelines over a ring of devices in both directions, and searched orders for them; shared by `amdp` and `amdp-auto`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.search.cyclic import cycle
from raypipe.schedules.search.dispatch import Key, Started, TimedPipelines, dispatch

_TRIAL_CYCLES = 48  # choices of when each pipeline starts
_MOST_IN_FLIGHT = 4  # microbatches of a pipeline, times its stages
_LONGER_PERIODS = 40  # periods tried, in steps of 2.5 % of the shortest

Pipelines = tuple[tuple[int, ...], ...]
"""The worker of each stage, for each pipeline."""


@dataclass(frozen=True)
class Form:
    """How an order is made.

    Attributes:
        in_flight: Microbatches of each pipeline in flight at once, about at most.
        run: Function from the number of microbatches of each pipeline to what each worker does.
    """

    line: TimedPipelines
    in_flight: int
    run: Callable[[int], list[list[Started]]]


def ring(depth: int, num_pipelines: int) -> Pipelines:
    """Return the placement of the authors of AMDP: starts are two devices apart, every other pipeline runs backwards."""
    return tuple(
        tuple((2 * pipeline + stage if pipeline % 2 == 0 else 2 * pipeline + 1 - stage) % depth for stage in range(depth))
        for pipeline in range(num_pipelines)
    )


def spread(depth: int, num_pipelines: int) -> Pipelines:
    """Return the placement whose starts are as far apart as they can be."""
    starts = [pipeline * depth // num_pipelines for pipeline in range(num_pipelines + 1)]
    return tuple(
        tuple((starts[pipeline] + stage if pipeline % 2 == 0 else starts[pipeline + 1] - 1 - stage) % depth for stage in range(depth))
        for pipeline in range(num_pipelines)
    )


def placements(depth: int, num_pipelines: int) -> list[Pipelines]:
    """Return the placements to try; within one, no two pipelines are equal."""
    candidates = dict.fromkeys((ring(depth, num_pipelines), spread(depth, num_pipelines)))
    return [placement for placement in candidates if len(set(placement)) == num_pipelines]


def num_pipelines(request: ScheduleRequest) -> int:
    """Return the number of pipelines; half as many as devices (AMDP) by default."""
    return request.num_pipelines or max(1, request.num_devices // 2)


def check_pipelines(name: str, request: ScheduleRequest, *, rounds_of: int = 0) -> None:
    """Check the numbers of pipelines and microbatches (multiples of `rounds_of`, or of one turn if 0).

    Raises:
        ScheduleError: A device would start two pipelines, or the microbatches do not divide into rounds.
    """
    depth, number = request.num_devices, request.num_microbatches
    if num_pipelines(request) > depth:
        raise ScheduleError(
            f"{name} starts at most one pipeline on each of {depth} devices, got {request.num_pipelines}; use --pipelines {depth}"
        )
    unit = rounds_of or num_pipelines(request)
    if number % unit:
        near = sorted({max(unit, number // unit * unit), -(-number // unit) * unit})
        choices = " or ".join(f"--microbatches {each}" for each in near)
        reason = f"rounds of {unit} microbatches" if rounds_of else f"as many microbatches for each of its {unit} pipelines"
        raise ScheduleError(f"{name} on {depth} devices takes {reason}, got {number} an update; use {choices}")


def too_many_activations(name: str, request: ScheduleRequest, least: int) -> ScheduleError:
    """Return the refusal of a limit below `least`, the fewest activations of any order."""
    return ScheduleError(
        f"{name} with {num_pipelines(request)} pipelines on {request.num_devices} devices holds at least {least} activations "
        f"on some device, max_in_flight allows {request.max_in_flight:g}; use --max-in-flight {least}, or fewer pipelines"
    )


def rules(depth: int) -> list[Key]:
    """Return rules for a free worker: first come, forward first, backward first, longest path left."""

    def path_left(op: Op) -> int:
        return 3 * depth - op.stage if op.kind is OpKind.FORWARD else 2 * (op.stage + 1)

    return [
        lambda at_s, op: (at_s, op.index, op.kind is not OpKind.BACKWARD, -op.stage),
        lambda at_s, op: (op.kind is not OpKind.FORWARD, op.index, at_s, -op.stage),
        lambda at_s, op: (op.kind is not OpKind.BACKWARD, op.index, at_s, -op.stage),
        lambda at_s, op: (-path_left(op), op.index, at_s),
    ]


def forms(line: TimedPipelines, keys: Sequence[Key], *, spare: int, sparing: bool) -> Iterator[Form]:
    """Yield the orders by rules, then the periodic one with the shortest feasible period.

    In flight are fewer than `spare` microbatches beyond what keeps workers busy; `sparing` tries fewer than that, too.
    """
    least = -(-line.num_workers // len(line.pipelines))
    for in_flight, key in itertools.product(range(1 if sparing else least, least + spare), keys):
        yield Form(line, in_flight, partial(_dispatched, line, in_flight, key))
    if (repeated := _in_cycles(line)) is not None:
        yield repeated


def _dispatched(line: TimedPipelines, in_flight: int, key: Key, turns: int) -> list[list[Started]]:
    return dispatch(line, turns=turns, in_flight=in_flight, key=key)


def _in_cycles(line: TimedPipelines) -> Form | None:
    chance = random.Random(0)
    number = len(line.pipelines)
    work_s = line.work_s
    if not max(work_s):
        return None  # what takes no time needs no order
    # Starts that are multiples of an Op leave no gaps that nothing fits into, where all stages are equal.
    step_s = max(min(times.forward_s for times in line.times), max(work_s) / 64)
    for longer in range(_LONGER_PERIODS):
        period_s = max(work_s) * (1 + longer / 40)
        cycles = []
        for trial in range(_TRIAL_CYCLES):
            starts_s = [chance.randrange(int(period_s / step_s) or 1) * step_s if trial else 0.0 for _ in range(number)]
            if (made := cycle(line, period_s=period_s, starts_s=starts_s)) is not None:
                cycles.append(made)
        if cycles:
            best = min(cycles, key=lambda each: each.mean_held)
            transits_s: list[float] = []
            for pipeline in range(number):
                ops = [started for started in best.first if started.op.pipeline == pipeline]
                transits_s.append(max(started.end_s for started in ops) - min(started.start_s for started in ops))
            # Long latencies would ask for more microbatches than are needed to see the steady state.
            most = _MOST_IN_FLIGHT * len(line.pipelines[0])
            return Form(line, min(math.ceil(max(transits_s) / period_s), most), best.unrolled)
    return None


def most_held(done: Sequence[Sequence[Started]]) -> int:
    """Return the most activations that a worker holds at once."""
    return max(max(itertools.accumulate(1 if started.op.kind is OpKind.FORWARD else -1 for started in row)) for row in done)
