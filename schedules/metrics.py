"""What a valid order costs in activations, copies of weights and staleness, proved from `reads` and the order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction

from raypipe.schedules.ir import Op, OpKind, Schedule, StageReplica, ops_of, reads


@dataclass(frozen=True)
class ScheduleMetrics:
    """The memory and the staleness of an order.

    Attributes:
        peak_in_flight: for each worker, the most stage activations held at once; each is held from the start of F to the end
            of B, or of W where the backward is split.
        weight_copies: for each worker, the most stage weights held at once; every version counts.
        max_mismatch: most updates between the weights that a microbatch's forward and backward use.
        max_delay: most updates between the weights that a forward reads and the weights that its gradient changes.
        mean_delay: mean of the delay over all microbatches and stages of the window.
    """

    peak_in_flight: tuple[int, ...]
    weight_copies: tuple[int, ...]
    max_mismatch: int
    max_delay: int
    mean_delay: float


def metrics(schedule: Schedule, *, holds_nothing: Collection[int] = ()) -> ScheduleMetrics:
    """Return the metrics of a valid schedule; activations of the stages `holds_nothing` do not count.

    Time: proportional to its Ops (times versions in flight, where weights are stashed).
    """
    in_flight = tuple(_peak_in_flight(schedule, worker, holds_nothing) for worker in range(schedule.num_workers))
    copies = Counter[int]()
    for replica in schedule.first_pipeline:
        copies[replica.worker] += _peak_versions(schedule, replica)
    versions = list(_forward_versions(schedule))
    mismatch = max((reads(schedule, op) - version for op, version in versions), default=0)
    delays = [schedule.update(op) - version for op, version in versions]
    return ScheduleMetrics(
        peak_in_flight=in_flight,
        weight_copies=tuple(copies[worker] for worker in range(schedule.num_workers)),
        max_mismatch=max(mismatch, 0),
        max_delay=max(delays, default=0),
        mean_delay=sum(delays) / len(delays) if delays else 0.0,
    )


def mean_delays(schedule: Schedule) -> dict[tuple[int, int], float]:
    """Return, by stage and update, the mean delay of the gradients over all microbatches, where it is not 0.

    Stages that share a weight have the mean of theirs: they make one step with it.
    """
    delays: dict[tuple[int, int], list[int]] = {}
    for op, version in _forward_versions(schedule):
        tie = schedule.graph.tie_of.get(op.stage)
        for stage in (op.stage,) if tie is None else schedule.graph.ties[tie]:
            delays.setdefault((stage, schedule.update(op)), []).append(schedule.update(op) - version)
    return {key: sum(each) / len(each) for key, each in sorted(delays.items()) if any(each)}


def _forward_versions(schedule: Schedule) -> Iterator[tuple[Op, int]]:
    """Yield each Op that gives an input gradient with the version that its forward read; nothing where no weights are late."""
    if schedule.weight_rule.overlaps_updates:
        for op, _ in schedule.ops():
            if op.kind.gives_input_gradient:
                yield op, reads(schedule, schedule.find(op._replace(kind=OpKind.FORWARD))[0])


def _peak_in_flight(schedule: Schedule, worker: int, holds_nothing: Collection[int]) -> int:
    """Count parts in proportion; what is begun of the next whole activation counts whole."""
    held = peak = Fraction(0)
    for slot in schedule.programs[worker]:
        ops = [op for op in ops_of(slot) if op.stage not in holds_nothing]
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
