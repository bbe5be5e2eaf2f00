"""Lowering: from the programs of workers to those of devices, with messages and collectives.

Before lowering a program belongs to a worker and holds computation; after it, it belongs to a device and says of every
tensor where it comes from and where it goes. Simulator and executor run these items and nothing else:

    Compute    the Ops of one slot, each with the version of the weights that it uses
    Send       hands a message to its channel and goes on
    Recv       waits for a message
    Start      takes part in a collective and goes on
    Await      waits for the end of a collective

A channel is an ordered pair of devices. Messages travel on it in the order in which the sender's program sends them, and
the receiver takes them in that order: a Recv stands before the Op that needs it, behind the Recvs of all that was sent
before it on the same channel. Sends do not wait. So every wait is for something that the sender's program does before what
the validator already knows the Op to depend on, and an order that cannot deadlock still cannot once it is lowered.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import itemgetter

from raypipe.errors import PlanError
from raypipe.schedules.ir import Holder, Op, OpKind, Schedule, StageGraph, UpdateScope, ops_of, reads
from raypipe.schedules.passes import add_reductions


class Direction(StrEnum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage gives another for one microbatch.

    Attributes:
        direction: activations go along an edge of the stage graph, gradients against it.
        source: the stage that made it.
        target: the stage that needs it.
        index: the microbatch.
        pipeline: of the Ops at both ends.
        part: of the Op that made it.
        rows: first row and end, counted in the microbatch, in shares of the microbatch from 0 to 1.
    """

    direction: Direction
    source: int
    target: int
    index: int
    pipeline: int = 0
    part: int = 0
    rows: tuple[float, float] = (0.0, 1.0)

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        return f"{self.direction} {self.source}->{self.target} of microbatch {self.index}{part}"


class CollectiveKind(StrEnum):
    """What the members of a collective put together."""

    GRADIENTS = "gradients"
    """The gradients of one stage, summed over its replicas."""
    NORM = "norm"
    """The squared gradient norms of all stages: what an update of scope `global` waits for."""
    TIED = "tied"
    """The gradients of the weights that several stages share."""
    TIED_NORM = "tied_norm"
    """The squared gradient norms of stages that share a weight: what an update of scope `tied` waits for."""

    @property
    def of_tie(self) -> bool:
        """Whether its members are those of a tie."""
        return self in {CollectiveKind.TIED, CollectiveKind.TIED_NORM}

    @property
    def is_norm(self) -> bool:
        """Whether it is made of a few bytes."""
        return self in {CollectiveKind.NORM, CollectiveKind.TIED_NORM}

    WEIGHTS = "weights"
    """The weights of one stage, from the owner to its replicas."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One meeting of several devices.

    Attributes:
        kind: what they put together.
        stage: the stage concerned; for a tie its number; 0 for the norm.
        update: the update it belongs to.
        part: the bucket, 0 for all.
        devices: the members, ascending.
    """

    kind: CollectiveKind
    stage: int
    update: int
    part: int
    devices: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if self.kind is CollectiveKind.NORM else f" of {'tie' if self.kind.of_tie else 'stage'} {self.stage}"
        return f"{self.kind}{where} for update {self.update}"


@dataclass(frozen=True, slots=True)
class Compute:
    """One slot.

    Attributes:
        ops: what runs, together if there are several.
        versions: of the weights that each Op uses.
        rows: of the microbatch that each Op works on, as in `Message`; an update's are the device's.
    """

    ops: tuple[Op, ...]
    versions: tuple[int, ...]
    rows: tuple[tuple[float, float], ...]

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


@dataclass(frozen=True, slots=True)
class Start:
    """Takes part in a collective; does not wait."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Await:
    """Waits for the end of a collective."""

    collective: Collective

    def __str__(self) -> str:
        return str(self.collective)


Item = Compute | Send | Recv | Start | Await


@dataclass(frozen=True)
class DeviceProgram:
    """What one device does in a window, and what it must know of the schedule.

    Attributes:
        device: Number of the device in the plan.
        worker: The worker that the device is, or is a replica of.
        rows: The device's share of every microbatch's rows, from 0 to 1.
        items: Items in execution order.
        graph: The stage graph.
        num_microbatches: Number of microbatches per update.
        num_updates: Number of updates in the window.
        update_scope: The stages whose gradient norm limits an update.
        forward_only: Whether the schedule evaluates.
        primary_stages: Stages whose first copy is on this device. Only that copy counts in norms, in sums of ties and in checkpoints.
    """

    device: int
    worker: int
    rows: tuple[float, float]
    items: tuple[Item, ...]
    graph: StageGraph
    num_microbatches: int
    num_updates: int
    update_scope: UpdateScope
    forward_only: bool
    primary_stages: frozenset[int]

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
    def row_ranges(self) -> frozenset[tuple[float, float]]:
        """The distinct rows that Ops of this device work on, in shares of a microbatch."""
        return frozenset(rows for item in self.items if isinstance(item, Compute) for rows in item.rows)


@dataclass(frozen=True)
class Placement:
    """The devices of each worker, with their shares of the rows.

    Attributes:
        workers: for each worker, pairs (device, share); the shares of a worker sum to 1.
    """

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
    def one_each(cls, num_workers: int) -> Placement:
        """Worker w is device w."""
        return cls(tuple(((worker, 1.0),) for worker in range(num_workers)))

    def rows(self, worker: int) -> Iterator[tuple[int, tuple[float, float]]]:
        """Each device of a worker with its range of the rows."""
        members = self.workers[worker]
        # Rounded, so that equal borders of two workers are equal however their shares add up.
        borders = [round(math.fsum(share for _, share in members[:position]), 12) for position in range(len(members))]
        for (device, _), rows in zip(members, zip(borders, [*borders[1:], 1.0], strict=True), strict=True):
            yield device, rows


def lower(schedule: Schedule, placement: Placement | None = None) -> tuple[DeviceProgram, ...]:
    """The programs of the devices, by device number.

    Args:
        schedule: a valid one; reductions are added where replicas lack them.
        placement: the devices of each worker; `None` for one device a worker, in order.
    """
    placement = placement or Placement.one_each(schedule.num_workers)
    replicated = {worker for worker, members in enumerate(placement.workers) if len(members) > 1}
    return _Lowering(add_reductions(schedule, replicated_workers=replicated), placement).programs()


class _Lowering:
    """One run of `lower`: first what every device sends, then what it waits for."""

    def __init__(self, schedule: Schedule, placement: Placement) -> None:
        self.schedule = schedule
        self.placement = placement
        self.rows = [dict(placement.rows(worker)) for worker in range(schedule.num_workers)]
        self.collectives = _Collectives(schedule, placement)
        self.made: dict[tuple[int, Op], list[tuple[Message, int]]] = {}
        self.overlaps: dict[tuple[int, int, int, int, int], list[tuple[tuple[float, float], int]]] = {}

    def programs(self) -> tuple[DeviceProgram, ...]:
        """The programs, by device."""
        channels, schedule = self._channels(), self.schedule
        first_copies: dict[int, int] = {}
        for holder in schedule.holders:
            first_copies.setdefault(holder.stage, holder.worker)
        found = [
            DeviceProgram(
                device=device,
                worker=worker,
                rows=rows,
                items=tuple(self._items(worker, device, channels.get(device, {}))),
                graph=schedule.graph,
                num_microbatches=schedule.num_microbatches,
                num_updates=schedule.num_updates,
                update_scope=schedule.update_scope,
                forward_only=schedule.forward_only,
                primary_stages=frozenset(
                    stage for stage, first in first_copies.items() if first == worker and device == next(iter(devices))
                ),
            )
            for worker, devices in enumerate(self.rows)
            for device, rows in devices.items()
        ]
        return tuple(sorted(found, key=lambda program: program.device))

    def _rows(self, op: Op, share: tuple[float, float]) -> tuple[float, float]:
        """The rows of the microbatch on which an Op works at a device with this share: part p of P has rows (p-1)/P to p/P."""
        if not op.part:
            return share
        num_parts = len(self.schedule.find(op._replace(part=0)))
        return (op.part - 1 + share[0]) / num_parts, (op.part - 1 + share[1]) / num_parts

    def _messages_made(self, op: Op, device: int) -> Iterator[tuple[Message, int]]:
        """What a device sends after an Op, and to which device."""
        graph = self.schedule.graph
        if op.kind is OpKind.FORWARD:
            direction, targets = Direction.ACTIVATION, graph.successors[op.stage]
        elif op.kind.gives_input_gradient:
            direction, targets = Direction.GRADIENT, graph.predecessors[op.stage]
        else:
            return
        workers = self.schedule.pipelines[op.pipeline]
        worker = workers[op.stage]
        for target in targets:
            other = workers[target]
            if other != worker:
                for rows, peer in self._peers(op, worker, device, other):
                    yield Message(direction, op.stage, target, op.index, op.pipeline, op.part, rows), peer

    def _peers(self, op: Op, worker: int, device: int, other: int) -> list[tuple[tuple[float, float], int]]:
        """The devices of another worker that an Op's rows at a device concern, and which rows."""
        num_parts = len(self.schedule.find(op._replace(part=0))) if op.part else 1
        key = (worker, device, other, op.part, num_parts)
        found = self.overlaps.get(key)
        if found is None:
            first, end = self._rows(op, self.rows[worker][device])
            found = self.overlaps[key] = []
            for peer, share in self.rows[other].items():
                # Both ends divide a microbatch alike, or the message carries all that its maker has.
                peer_first, peer_end = self._rows(op, share)
                rows = (max(first, peer_first), min(end, peer_end))
                if rows[0] < rows[1]:
                    found.append((rows, peer))
        return found

    def _channels(self) -> dict[int, dict[int, list[Message]]]:
        """For each device and each one that sends to it, the messages in the sender's order."""
        channels: dict[int, dict[int, list[Message]]] = {}
        for worker, program in enumerate(self.schedule.programs):
            for device in self.rows[worker]:
                for slot in program:
                    for op in ops_of(slot):
                        made = list(self._messages_made(op, device))
                        if made:
                            self.made[device, op] = made
                            for message, peer in made:
                                channels.setdefault(peer, {}).setdefault(device, []).append(message)
        return channels

    def _items(self, worker: int, device: int, incoming: dict[int, list[Message]]) -> list[Item]:
        # Where each awaited message stands on its channel, by what the Op that needs it can tell of it.
        awaited: _Awaited = {}
        for peer, messages in incoming.items():
            for position, message in enumerate(messages):
                key = (message.direction, message.source, message.target, message.index, message.pipeline)
                awaited.setdefault(key, []).append((peer, position))
        taken = dict.fromkeys(incoming, 0)
        share = self.rows[worker][device]
        items: list[Item] = []
        for slot in self.schedule.programs[worker]:
            ops = ops_of(slot)
            self._recvs(ops, incoming, awaited, taken, items)
            meets = not self.collectives.concerned.isdisjoint(ops)
            if meets:
                items += self.collectives.before(ops)
            computed = tuple(op for op in ops if op.kind not in _NOT_COMPUTED) if meets else ops
            if computed:
                versions = tuple([reads(self.schedule, op) for op in computed])
                items.append(Compute(computed, versions, tuple([self._rows(op, share) for op in computed])))
            for op in computed:
                items += [Send(message, peer) for message, peer in self.made.get((device, op), ())]
            if meets:
                items += self.collectives.behind(ops)
        return items + [Await(collective) for collective in self.collectives.at_end.get(worker, ())]

    def _recvs(
        self, ops: tuple[Op, ...], incoming: dict[int, list[Message]], awaited: _Awaited, taken: dict[int, int], items: list[Item]
    ) -> None:
        """Adds the Recvs that stand before a slot."""
        graph = self.schedule.graph
        for op in ops:
            if op.kind is OpKind.FORWARD:
                direction, sources = Direction.ACTIVATION, graph.predecessors[op.stage]
            elif op.kind.gives_input_gradient:
                direction, sources = Direction.GRADIENT, graph.successors[op.stage]
            else:
                continue
            for source in sources:
                for peer, position in awaited.get((direction, source, op.stage, op.index, op.pipeline), ()):
                    messages = incoming[peer]
                    if op.part and messages[position].part not in {0, op.part}:
                        continue
                    items += [Recv(earlier, peer) for earlier in messages[taken[peer] : position + 1]]
                    taken[peer] = max(taken[peer], position + 1)


_Awaited = dict[tuple[Direction, int, int, int, int], list[tuple[int, int]]]
"""By direction, source, target, microbatch and pipeline: the peers that send it, and its place on their channels."""

_NOT_COMPUTED = frozenset({OpKind.REDUCE, OpKind.PUBLISH})

_IN_TURN = (
    {CollectiveKind.GRADIENTS, CollectiveKind.WEIGHTS},
    {CollectiveKind.TIED},
    {CollectiveKind.NORM, CollectiveKind.TIED_NORM},
)
"""Each is made of those before it."""


class _Collectives:
    """Where the devices of a schedule start and await their collectives.

    Sums of replicas start at their G. Weights that are published are taken part in at the P and awaited by what next concerns the
    stage there. What joins several stages, the sum of what they share and then a norm, starts behind a worker's last gradient for it,
    and is awaited by the first U that needs it there. Where these gradients are summed first, over replicas or over a tie, the sums
    must be there: it starts right before that U. So each worker has, for one update after the other: sums of replicas, sums of ties,
    norms.
    """

    def __init__(self, schedule: Schedule, placement: Placement) -> None:
        self.schedule = schedule
        self.devices = [tuple(device for device, _ in members) for members in placement.workers]
        self.starts: dict[Op, list[Collective]] = {}
        self.awaits: dict[Op, list[Collective]] = {}
        self.late_starts: dict[Op, list[Collective]] = {}
        self.at_end: dict[int, list[Collective]] = {}
        if schedule.forward_only:
            return
        self.joints = self._joints()
        self._reductions()
        for update in range(schedule.num_updates):
            for number, tie in enumerate(map(frozenset, schedule.graph.ties)):
                if not self._is_at_hand(tie, update):
                    self._join(CollectiveKind.TIED, number, tie, update)
                if schedule.update_scope is UpdateScope.TIED:
                    self._join(CollectiveKind.TIED_NORM, number, tie, update)
            if schedule.update_scope is UpdateScope.GLOBAL:
                self._join(CollectiveKind.NORM, 0, self.joints[0], update)

    def _joints(self) -> list[frozenset[int]]:
        """The sets of stages whose updates wait for each other."""
        if self.schedule.update_scope is UpdateScope.GLOBAL:
            return [frozenset(range(self.schedule.num_stages))]
        return [frozenset(tie) for tie in self.schedule.graph.ties]

    def _is_at_hand(self, tie: frozenset[int], update: int) -> bool:
        """Whether every worker that updates any stage of a tie updates all of them, so that each adds their gradients up by itself."""
        updated: dict[int, set[int]] = {}
        for holder, pipeline in self.schedule.holders.items():
            if holder.stage in tie and Op(OpKind.UPDATE, holder.stage, update, pipeline) in self.schedule.places:
                updated.setdefault(holder.worker, set()).add(holder.stage)
        return all(stages == tie for stages in updated.values())

    def _members(self, workers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({device for worker in workers for device in self.devices[worker]}))

    def _first_updates(self, stages: Collection[int], update: int) -> dict[int, Op]:
        """The first U of some stages on each worker that has one."""
        found: dict[int, tuple[int, Op]] = {}
        for holder, pipeline in self.schedule.holders.items():
            op = Op(OpKind.UPDATE, holder.stage, update, pipeline)
            place = self.schedule.places.get(op)
            if holder.stage in stages and place is not None:
                found[holder.worker] = min(found.get(holder.worker, (place.position, op)), (place.position, op))
        return {worker: op for worker, (_, op) in found.items()}

    def _next_use(self) -> Callable[[Op], Op | None]:
        """For a P, the next Op of its stage on its worker; `None` at the end."""
        uses: dict[Holder, list[tuple[int, Op]]] = {}
        for op, place in self.schedule.ops():
            if op.kind is not OpKind.REDUCE:
                uses.setdefault(self.schedule.holder(op), []).append((place.position, op))

        def after(publication: Op) -> Op | None:
            of_stage = uses[self.schedule.holder(publication)]
            at = bisect.bisect_right(of_stage, self.schedule.places[publication].position, key=itemgetter(0))
            return of_stage[at][1] if at < len(of_stage) else None

        return after

    def _reductions(self) -> None:
        next_use = self._next_use()
        for op, place in self.schedule.ops():
            if op.kind not in {OpKind.REDUCE, OpKind.PUBLISH}:
                continue
            kind = CollectiveKind.GRADIENTS if op.kind is OpKind.REDUCE else CollectiveKind.WEIGHTS
            members = self._members(holder.worker for holder in self.schedule.replicas[op.stage])
            collective = Collective(kind, op.stage, op.index, op.part, members)
            self.starts.setdefault(op, []).append(collective)
            if op.kind is OpKind.REDUCE:
                update = op._replace(kind=OpKind.UPDATE, part=0)
                for stages in self.joints:
                    if op.stage in stages:
                        # What joins the stages is made of their sums.
                        update = self._first_updates(stages, op.index).get(place.worker, update)
                if update not in self.schedule.places:  # another copy updates and publishes; the sum is taken part in all the same
                    update = op._replace(kind=OpKind.PUBLISH, part=0)
                self.awaits.setdefault(update, []).append(collective)
            elif (user := next_use(op)) is not None:
                self.awaits.setdefault(user, []).append(collective)
            else:
                self.at_end.setdefault(place.worker, []).append(collective)

    def _join(self, kind: CollectiveKind, number: int, stages: frozenset[int], update: int) -> None:
        """One collective over the workers that update any of some stages."""
        schedule, places = self.schedule, self.schedule.places
        # All that an update meets for stands where its worker first updates any of the stages that wait for each other.
        meeting = next(joint for joint in self.joints if stages <= joint)
        first = self._first_updates(meeting, update)
        members = first if stages == meeting else self._first_updates(stages, update)
        earlier = self._first_updates(meeting, update - 1) if schedule.graph.ties else {}
        collective = Collective(kind, number, update, 0, self._members(members))
        for worker in members:
            update_op = first[worker]
            own = [holder for holder in schedule.holders if holder.worker == worker and holder.stage in stages]
            summed = any(schedule.find(Op(OpKind.REDUCE, holder.stage, update, schedule.holders[holder])) for holder in own)
            summed = summed or (kind.is_norm and any(holder.stage in schedule.graph.tie_of for holder in own))
            gradients = [op for holder in own for op in schedule.gradient_ops(holder, update)[-1:]]
            last = max(gradients, key=lambda op: places[op].position, default=None)
            if last is not None and worker in earlier and places[last] < places[earlier[worker]]:
                last = None  # sums and norms of one update before those of the next, or workers would meet in different orders
            if summed or last is None:
                self.late_starts.setdefault(update_op, []).append(collective)
            else:
                self.starts.setdefault(last, []).append(collective)
            self.awaits.setdefault(update_op, []).append(collective)

    @cached_property
    def concerned(self) -> frozenset[Op]:
        """The Ops beside which something is started or awaited, and the G and P, which are nothing else."""
        named = (op for op in self.schedule.places if op.kind in _NOT_COMPUTED)
        return frozenset({*self.starts, *self.awaits, *self.late_starts, *named})

    def before(self, ops: tuple[Op, ...]) -> Iterator[Item]:
        """What is awaited before a slot."""
        for op in ops:
            for kinds in _IN_TURN:
                for item, collectives in ((Start, self.late_starts), (Await, self.awaits)):
                    found = (each for each in collectives.get(op, ()) if each.kind in kinds and len(each.devices) > 1)
                    yield from map(item, found)

    def behind(self, ops: tuple[Op, ...]) -> Iterator[Item]:
        """What is started behind a slot."""
        for op in ops:
            yield from (Start(collective) for collective in self.starts.get(op, ()) if len(collective.devices) > 1)
