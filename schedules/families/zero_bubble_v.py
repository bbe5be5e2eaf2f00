"""ZB-V: no bubble in the memory of 1F1B, with two stages a device (Qi et al., ICLR 2024, arXiv 2401.10241, section 6).

Device s of D holds the stages s and 2D-1-s: forwards run down the devices and back up. Letters as in `zero_bubble`. Four
devices, stages 0 to 3 down, 4 to 7 up:

    worker 0   0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0 7F4 7I4 7W4 0I1 ...
    worker 1   .   1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4 6I3 6W3 1F7 1I1 1W1 ...
    worker 2   .   .   2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6 2I1 2W1 5F5 5I3 ...
    worker 3   .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5 4I2 4W2 3F6 ...

Device s warms up with 2(D-s)-1 forwards of its first stage, s forwards of both in turn, and D-s times F I W of its second.
Then F I W of both stages take turns. The last s weight gradients of each stage come at the end.

With M >= 2D-1 and I >= F >= W of a stage, device s is idle for 2(D-1)(I-W) - s(F+I-2W) between its first start and its last
end, and the update takes 2M(F+I+W) + (D-1) max(2(I-W), I). With F = I = W no device is idle. At most 2D stage activations are
held, as much as D of 1F1B's stages, which are twice as long.

Where 2M < 3D-1 weight gradients are too few to fill the gaps: each waits as long as 2D activations allow. With F = I = W the
update takes max(6M+D-1, 3M+4D-2) F for any M; the first is a lower bound where M >= D.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.schedules.builders import synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec


def zb_v(request: ScheduleRequest) -> Schedule:
    """Return warm-up, F I W of both stages in turn, and the weight gradients left over."""
    request.require_one_pipeline("zb-v")
    if request.num_chunks != 2:
        raise ScheduleError(f"zb-v holds two stages a device, got {request.num_chunks} chunks; use --chunks 2")
    one_update = [_program(request, worker) for worker in range(request.num_devices)]
    if 2 * request.num_microbatches < 3 * request.num_devices - 1:
        one_update = [_put_off(ops, request.num_devices, worker) for worker, ops in enumerate(one_update)]
    workers = [*range(request.num_devices), *reversed(range(request.num_devices))]
    return synchronous("zb-v", request, workers=workers, one_update=one_update)


def _program(request: ScheduleRequest, worker: int) -> list[Op]:
    num_devices = request.num_devices
    num_microbatches = max(request.num_microbatches, 2 * num_devices - 1)
    first, second = worker, 2 * num_devices - 1 - worker
    (f0, i0, w0), (f1, i1, w1) = (
        [(kind, stage) for kind in (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)] for stage in (first, second)
    )
    steps = [
        *[f0] * (2 * (num_devices - worker) - 1),
        *[f1, f0] * worker,
        *[f1, i1, w1] * (num_devices - worker),
        *[f0, i0, w0, f1, i1, w1] * (num_microbatches - second),
        *[i0, w0, f1, i1, w1] * (num_devices - 1 - worker),
        *[i0, i1] * worker,
        *[i0, w0] * (num_devices - worker),
        *[w1] * worker,
        *[w0] * worker,
    ]
    done = Counter[tuple[OpKind, int]]()
    ops: list[Op] = []
    for kind, stage in steps:
        ops.append(Op(kind, stage, done[kind, stage]))
        done[kind, stage] += 1
    return [op for op in ops if op.index < request.num_microbatches]


def _put_off(ops: Sequence[Op], num_devices: int, worker: int) -> list[Op]:
    chain = [op for op in ops if op.kind is not OpKind.WEIGHT_GRADIENT]
    waiting: deque[Op] = deque()
    order: list[Op] = []
    num_held = 0
    for position, op in enumerate(chain):
        if op.kind is OpKind.FORWARD and num_held == 2 * num_devices:
            order.append(waiting.popleft())
            num_held -= 1
        num_held += op.kind is OpKind.FORWARD
        order.append(op)
        if op.kind is OpKind.INPUT_GRADIENT:
            waiting.append(op._replace(kind=OpKind.WEIGHT_GRADIENT))
            if position >= len(chain) - (num_devices - worker):
                order.append(waiting.popleft())
                num_held -= 1
    return [*order, *waiting]


def _makespan_s(request: ScheduleRequest, times: StageTimes) -> float | None:
    ramp = request.num_devices - 1
    forward_s, input_grad_s, weight_grad_s = times.forward_s, times.input_grad_s, times.weight_grad_s
    if forward_s == input_grad_s == weight_grad_s:
        return max(6 * request.num_microbatches + ramp, 3 * request.num_microbatches + 4 * ramp + 2) * forward_s
    if request.num_microbatches < 2 * ramp + 1 or not input_grad_s >= forward_s >= weight_grad_s:
        return None
    work = 2 * request.num_microbatches * (forward_s + input_grad_s + weight_grad_s)
    # Device s starts s F late: with its idle time that is largest at one of the two ends.
    return work + ramp * max(2 * (input_grad_s - weight_grad_s), input_grad_s)


SPEC = ScheduleSpec(
    name="zb-v",
    build=zb_v,
    title="no bubble where F = I = W, memory as 1F1B",
    paper="Qi et al., ICLR 2024, arXiv 2401.10241",
    bubble="2(D-1)(I-W) idle",
    memory="2D chunks",
    mismatch="0",
    delay="0",
    makespan_s=_makespan_s,
    peak_in_flight=lambda request, _: 2 * min(request.num_devices, request.num_microbatches),
    default_chunks=2,
)
