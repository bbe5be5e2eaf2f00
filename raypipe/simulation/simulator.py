"""Predicts a window: the very programs that run, with times from a cost model. No ray, no torch.

A discrete-event simulation of the lowered items. Devices run their items in order; a Send hands its message to the links;
links are taken first come, first served, and a message occupies each of its resources for bytes / bandwidth, then arrives
one latency later (latency occupies nothing). Devices that share cores progress at an equal rate, cores / computing devices
at most 1 (processor sharing).

An order is numbered once (`Numbered`) and timed as often as wanted (`Numbered.run`): a search over costs pays for the
numbering once, and for spans not at all. Time: O(items log devices).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import attrgetter

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace, steady_s
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Collective, CollectiveKind, Compute, DeviceProgram, Message, Recv, Send, Start, lower
from raypipe.simulation.cost import Cost, SharedCompute, plan_cost

# What an item is, in the inner loop.
_COMPUTE, _SEND, _RECV, _START, _AWAIT = range(5)
_UNKNOWN = -1.0
_OPS = attrgetter("ops")


def simulate(programs: Sequence[DeviceProgram], cost: Cost, *, name: str, num_updates: int = 1, with_memory: bool = True) -> Trace:
    """The trace of one window.

    Args:
        programs: lowered, of a valid schedule.
        cost: seconds and bytes.
        name: of the trace.
        num_updates: updates of the window.
        with_memory: whether the trace has the bytes held over time.
    """
    return Numbered(programs).run(cost).trace(name=name, num_updates=num_updates, with_memory=with_memory)


def simulate_plan(plan: Plan) -> Trace:
    """The trace of one window of a plan on its own topology."""
    return simulate(lower(plan.schedule, plan.placement), plan_cost(plan), name=plan.name, num_updates=plan.schedule.num_updates)


class Numbered:
    """An order whose items, messages and collectives are numbers, to be timed with one cost after the other.

    Args:
        programs: lowered, of a valid schedule. The n-th Send of a channel is what its n-th Recv waits for.
    """

    def __init__(self, programs: Sequence[DeviceProgram]) -> None:
        self.programs = tuple(programs)
        self.kinds: list[bytearray] = []
        self.numbers: list[list[int]] = []
        """For each device and item: the class of a Compute, the number of a message or of a collective."""
        self.computes: list[list[Compute]] = []
        self.classes: list[tuple[int, Compute]] = []
        """A device and one of its slots for each class of slots that take equally long."""
        self.messages: list[Message] = []
        self.message_classes: list[int] = []
        self.transfers: list[tuple[int, int, Message]] = []
        """Sender, receiver and one message for each class of messages that take the same way with equally many bytes."""
        self.collectives: list[Collective] = []
        self._class_of: dict[object, int] = {}
        self._transfer_of: dict[object, int] = {}
        self._collective_of: dict[Collective, int] = {}
        self._sent: dict[tuple[int, int], list[int]] = {}
        # A message's number is known at its Send: all programs' sends come first.
        sends = [[self._message(program.device, item) for item in program.items if type(item) is Send] for program in programs]
        for program, numbers in zip(programs, sends, strict=True):
            self._add(program, numbers)

    def _message(self, device: int, item: Send) -> int:
        number = len(self.messages)
        message = item.message
        self.messages.append(message)
        key = (device, item.device, message.source, message.target, message.rows)
        known = self._transfer_of.get(key)
        if known is None:
            known = self._transfer_of[key] = len(self.transfers)
            self.transfers.append((device, item.device, message))
        self.message_classes.append(known)
        channel = self._sent.get((device, item.device))
        if channel is None:
            channel = self._sent[device, item.device] = []
        channel.append(number)
        return number

    def _add(self, program: DeviceProgram, sends: list[int]) -> None:
        device = program.device
        kinds, numbers, computes = bytearray(), [], []
        unsent = iter(sends)
        arriving = {peer: iter(channel) for (peer, target), channel in self._sent.items() if target == device}
        class_of = self._class_of
        for item in program.items:
            kind = type(item)
            if kind is Compute:
                assert isinstance(item, Compute)
                ops = item.ops
                key: object = (
                    (device, ops[0].stage, ops[0].kind, item.rows[0])
                    if len(ops) == 1
                    else (device, tuple((op.stage, op.kind) for op in ops), item.rows)
                )
                known = class_of.get(key)
                if known is None:
                    known = class_of[key] = len(self.classes)
                    self.classes.append((device, item))
                kinds.append(_COMPUTE)
                numbers.append(known)
                computes.append(item)
            elif kind is Send:
                kinds.append(_SEND)
                numbers.append(next(unsent))
            elif kind is Recv:
                assert isinstance(item, Recv)
                number = next(arriving[item.device])
                message = self.messages[number]
                assert message is item.message or message == item.message, f"device {device} expects {item.message}, {message} is sent"
                kinds.append(_RECV)
                numbers.append(number)
            else:
                assert not isinstance(item, Compute | Send | Recv)
                known = self._collective_of.get(item.collective)
                if known is None:
                    known = self._collective_of[item.collective] = len(self.collectives)
                    self.collectives.append(item.collective)
                kinds.append(_START if kind is Start else _AWAIT)
                numbers.append(known)
        self.kinds.append(kinds)
        self.numbers.append(numbers)
        self.computes.append(computes)

    @cached_property
    def updates(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each update, its U's: pairs of a program and the number of the slot among its slots."""
        found: dict[int, list[tuple[int, int]]] = {}
        for program, computes in enumerate(self.computes):
            for position, item in enumerate(computes):
                if item.ops[0].kind is OpKind.UPDATE:
                    found.setdefault(item.ops[0].index, []).append((program, position))
        return tuple(tuple(found[update]) for update in sorted(found))

    @cached_property
    def microbatches_per_update(self) -> int:
        """How many microbatches an update is made of."""
        ops = (op for computes in self.computes for item in computes for op in item.ops)
        num_microbatches = 1 + max((op.index for op in ops if not op.kind.per_update), default=0)
        return max(num_microbatches // max(len(self.updates), 1), 1)

    def run(self, cost: Cost) -> Timing:
        """When everything happens with these costs."""
        run = _Run(self, cost)
        run.run()
        return Timing(self, cost, run.starts, run.ends, run.waits, run.left_s, run.arrival_s)


@dataclass(frozen=True)
class Timing:
    """When the slots of an order start and end.

    Attributes:
        order: what was timed.
        cost: with what.
        starts: for each program the start of each of its slots.
        ends: likewise their ends.
        waits: for each program: message or -1, collective or -1, start, end.
        left_s: for each message when it came onto its links.
        arrival_s: for each message when it was there.
    """

    order: Numbered
    cost: Cost
    starts: list[list[float]]
    ends: list[list[float]]
    waits: list[list[tuple[int, int, float, float]]]
    left_s: list[float]
    arrival_s: list[float]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last slot, or the last wait, ends."""
        return max([*(row[-1] for row in self.ends if row), *(row[-1][3] for row in self.waits if row)], default=0.0)

    @cached_property
    def update_ends_s(self) -> tuple[float, ...]:
        """For each update, when its last U ended; all of it where there is none."""
        ends = self.ends
        return tuple(max(ends[at][position] for at, position in places) for places in self.order.updates) or (self.makespan_s,)

    @property
    def update_s(self) -> float:
        """Seconds per update, as `Trace.update_s`."""
        ends = self.update_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]

    @property
    def steady_update_s(self) -> float:
        """Seconds per update far from the ends of the window, as `Trace.steady_update_s`."""
        return steady_s(self.update_ends_s) or self.update_s

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """For each program, the seconds in which its device computed."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    def trace(self, *, name: str, num_updates: int = 1, with_memory: bool = True) -> Trace:
        """The same as spans."""
        spans: list[Span] = []
        order, make = self.order, Span._make
        for program, items, starts, ends, waits in zip(order.programs, order.computes, self.starts, self.ends, self.waits, strict=True):
            device = program.device
            spans += map(make, zip(repeat(device), repeat(SpanKind.COMPUTE), map(_OPS, items), starts, ends, repeat(0), repeat(None)))
            for message, collective, start, end in waits:
                if message >= 0:
                    known = order.message_classes[message]
                    sender = order.transfers[known][0]
                    spans.append(make((device, SpanKind.RECV, order.messages[message], start, end, self._bytes[known], sender)))
                else:
                    met = order.collectives[collective]
                    spans.append(Span(device, SpanKind.COLLECTIVE, met, start, end, self.cost.collective_bytes(met)))
        for known, item, left, arrival in zip(order.message_classes, order.messages, self.left_s, self.arrival_s, strict=True):
            if arrival > left:
                sender, target, _ = order.transfers[known]
                spans.append(make((target, SpanKind.TRANSFER, item, left, arrival, self._bytes[known], sender)))
        return Trace(name, Source.SIMULATED, self.cost.devices, num_updates, tuple(spans), self.memory if with_memory else ())

    @cached_property
    def _bytes(self) -> list[int]:
        return [self.cost.message_bytes(message) for _, _, message in self.order.transfers]

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each device, steps (seconds, bytes held from then on)."""
        found: list[tuple[tuple[float, int], ...]] = [
            ((0.0, self.cost.standing_bytes(device)),) for device in range(len(self.cost.devices))
        ]
        for at, program in enumerate(self.order.programs):
            found[program.device] = tuple(self._memory(at, program.device))
        return tuple(found)

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """For each device, the most bytes held."""
        return tuple(max(held for _, held in steps) for steps in self.memory)

    def _memory(self, at: int, device: int) -> list[tuple[float, int]]:
        order, cost = self.order, self.cost
        steps = {number: _steps(cost, device, item) for number, (owner, item) in enumerate(order.classes) if owner == device}
        gradients = _Gradients(cost, device, order.microbatches_per_update)
        held = cost.standing_bytes(device)
        curve = [(0.0, held)]
        slots = zip(order.computes[at], self.starts[at], self.ends[at], strict=True)
        now_s = 0.0
        for kind, number in zip(order.kinds[at], order.numbers[at], strict=True):
            if kind == _COMPUTE:
                item, start_s, now_s = next(slots)
                taken, working, freed = steps[number]
                if taken or working:
                    curve.append((start_s, held + taken + working))
                change = taken - freed + gradients.after(item)
                if working or change != taken:
                    curve.append((now_s, held + change))
                held += change
            elif kind in {_START, _AWAIT}:
                collective = order.collectives[number]
                more, change = gradients.started(collective) if kind == _START else (0, gradients.awaited(collective))
                held += change
                if more:
                    curve.append((now_s, held + more))
                if more or change:
                    curve.append((now_s, held))
        return curve


def _steps(cost: Cost, device: int, item: Compute) -> tuple[int, int, int]:
    """The bytes that a slot takes when it starts, needs while it runs, and frees when it ends."""
    shares = [rows[1] - rows[0] for rows in item.rows]
    parts = [cost.memory_step_bytes(device, op, share) for op, share in zip(item.ops, shares, strict=True)]
    working = max(cost.working_bytes(device, op, share) for op, share in zip(item.ops, shares, strict=True))
    return sum(taken for taken, _ in parts), working, sum(freed for _, freed in parts)


class _Gradients:
    """What the gradients and sums of a device's stages hold, as its program goes on.

    Args:
        cost: bytes.
        device: its number.
        microbatches_per_update: which update a microbatch belongs to.
    """

    def __init__(self, cost: Cost, device: int, microbatches_per_update: int) -> None:
        self.sizes = {stage: found.gradient_bytes for (at, stage), found in cost.stages.items() if at == device}
        self.weights = {stage: found.trained_bytes for (at, stage), found in cost.stages.items() if at == device}
        self.microbatches_per_update = microbatches_per_update
        self.there: set[tuple[int, int]] = set()
        """Stages and updates that have some."""

    def after(self, item: Compute) -> int:
        """The bytes that there are more when a slot has ended."""
        more = 0
        for op in item.ops:
            if op.kind.writes_gradient:
                key = (op.stage, op.index // self.microbatches_per_update)
                if key not in self.there:
                    self.there.add(key)
                    more += self.sizes[op.stage]
            elif op.kind is OpKind.UPDATE:
                more -= self._dropped(op.stage, op.index)
        return more

    def started(self, collective: Collective) -> tuple[int, int]:
        """The bytes that a sum needs for a moment, and those that it holds from then on."""
        match collective.kind:
            case CollectiveKind.GRADIENTS:
                # One vector takes the place of what it is put together from.
                return self.sizes[collective.stage], 0
            case CollectiveKind.WEIGHTS:
                return 0, self.weights[collective.stage]
            case _:
                return 0, 0

    def awaited(self, collective: Collective) -> int:
        """The bytes that there are more when a sum has been taken."""
        if collective.kind is not CollectiveKind.WEIGHTS:
            return 0
        return -self.weights[collective.stage] - self._dropped(collective.stage, collective.update)

    def _dropped(self, stage: int, update: int) -> int:
        if (stage, update) not in self.there:
            return 0
        self.there.remove((stage, update))
        return self.sizes[stage]


@dataclass
class _Cores:
    """Devices that share cores. `work` is the compute that each active one has been given since the window began."""

    shared: SharedCompute
    work: float = 0.0
    since_s: float = 0.0
    active: list[tuple[float, int]] = field(default_factory=list)
    epoch: int = 0

    def rate(self) -> float:
        return min(1.0, self.shared.cores / len(self.active)) if self.active else 1.0

    def advance(self, now_s: float) -> None:
        self.work += (now_s - self.since_s) * self.rate()
        self.since_s = now_s

    def next_end_s(self) -> float:
        return self.since_s + max(self.active[0][0] - self.work, 0.0) / self.rate()


class _Run:
    """One run over numbered programs.

    The heap holds for each device that can go on the time from which it can, and for each group of devices that share
    cores the time at which the first of them is done. A device that waits for what has not been sent is in no heap.
    """

    def __init__(self, order: Numbered, cost: Cost) -> None:
        self.order = order
        self.cost = cost
        num_programs = len(order.programs)
        self.starts: list[list[float]] = [[] for _ in range(num_programs)]
        self.ends: list[list[float]] = [[] for _ in range(num_programs)]
        self.waits: list[list[tuple[int, int, float, float]]] = [[] for _ in range(num_programs)]
        self.left_s = [_UNKNOWN] * len(order.messages)
        self.arrival_s = [_UNKNOWN] * len(order.messages)
        self.durations_s = [
            cost.compute_s(device, item.ops, tuple(rows[1] - rows[0] for rows in item.rows)) for device, item in order.classes
        ]
        self.links = [_Link(cost, source, target, message) for source, target, message in order.transfers]
        self.free_s: dict[str, float] = {}
        program_of = {program.device: at for at, program in enumerate(order.programs)}
        self.groups = [_Cores(shared) for shared in cost.shared_compute]
        self.group_of = {program_of[device]: group for group in self.groups for device in group.shared.devices if device in program_of}
        self.heads = [0] * num_programs
        self.since_s = [0.0] * num_programs
        self.message_waiter = [-1] * len(order.messages)
        self.num_started = [0] * len(order.collectives)
        self.collective_end_s = [_UNKNOWN] * len(order.collectives)
        self.collective_waiters: list[list[int]] = [[] for _ in order.collectives]
        # Time, a number that keeps simultaneous events in the order in which they were caused, program, epoch of its cores.
        self.heap: list[tuple[float, int, int, int]] = []
        self.sequence = 0

    def push(self, time_s: float, program: int, epoch: int = 0) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time_s, self.sequence, program, epoch))

    def run(self) -> None:
        for program in range(len(self.heads)):
            self.push(0.0, program)
        while self.heap:
            now_s, _, program, epoch = heapq.heappop(self.heap)
            if program < 0:
                group = self.groups[-1 - program]
                if group.epoch != epoch:
                    continue
                group.advance(now_s)
                _, program = heapq.heappop(group.active)
                self.plan(group)
                self.ends[program].append(now_s)
            self.proceed(program, now_s)
        stuck = [program.device for program, head in zip(self.order.programs, self.heads, strict=True) if head < len(program.items)]
        assert not stuck, f"devices {stuck} wait for ever; validate the schedule before it is lowered"

    def proceed(self, program: int, now_s: float) -> None:  # noqa: PLR0912, PLR0915  # one loop: a call an item would double its time
        """Runs the items of a program until it must wait, or until something else happens before it goes on."""
        kinds, numbers = self.order.kinds[program], self.order.numbers[program]
        starts, ends, arrival_s, heap, durations_s = self.starts[program], self.ends[program], self.arrival_s, self.heap, self.durations_s
        links, classes = self.links, self.order.message_classes
        shared = self.group_of.get(program)
        head, length = self.heads[program], len(kinds)
        while head < length:
            kind, number = kinds[head], numbers[head]
            head += 1
            if kind == _COMPUTE:
                starts.append(now_s)
                duration_s = durations_s[number]
                if shared is not None and duration_s:
                    self.heads[program] = head
                    shared.advance(now_s)
                    heapq.heappush(shared.active, (shared.work + duration_s, program))
                    self.plan(shared)
                    return
                now_s += duration_s
                ends.append(now_s)
                if not duration_s:
                    continue
            elif kind == _RECV:
                arrival = arrival_s[number]
                if arrival == _UNKNOWN:
                    self.message_waiter[number] = program
                    self.since_s[program] = now_s
                    break
                if arrival > now_s:
                    self.waits[program].append((number, -1, now_s, arrival))
                    now_s = arrival
                    now_s += links[classes[number]].recv_s
                elif recv_s := links[classes[number]].recv_s:
                    now_s += recv_s
                else:
                    continue
            elif kind == _SEND:
                self.send(number, now_s)
                send_s = links[classes[number]].send_s
                if not send_s:
                    continue
                now_s += send_s
            elif kind == _START:
                self.start(number, now_s)
                continue
            else:
                end_s = self.collective_end_s[number]
                if end_s == _UNKNOWN:
                    self.collective_waiters[number].append(program)
                    self.since_s[program] = now_s
                    break
                if end_s <= now_s:
                    continue
                self.waits[program].append((-1, number, now_s, end_s))
                now_s = end_s
            # Time has passed: what comes earlier elsewhere comes first.
            if heap and heap[0][0] <= now_s:
                self.push(now_s, program)
                break
        self.heads[program] = head

    def plan(self, group: _Cores) -> None:
        """Enters the time at which the first of the devices that share cores is done."""
        group.epoch += 1
        if group.active:
            self.push(group.next_end_s(), -1 - self.groups.index(group), group.epoch)

    def send(self, number: int, now_s: float) -> None:
        link = self.links[self.order.message_classes[number]]
        start_s = now_s
        if link.resources:
            for resource, _ in link.resources:
                start_s = max(start_s, self.free_s.get(resource, 0.0))
            for resource, busy_s in link.resources:
                self.free_s[resource] = start_s + busy_s
        self.left_s[number] = start_s
        arrival = self.arrival_s[number] = start_s + link.transfer_s
        program = self.message_waiter[number]
        if program >= 0:
            since_s = self.since_s[program]
            if arrival > since_s:
                self.waits[program].append((number, -1, since_s, arrival))
            self.push(arrival + link.recv_s, program)

    def start(self, number: int, now_s: float) -> None:
        collective = self.order.collectives[number]
        self.num_started[number] += 1
        if self.num_started[number] < len(collective.devices):
            return
        end_s = self.collective_end_s[number] = now_s + self.cost.collective_s(collective)
        for program in self.collective_waiters[number]:
            since_s = self.since_s[program]
            if end_s > since_s:
                self.waits[program].append((-1, number, since_s, end_s))
            self.push(end_s, program)


class _Link:
    """What the messages of one class meet: seconds until they are there, for which they occupy each resource, and for which the devices."""

    __slots__ = ("recv_s", "resources", "send_s", "transfer_s")

    def __init__(self, cost: Cost, source: int, target: int, message: Message) -> None:
        path, size = cost.path(source, target), cost.message_bytes(message)
        self.transfer_s = size / path.bandwidth_bytes_per_s + path.latency_s
        self.resources = tuple((resource, size / bandwidth) for resource, bandwidth in path.resources)
        overheads = cost.overheads
        self.send_s = overheads.send_s + overheads.send_s_per_byte * size
        self.recv_s = overheads.recv_s + overheads.recv_s_per_byte * size
