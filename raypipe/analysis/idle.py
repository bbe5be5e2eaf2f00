"""Where the time of each device went, by cause, from a trace alone.

    0 |F0 F1 ~~~~~~~~~~ : B0---- . B1---- === U0       ~ another had not finished, : a message was on its way, = a collective
    1 |wwww F0 B0---- F1 B1---- ~~~~~~~~~ === U0 dd    w warm-up, d drain, . overhead

The window of each device is cut into intervals without gap or overlap, from 0 to the trace's makespan. Each has one cause, so the
seconds of all causes sum to the makespan. Simulated, rehearsed and measured traces are cut by one rule, and can be compared:

* A wait for a message is cut where the Op that makes it ended on its sender. Before, the sender had not finished; behind, the
  message was on its way, on the link or in the queue before it.
* A wait for a collective is cut where the last of its members was done with what it brings.
* A window of several updates has one warm-up and one drain. The ramps between its updates are waits.

Limits: a trace that was loaded from a file does not know who sent a message. Where a stage has several replicas, the sender is then taken
to be the one that finished last before the message came. Clocks of different nodes are taken as they are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

from raypipe.artifacts.trace import Span, SpanItem, SpanKind, Trace
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Direction, Message

Key = TypeVar("Key", bound=Hashable)


class Cause(StrEnum):
    """Why a device computed or was idle."""

    COMPUTE = "compute"
    """An Op ran."""
    WARM_UP = "warm_up"
    """Its first Op had not begun; of a device without Ops, all of the window."""
    ACTIVATION = "activation"
    """It waited for an activation whose sender had not finished."""
    ACTIVATION_TRANSFER = "activation_transfer"
    """It waited for an activation that was on its way."""
    GRADIENT = "gradient"
    """It waited for a gradient whose sender had not finished."""
    GRADIENT_TRANSFER = "gradient_transfer"
    """It waited for a gradient that was on its way."""
    COLLECTIVE = "collective"
    """It waited for a norm or a sum to which another device had not yet brought its part."""
    COLLECTIVE_TRANSFER = "collective_transfer"
    """It waited for a norm or a sum to which all had brought their parts."""
    OVERHEAD = "overhead"
    """No span explains it: the framework, or the machine."""
    DRAIN = "drain"
    """It was done and others were not."""

    @property
    def is_wait(self) -> bool:
        """Whether a device waits for another, between warm-up and drain."""
        return self in _PEER_COMPUTES or self in _TRANSFERS

    @property
    def is_transfer(self) -> bool:
        """Whether what is waited for is on its way."""
        return self in _TRANSFERS


_PEER_COMPUTES = frozenset({Cause.ACTIVATION, Cause.GRADIENT, Cause.COLLECTIVE})
_TRANSFERS = frozenset({Cause.ACTIVATION_TRANSFER, Cause.GRADIENT_TRANSFER, Cause.COLLECTIVE_TRANSFER})

IDLE = tuple(cause for cause in Cause if cause is not Cause.COMPUTE)
"""All causes of idleness, in the order in which they are listed."""


class Interval(NamedTuple):
    """Time of one device that has one cause.

    Attributes:
        cause: Why the device computed or was idle.
        start_s: Seconds since the window began.
        end_s: Seconds since the window began.
        item: Ops that ran, or message or collective that the device waited for; None where no span covers the time.
        peer: Device that was waited for, if known.
        bytes: Size of the message or collective.
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
    """Time that one device waited for another.

    Attributes:
        device: Device that waited.
        peer: Device that was waited for.
        wait_s: Seconds, without warm-up and drain.
    """

    device: int
    peer: int
    wait_s: float


class Root(StrEnum):
    """What a wait traces back to."""

    WORK = "work"
    """A device that works, or that no span of its own explains."""
    MESSAGE = "message"
    """A message on its way."""
    COLLECTIVE = "collective"
    """A collective on its way."""


class Culprit(NamedTuple):
    """What waits trace back to.

    Attributes:
        root: Kind of the root.
        device: Device at work, or receiver of the message; None for collectives.
        sender: Sender of the message, if known.
        wait_s: Seconds of all waits with this root; two devices that wait at once count twice.
    """

    root: Root
    device: int | None
    sender: int | None
    wait_s: float


_RootKey = tuple[Root, int | None, int | None]


@dataclass(frozen=True)
class Division:
    """The time of every device of a trace, divided by cause.

    Attributes:
        trace: The trace.
        intervals: For each device, intervals from 0 to the makespan without gap or overlap.
        stages: For each device, the stages of its Ops, ascending.
    """

    trace: Trace
    intervals: tuple[tuple[Interval, ...], ...]
    stages: tuple[tuple[int, ...], ...]

    @cached_property
    def by_cause_s(self) -> tuple[dict[Cause, float], ...]:
        """For each device, the seconds of every cause; they sum to the makespan."""
        return tuple(_sums([(interval.cause, interval.duration_s) for interval in row]) for row in self.intervals)

    @cached_property
    def compute_s(self) -> tuple[dict[str, float], ...]:
        """For each device, the seconds of every kind of Op: `F`, or `F&B` where Ops of several kinds overlap."""
        kinds: dict[SpanItem, str] = {}
        rows: list[list[tuple[str, float]]] = []
        for row in self.intervals:
            rows.append([])
            for interval in row:
                if isinstance(interval.item, tuple):
                    if interval.item not in kinds:
                        kinds[interval.item] = "&".join(dict.fromkeys(op.kind for op in interval.item))
                    rows[-1].append((kinds[interval.item], interval.duration_s))
        return tuple(map(_sums, rows))

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Who waited for whom, the longest wait first."""
        found = _sums([
            ((device, interval.peer), interval.duration_s)
            for device, row in enumerate(self.intervals)
            for interval in row
            if interval.cause.is_wait and interval.peer is not None
        ])
        return tuple(sorted((Wait(*pair, wait_s) for pair, wait_s in found.items()), key=lambda wait: (-wait.wait_s, wait)))

    @cached_property
    def culprits(self) -> tuple[Culprit, ...]:
        """What held devices up, the longest wait first.

        A device that waits for a waiting device is held up by what that one waits for. So each instant of a wait is followed from
        device to device until one works or a message is on its way. Warm-up and drain are left out.
        """
        found: dict[_RootKey, list[float]] = defaultdict(list)
        starts = [[interval.start_s for interval in row] for row in self.intervals]
        for device, row in enumerate(self.intervals):
            for interval in row:
                if interval.cause.is_wait:
                    for key, wait_s in self._roots(device, interval, starts):
                        found[key].append(wait_s)
        totals = [Culprit(*key, math.fsum(waits)) for key, waits in found.items()]
        return tuple(sorted(totals, key=lambda culprit: -culprit.wait_s))

    def _roots(self, waiting: int, interval: Interval, starts: Sequence[Sequence[float]]) -> Iterator[tuple[_RootKey, float]]:
        open_waits = [(waiting, interval, 0)]
        while open_waits:
            device, wait, depth = open_waits.pop()
            if wait.cause is Cause.COLLECTIVE_TRANSFER:
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

    def peer_most_waited_for(self, device: int) -> Wait | None:
        """Return the longest wait of a device."""
        return next((wait for wait in self.waits if wait.device == device), None)


def divide(trace: Trace) -> Division:
    """Divide the time of every device by cause, in time linear in the number of spans."""
    makers = _Makers(trace)
    rows = tuple(tuple(_intervals(trace, device, makers)) for device in range(len(trace.devices)))
    return Division(trace, rows, tuple(tuple(sorted(stages)) for stages in makers.stages))


def _sums(pairs: Sequence[tuple[Key, float]]) -> dict[Key, float]:
    """Return exact sums, so that the causes of a device sum to the makespan."""
    found: dict[Key, list[float]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: math.fsum(values) for key, values in found.items()}


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
    awaited = makers.of(span, device)
    causes = (Cause.WARM_UP, Cause.WARM_UP) if start_s < first_s else (awaited.before, awaited.behind)
    ready_s = min(max(awaited.ready_s, start_s), span.end_s)
    if ready_s > start_s:
        yield Interval(causes[0], start_s, ready_s, span.item, awaited.peer, span.bytes)
    if span.end_s > ready_s:
        yield Interval(causes[1], ready_s, span.end_s, span.item, awaited.peer, span.bytes, on_its_way=causes[1] is not Cause.OVERHEAD)


class _Awaited(NamedTuple):
    """What a wait was for.

    Attributes:
        before: Cause of the wait until the peer finished.
        behind: Cause of the wait from then on.
        ready_s: When the peer finished; -infinity if before the trace.
        peer: The other device that made what was awaited, if known.
    """

    before: Cause
    behind: Cause
    ready_s: float
    peer: int | None


_UNREADABLE = _Awaited(Cause.OVERHEAD, Cause.OVERHEAD, -math.inf, None)


class _Makers:
    """Who made what waits of a trace were for, and when."""

    def __init__(self, trace: Trace) -> None:
        self.stages: list[set[int]] = [set() for _ in trace.devices]
        self.made: dict[tuple[Direction, int, int, int], list[tuple[float, int]]] = defaultdict(list)
        """By direction, stage, microbatch and part: when and where."""
        self.updated: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """By stage and update: for each device, when its update ended."""
        self._written: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """By stage and microbatch: for each device, when its last Op that writes a gradient ended."""
        for span in trace.spans:
            for op in span.ops:
                self._add(op, span)
        self.gradients, self.all_gradients = self._by_update()

    def _by_update(self) -> tuple[dict[tuple[int, int], dict[int, float]], dict[int, dict[int, float]]]:
        """Return when the gradients of each device were complete, by (stage, update) and by update."""
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
        if op.kind is OpKind.FORWARD:
            self.made[Direction.ACTIVATION, op.stage, op.index, op.part].append((span.end_s, span.device))
        elif op.kind.gives_input_gradient:
            self.made[Direction.GRADIENT, op.stage, op.index, op.part].append((span.end_s, span.device))
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
                return _UNREADABLE

    def _message(self, message: Message, span: Span, device: int) -> _Awaited:
        if message.direction is Direction.ACTIVATION:
            causes = (Cause.ACTIVATION, Cause.ACTIVATION_TRANSFER)
        else:
            causes = (Cause.GRADIENT, Cause.GRADIENT_TRANSFER)
        makers = self.made.get((message.direction, message.source, message.index, message.part), ())
        found = [maker for maker in makers if maker[1] != device and span.sender in {None, maker[1]}]
        if not found and span.sender is not None:
            return _Awaited(*causes, -math.inf, span.sender)
        if not found:
            holders = [peer for peer, stages in enumerate(self.stages) if message.source in stages and peer != device]
            return _Awaited(*causes, -math.inf, holders[0] if len(holders) == 1 else None)
        # Where clocks disagree, all may seem to have finished too late.
        return _Awaited(*causes, *max((maker for maker in found if maker[0] <= span.end_s), default=min(found)))

    def _collective(self, collective: Collective, span: Span, device: int) -> _Awaited:
        members = collective.devices or range(len(self.stages))
        arrivals = {member: end_s for member, end_s in self._brought(collective).items() if end_s <= span.end_s and member in members}
        last = max(arrivals, key=lambda member: (arrivals[member], member), default=device)
        return _Awaited(Cause.COLLECTIVE, Cause.COLLECTIVE_TRANSFER, arrivals.get(last, -math.inf), None if last == device else last)

    def _brought(self, collective: Collective) -> dict[int, float]:
        """Return for each device when its part of a collective was complete."""
        match collective.kind:
            case CollectiveKind.WEIGHTS:
                return self.updated.get((collective.stage, collective.update), {})
            case CollectiveKind.GRADIENTS:
                return self.gradients.get((collective.stage, collective.update), {})
            case CollectiveKind.NORM | CollectiveKind.TIED | CollectiveKind.TIED_NORM:
                # A trace does not say which stages are tied.
                return self.all_gradients.get(collective.update, {})
