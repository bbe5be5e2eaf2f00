"""Lowers schedules for the executor, and refuses those that can only be simulated."""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import OpKind, Schedule
from raypipe.schedules.lower import DeviceProgram, Placement, lower


def executable_programs(schedule: Schedule, placement: Placement | None = None) -> tuple[DeviceProgram, ...]:
    """Return the programs of all devices for a valid schedule; raises `ScheduleError` as `check_executable`."""
    check_executable(schedule)
    return lower(schedule, placement)


def check_executable(schedule: Schedule) -> None:
    """Raise `ScheduleError` for losses coupled over microbatches, and for a microbatch that its Ops divide differently."""
    if schedule.loss_group_size != 1:
        raise ScheduleError(f"loss_group_size {schedule.loss_group_size} can be simulated but not yet run; use 1")
    num_parts: dict[int, int] = {}
    for op, place in schedule.ops():
        where = f"worker {place.worker}, position {place.position}"
        if op.kind is OpKind.EXCHANGE:
            raise ScheduleError(f"{where}: {op} can be simulated but not yet run")
        if op.kind.per_update:
            if op.part:
                raise ScheduleError(f"{where}: {op} can be simulated but not yet run; leave the part out")
            continue
        parts_of_op = len(schedule.find(op._replace(part=0)))
        if num_parts.setdefault(op.index, parts_of_op) != parts_of_op:
            raise ScheduleError(
                f"{where}: {op} is one of {parts_of_op} parts, other Ops of microbatch {op.index} have {num_parts[op.index]}; to be run, "
                "all stages must divide a microbatch into the same number of parts, forward and backward"
            )
