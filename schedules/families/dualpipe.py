"""DualPipe and DualPipeV: forwards and backwards of opposite directions share a slot (DeepSeek-AI, 2024, arXiv 2412.19437).

Section 3.2.1, figures 4 and 5, and github.com/deepseek-ai/DualPipe. In a slot F&B the forward of one microbatch and the
backward of another overlap: the messages of each travel while the other computes.

DualPipe has two pipelines in opposite directions: device s holds stage s of pipeline 0 and stage D-1-s of pipeline 1, and
microbatch m passes through pipeline m mod 2. Four devices with F = I = W and F&B = F + B (even microbatches run down):

    worker 0   F0 F2 F4 F1 I1 W1 F3 F6&B3    .  F5&B0    B5    .  F7&B2    B7    I4 W4 I6 W6
    worker 1   .  F0 F1 F2 F3 F4 B1    F5&B0    F6&B3    F7&B2    B5    B4    .  I7 I6 W7 W6
    worker 2   .  F1 F0 F3 F2 F5 B0    F4&B1    F7&B2    F6&B3    B4    B5    .  I6 I7 W6 W7
    worker 3   F1 F3 F5 F0 I0 W0 F2 F7&B2    .  F4&B1    B4    .  F6&B3    B6    I5 W5 I7 W7

DualPipeV folds it into one pipeline down the devices and up again: device s holds stages s and 2D-1-s and does what device s
of 2D does in DualPipe; no stage has a replica. Two devices:

    worker 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1     .   3F2&0B0     3B2     .   3F3&0B1     3B3     0I2 0W2 0I3 0W3
    worker 1   .   1F0 2F0 1F1 2F1 1F2 2B0     2F2&1B0     1F3&2B1     2F3&1B1     2B2     1B2     .   2I3 1I3 2W3 1W3

Idle time per device (H-1)(F&B + B - 3W), with H = D/2 in DualPipe and H = D in DualPipeV, for F = I >= W, F&B = F + B and at
least 4H microbatches in DualPipe, 2H in DualPipeV; other times: `_makespan_s`. 2H+1 activations held. Fewer microbatches, or
an odd number in DualPipe, run the order of the next number that fits without the last microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from raypipe.errors import ScheduleError
from raypipe.schedules.builders import synchronous, synchronous_pipelines
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, ops_of
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.spec import ScheduleSpec


def dualpipe(request: ScheduleRequest) -> Schedule:
    """Return two pipelines in opposite directions; device s holds stages s and D-1-s."""
    request.require_one_chunk("dualpipe")
    request.require_even_devices("dualpipe")
    if request.num_pipelines not in {0, 2}:
        raise ScheduleError(f"dualpipe has two pipelines, got {request.num_pipelines}; use --pipelines 2")
    last = request.num_devices - 1
    num_each = max((request.num_microbatches + 1) // 2, request.num_devices)
    one_update: list[list[Slot]] = []
    for worker in range(request.num_devices):
        # The first direction of a device starts in the same half of the devices.
        first = (worker, 0) if worker < last - worker else (last - worker, 1)
        device = _Device(first, (last - first[0], 1 - first[1]), num_pipelines=2)
        one_update.append(_without(_order(device, first[0], request.num_devices // 2, num_each), request.num_microbatches))
    pipelines = [range(request.num_devices), range(last, -1, -1)]
    return synchronous_pipelines("dualpipe", request, pipelines=pipelines, one_update=one_update)


def dualpipe_v(request: ScheduleRequest) -> Schedule:
    """Return one pipeline down the devices and up again; device s holds stages s and 2D-1-s."""
    request.require_one_pipeline("dualpipe-v")
    if request.num_chunks != 2:
        raise ScheduleError(f"dualpipe-v holds two stages a device, got {request.num_chunks} chunks; use --chunks 2")
    last = 2 * request.num_devices - 1
    num_each = max(request.num_microbatches, 2 * request.num_devices)
    one_update: list[list[Slot]] = []
    for worker in range(request.num_devices):
        device = _Device((worker, 0), (last - worker, 0), num_pipelines=1)
        one_update.append(_without(_order(device, worker, request.num_devices, num_each), request.num_microbatches))
    workers = [min(stage, last - stage) for stage in range(last + 1)]
    return synchronous("dualpipe-v", request, workers=workers, one_update=one_update)


class _Device:
    """The next Ops of one device in its two directions, each a (stage, pipeline)."""

    def __init__(self, *directions: tuple[int, int], num_pipelines: int) -> None:
        self.directions = directions
        self.num_pipelines = num_pipelines
        self.num_forwards = [0, 0]
        self.num_backwards = [0, 0]
        self.put_off: deque[Op] = deque()

    def forward(self, direction: int) -> Op:
        self.num_forwards[direction] += 1
        return self._op(OpKind.FORWARD, direction, self.num_forwards[direction] - 1)

    def backward(self, direction: int) -> Op:
        self.num_backwards[direction] += 1
        return self._op(OpKind.BACKWARD, direction, self.num_backwards[direction] - 1)

    def input_gradient(self, direction: int) -> Op:
        op = self.backward(direction)
        self.put_off.append(op._replace(kind=OpKind.WEIGHT_GRADIENT))
        return op._replace(kind=OpKind.INPUT_GRADIENT)

    def weight_gradient(self) -> Op:
        return self.put_off.popleft()

    def _op(self, kind: OpKind, direction: int, number: int) -> Op:
        stage, pipeline = self.directions[direction]
        return Op(kind, stage, number * self.num_pipelines + pipeline, pipeline)


def _order(device: _Device, distance: int, half: int, num_each: int) -> Iterator[Slot]:
    """Yield the slots of one update; direction 0 starts `distance` devices away, `half` devices from the middle."""
    nearer, further = distance + 1, half - distance - 1
    for _ in range(2 * further):
        yield device.forward(0)
    for _ in range(nearer):
        yield device.forward(0)
        yield device.forward(1)
    for _ in range(further):
        yield device.input_gradient(1)
        yield device.weight_gradient()
        yield device.forward(1)
    for step in range(num_each - 2 * further - nearer):
        pair = device.forward(0), device.backward(1)
        # In the middle the first backward waits for a forward of the neighbor that waits for this one.
        yield from pair if step == further == 0 else (Overlap(pair),)
        yield Overlap((device.forward(1), device.backward(0)))
    for _ in range(further):
        yield device.backward(1)
        yield Overlap((device.forward(1), device.backward(0)))
    for step in range(2 * nearer):
        direction = 1 - step % 2
        yield device.backward(direction) if step < nearer else device.input_gradient(direction)
    for _ in range(further):
        yield device.weight_gradient()
        yield device.input_gradient(0)
    for _ in range(nearer):
        yield device.weight_gradient()


def _without(slots: Iterable[Slot], num_microbatches: int) -> list[Slot]:
    kept: list[Slot] = []
    for slot in slots:
        ops = tuple(op for op in ops_of(slot) if op.index < num_microbatches)
        if ops:
            kept.append(Overlap(ops) if len(ops) > 1 else ops[0])
    return kept


def _makespan_s(request: ScheduleRequest, times: StageTimes, *, half: int) -> float:
    """Return the published time where F = I >= W; else a formula that agrees with the simulated order."""
    forward_s, input_grad_s, weight_grad_s = times.forward_s, times.input_grad_s, times.weight_grad_s
    turn_s = forward_s + input_grad_s + max(forward_s, input_grad_s) - min(weight_grad_s, input_grad_s)
    gained_s = min((half - 1) * max(input_grad_s - forward_s, 0), forward_s)
    return request.num_chunks * request.num_microbatches * (forward_s + input_grad_s + weight_grad_s) + (half - 1) * turn_s - gained_s


def _dualpipe_makespan_s(request: ScheduleRequest, times: StageTimes) -> float | None:
    if request.num_microbatches % 2 or request.num_microbatches < 2 * request.num_devices:
        return None
    return _makespan_s(request, times, half=request.num_devices // 2)


def _dualpipe_v_makespan_s(request: ScheduleRequest, times: StageTimes) -> float | None:
    if request.num_microbatches < 2 * request.num_devices:
        return None
    return _makespan_s(request, times, half=request.num_devices)


SPEC = ScheduleSpec(
    name="dualpipe",
    build=dualpipe,
    title="forwards and backwards of opposite pipelines overlap",
    paper="DeepSeek-AI 2024, arXiv 2412.19437",
    bubble="(D/2-1)(F&B+B-3W) idle",
    memory="D+1",
    mismatch="0",
    delay="0",
    makespan_s=_dualpipe_makespan_s,
    peak_in_flight=lambda request, _: min(request.num_devices + 1, request.num_microbatches),
)

SPEC_V = ScheduleSpec(
    name="dualpipe-v",
    build=dualpipe_v,
    title="dualpipe folded: one pipeline down the devices and up again",
    paper="DeepSeek-AI 2024, arXiv 2412.19437",
    bubble="(D-1)(F&B+B-3W) idle",
    memory="2D+1 chunks",
    mismatch="0",
    delay="0",
    makespan_s=_dualpipe_v_makespan_s,
    peak_in_flight=lambda request, _: min(2 * request.num_devices + 1, 2 * request.num_microbatches),
    default_chunks=2,
)
