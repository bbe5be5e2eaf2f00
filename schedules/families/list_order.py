"""SPP's list order: stages and channels between them take turns (Luo et al., INFOCOM 2022, arXiv 2204.10562).

D stages and the channels between them are R = 2D - 1 resources; stage s is resource 2s. A slot is as long as the busiest
resource takes for one microbatch. The forward of microbatch i is on resource r in slot i + r, its backward in slot
i + 2R - 2 - r. Each stage runs its list as soon as possible, forwards first where both fall into one slot:

    worker 0   F0 F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 B0 F13 B1 F14 B2 ...
    worker 1   .  F0 F1 F2 F3 F4 F5 F6 F7 F8 B0  F9  B1 F10 B2 ...
    worker 2   .  .  F0 F1 F2 F3 F4 B0 F5 B1 F6  B2 ...
    worker 3   .  .  .  F0 B0 F1 B1 F2 B2 ...

Stage s holds 4(D-1-s) + 1 activations instead of 1F1B's D - s, so messages may take as long as stages do without idle time.
The paper's theorem could not be read; proved here: an update takes at most (M + 4D - 4) C and the longest sum of gradients,
C being the seconds of the busiest resource for one microbatch (slots of length C fit; running each list as soon as possible
is never later). `max_in_flight` caps the activations: the forward of microbatch i then stands behind the backward of
i - `max_in_flight`.
"""

from __future__ import annotations

from raypipe.schedules.builders import synchronous
from raypipe.schedules.families.gpipe import flushed_makespan_s
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec


def list_order(request: ScheduleRequest) -> Schedule:
    """Return the Ops of each stage by slot, forwards before backwards."""
    request.require_one_chunk("list")
    request.require_one_pipeline("list")
    microbatches = range(request.num_microbatches)
    one_update: list[list[Op]] = []
    for stage in range(request.num_devices):
        most = in_flight(request, stage)
        first_backward = 4 * (request.num_devices - 1 - stage)
        # Slots count from the stage's first. In a slot the forward comes first, then the backward, then a forward that it makes room for.
        forwards = [
            (max((i, 0), (i - most + first_backward, 2) if i >= most else (0, 0)), Op(OpKind.FORWARD, stage, i)) for i in microbatches
        ]
        backwards = [((i + first_backward, 1), Op(OpKind.BACKWARD, stage, i)) for i in microbatches]
        one_update.append([op for _, op in sorted(forwards + backwards)])
    return synchronous("list", request, workers=range(request.num_devices), one_update=one_update)


def in_flight(request: ScheduleRequest, stage: int) -> int:
    """Return the most activations that a stage holds."""
    cap = request.num_microbatches if request.max_in_flight is None else int(request.max_in_flight)
    return min(request.num_microbatches, 4 * (request.num_devices - 1 - stage) + 1, cap)


SPEC = ScheduleSpec(
    name="list",
    build=list_order,
    title="SPP's list order: transfers take turns as stages do",
    paper="Luo et al., INFOCOM 2022, arXiv 2204.10562",
    bubble="(D-1)/(M+D-1)",
    memory="4(D-1-s)+1",
    mismatch="0",
    delay="0",
    makespan_s=lambda request, times: flushed_makespan_s(request, times) if request.max_in_flight is None else None,
    peak_in_flight=in_flight,
)
