"""What one device does in every window of a schedule: its lowered program and what goes with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from raypipe.errors import ScheduleError
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope
from raypipe.schedules.lower import Await, Compute, DeviceProgram, Direction, Item, Message, Placement, Recv, Send, lower

Rows = tuple[float, float]
"""First row and end of a microbatch, in shares of it."""

MessageKey = tuple[Direction, int, int, int, int, int]
"""Direction, source stage, target stage, microbatch, pipeline and part: what one Op gives another stage, whatever rows travel where."""


def message_key(message: Message) -> MessageKey:
    """The key of a message."""
    return (message.direction, message.source, message.target, message.index, message.pipeline, message.part)


def row_range(rows: tuple[float, float], num_rows: int) -> tuple[int, int]:
    """First row and end of a share of the rows of a microbatch; neighbouring shares meet without gap or overlap."""
    return round(rows[0] * num_rows), round(rows[1] * num_rows)


@dataclass(frozen=True)
class Job:
    """What one device does in every window of a schedule.

    Attributes:
        program: the items.
        graph: which stage feeds which.
        num_microbatches: of one update.
        num_updates: of the window.
        update_scope: whose gradients the norm of an update counts.
        forward_only: whether it evaluates.
        norm_stages: the stages whose gradients this device brings to norms and to the sums of ties, so that replicas count once.
    """

    program: DeviceProgram
    graph: StageGraph
    num_microbatches: int
    num_updates: int
    update_scope: UpdateScope
    forward_only: bool
    norm_stages: frozenset[int]

    @cached_property
    def num_sends(self) -> Counter[MessageKey]:
        """How many Sends carry each message; none where the stage that needs it is on the same device."""
        return Counter(message_key(item.message) for item in self.program.items if isinstance(item, Send))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each item that takes time in text: for spans, status and faults, made once for all windows."""
        return tuple(_name(item) for item in self.program.items)

    @cached_property
    def recomputations(self) -> frozenset[Op]:
        """The Ops that run a forward again."""
        computed = (op for item in self.program.items if isinstance(item, Compute) for op in item.ops)
        return frozenset(op for op in computed if op.kind is OpKind.RECOMPUTE)

    @cached_property
    def updated(self) -> frozenset[int]:
        """The stages that this device updates; those of its others are published to it."""
        computed = (op for item in self.program.items if isinstance(item, Compute) for op in item.ops)
        return frozenset(op.stage for op in computed if op.kind is OpKind.UPDATE)

    @cached_property
    def rows(self) -> frozenset[Rows]:
        """The different rows of a microbatch that Ops of this device work on."""
        return frozenset(rows for item in self.program.items if isinstance(item, Compute) for rows in item.rows)


def _name(item: Item) -> str:
    match item:
        case Compute():
            return str(item)
        case Recv():
            return str(item.message)
        case Await():
            return str(item.collective)
        case _:
            return ""


def jobs(schedule: Schedule, placement: Placement | None = None) -> tuple[Job, ...]:
    """The jobs of all devices of a valid schedule.

    Raises:
        ScheduleError: it asks for what the executor does not do: losses coupled over microbatches, or a
            microbatch that is not divided alike by all that is done with it.
    """
    placement = placement or Placement.one_each(schedule.num_workers)
    num_parts: dict[int, int] = {}
    for op, place in schedule.ops():
        where = f"worker {place.worker}, position {place.position}"
        if op.kind is OpKind.EXCHANGE:
            raise ScheduleError(f"{where}: {op} can be simulated but not yet run")
        if not op.kind.per_update:
            found_parts = len(schedule.find(op._replace(part=0)))
            if num_parts.setdefault(op.index, found_parts) != found_parts:
                raise ScheduleError(
                    f"{where}: {op} is one of {found_parts}, other Ops of microbatch {op.index} of {num_parts[op.index]}; to be run, "
                    "a microbatch must be divided alike by all stages, forward and backward"
                )
        elif op.part:
            raise ScheduleError(f"{where}: {op} can be simulated but not yet run; leave the part out")
    if schedule.loss_group_size != 1:
        raise ScheduleError(f"loss_group_size {schedule.loss_group_size} can be simulated but not yet run; use 1")
    found: list[Job] = []
    for program in lower(schedule, placement):
        first = placement.workers[program.worker][0][0] == program.device
        norm_stages = frozenset(holders[0].stage for holders in schedule.replicas if first and holders[0].worker == program.worker)
        found.append(
            Job(
                program=program,
                graph=schedule.graph,
                num_microbatches=schedule.num_microbatches,
                num_updates=schedule.num_updates,
                update_scope=schedule.update_scope,
                forward_only=schedule.forward_only,
                norm_stages=norm_stages,
            )
        )
    return tuple(found)
