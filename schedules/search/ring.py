"""Pipelines laid over a ring of devices in both directions, and orders for them that are found by search.

What `amdp` and `amdp-auto` share. Orders are made in two ways: a free worker takes what a rule says (`dispatch`), with so many
microbatches of a pipeline in flight; or every Op gets a place in a period (`cyclic`).
"""

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

_TRIAL_CYCLES = 48
"""Choices of when each pipeline starts."""
_MOST_IN_FLIGHT = 4
"""Microbatches of a pipeline for each of its stages."""
_LONGER_PERIODS = 40
"""Periods that are tried, each 2.5 % of the shortest one longer than the one before."""

Pipelines = tuple[tuple[int, ...], ...]
"""The worker of each stage, for each pipeline."""


@dataclass(frozen=True)
class Form:
    """How an order is made.

    Attributes:
        line: the pipelines and their times.
        in_flight: microbatches of each pipeline that are under way at once, about at most.
        run: what each worker does, for so many microbatches of each pipeline.
    """

    line: TimedPipelines
    in_flight: int
    run: Callable[[int], list[list[Started]]]


def ring(depth: int, num_pipelines: int) -> Pipelines:
    """As the authors of AMDP lay them: each starts two devices behind the one before, every other one runs backwards."""
    return tuple(
        tuple((2 * pipeline + stage if pipeline % 2 == 0 else 2 * pipeline + 1 - stage) % depth for stage in range(depth))
        for pipeline in range(num_pipelines)
    )


def spread(depth: int, num_pipelines: int) -> Pipelines:
    """Return the same, with the starts as far from each other as they can be."""
    starts = [pipeline * depth // num_pipelines for pipeline in range(num_pipelines + 1)]
    return tuple(
        tuple((starts[pipeline] + stage if pipeline % 2 == 0 else starts[pipeline + 1] - 1 - stage) % depth for stage in range(depth))
        for pipeline in range(num_pipelines)
    )


def layings(depth: int, num_pipelines: int) -> list[Pipelines]:
    """Return the ways to lay so many pipelines that are tried; none lays two of them alike, which would be one."""
    return [
        found for found in dict.fromkeys((ring(depth, num_pipelines), spread(depth, num_pipelines))) if len(set(found)) == num_pipelines
    ]


def num_pipelines(request: ScheduleRequest) -> int:
    """Of a size; half as many as devices, as in AMDP, where it does not say."""
    return request.num_pipelines or max(1, request.num_devices // 2)


def check_pipelines(name: str, request: ScheduleRequest, *, rounds_of: int = 0) -> None:
    """Check how many pipelines and microbatches are asked for.

    Args:
        name: of the schedule.
        request: what is asked for.
        rounds_of: microbatches that an update has multiples of; 0 for those of one turn.

    Raises:
        ScheduleError: a device would start two pipelines, or the microbatches do not divide into rounds; says what would do.
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
    """Return the refusal of a limit on activations that no order keeps.

    Args:
        name: of the schedule.
        request: what is asked for, with the limit.
        least: the activations that it must allow.
    """
    return ScheduleError(
        f"{name} with {num_pipelines(request)} pipelines on {request.num_devices} devices holds at least {least} activations "
        f"on some device, max_in_flight allows {request.max_in_flight:g}; use --max-in-flight {least}, or fewer pipelines"
    )


def rules(depth: int) -> list[Key]:
    """Return what a free worker takes: of all that has arrived, the least. First come, forward first, backward first, longest way first."""

    def way_left(op: Op) -> int:
        return 3 * depth - op.stage if op.kind is OpKind.FORWARD else 2 * (op.stage + 1)

    return [
        lambda at_s, op: (at_s, op.index, op.kind is not OpKind.BACKWARD, -op.stage),
        lambda at_s, op: (op.kind is not OpKind.FORWARD, op.index, at_s, -op.stage),
        lambda at_s, op: (op.kind is not OpKind.BACKWARD, op.index, at_s, -op.stage),
        lambda at_s, op: (-way_left(op), op.index, at_s),
    ]


def forms(line: TimedPipelines, keys: Sequence[Key], *, spare: int, sparing: bool) -> Iterator[Form]:
    """Orders of pipelines: those by rules, and the one that repeats with the shortest period for which any was found.

    Args:
        line: the pipelines and their times.
        keys: rules for what a free worker takes.
        spare: with up to so many microbatches of each pipeline in flight fewer one, beyond what keeps all workers busy.
        sparing: with fewer than that, too.
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
    step_s = max(min(line.forward_s), max(work_s) / 64)
    for longer in range(_LONGER_PERIODS):
        period_s = max(work_s) * (1 + longer / 40)
        found = []
        for trial in range(_TRIAL_CYCLES):
            starts_s = [chance.randrange(int(period_s / step_s) or 1) * step_s if trial else 0.0 for _ in range(number)]
            made = cycle(line, period_s=period_s, starts_s=starts_s)
            if made is not None:
                found.append(made)
        if found:
            best = min(found, key=lambda made: made.mean_held)
            ways_s = [0.0] * number
            for pipeline in range(number):
                of_pipeline = [started for started in best.first if started.op.pipeline == pipeline]
                ways_s[pipeline] = max(started.end_s for started in of_pipeline) - min(started.start_s for started in of_pipeline)
            # What lasts long without any work needs no more of them than this to be seen.
            most = _MOST_IN_FLIGHT * len(line.pipelines[0])
            return Form(line, min(math.ceil(max(ways_s) / period_s), most), best.unrolled)
    return None


def most_held(done: Sequence[Sequence[Started]]) -> int:
    """Return the most activations that a worker has at once."""
    return max(max(itertools.accumulate(1 if started.op.kind is OpKind.FORWARD else -1 for started in row)) for row in done)
