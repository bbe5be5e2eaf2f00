"""ZB-H1 and ZB-H2: weight gradients fill the bubble (Qi et al., ICLR 2024, arXiv 2401.10241, section 2).

The backward is split: the input gradient I stays on the chain of stages, the weight gradient W of a microbatch may run at
any time after its I. In the steady state worker s of D runs the triples

    H1   F[x]  I[x - (D-1-s)]    W[x - (D-1)]         idle (D-1)(F+I-W),   D activations
    H2   F[x]  I[x - 2(D-1-s)]   W[x - 2(D-1)]        idle (D-1)(F+I-2W),  2D-1 activations

for x = 0, 1, ...; without the microbatches that do not exist this is warm-up and cool-down, too. ZB-H1 with D = 4:

    worker 0   F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 ...
    worker 1   .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 ...
    worker 2   .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 ...
    worker 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 ...

Idle time counts from a device's first start to its last end, for F + I >= k W (k = 1 or 2) and enough microbatches. ZB-H2
gains only where an update does not wait for all stages (`update_scope` stage), since its devices are shifted against each
other; the paper validates the norm afterwards instead.
"""

from __future__ import annotations

from raypipe.schedules.builders import synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec


def zb_h1(request: ScheduleRequest) -> Schedule:
    """Return the order with the memory of 1F1B."""
    return _handcrafted("zb-h1", request, depth=1)


def zb_h2(request: ScheduleRequest) -> Schedule:
    """Return the order with twice the memory of 1F1B, without a bubble where F = I = W."""
    return _handcrafted("zb-h2", request, depth=2)


def _handcrafted(name: str, request: ScheduleRequest, *, depth: int) -> Schedule:
    request.require_one_chunk(name)
    request.require_one_pipeline(name)
    last = request.num_devices - 1
    one_update: list[list[Op]] = []
    for stage in range(request.num_devices):
        ops: list[Op] = []
        for step in range(request.num_microbatches + depth * last):
            triple = (
                Op(OpKind.FORWARD, stage, step),
                Op(OpKind.INPUT_GRADIENT, stage, step - depth * (last - stage)),
                Op(OpKind.WEIGHT_GRADIENT, stage, step - depth * last),
            )
            ops += [op for op in triple if 0 <= op.index < request.num_microbatches]
        one_update.append(ops)
    return synchronous(name, request, workers=range(request.num_devices), one_update=one_update)


def _makespan_s(depth: int, request: ScheduleRequest, times: StageTimes) -> float | None:
    """Return when the last device ends; `None` outside the assumptions."""
    ramp = request.num_devices - 1
    idle = times.forward_s + times.input_grad_s - depth * times.weight_grad_s
    if request.num_microbatches < depth * ramp + 1 or idle < 0:
        return None
    work = request.num_microbatches * (times.forward_s + times.input_grad_s + times.weight_grad_s)
    # Device s starts s F late and is idle (D-1-s)(F+I-kW): the sum is largest at one of the two ends.
    return work + max(ramp * idle, ramp * times.forward_s)


SPEC_H1 = ScheduleSpec(
    name="zb-h1",
    build=zb_h1,
    title="weight gradients fill the bubble, memory as 1F1B",
    paper="Qi et al., ICLR 2024, arXiv 2401.10241",
    bubble="(D-1)(F+I-W) idle",
    memory="D",
    mismatch="0",
    delay="0",
    makespan_s=lambda request, times: _makespan_s(1, request, times),
    peak_in_flight=lambda request, _: min(request.num_devices, request.num_microbatches),
)

SPEC_H2 = ScheduleSpec(
    name="zb-h2",
    build=zb_h2,
    title="no bubble where F = I = W, twice the memory",
    paper="Qi et al., ICLR 2024, arXiv 2401.10241",
    bubble="(D-1)(F+I-2W) idle",
    memory="2D-1",
    mismatch="0",
    delay="0",
    makespan_s=lambda request, times: _makespan_s(2, request, times),
    peak_in_flight=lambda request, _: min(2 * request.num_devices - 1, request.num_microbatches),
)
