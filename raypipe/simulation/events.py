"""The event loop: when each item of compiled programs starts and ends. Time: O(items log devices).

Messages occupy their links for bytes / bandwidth, first come, first served, and arrive one latency later. In an order in which messages of
several devices pass one link, and in any while a sum takes time on links, messages and sums are flows (`flows`). Devices that share cores
progress at an equal rate, cores / computing devices but at most 1 (processor sharing).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from raypipe import stopping
from raypipe.schedules.lower import Message
from raypipe.simulation.compiled import COMPUTE, GO_ON, RECV, SEND, START, CompiledOrder, SlotClass
from raypipe.simulation.cost import Cost, SharedCompute
from raypipe.simulation.transfers import OrderTransfers

_UNKNOWN = -1.0
_EVENT_WORK_S = 6e-6
_EVENTS_AT_ONCE = 256  # Between two questions whether the computation shall end.
_TAKES_PART = 1
"""Stands for an epoch where a program takes part in collectives whose sums have ended."""


@dataclass
class _SharedCores:
    """`work`: seconds of full speed that each active device has had since the window began."""

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


class EventLoop:
    """One run of compiled programs.

    The heap holds the time at which each runnable device can go on, and for each group that shares cores its first end.
    """

    def __init__(self, order: CompiledOrder, cost: Cost) -> None:
        self.order = order
        self.cost = cost.with_patterns(order.collectives)
        self.blocking = cost.transfers_block
        num_programs = len(order.devices)
        self.starts: list[list[float]] = [[] for _ in range(num_programs)]
        self.ends: list[list[float]] = [[] for _ in range(num_programs)]
        self.waits: list[list[tuple[int, int, float, float]]] = [[] for _ in range(num_programs)]
        self.departure_s = [_UNKNOWN] * len(order.messages)
        self.arrival_s = [_UNKNOWN] * len(order.messages)
        self.durations_s = [_duration_s(cost, of_class) for of_class in order.classes]
        self.transfers = [_Transfer(cost, source, target, message) for source, target, message in order.transfers]
        self.free_s: dict[str, float] = {}
        program_of = {device: at for at, device in enumerate(order.devices)}
        self.groups = [_SharedCores(shared) for shared in cost.shared_compute]
        self.group_of = {program_of[device]: group for group in self.groups for device in group.shared.devices if device in program_of}
        self.heads = [0] * num_programs
        self.since_s = [0.0] * num_programs
        self.message_waiter = [-1] * len(order.messages)
        self.num_started = [0] * len(order.collectives)
        self.collective_end_s = [_UNKNOWN] * len(order.collectives)
        self.collective_waiters: list[list[int]] = [[] for _ in order.collectives]
        self.started: list[deque[int]] = [deque() for _ in range(num_programs)]
        """By program, the collectives that it has started and takes no part in yet, since sums must end before."""
        self.starters: list[list[int]] = [[] for _ in order.collectives]
        """By collective, the programs that take part in others behind it."""
        # Time, number that keeps simultaneous events in the order of their causes, program, epoch of its cores.
        self.heap: list[tuple[float, int, int, int]] = []
        self.sequence = 0
        self.network = OrderTransfers.of(order, self.cost, self._push_flow, self.free_s)
        self.merged_free_s = [0.0] * num_programs
        """By program, the end of its latest collective with one member."""
        self.merged_wires_s: dict[str, float] = {}
        """By wire, the end of the latest of these collectives on it."""

    def _push(self, time_s: float, program: int, epoch: int = 0) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time_s, self.sequence, program, epoch))

    def _push_flow(self, time_s: float, flow: int, epoch: int) -> None:
        self._push(time_s, -1 - len(self.groups) - flow, epoch)

    def run(self) -> None:
        """Run all programs to their ends."""
        for program in range(len(self.heads)):
            self._push(0.0, program)
        num_events = 0
        while self.heap:
            num_events += 1
            if num_events % _EVENTS_AT_ONCE == 0:
                stopping.spend(_EVENT_WORK_S * _EVENTS_AT_ONCE)
            now_s, _, program, epoch = heapq.heappop(self.heap)
            if program < 0:
                if -1 - program >= len(self.groups):
                    assert self.network is not None, "it has flows"
                    self.network.fire(-1 - len(self.groups) - program, epoch, now_s)
                    continue
                group = self.groups[-1 - program]
                if group.epoch != epoch:
                    continue
                group.advance(now_s)
                _, program = heapq.heappop(group.active)
                self._schedule_next_end(group)
                if self.order.kinds[program][self.heads[program] - 1] == GO_ON:
                    self.ends[program].pop()
                self.ends[program].append(now_s)
            elif epoch == _TAKES_PART:
                self._take_part(program, now_s)
                continue
            self._proceed(program, now_s)
        ended = map(len, self.order.kinds)
        stuck = [device for device, head, end in zip(self.order.devices, self.heads, ended, strict=True) if head < end]
        assert not stuck, f"devices {stuck} wait for ever; validate the schedule before it is lowered"

    def _proceed(self, program: int, now_s: float) -> None:  # noqa: PLR0912, PLR0915  # one loop: a call an item would double its time
        """Run the items of a program until it must wait, or until an earlier event is due elsewhere."""
        kinds, numbers = self.order.kinds[program], self.order.numbers[program]
        starts, ends, arrival_s, heap, durations_s = self.starts[program], self.ends[program], self.arrival_s, self.heap, self.durations_s
        transfers, transfer_of = self.transfers, self.order.transfer_of
        blocking = self.blocking
        shared = self.group_of.get(program)
        head, length = self.heads[program], len(kinds)
        while head < length:
            kind, number = kinds[head], numbers[head]
            head += 1
            if kind <= GO_ON:
                duration_s = durations_s[number]
                if kind == COMPUTE:
                    starts.append(now_s)
                elif shared is None or not duration_s:
                    ends.pop()
                if shared is not None and duration_s:
                    self.heads[program] = head
                    shared.advance(now_s)
                    heapq.heappush(shared.active, (shared.work + duration_s, program))
                    self._schedule_next_end(shared)
                    return
                now_s += duration_s
                ends.append(now_s)
                if not duration_s:
                    continue
            elif kind == RECV:
                arrival = arrival_s[number]
                if arrival == _UNKNOWN:
                    self.message_waiter[number] = program
                    self.since_s[program] = now_s
                    break
                if arrival > now_s or blocking:
                    here_s = max(arrival, now_s + transfers[transfer_of[number]].transfer_s) if blocking else arrival
                    self.waits[program].append((number, -1, now_s, here_s))
                    now_s = here_s
                    now_s += transfers[transfer_of[number]].recv_s
                elif recv_s := transfers[transfer_of[number]].recv_s:
                    now_s += recv_s
                else:
                    continue
            elif kind == SEND:
                self._send(number, now_s)
                send_s = transfers[transfer_of[number]].send_s
                if blocking:
                    send_s += max(self.departure_s[number] - now_s, 0.0) + transfers[transfer_of[number]].transfer_s
                if not send_s:
                    continue
                now_s += send_s
            elif kind == START:
                self._start(program, number, now_s)
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
            # Time has passed: earlier events of other devices come first.
            if heap and heap[0][0] <= now_s:
                self._push(now_s, program)
                break
        self.heads[program] = head

    def _schedule_next_end(self, group: _SharedCores) -> None:
        group.epoch += 1
        if group.active:
            self._push(group.next_end_s(), -1 - self.groups.index(group), group.epoch)

    def _send(self, number: int, now_s: float) -> None:
        transfer = self.transfers[self.order.transfer_of[number]]
        if self.network is not None and self.network.takes_messages and transfer.resources and transfer.num_bytes:
            self.network.send(number, now_s, self._arrived)
            return
        start_s = now_s
        if transfer.resources:
            for resource, _ in transfer.resources:
                start_s = max(start_s, self.free_s.get(resource, 0.0))
            for resource, busy_s in transfer.resources:
                self.free_s[resource] = start_s + busy_s
            if self.network is not None:
                self.network.left(number, start_s + max(busy_s for _, busy_s in transfer.resources))
        self._arrived(number, start_s, start_s + transfer.transfer_s)

    def _arrived(self, number: int, departure_s: float, arrival: float) -> None:
        transfer = self.transfers[self.order.transfer_of[number]]
        self.departure_s[number] = departure_s
        self.arrival_s[number] = arrival
        program = self.message_waiter[number]
        if program >= 0:
            since_s = self.since_s[program]
            if self.blocking:
                arrival = max(arrival, since_s + transfer.transfer_s)
            if arrival > since_s:
                self.waits[program].append((number, -1, since_s, arrival))
            self._push(arrival + transfer.recv_s, program)

    def _start(self, program: int, number: int, now_s: float) -> None:
        if not self.order.after[program]:
            self._begin(program, number, now_s)
            return
        self.started[program].append(number)
        if len(self.started[program]) == 1:
            self._take_part(program, now_s)

    def _take_part(self, program: int, now_s: float) -> None:
        started, after = self.started[program], self.order.after[program]
        while started:
            for needed in after.get(started[0], ()):
                end_s = self.collective_end_s[needed]
                if end_s == _UNKNOWN:
                    self.starters[needed].append(program)
                    return
                if end_s > now_s:
                    self._push(end_s, program, _TAKES_PART)
                    return
            self._begin(program, started.popleft(), now_s)

    def _begin(self, program: int, number: int, now_s: float) -> None:
        if self.network is not None and self.network.start(program, number, now_s, self._summed):
            return
        collective = self.order.collectives[number]
        self.num_started[number] += 1
        if len(collective.devices) == 1:
            # Of a device that stands for several, whose sums pass the same links.
            merged = self.cost.merged_sum(collective)
            end_s = max(now_s, self.merged_free_s[program]) + merged.late_s
            for wire, busy_s in merged.wires.items():
                begun_s = max(self.merged_wires_s.get(wire, 0.0), now_s + merged.late_s - merged.lasts_s)
                self.merged_wires_s[wire] = begun_s + busy_s
                end_s = max(end_s, begun_s + busy_s)
            self.merged_free_s[program] = end_s
            self._summed(number, end_s)
        elif self.num_started[number] == len(collective.devices):
            self._summed(number, now_s + self.cost.collective_s(collective))

    def _summed(self, number: int, end_s: float) -> None:
        self.collective_end_s[number] = end_s
        for program in self.starters[number]:
            self._push(end_s, program, _TAKES_PART)
        for program in self.collective_waiters[number]:
            since_s = self.since_s[program]
            if end_s > since_s:
                self.waits[program].append((-1, number, since_s, end_s))
            self._push(end_s, program)


def _duration_s(cost: Cost, of_class: SlotClass) -> float:
    slot, piece = of_class.slot, of_class.piece
    whole_s = cost.compute_s(of_class.device, slot.ops, tuple(rows[1] - rows[0] for rows in slot.rows))
    if piece is None:
        return whole_s
    ready = [0.0, *cost.ready(of_class.device, slot.ops[0], piece.num_buckets)]
    return whole_s * ((1.0 if piece.number == piece.last else ready[piece.number]) - ready[piece.number - 1])


class _Transfer:
    __slots__ = ("num_bytes", "recv_s", "resources", "send_s", "transfer_s")

    def __init__(self, cost: Cost, source: int, target: int, message: Message) -> None:
        path, size = cost.link(source, target), cost.message_bytes(message)
        self.num_bytes = size
        self.transfer_s = size / path.bandwidth_bytes_per_s + path.latency_s
        self.resources = tuple((resource, size / bandwidth) for resource, bandwidth in path.resources)
        overheads = cost.overheads
        self.send_s = overheads.send_s + overheads.send_s_per_byte * size
        self.recv_s = overheads.recv_s + overheads.recv_s_per_byte * size
