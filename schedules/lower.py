"""Lowering: from the programs of workers to those of devices, with messages and collectives.

Before lowering a program belongs to a worker and holds computation; after it, it belongs to a device and says of every
tensor where it comes from and where it goes. Simulator and executor run these items and nothing else:

    Compute    the Ops of one slot, each with the version of the weights that it uses
    Send       hands a message to its channel and goes on
    Recv       waits for a message
    Start      takes part in a collective and goes on
    Await      waits for the end of a collective

A channel is an ordered pair of devices. A Recv stands before the Op that needs its message, behind the Recvs of all that was sent
before it on the same channel. Sends do not wait, so an order that cannot deadlock still cannot once it is lowered.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from raypipe.errors import PlanError, ScheduleError
from raypipe.schedules.collectives import NOT_COMPUTED, Await, CollectiveOrder, Start, SumRows
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope, inputs, ops_of, outputs, reads, takers
from raypipe.schedules.reductions import add_reductions


class Direction(StrEnum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


Rows = tuple[float, float]
"""First row and end, as shares of a microbatch from 0 to 1."""


class Message(NamedTuple):
    """What one stage gives another for one microbatch.

    Attributes:
        pipeline: Pipeline of the Ops at both ends.
        part: Part of the Op that made it.
        rows: First row and end, as shares of the microbatch from 0 to 1.
    """

    direction: Direction
    source: int
    target: int
    index: int  # type: ignore[assignment]  # tuple.index gives way to the field's own word
    pipeline: int = 0
    part: int = 0
    rows: Rows = (0.0, 1.0)

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        return f"{self.direction} {self.source}->{self.target} of microbatch {self.index}{part}"


class Compute(NamedTuple):
    """The Ops of one slot, with the version of the weights and the rows of each (as in `Message`)."""

    ops: tuple[Op, ...]
    versions: tuple[int, ...]
    rows: tuple[Rows, ...]

    def __str__(self) -> str:
        return str(self.ops[0]) if len(self.ops) == 1 else "(" + ";".join(map(str, self.ops)) + ")"


@dataclass(frozen=True, slots=True)
class Send:
    """Hands a message to the channel towards a device; does not wait."""

    message: Message
    device: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Waits for a message on the channel from a device."""

    message: Message
    device: int

    def __str__(self) -> str:
        return str(self.message)


Item = Compute | Send | Recv | Start | Await


@dataclass(frozen=True)
class DeviceProgram:
    """What one device does in a window, and what it must know of the schedule.

    Attributes:
        worker: The worker that the device is, or is a replica of.
        rows: The device's share of every microbatch's rows, from 0 to 1.
        primary_stages: Stages whose first copy is on this device. Only that copy counts in norms, in sums of ties and in checkpoints.
        delays: Stage, update and mean delay of the gradients, where these are late; for the executor's optimizers alone.
    """

    device: int
    worker: int
    rows: Rows
    items: tuple[Item, ...]
    graph: StageGraph
    num_microbatches: int
    num_updates: int
    update_scope: UpdateScope
    forward_only: bool
    primary_stages: frozenset[int]
    delays: tuple[tuple[int, int, float], ...] = ()

    @cached_property
    def delay_of(self) -> dict[tuple[int, int], float]:
        """For each (stage, update) with late gradients, their mean delay over all microbatches."""
        return {(stage, update): delay for stage, update, delay in self.delays}

    @cached_property
    def has_late_rows(self) -> bool:
        """Whether some rows of looked-up weights are summed behind others."""
        return any(isinstance(item, Start) and item.collective.rows is SumRows.LATE for item in self.items)

    @cached_property
    def last_reads(self) -> dict[tuple[int, int], int]:
        """For each (stage, version of its weights) the position of the last item that uses it."""
        return {
            (op.stage, version): position
            for position, item in enumerate(self.items)
            if isinstance(item, Compute)
            for op, version in zip(item.ops, item.versions, strict=True)
        }

    @cached_property
    def row_ranges(self) -> frozenset[Rows]:
        """The distinct rows that Ops of this device work on, in shares of a microbatch."""
        return frozenset(rows for item in self.items if isinstance(item, Compute) for rows in item.rows)


@dataclass(frozen=True)
class Placement:
    """The devices of each worker, as pairs (device, share of the rows); the shares of a worker sum to 1."""

    workers: tuple[tuple[tuple[int, float], ...], ...]

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for worker, members in enumerate(self.workers):
            if not members or abs(sum(share for _, share in members) - 1) > 1e-9:
                raise PlanError(f"worker {worker}: the shares of its devices must sum to 1, got {[share for _, share in members]}")
            for device, share in members:
                if share <= 0 or device in seen:
                    raise PlanError(f"worker {worker}: device {device} has share {share} or serves two workers; give each device one place")
                seen.add(device)

    @classmethod
    def even(cls, num_workers: int, replicas: int = 1) -> Placement:
        """Workers are so many neighboring devices each, with equal shares; by default worker w is device w."""
        devices = itertools.count()
        return cls(tuple(tuple((next(devices), 1 / replicas) for _ in range(replicas)) for _ in range(num_workers)))

    @property
    def replicated_workers(self) -> frozenset[int]:
        """The workers that are several devices each."""
        return frozenset(worker for worker, members in enumerate(self.workers) if len(members) > 1)

    def rows(self, worker: int) -> Iterator[tuple[int, Rows]]:
        """Each device of a worker with its range of the rows."""
        members = self.workers[worker]
        # Rounded, so that equal borders of two workers are equal however their shares add up.
        borders = [round(math.fsum(share for _, share in members[:position]), 12) for position in range(len(members))]
        for (device, _), rows in zip(members, zip(borders, [*borders[1:], 1.0], strict=True), strict=True):
            yield device, rows


def lower(
    schedule: Schedule,
    placement: Placement | None = None,
    *,
    buckets: Sequence[int] = (),
    late_rows: Collection[int] = (),
    merged: bool = False,
) -> tuple[DeviceProgram, ...]:
    """Return the programs of the devices, by number, for a valid schedule; replicas that lack reductions get them.

    `buckets` are the parts in which the gradients of each stage are summed, 1 by default (`communication.buckets.num_buckets`).
    Stages of `late_rows` sum some rows of their looked-up weights later than others, where that is possible (`CollectiveOrder`).
    Where workers are `merged`, each device stands for all of a worker: it takes part in their sums alone. Such programs cannot run.
    """
    placement = placement or Placement.even(schedule.num_workers)
    replicated = range(schedule.num_workers) if merged else placement.replicated_workers
    reduced = add_reductions(schedule, replicated_workers=replicated, buckets=buckets)
    return _Lowering(reduced, placement, late_rows, fewest=1 if merged else 2).programs()


def starts_inside(items: Sequence[Item], position: int, num_microbatches: int) -> list[Start]:
    """Return the sums that start while the Op at a position runs: all buckets but the last of the gradients that it completes.

    Their Starts come right behind it and its Sends. The last bucket is complete when the Op ends, and messages go first.
    """
    item = items[position]
    if not isinstance(item, Compute) or len(item.ops) > 1 or not (op := item.ops[0]).kind.writes_gradient:
        return []
    found: list[Start] = []
    while (position := position + 1) < len(items):
        item = items[position]
        if isinstance(item, Send):
            continue
        if not isinstance(item, Start) or not 0 < item.collective.part < item.collective.num_parts:
            break
        if (item.collective.stage, item.collective.update) != (op.stage, op.index // num_microbatches):
            break
        found.append(item)
    return found


def check_whole_losses(schedule: Schedule, placement: Placement) -> None:
    """Refuse an order or a placement that divides the rows of a microbatch where its loss is taken.

    Raises:
        ScheduleError: An Op there takes a part of the rows.
        PlanError: A worker there has several devices, which share the rows.
    """
    reason = "the loss couples the rows of a microbatch, so that this would change its value"
    sinks = schedule.graph.sinks
    for op, _ in schedule.ops():
        if op.part and op.stage in sinks and not op.kind.per_update:
            raise ScheduleError(
                f"the order {schedule.name!r} divides microbatch {op.index} into parts ({op}) at stage {op.stage}, which takes the loss; "
                f"{reason}: choose an order of whole microbatches, such as 1f1b"
            )
    for workers in schedule.pipelines:
        for stage in sinks:
            if (count := len(placement.workers[workers[stage]])) > 1:
                raise PlanError(
                    f"worker {workers[stage]} has {count} devices, which share the rows of each microbatch, and stage {stage}, which takes "
                    f"the loss; {reason}: give this worker one device"
                )


@dataclass(frozen=True)
class _Route:
    """Messages from a device to a stage on another.

    Attributes:
        rows: Rows of each message of an Op; several where a replica takes parts that are not neighbors.
        channel: All messages from the device to the peer.
        ends: For each Op, where its messages end on the channel.
    """

    peer: int
    target: int
    rows: tuple[Rows, ...]
    channel: list[Message]
    ends: dict[Op, int]


class _Lowering:
    def __init__(self, schedule: Schedule, placement: Placement, late_rows: Collection[int], *, fewest: int) -> None:
        self.schedule = schedule
        self.slots = [list(map(ops_of, program)) for program in schedule.programs]
        """By worker, the Ops of each slot: all devices of a worker share them."""
        self.rows = [dict(placement.rows(worker)) for worker in range(schedule.num_workers)]
        devices = [[device for device, _ in members] for members in placement.workers]
        self.collectives = CollectiveOrder(schedule, devices, late_rows, fewest=fewest)
        self._num_parts: dict[tuple[int, int, OpKind], int] = {}
        """Of what is divided, by microbatch, stage and kind."""
        for op in schedule.places:
            if op.part and not op.kind.per_update:
                key = (op.index, op.stage, op.kind)
                self._num_parts[key] = max(op.part, self._num_parts.get(key, 0))
        self._routes: dict[object, list[_Route]] = {}
        self._channels: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        """By sender and receiver."""
        self._arrivals: defaultdict[tuple[int, int, int, int], dict[int, tuple[list[Message], dict[Op, int]]]] = defaultdict(dict)
        """By receiver, source stage, target stage and pipeline: the channel of each sender, and where the messages of each Op end."""

    def programs(self) -> tuple[DeviceProgram, ...]:
        """Return the programs, by device."""
        for worker, devices in enumerate(self.rows):
            for device in devices:
                self._send(worker, device)
        schedule = self.schedule
        programs = [
            DeviceProgram(
                device=device,
                worker=worker,
                rows=rows,
                items=tuple(self._items(worker, device)),
                graph=schedule.graph,
                num_microbatches=schedule.num_microbatches,
                num_updates=schedule.num_updates,
                update_scope=schedule.update_scope,
                forward_only=schedule.forward_only,
                primary_stages=frozenset(
                    replicas[0].stage for replicas in schedule.replicas if replicas[0].worker == worker and device == next(iter(devices))
                ),
            )
            for worker, devices in enumerate(self.rows)
            for device, rows in devices.items()
        ]
        return tuple(sorted(programs, key=lambda program: program.device))

    def _rows(self, op: Op, share: Rows) -> Rows:
        """Return the rows on which a device with a share of each part works: part p of P goes from (p-1)/P to p/P."""
        if not op.part or op.kind.per_update:
            return share
        num_parts = self._num_parts[op.index, op.stage, op.kind]
        return (op.part - 1 + share[0]) / num_parts, (op.part - 1 + share[1]) / num_parts

    def _routes_of(self, op: Op, device: int) -> list[_Route]:
        key: tuple[object, ...] = (op.kind, op.stage, op.pipeline, device)
        if self._num_parts:
            kinds = _GRADIENT_KINDS if op.kind.gives_input_gradient else (op.kind,)
            stages = (op.stage, *takers(self.schedule.graph, op))
            key += (op.part, *(self._num_parts.get((op.index, stage, kind), 0) for stage in stages for kind in kinds))
        routes = self._routes.get(key)
        if routes is None:
            routes = self._routes[key] = list(self._routes_between(op, device))
        return routes

    def _routes_between(self, op: Op, device: int) -> Iterator[_Route]:
        workers = self.schedule.pipelines[op.pipeline]
        worker = workers[op.stage]
        first, end = self._rows(op, self.rows[worker][device])
        for stage in takers(self.schedule.graph, op):
            for peer, share in self.rows[workers[stage]].items() if workers[stage] != worker else ():
                taken = [self._rows(taking, share) for taking in outputs(self.schedule, op, stage)] if self._num_parts else [share]
                rows = tuple(_joined((max(first, start), min(end, stop)) for start, stop in taken))
                if rows:
                    arrivals = self._arrivals[peer, op.stage, stage, op.pipeline]
                    channel, ends = arrivals.setdefault(device, (self._channels[device, peer], {}))
                    yield _Route(peer, stage, rows, channel, ends)

    def _send(self, worker: int, device: int) -> None:
        for ops in self.slots[worker]:
            for op in ops:
                kind, stage, index, pipeline, part = op
                for route in self._routes_of(op, device):
                    direction = Direction.ACTIVATION if kind is OpKind.FORWARD else Direction.GRADIENT
                    for rows in route.rows:
                        route.channel.append(_new_message(Message, (direction, stage, route.target, index, pipeline, part, rows)))
                    route.ends[op] = len(route.channel)

    def _items(self, worker: int, device: int) -> list[Item]:
        schedule, collectives = self.schedule, self.collectives
        concerned = collectives.concerned
        received = Counter[int]()
        share = self.rows[worker][device]
        # Few versions and rows differ: one object for all that are equal spares the garbage collector a third of its work.
        equal: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        items: list[Item] = []
        for ops in self.slots[worker]:
            for op in ops:
                self._receive(op, device, received, items)
            meets, computed = not concerned.isdisjoint(ops), ops
            if meets:
                items += collectives.before(ops)
                computed = tuple([op for op in ops if op.kind not in NOT_COMPUTED])
            if computed:
                versions = tuple([reads(schedule, op) for op in computed])
                rows = tuple([self._rows(op, share) for op in computed])
                items.append(Compute(computed, equal.setdefault(versions, versions), equal.setdefault(rows, rows)))
            for op in computed:
                for route in self._routes_of(op, device):
                    end = route.ends[op]
                    for position in range(end - len(route.rows), end):
                        items.append(Send(route.channel[position], route.peer))
            if meets:
                items += collectives.behind(ops)
        return items + collectives.at_end.get(worker, [])

    def _receive(self, op: Op, device: int, received: Counter[int], items: list[Item]) -> None:
        """Add the Recvs of inputs, and of what was sent before these on the same channels."""
        for source in inputs(self.schedule, op):
            for peer, (channel, ends) in self._arrivals[device, source.stage, op.stage, op.pipeline].items():
                end = ends.get(source, 0)
                if end > (first := received[peer]):
                    for message in channel[first:end]:
                        items.append(Recv(message, peer))
                    received[peer] = end


def _joined(ranges: Iterable[Rows]) -> Iterator[Rows]:
    """Yield ranges that are not empty, in order, with neighbors joined."""
    first = end = 0.0
    for start, stop in sorted(ranges):
        if stop - start < _LEAST_SHARE:
            continue
        if start - end > _LEAST_SHARE:
            if first < end:
                yield first, end
            first = start
        end = stop
    if first < end:
        yield first, end


_new_message = tuple.__new__
"""Makes a `Message` without the call that looks at default values."""
_GRADIENT_KINDS = (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
_LEAST_SHARE = 1e-9  # less is rounding, no row
