"""Where the time of each device went, by cause, from a trace alone.

    0 |F0 F1 ~~~~~~~~~~ : B0---- . B1---- === U0       ~ another had not finished, : a message was on its way, = a collective
    1 |wwww F0 B0---- F1 B1---- ~~~~~~~~~ === U0 dd    w warm-up, d drain, . overhead

The intervals of a device have no gaps; their causes sum to the makespan. Ramps between the updates of a window count as waits.
A wait for a message that a stage of another branch makes is that branch's doing until the message is made. Where branches meet, a wait
is another branch's doing from when one branch had arrived until the others had: a stage of no branch waits for the last of them, and a
branch for a gradient that needs the activations of the others. How long activations were on their way to it does not count.

Limits: where a trace does not name senders, of several replicas the last to finish is taken. Clocks are not aligned.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

from raypipe.artifacts.trace import Dimension, Span, SpanItem, SpanKind, Trace, dimension
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Direction, Message

Key = TypeVar("Key", bound=Hashable)


class Cause(StrEnum):
    """Why a device computed or was idle; a `_TRANSFER` means that the sender, or all members, had finished."""

    COMPUTE = "compute"
    WARM_UP = "warm_up"  # no Op has begun
    ACTIVATION = "activation"
    ACTIVATION_TRANSFER = "activation_transfer"
    GRADIENT = "gradient"
    GRADIENT_TRANSFER = "gradient_transfer"
    OTHER_BRANCH = "other_branch"  # what it waits for needs an Op of another branch, which has not finished
    COLLECTIVE = "collective"
    COLLECTIVE_TRANSFER = "collective_transfer"
    DATA = "data"  # rows of the training data have not been read
    OVERHEAD = "overhead"  # no span: the framework, or the machine
    DRAIN = "drain"  # done before others

    @property
    def is_wait(self) -> bool:
        """Whether a device waits for another, between warm-up and drain, or for data."""
        return self in _WAITS

    @property
    def is_transfer(self) -> bool:
        """Whether data is on its way."""
        return self in _TRANSFERS


_TRANSFERS = frozenset({Cause.ACTIVATION_TRANSFER, Cause.GRADIENT_TRANSFER, Cause.COLLECTIVE_TRANSFER})
_WAITS = _TRANSFERS | {Cause.ACTIVATION, Cause.GRADIENT, Cause.OTHER_BRANCH, Cause.COLLECTIVE, Cause.DATA}
IDLE = tuple(cause for cause in Cause if cause is not Cause.COMPUTE)


class Interval(NamedTuple):
    """Time of one device that has one cause, in seconds since the window began.

    Attributes:
        item: Ops that ran, or message or collective that the device waited for; None where no span covers the time.
        peer: Device that was waited for, if known.
        on_its_way: Whether the peer had finished; known in the warm-up, too.
    """

    cause: Cause
    start_s: float
    end_s: float
    item: SpanItem | None = None
    peer: int | None = None
    bytes: int = 0
    on_its_way: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


class Wait(NamedTuple):
    """Time that one device waited for its peer, without warm-up and drain."""

    device: int
    peer: int
    wait_s: float


class Root(StrEnum):
    """What a wait traces back to: a device at work or in overhead, data, or a message or collective on its way."""

    WORK = "work"
    DATA = "data"
    MESSAGE = "message"
    COLLECTIVE = "collective"


class Culprit(NamedTuple):
    """What waits trace back to.

    Attributes:
        device: Device at work or without rows, or receiver of the message; None for collectives.
        sender: Sender of the message, if known.
        wait_s: Seconds of all waits with this root; two devices that wait at once count twice.
    """

    root: Root
    device: int | None
    sender: int | None
    wait_s: float


@dataclass(frozen=True)
class Division:
    """The time of every device divided by cause: intervals without gap or overlap, and the stages of its Ops, ascending."""

    trace: Trace
    intervals: tuple[tuple[Interval, ...], ...]
    stages: tuple[tuple[int, ...], ...]

    @cached_property
    def by_cause_s(self) -> tuple[dict[Cause, float], ...]:
        """Seconds of every cause, for each device."""
        return tuple(_sums([(interval.cause, interval.duration_s) for interval in row]) for row in self.intervals)

    @cached_property
    def compute_s(self) -> tuple[dict[str, float], ...]:
        """Seconds of every kind of Op for each device: `F`, or `F&B` where kinds overlap."""
        kinds = {item: "&".join(dict.fromkeys(op.kind for op in item)) for item in {span.ops for span in self.trace.spans}}
        return tuple(
            _sums([
                (kinds[interval.item], interval.duration_s)
                for interval in row
                if isinstance(interval.item, tuple) and not isinstance(interval.item, Message)
            ])
            for row in self.intervals
        )

    @cached_property
    def exposed_s(self) -> tuple[dict[Dimension, float], ...]:
        """Seconds that each device waited for what was on its way, by dimension; computation hid the rest. Warm-up is left out."""
        return tuple(
            _sums([
                (carried, interval.duration_s)
                for interval in row
                if interval.cause.is_transfer and (carried := dimension(interval.item)) is not None
            ])
            for row in self.intervals
        )

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Who waited for whom, the longest wait first."""
        sums = _sums([
            ((device, interval.peer), interval.duration_s)
            for device, row in enumerate(self.intervals)
            for interval in row
            if interval.cause.is_wait and interval.peer is not None
        ])
        return tuple(sorted((Wait(*pair, wait_s) for pair, wait_s in sums.items()), key=lambda wait: (-wait.wait_s, wait)))

    @cached_property
    def culprits(self) -> tuple[Culprit, ...]:
        """What held devices up, the longest wait first; waits in a row trace back to the same root. Warm-up and drain are left out."""
        starts = [[interval.start_s for interval in row] for row in self.intervals]
        sums = _sums([
            root
            for device, row in enumerate(self.intervals)
            for interval in row
            if interval.cause.is_wait
            for root in self._roots(device, interval, starts)
        ])
        return tuple(sorted((Culprit(*key, wait_s) for key, wait_s in sums.items()), key=lambda culprit: -culprit.wait_s))

    def _roots(
        self, waiting: int, interval: Interval, starts: Sequence[Sequence[float]]
    ) -> Iterator[tuple[tuple[Root, int | None, int | None], float]]:
        # Each instant is followed from device to device until one works or data is on its way.
        open_waits = [(waiting, interval, 0)]
        while open_waits:
            device, wait, depth = open_waits.pop()
            if wait.cause is Cause.DATA:
                yield (Root.DATA, device, None), wait.duration_s
            elif wait.cause is Cause.COLLECTIVE_TRANSFER:
                yield (Root.COLLECTIVE, None, None), wait.duration_s
            elif wait.on_its_way:
                yield (Root.MESSAGE, device, wait.peer), wait.duration_s
            elif wait.peer is None or depth > len(starts):
                yield (Root.WORK, device, None), wait.duration_s
            else:
                for other in self._during(wait, starts[wait.peer]):
                    if other.cause.is_wait or (other.cause is Cause.WARM_UP and other.peer is not None):
                        open_waits.append((wait.peer, other, depth + 1))
                    else:
                        yield (Root.WORK, wait.peer, None), other.duration_s

    def _during(self, wait: Interval, starts: Sequence[float]) -> Iterator[Interval]:
        assert wait.peer is not None
        row = self.intervals[wait.peer]
        for position in range(max(bisect_right(starts, wait.start_s) - 1, 0), len(row)):
            if starts[position] >= wait.end_s:
                return
            start_s, end_s = max(starts[position], wait.start_s), min(row[position].end_s, wait.end_s)
            if end_s > start_s:
                yield row[position]._replace(start_s=start_s, end_s=end_s)


def divide(trace: Trace) -> Division:
    """Divide the time of every device by cause."""
    makers = _Makers(trace)
    rows = tuple(tuple(_intervals(trace, device, makers)) for device in range(len(trace.devices)))
    return Division(trace, rows, tuple(tuple(sorted(stages)) for stages in makers.stages))


def _sums(pairs: Sequence[tuple[Key, float]]) -> dict[Key, float]:
    several: dict[Key, list[float]] = defaultdict(list)
    for key, value in pairs:
        several[key].append(value)
    return {key: math.fsum(values) for key, values in several.items()}  # exact, so that causes sum to the makespan


def _intervals(trace: Trace, device: int, makers: _Makers) -> Iterator[Interval]:
    row = trace.by_device[device]
    first_s = next((span.start_s for span in row if span.kind is SpanKind.COMPUTE), math.inf)
    at_s = 0.0
    for span in row:
        # What overlaps, which no device of raypipe's does, belongs to what began first.
        start_s = max(span.start_s, at_s)
        if span.end_s <= start_s:
            continue
        if start_s > at_s:
            yield Interval(Cause.WARM_UP if at_s < first_s else Cause.OVERHEAD, at_s, start_s)
        yield from _intervals_of(span, device, start_s, first_s, makers)
        at_s = span.end_s
    if at_s < trace.makespan_s:
        yield Interval(Cause.DRAIN if first_s < math.inf else Cause.WARM_UP, at_s, trace.makespan_s)


def _intervals_of(span: Span, device: int, start_s: float, first_s: float, makers: _Makers) -> Iterator[Interval]:
    if span.kind is SpanKind.COMPUTE:
        yield Interval(Cause.COMPUTE, start_s, span.end_s, span.item)
        return
    if span.kind is SpanKind.DATA:
        yield Interval(Cause.DATA, start_s, span.end_s, span.item)
        return
    awaited = makers.of(span, device)
    causes = (Cause.WARM_UP, Cause.WARM_UP) if start_s < first_s else (awaited.before, awaited.behind)
    ready_s = min(max(awaited.ready_s, start_s), span.end_s)
    late = makers.late_branch(span, device) if causes[0].is_wait else None
    if late is not None:
        late_s, late_end_s = (min(max(at_s, start_s), ready_s) for at_s in (late.start_s, late.end_s))
        if late_end_s > late_s:
            if late_s > start_s:
                yield Interval(causes[0], start_s, late_s, span.item, awaited.peer, span.bytes)
            peer = awaited.peer if late.peer in {None, device} else late.peer
            yield Interval(Cause.OTHER_BRANCH, late_s, late_end_s, span.item, peer, span.bytes)
            start_s = late_end_s
    if ready_s > start_s:
        yield Interval(causes[0], start_s, ready_s, span.item, awaited.peer, span.bytes)
    if span.end_s > ready_s:
        yield Interval(causes[1], ready_s, span.end_s, span.item, awaited.peer, span.bytes, on_its_way=causes[1] is not Cause.OVERHEAD)


class _Awaited(NamedTuple):
    before: Cause  # until the peer finished
    behind: Cause  # from then on
    ready_s: float  # when the peer finished; -infinity if before the trace
    peer: int | None


class _Late(NamedTuple):
    start_s: float  # when a branch had arrived; -infinity if that does not matter
    end_s: float  # when the others had
    peer: int | None = None  # device that finished them; None for the sender


_CAUSES = {
    Direction.ACTIVATION: (Cause.ACTIVATION, Cause.ACTIVATION_TRANSFER),
    Direction.GRADIENT: (Cause.GRADIENT, Cause.GRADIENT_TRANSFER),
}


class _Makers:
    """Who made the messages and collectives that devices waited for, and when."""

    def __init__(self, trace: Trace) -> None:
        self.stages: list[set[int]] = [set() for _ in trace.devices]
        # By direction, stage, microbatch and part: when and where.
        self.made: dict[tuple[Direction, int, int, int], list[tuple[float, int]]] = defaultdict(list)
        # By stage and update, and by stage and microbatch: for each device, when the update or its last gradient was done.
        self.updated: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._written: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._trace = trace
        # By direction, stage and microbatch: the same with all parts.
        self._made_whole: dict[tuple[Direction, int, int], list[tuple[float, int]]] = defaultdict(list)
        self._stages_of: dict[str, list[int]] = defaultdict(list)
        for stage, branch in enumerate(trace.branches):
            if branch:
                self._stages_of[branch].append(stage)
        for span in trace.spans:
            for op in span.ops:
                self._add(op, span)
        self.gradients, self.all_gradients = self._by_update()

    def _by_update(self) -> tuple[dict[tuple[int, int], dict[int, float]], dict[int, dict[int, float]]]:
        # When the gradients of each device were complete, by (stage, update) and by update.
        num_microbatches = max((index + 1 for _, index in self._written), default=1)
        num_updates = max((index + 1 for _, index in self.updated), default=1)
        of_stage: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        of_all: dict[int, dict[int, float]] = defaultdict(dict)
        for (stage, index), ends in self._written.items():
            update = index // max(round(num_microbatches / num_updates), 1)
            for device, end_s in ends.items():
                of_stage[stage, update][device] = max(of_stage[stage, update].get(device, end_s), end_s)
                of_all[update][device] = max(of_all[update].get(device, end_s), end_s)
        return of_stage, of_all

    def _add(self, op: Op, span: Span) -> None:
        self.stages[span.device].add(op.stage)
        if op.kind is OpKind.FORWARD or op.kind.gives_input_gradient:
            direction = Direction.ACTIVATION if op.kind is OpKind.FORWARD else Direction.GRADIENT
            self.made[direction, op.stage, op.index, op.part].append((span.end_s, span.device))
            if self._stages_of:
                self._made_whole[direction, op.stage, op.index].append((span.end_s, span.device))
        if op.kind.writes_gradient or op.kind is OpKind.UPDATE:
            ends = (self.updated if op.kind is OpKind.UPDATE else self._written)[op.stage, op.index]
            ends[span.device] = max(ends.get(span.device, span.end_s), span.end_s)

    def of(self, span: Span, device: int) -> _Awaited:
        match span.item:
            case Message():
                return self._message(span.item, span, device)
            case Collective():
                return self._collective(span.item, span, device)
            case _:
                return _Awaited(Cause.OVERHEAD, Cause.OVERHEAD, -math.inf, None)

    def _message(self, message: Message, span: Span, device: int) -> _Awaited:
        causes = _CAUSES[message.direction]
        makers = self.made.get((message.direction, message.source, message.index, message.part), ())
        senders = [maker for maker in makers if maker[1] != device and span.sender in {None, maker[1]}]
        if senders:  # where clocks disagree, all may seem to have finished too late
            return _Awaited(*causes, *max((maker for maker in senders if maker[0] <= span.end_s), default=min(senders)))
        holders = [peer for peer, stages in enumerate(self.stages) if message.source in stages and peer != device]
        only = holders[0] if len(holders) == 1 else None
        return _Awaited(*causes, -math.inf, only if span.sender is None else span.sender)

    def late_branch(self, span: Span, device: int) -> _Late | None:
        """Return when a wait was another branch's doing, at most until the message was made; None if it never was."""
        message = span.item
        if not isinstance(message, Message) or not self._stages_of:
            return None
        source, target = self._trace.branch(message.source), self._trace.branch(message.target)
        if source and target and source != target:
            return _Late(-math.inf, math.inf)
        if source and not target:  # the target is where branches meet: from when the first of the others was there
            arrived = self._arrived(message, message.target)
            first_s = min((end_s for branch, (end_s, _) in arrived.items() if branch != source), default=math.inf)
            return _Late(first_s, math.inf)
        if target and message.direction is Direction.GRADIENT:  # branches meet behind the target: until the others are there
            joint = self._joint(message.source)
            arrived = self._arrived(message._replace(direction=Direction.ACTIVATION), joint) if joint is not None else {}
            others = [made for branch, made in arrived.items() if branch != target]
            return _Late(arrived[target][0], *max(others)) if others and target in arrived else None
        if not target:  # the source is where branches meet
            ends = self._arrived(message, message.source).values()
            return _Late(min(ends)[0], *max(ends)) if ends else None
        return None

    def _joint(self, stage: int) -> int | None:
        # The stage itself, or the next behind it, that is of no branch.
        branches = self._trace.branches
        return next((behind for behind in range(stage, len(branches)) if not branches[behind]), None)

    def _arrived(self, message: Message, joint: int) -> dict[str, tuple[float, int]]:
        # When and where each branch did all that a stage of no branch needs for the microbatch; -infinity if before the trace.
        direction, index, part = message.direction, message.index, message.part
        is_whole = not part or (direction, joint, index, part) not in self.made
        arrived: dict[str, tuple[float, int]] = {}
        for branch, stages in self._stages_of.items():
            needed = [stage for stage in stages if (stage < joint if direction is Direction.ACTIVATION else stage > joint)]
            ends = (
                self._made_whole.get((direction, stage, index), ()) if is_whole else self.made.get((direction, stage, index, part), ())
                for stage in needed
            )
            if needed:
                arrived[branch] = max(itertools.chain.from_iterable(ends), default=(-math.inf, -1))
        return arrived

    def _collective(self, collective: Collective, span: Span, device: int) -> _Awaited:
        members = collective.devices or range(len(self.stages))
        arrivals = {member: end_s for member, end_s in self._brought(collective).items() if end_s <= span.end_s and member in members}
        last = max(arrivals, key=lambda member: (arrivals[member], member), default=device)
        return _Awaited(Cause.COLLECTIVE, Cause.COLLECTIVE_TRANSFER, arrivals.get(last, -math.inf), None if last == device else last)

    def _brought(self, collective: Collective) -> dict[int, float]:
        match collective.kind:  # for each device, when its part was complete
            case CollectiveKind.WEIGHTS:
                return self.updated.get((collective.stage, collective.update), {})
            case CollectiveKind.GRADIENTS | CollectiveKind.STAGE_NORM:
                return self.gradients.get((collective.stage, collective.update), {})
            case CollectiveKind.NORM | CollectiveKind.TIED | CollectiveKind.TIED_NORM:
                # A trace does not say which stages are tied.
                return self.all_gradients.get(collective.update, {})
