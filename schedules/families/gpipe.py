"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965, section 2.3).

    worker 0   F0 F1 F2 F3 .  .  .  .     .     .     .     B0    B1    B2    B3
    worker 1   .  F0 F1 F2 F3 .  .  .     .     .     B0    B1    B2    B3    .
    worker 2   .  .  F0 F1 F2 F3 .  .     .     B0    B1    B2    B3    .     .
    worker 3   .  .  .  F0 F1 F2 F3 .     B0    B1    B2    B3    .     .     .

Idle time per device (D-1)(F+B); M activations held everywhere. Backwards run in the order of the forwards, so that
microbatch 0 frees its activations first.
"""

from __future__ import annotations

from raypipe.schedules.builders import synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec


def gpipe(request: ScheduleRequest) -> Schedule:
    """Return all forwards of an update, then all its backwards."""
    request.require_one_chunk("gpipe")
    request.require_one_pipeline("gpipe")
    one_update = [
        [Op(kind, stage, microbatch) for kind in (OpKind.FORWARD, OpKind.BACKWARD) for microbatch in range(request.num_microbatches)]
        for stage in range(request.num_devices)
    ]
    return synchronous("gpipe", request, workers=range(request.num_devices), one_update=one_update)


def flushed_makespan_s(request: ScheduleRequest, times: StageTimes) -> float:
    """Return (M + D - 1)(F + B), the time of one update of GPipe and 1F1B."""
    return (request.num_microbatches + request.num_devices - 1) * (times.forward_s + times.input_grad_s + times.weight_grad_s)


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
    peak_in_flight=lambda request, _: request.num_microbatches,
)
