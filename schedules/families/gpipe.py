"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965, section 2.3).

    worker 0   F0 F1 F2 F3 .  .  .  .     .     .     .     B0    B1    B2    B3
    worker 1   .  F0 F1 F2 F3 .  .  .     .     .     B0    B1    B2    B3    .
    worker 2   .  .  F0 F1 F2 F3 .  .     .     B0    B1    B2    B3    .     .
    worker 3   .  .  .  F0 F1 F2 F3 .     B0    B1    B2    B3    .     .     .

Idle time per device (D-1)(F+B); M activations held everywhere. Backwards run in the order of the forwards, so that
microbatch 0 frees its activations first.
"""

from __future__ import annotations

from raypipe.schedules.ir import Op, OpKind, Schedule, ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec, require_one_chunk, require_one_pipeline, synchronous


def gpipe(size: ScheduleRequest) -> Schedule:
    """All forwards of an update, then all its backwards."""
    require_one_chunk("gpipe", size)
    require_one_pipeline("gpipe", size)
    one_update = [
        [Op(kind, stage, microbatch) for kind in (OpKind.FORWARD, OpKind.BACKWARD) for microbatch in range(size.num_microbatches)]
        for stage in range(size.num_devices)
    ]
    return synchronous("gpipe", size, workers=range(size.num_devices), one_update=one_update)


def flushed_makespan_s(size: ScheduleRequest, times: StageTimes) -> float:
    """(M + D - 1)(F + B): one update of GPipe and of 1F1B alike."""
    return (size.num_microbatches + size.num_devices - 1) * (times.forward_s + times.input_grad_s + times.weight_grad_s)


SPEC = ScheduleSpec(
    name="gpipe",
    build=gpipe,
    title="all forwards, then all backwards",
    paper="Huang et al., NeurIPS 2019, arXiv 1811.06965",
    bubble="(D-1)/(M+D-1)",
    memory="M",
    mismatch="0",
    delay="0",
    makespan_s=flushed_makespan_s,
    peak_in_flight=lambda size, _: size.num_microbatches,
)
