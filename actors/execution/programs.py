"""Lowers schedules for the executor, and refuses those that can only be simulated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from raypipe.errors import PlanError, ScheduleError
from raypipe.schedules.ir import Op, OpKind, Schedule, ops_of
from raypipe.schedules.lower import DeviceProgram, Placement, lower
from raypipe.schedules.metrics import mean_delays


def executable_programs(
    schedule: Schedule, placement: Placement | None = None, buckets: Sequence[int] = (), late_rows: Collection[int] = ()
) -> tuple[DeviceProgram, ...]:
    """Return the programs of all devices for a valid schedule, as `lower`; raises as `check_executable`."""
    check_executable(schedule, placement)
    delays = [(stage, update, delay) for (stage, update), delay in mean_delays(schedule).items()]
    stages_of = [{op.stage for slot in program for op in ops_of(slot)} for program in schedule.programs]
    return tuple(
        replace(program, delays=tuple(delay for delay in delays if delay[0] in stages_of[program.worker]))
        for program in lower(schedule, placement, buckets=buckets, late_rows=late_rows)
    )


def check_executable(schedule: Schedule, placement: Placement | None = None) -> None:
    """Refuse an order whose parts the executor cannot join, and a placement where replicas would have to exchange rows to join them.

    Raises:
        ScheduleError: A stage divides a microbatch differently in forward and backward, or into other parts than a neighbor that divides
            it too; or an update or a publication is divided.
        PlanError: Of two neighbors on a worker with several devices, one has a microbatch whole and the other in parts.
    """
    if not any(op.part for op in schedule.places):
        return
    of_stages = _one_op_a_stage(schedule)
    for (index, source), op in of_stages.items():
        for target in schedule.graph.successors[source]:
            other = of_stages[index, target]
            num_parts = _num_parts(schedule, op), _num_parts(schedule, other)
            if num_parts[0] == num_parts[1]:
                continue
            if 1 not in num_parts:
                raise _refused(schedule, op, other, "a stage must work on the parts of the stages that feed it, or on whole microbatches")
            worker = schedule.worker(op)
            if placement is not None and worker == schedule.worker(other) and len(placement.workers[worker]) > 1:
                raise PlanError(
                    f"worker {worker} has several devices, and runs {op} and {other}, of which one works on a part of microbatch {index} "
                    "and one on all its rows, which the devices would have to exchange; give this worker one device, or put one of the two "
                    "stages on another worker"
                )


def _one_op_a_stage(schedule: Schedule) -> dict[tuple[int, int], Op]:
    """Return an Op of each microbatch and stage; all its Ops divide the microbatch alike."""
    found: dict[tuple[int, int], Op] = {}
    for op, (worker, position) in schedule.ops():
        if op.kind.per_update:
            if op.part and op.kind is not OpKind.REDUCE:
                raise ScheduleError(f"worker {worker}, position {position}: {op} can be simulated, but not run; leave the part out")
            continue
        first = found.setdefault((op.index, op.stage), op)
        if _num_parts(schedule, op) != _num_parts(schedule, first):
            raise _refused(schedule, op, first, "a stage must divide a microbatch alike in forward and backward")
    return found


def _num_parts(schedule: Schedule, op: Op) -> int:
    return len(schedule.find(op._replace(part=0)))


def _refused(schedule: Schedule, op: Op, other: Op, rule: str) -> ScheduleError:
    worker, position = schedule.places[op]
    ops = " and ".join(f"{each} ({_num_parts(schedule, each)} parts)" if each.part else f"{each} (whole)" for each in (op, other))
    return ScheduleError(f"worker {worker}, position {position}: {ops} divide microbatch {op.index} differently; to be run, {rule}")
