"""What a valid order costs in activations, copies of weights and staleness, proved from `reads` and the order."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from raypipe.schedules.ir import OpKind, Schedule, StageReplica, ops_of, reads


@dataclass(frozen=True)
class ScheduleMetrics:
    """What an order holds and how stale it computes.

    Attributes:
        peak_in_flight: per worker, the most stage activations held at once, from the start of F to the end of B, or of W
            where the backward is split.
        weight_copies: per worker, the most stage weights held at once, counting versions.
        max_mismatch: most weight versions between forward and backward of a microbatch at a stage.
        max_delay: most updates between the weights of a forward and those its gradient is applied to.
        mean_delay: the same on average over microbatches and stages, in a window as long as the schedule.
    """

    peak_in_flight: tuple[int, ...]
    weight_copies: tuple[int, ...]
    max_mismatch: int
    max_delay: int
    mean_delay: float


def metrics(schedule: Schedule) -> ScheduleMetrics:
    """Return the metrics of a valid schedule. Time: proportional to its Ops (times versions in flight, where weights are stashed)."""
    in_flight = tuple(_peak_in_flight(schedule, worker) for worker in range(schedule.num_workers))
    copies = Counter[int]()
    for replica in schedule.first_pipeline:
        copies[replica.worker] += _peak_versions(schedule, replica)
    mismatch = 0
    delays: list[int] = []
    if schedule.weight_rule.overlaps_updates:
        for op, _ in schedule.ops():
            if op.kind.gives_input_gradient:
                forward = reads(schedule, schedule.find(op._replace(kind=OpKind.FORWARD))[0])
                mismatch = max(mismatch, reads(schedule, op) - forward)
                delays.append(schedule.update(op) - forward)
    return ScheduleMetrics(
        peak_in_flight=in_flight,
        weight_copies=tuple(copies[worker] for worker in range(schedule.num_workers)),
        max_mismatch=mismatch,
        max_delay=max(delays, default=0),
        mean_delay=sum(delays) / len(delays) if delays else 0.0,
    )


def _peak_in_flight(schedule: Schedule, worker: int) -> int:
    """Count parts in proportion; what is begun of the next whole activation counts whole."""
    held = peak = Fraction(0)
    for slot in schedule.programs[worker]:
        ops = ops_of(slot)
        held += sum(Fraction(1, len(schedule.find(op._replace(part=0)))) for op in ops if op.kind is OpKind.FORWARD)
        peak = max(peak, held)
        if schedule.forward_only:
            held = Fraction(0)  # nothing is kept for a backward
        else:
            held -= sum(Fraction(1, len(schedule.find(op._replace(part=0)))) for op in ops if op.kind.writes_gradient)
    return math.ceil(peak)


def _peak_versions(schedule: Schedule, replica: StageReplica) -> int:
    """Count the versions of one copy that are still to be read at once, with the newest."""
    if not schedule.weight_rule.keeps_versions:
        return 1
    born = {0: -1}
    last: dict[int, int] = {}
    for position, slot in enumerate(schedule.programs[replica.worker]):
        for op in ops_of(slot):
            if schedule.replica(op) != replica:
                continue
            if op.kind in {OpKind.UPDATE, OpKind.PUBLISH}:
                born[op.index + 1] = position
            elif not op.kind.per_update:
                version = reads(schedule, op)
                last[version] = max(last.get(version, 0), position)
    end = len(schedule.programs[replica.worker])
    newest_until = {version: min((at for later, at in born.items() if later > version), default=end) for version in born}
    until = {version: max(last.get(version, -1), newest_until[version]) for version in born}
    return max(sum(born[other] < position <= until[other] for other in born) for position in {*born.values(), *until.values()})
