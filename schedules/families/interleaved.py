"""Interleaved 1F1B: V stages a device shorten the ramp (Narayanan et al., 2021, arXiv 2104.04473, section 2.2).

Device s holds stages s, s+D, s+2D, ... Forwards go through a group of microbatches chunk by chunk; backwards mirror them.
Two devices, two chunks, four microbatches (stages 0 and 2 on worker 0, 1 and 3 on worker 1):

    worker 0   0F0 0F1 2F0 2F1 .    2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 ...
    worker 1   .   1F0 1F1 3F0 3B0  3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 ...

Groups have D microbatches where M is a multiple of D; else M is divided into max(1, M // D) groups whose sizes differ by one
at most, the larger ones first. Idle time per device (D-1)(F+B)/V of a device's F and B for M >= D, more where M < D; with groups
of D, D(V-1) + 2(D-1-s) + 1 chunk activations held.
"""

from __future__ import annotations

from raypipe.schedules.ir import Op, OpKind, Schedule, ScheduleRequest, Slot, StageTimes
from raypipe.schedules.spec import ScheduleSpec, in_turn, require_one_pipeline, synchronous


def interleaved(size: ScheduleRequest) -> Schedule:
    """Warm-up of 2(D-1-s) + (V-1) g forwards, g the largest group, then forwards and backwards in turn."""
    require_one_pipeline("interleaved", size)
    return synchronous("interleaved", size, workers=round_robin(size), one_update=one_update(size))


def one_update(size: ScheduleRequest) -> list[list[Slot]]:
    """The slots of each worker for one update."""
    order = _order(size)
    programs: list[list[Slot]] = []
    for worker in range(size.num_devices):
        forwards = [Op(OpKind.FORWARD, chunk * size.num_devices + worker, microbatch) for chunk, microbatch in order]
        backwards = [
            Op(OpKind.BACKWARD, (size.num_chunks - 1 - chunk) * size.num_devices + worker, microbatch) for chunk, microbatch in order
        ]
        programs.append(in_turn(forwards, backwards, warm_up=_warm_up(size, worker)))
    return programs


def round_robin(size: ScheduleRequest) -> list[int]:
    """The worker of each stage: they take turns."""
    return [stage % size.num_devices for stage in range(size.num_devices * size.num_chunks)]


def _groups(size: ScheduleRequest) -> list[range]:
    """The microbatches of each group, which pass through one chunk before the next chunk's turn."""
    num_groups = max(1, size.num_microbatches // size.num_devices)
    small, larger = divmod(size.num_microbatches, num_groups)
    groups: list[range] = []
    first = 0
    for number in range(num_groups):
        end = first + small + (number < larger)
        groups.append(range(first, end))
        first = end
    return groups


def _order(size: ScheduleRequest) -> list[tuple[int, int]]:
    """Pairs (chunk, microbatch) in the order of the forwards."""
    return [(chunk, microbatch) for group in _groups(size) for chunk in range(size.num_chunks) for microbatch in group]


def _warm_up(size: ScheduleRequest, worker: int) -> int:
    largest = len(_groups(size)[0])
    return min(2 * (size.num_devices - 1 - worker) + (size.num_chunks - 1) * largest, size.num_microbatches * size.num_chunks)


def _makespan_s(size: ScheduleRequest, times: StageTimes) -> float | None:
    """(V M + D - 1)(f + b) with the times of one chunk, where M >= D."""
    if size.num_microbatches < size.num_devices:
        return None
    steps = size.num_chunks * size.num_microbatches + size.num_devices - 1
    return steps * (times.forward_s + times.input_grad_s + times.weight_grad_s)


def _peak_in_flight(size: ScheduleRequest, worker: int) -> int:
    return min(_warm_up(size, worker) + 1, size.num_microbatches * size.num_chunks)


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
