"""Chimera: pipelines in opposite directions fill each other's bubbles (Li and Hoefler, SC 2021, arXiv 2107.06925, section 3).

N pipelines of D stages share the same D devices; N is even and divides D. Pipeline 2q runs down, with stage s on device
2qD/N + s (mod D); pipeline 2q+1 runs up, with stage s on the opposite device. Each device holds N stages. Microbatch m passes
through pipeline m mod N. Four devices, two pipelines, F = B (even microbatches run down):

    worker 0   F0 F2 .  F1 B1 F3 B3 B0 .  B2
    worker 1   .  F0 F1 F2 F3 B1 B0 B3 B2
    worker 2   .  F1 F0 F3 F2 B0 B1 B2 B3
    worker 3   F1 F3 .  F0 B0 F2 B2 B1 .  B3

This is a unit: on each device D/N forward and D/N backward slots of each pipeline. The k-th microbatch of a pipeline has its
F of stage s in slot 2k+s, its B in slot 2k+2D-1-s; no two Ops of a device share a slot, and a worker runs them in this order.

Several units, for more than D microbatches, are joined in three forms (section 3.5):

chimera           units follow 2D slots apart, with bubbles between them where B takes longer than F.
chimera-doubling  a forward slot runs two microbatches, as long as a B where B = 2F (slots of 2F):

    worker 0   F0+2 F4+6 .    F1+3 B1   F5+7 B3   B0   B5   B2   B7   B4   .    B6
    worker 1   .    F0+2 F1+3 F4+6 F5+7 B1   B0   B3   B2   B5   B4   B7   B6
    worker 2   .    F1+3 F0+2 F5+7 F4+6 B0   B1   B2   B3   B4   B5   B6   B7
    worker 3   F1+3 F5+7 .    F0+2 B0   F4+6 B2   B1   B4   B3   B6   B5   .    B7

chimera-halving   a backward slot runs half the rows of a microbatch, as long as an F where B = 2F (slots of F):

    worker 0   F0   F2   .    F1   B1.1 F3   B1.2 B0.1 B3.1 B0.2 B3.2 B2.1 .    B2.2
    worker 1   .    F0   F1   F2   F3   B1.1 B0.1 B1.2 B0.2 B3.1 B2.1 B3.2 B2.2
    worker 2   .    F1   F0   F3   F2   B0.1 B1.1 B0.2 B1.2 B2.1 B3.1 B2.2 B3.2
    worker 3   F1   F3   .    F0   B0.1 F2   B0.2 B1.1 B2.1 B1.2 B2.2 B3.1 .    B3.2

The last two have twice as many backward as forward slots, and units 3D slots apart. With f and b the times of a forward and a
backward slot, K whole units (M/D, with doubled forwards M/2D) leave each device idle for

    (2D/N - 2) (max(f, b) + (K - 1) |f - b|)

With two pipelines and B = 2F: (D-2)(2F + (K-1)F) in chimera, (D-2) 2F in chimera-doubling and (D-2) F in chimera-halving,
where 1F1B has (D-1) 3F; with D pipelines there are no bubbles. Activations held: at most D, 2D where forwards are doubled;
D/N - 1 less on a device where a pipeline starts, half of that less where backwards are halved.

A number of microbatches that makes no whole unit leaves out the last ones; pipelines differ by one microbatch at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from raypipe.errors import ScheduleError
from raypipe.schedules.builders import synchronous_pipelines
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec

_DEFAULT_PIPELINES = 2


@dataclass(frozen=True)
class _Form:
    """How units are joined.

    Attributes:
        width: pieces of work in a forward slot; a backward slot has one.
        num_parts: pieces that a microbatch is divided into.
    """

    name: str
    width: int
    num_parts: int


_DIRECT = _Form("chimera", width=1, num_parts=1)
_DOUBLING = _Form("chimera-doubling", width=2, num_parts=1)
_HALVING = _Form("chimera-halving", width=2, num_parts=2)


def _build(form: _Form, request: ScheduleRequest) -> Schedule:
    placement = _checked(form.name, request)
    placed: list[list[tuple[int, Slot]]] = [[] for _ in range(request.num_devices)]
    for pipeline, workers in enumerate(placement):
        for stage, worker in enumerate(workers):
            placed[worker] += _slots(form, request, pipeline, len(placement), stage)
    one_update = [[slot for _, slot in sorted(mine, key=itemgetter(0))] for mine in placed]
    return synchronous_pipelines(form.name, request, pipelines=placement, one_update=one_update)


def _checked(name: str, request: ScheduleRequest) -> tuple[tuple[int, ...], ...]:
    request.require_one_chunk(name)
    request.require_even_devices(name)
    depth, count = request.num_devices, request.num_pipelines or _DEFAULT_PIPELINES
    possible = [number for number in range(2, depth + 1, 2) if depth % number == 0]
    if count not in possible:
        choices = " or ".join(f"--pipelines {number}" for number in possible)
        raise ScheduleError(f"{name} needs an even number of pipelines that divides the {depth} devices, got {count}; use {choices}")
    return pipelines(depth, count)


def pipelines(depth: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the workers of each pipeline by stage; every other pipeline runs up."""
    down = [tuple((2 * pair * depth // count + stage) % depth for stage in range(depth)) for pair in range(count // 2)]
    return tuple(placement for workers in down for placement in (workers, tuple(depth - 1 - worker for worker in workers)))


def _slots(form: _Form, request: ScheduleRequest, pipeline: int, num_pipelines: int, stage: int) -> Iterator[tuple[int, Slot]]:
    """Yield (number of the slot, slot) for a stage in one update."""
    depth, turns = request.num_devices, request.num_devices // num_pipelines
    parts = range(1, form.num_parts + 1) if form.num_parts > 1 else (0,)
    pieces = [(microbatch, part) for microbatch in range(pipeline, request.num_microbatches, num_pipelines) for part in parts]
    for number, (microbatch, part) in enumerate(pieces):
        unit, within = divmod(number, form.width * turns)
        start = unit * (form.width + 1) * depth
        if within % form.width == 0:
            forwards = tuple(Op(OpKind.FORWARD, stage, at, pipeline, of) for at, of in pieces[number : number + form.width])
            yield start + 2 * (within // form.width) + stage, Overlap(forwards) if len(forwards) > 1 else forwards[0]
        later, turn = divmod(within, turns)
        yield start + (later + 2) * depth - 1 + 2 * turn - stage, Op(OpKind.BACKWARD, stage, microbatch, pipeline, part)


def _makespan_s(form: _Form, request: ScheduleRequest, times: StageTimes) -> float | None:
    num_units, rest = divmod(request.num_microbatches, request.num_devices * form.width // form.num_parts)
    if rest:
        return None
    backward_s = times.input_grad_s + times.weight_grad_s
    forward_slot_s, backward_slot_s = times.forward_s * form.width / form.num_parts, backward_s / form.num_parts
    idle_slots = _between(request) - 2
    idle_s = idle_slots * (max(forward_slot_s, backward_slot_s) + (num_units - 1) * abs(forward_slot_s - backward_slot_s))
    return request.num_microbatches * (times.forward_s + backward_s) + idle_s


def _peak_in_flight(form: _Form, request: ScheduleRequest, worker: int) -> int:
    """Return the peak, which grows by a piece with each device from the start of a pipeline to the middle."""
    between = _between(request)
    distance = min(worker % between, between - 1 - worker % between)
    pieces = form.width * request.num_devices - (between // 2 - 1) + distance
    return min(math.ceil(pieces / form.num_parts), request.num_microbatches)


def _between(request: ScheduleRequest) -> int:
    return 2 * request.num_devices // (request.num_pipelines or _DEFAULT_PIPELINES)


SPEC = ScheduleSpec(
    name=_DIRECT.name,
    build=partial(_build, _DIRECT),
    title="pipelines in opposite directions fill each other's bubbles",
    paper="Li and Hoefler, SC 2021, arXiv 2107.06925",
    bubble="(2D/N-2)(B+(M/D-1)(B-F)) idle",
    memory="[D-D/N+1, D]",
    mismatch="0",
    delay="0",
    makespan_s=partial(_makespan_s, _DIRECT),
    peak_in_flight=partial(_peak_in_flight, _DIRECT),
)

SPEC_DOUBLING = replace(
    SPEC,
    name=_DOUBLING.name,
    build=partial(_build, _DOUBLING),
    title="chimera with forwards of two microbatches at once",
    bubble="(2D/N-2)2F idle if B = 2F",
    memory="[2D-D/N+1, 2D]",
    makespan_s=partial(_makespan_s, _DOUBLING),
    peak_in_flight=partial(_peak_in_flight, _DOUBLING),
)

SPEC_HALVING = replace(
    SPEC,
    name=_HALVING.name,
    build=partial(_build, _HALVING),
    title="chimera with backwards of half a microbatch at a time",
    bubble="(2D/N-2)F idle if B = 2F",
    memory="[D-(D/N-1)/2, D]",
    makespan_s=partial(_makespan_s, _HALVING),
    peak_in_flight=partial(_peak_in_flight, _HALVING),
)
