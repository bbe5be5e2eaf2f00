"""Interleaved 1F1B: V stages a device shorten the ramp (Narayanan et al., 2021, arXiv 2104.04473, section 2.2).

Device s holds stages s, s+D, s+2D, ... Forwards go through a group of microbatches chunk by chunk; backwards mirror them.
Two devices, two chunks, four microbatches (stages 0 and 2 on worker 0, 1 and 3 on worker 1):

    worker 0   0F0 0F1 2F0 2F1 .    2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 ...
    worker 1   .   1F0 1F1 3F0 3B0  3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 ...

Idle time per device (D-1)(F+B)/V of a device's F and B; D(V-1) + 2(D-1-s) + 1 chunk activations held.
"""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedules.family import Family, StageTimes, require_one_pipeline, synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule, Size


def interleaved(size: Size) -> Schedule:
    """Warm-up of 2(D-1-s) + (V-1) g forwards with groups of g microbatches, then forwards and backwards in turn.

    Groups have D microbatches where M is a multiple of D; else M is divided into max(1, M // D) equal groups.

    Raises:
        ScheduleError: M cannot be divided into equal groups of at least D, or of M where M < D.
    """
    require_one_pipeline("interleaved", size)
    group = group_size(size)
    total = size.num_microbatches * size.num_chunks
    one_update: list[list[Op]] = []
    for worker in range(size.num_devices):
        forwards = [_op(OpKind.FORWARD, worker, step, size, group) for step in range(total)]
        backwards = [_op(OpKind.BACKWARD, worker, step, size, group) for step in range(total)]
        warm_up = min(2 * (size.num_devices - 1 - worker) + (size.num_chunks - 1) * group, total)
        num_pairs = total - warm_up
        pairs = [op for pair in zip(forwards[warm_up:], backwards[:num_pairs], strict=True) for op in pair]
        one_update.append([*forwards[:warm_up], *pairs, *backwards[num_pairs:]])
    workers = [stage % size.num_devices for stage in range(size.num_devices * size.num_chunks)]
    return synchronous("interleaved", size, workers=workers, one_update=one_update)


def group_size(size: Size) -> int:
    """Microbatches that pass through one chunk before the next chunk's turn.

    Raises:
        ScheduleError: names the nearest numbers of microbatches that work.
    """
    microbatches, devices = size.num_microbatches, size.num_devices
    num_groups = max(1, microbatches // devices)
    if microbatches % num_groups:
        below, above = microbatches // devices * devices, (microbatches // devices + 1) * devices
        raise ScheduleError(
            f"interleaved on {devices} devices cannot divide {microbatches} microbatches into {num_groups} equal groups; "
            f"use {below} or {above} microbatches, or the schedule '1f1b'"
        )
    return microbatches // num_groups


def _op(kind: OpKind, worker: int, step: int, size: Size, group: int) -> Op:
    """The `step`-th forward or backward of a worker."""
    chunk = step // group % size.num_chunks
    if kind is OpKind.BACKWARD:
        chunk = size.num_chunks - 1 - chunk
    microbatch = step // (group * size.num_chunks) * group + step % group
    return Op(kind, chunk * size.num_devices + worker, microbatch)


def _makespan_s(size: Size, times: StageTimes) -> float | None:
    """(V M + D - 1)(f + b) with the times of one chunk, where M is a multiple of D."""
    if size.num_microbatches % size.num_devices:
        return None
    steps = size.num_chunks * size.num_microbatches + size.num_devices - 1
    return steps * (times.forward_s + times.input_grad_s + times.weight_grad_s)


def _peak_in_flight(size: Size, worker: int) -> int:
    warm_up = 2 * (size.num_devices - 1 - worker) + (size.num_chunks - 1) * group_size(size)
    return min(warm_up + 1, size.num_microbatches * size.num_chunks)


FAMILY = Family(
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
)
