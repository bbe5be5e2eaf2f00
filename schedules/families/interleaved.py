"""Interleaved 1F1B: V stages a device shorten the ramp (Narayanan et al., 2021, arXiv 2104.04473, section 2.2).

Device s holds stages s, s+D, s+2D, ... Forwards go through a group of microbatches chunk by chunk; backwards mirror them.
Two devices, two chunks, four microbatches (stages 0 and 2 on worker 0, 1 and 3 on worker 1):

    worker 0   0F0 0F1 2F0 2F1 .    2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 ...
    worker 1   .   1F0 1F1 3F0 3B0  3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 ...

Groups have D microbatches if D divides M; else max(1, M // D) groups differ by at most one microbatch, the larger ones first.
Idle time per device (D-1)(F+B)/V of a device's F and B for M >= D, more where M < D. With groups of D,
D(V-1) + 2(D-1-s) + 1 chunk activations are held.
"""

from __future__ import annotations

from raypipe.schedules.builders import in_turn, synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule, Slot
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec


def interleaved(request: ScheduleRequest) -> Schedule:
    """Return 2(D-1-s) + (V-1) g warm-up forwards (g: largest group), then forwards and backwards in turn."""
    request.require_one_pipeline("interleaved")
    return synchronous("interleaved", request, workers=round_robin(request), one_update=one_update(request))


def one_update(request: ScheduleRequest) -> list[list[Slot]]:
    """Return the slots of each worker for one update."""
    order = _order(request)
    programs: list[list[Slot]] = []
    for worker in range(request.num_devices):
        forwards = [Op(OpKind.FORWARD, chunk * request.num_devices + worker, microbatch) for chunk, microbatch in order]
        backwards = [
            Op(OpKind.BACKWARD, (request.num_chunks - 1 - chunk) * request.num_devices + worker, microbatch) for chunk, microbatch in order
        ]
        programs.append(in_turn(forwards, backwards, warm_up=_warm_up(request, worker)))
    return programs


def round_robin(request: ScheduleRequest) -> list[int]:
    """Return the worker of each stage."""
    return [stage % request.num_devices for stage in range(request.num_devices * request.num_chunks)]


def _groups(request: ScheduleRequest) -> list[range]:
    num_groups = max(1, request.num_microbatches // request.num_devices)
    small, larger = divmod(request.num_microbatches, num_groups)
    groups: list[range] = []
    first = 0
    for number in range(num_groups):
        end = first + small + (number < larger)
        groups.append(range(first, end))
        first = end
    return groups


def _order(request: ScheduleRequest) -> list[tuple[int, int]]:
    return [(chunk, microbatch) for group in _groups(request) for chunk in range(request.num_chunks) for microbatch in group]


def _warm_up(request: ScheduleRequest, worker: int) -> int:
    largest = len(_groups(request)[0])
    return min(2 * (request.num_devices - 1 - worker) + (request.num_chunks - 1) * largest, request.num_microbatches * request.num_chunks)


def _makespan_s(request: ScheduleRequest, times: StageTimes) -> float | None:
    if request.num_microbatches < request.num_devices:
        return None
    steps = request.num_chunks * request.num_microbatches + request.num_devices - 1
    return steps * (times.forward_s + times.input_grad_s + times.weight_grad_s)


def _peak_in_flight(request: ScheduleRequest, worker: int) -> int:
    return min(_warm_up(request, worker) + 1, request.num_microbatches * request.num_chunks)


SPEC = ScheduleSpec(
    name="interleaved",
    build=interleaved,
    title="1F1B with V stages a device",
    paper="Narayanan et al., SC 2021, arXiv 2104.04473",
    bubble="(D-1)/(VM+D-1)",
    memory="D(V-1)+2(D-1-s)+1 chunks",
    mismatch="0",
    delay="0",
    makespan_s=_makespan_s,
    peak_in_flight=_peak_in_flight,
    default_chunks=2,
)
