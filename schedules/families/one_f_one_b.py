"""1F1B: as few activations as a full pipeline needs.

Narayanan et al., 2019, arXiv 1806.03377; with a flush: Fan et al., 2021 (DAPPLE), arXiv 2007.01045.

    worker 0   F0 F1 F2 F3 .  .     .     B0    F4 B1    F5 B2    ...
    worker 1   .  F0 F1 F2 .  .     B0    F3    B1    F4 B2       ...
    worker 2   .  .  F0 F1 .  B0    F2 B1    F3 B2    ...
    worker 3   .  .  .  F0 B0 F1 B1 F2 B2    ...

Worker s runs min(D-1-s, M) forwards, then a forward and a backward in turn, then the backwards left over. Idle time per
device (D-1)(F+B), as GPipe's; at most D-s activations held.
"""

from __future__ import annotations

from raypipe.schedules.builders import in_turn, synchronous
from raypipe.schedules.families.gpipe import flushed_makespan_s
from raypipe.schedules.ir import Op, OpKind, Schedule, Slot
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec


def one_f_one_b(request: ScheduleRequest) -> Schedule:
    """Return warm-up forwards, forwards and backwards in turn, then the other backwards."""
    request.require_one_chunk("1f1b")
    request.require_one_pipeline("1f1b")
    one_update: list[list[Slot]] = []
    for stage in range(request.num_devices):
        forwards = [Op(OpKind.FORWARD, stage, microbatch) for microbatch in range(request.num_microbatches)]
        backwards = [Op(OpKind.BACKWARD, stage, microbatch) for microbatch in range(request.num_microbatches)]
        one_update.append(in_turn(forwards, backwards, warm_up=request.num_devices - 1 - stage))
    return synchronous("1f1b", request, workers=range(request.num_devices), one_update=one_update)


SPEC = ScheduleSpec(
    name="1f1b",
    build=one_f_one_b,
    title="one forward, one backward, with a flush",
    paper="Narayanan et al., SOSP 2019, arXiv 1806.03377; Fan et al., PPoPP 2021, arXiv 2007.01045",
    bubble="(D-1)/(M+D-1)",
    memory="D-s",
    mismatch="0",
    delay="0",
    makespan_s=flushed_makespan_s,
    peak_in_flight=lambda request, worker: min(request.num_devices - worker, request.num_microbatches),
)
