"""Predicts a window: the very programs that run, with times from a cost model. No ray, no torch.

A discrete-event simulation of the lowered items. Devices run their items in order; a Send hands its message to the links
and costs the device nothing; links are taken first come, first served, and a message occupies each of its resources for
bytes / bandwidth, then arrives one latency later (latency occupies nothing). Devices that share cores progress at an equal
rate, cores / computing devices at most 1 (processor sharing). Time: O(items log devices).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from raypipe.cost import Cost, SharedCompute, plan_cost
from raypipe.plan import Plan
from raypipe.schedules.lower import Collective, Compute, DeviceProgram, Message, Recv, Send, Start, lower
from raypipe.trace import Source, Span, SpanKind, Trace


def simulate(programs: Sequence[DeviceProgram], cost: Cost, *, name: str, num_updates: int = 1, with_memory: bool = True) -> Trace:
    """The trace of one window.

    Args:
        programs: lowered, of a valid schedule.
        cost: seconds and bytes.
        name: of the trace.
        num_updates: updates of the window.
        with_memory: whether the trace has the bytes held over time.
    """
    run = _Simulation(programs, cost)
    run.run()
    memory = tuple(map(tuple, run.memory)) if with_memory else ()
    return Trace(name, Source.SIMULATED, cost.devices, num_updates, tuple(run.spans), memory)


def simulate_plan(plan: Plan) -> Trace:
    """The trace of one window of a plan on its own topology."""
    return simulate(lower(plan.schedule, plan.placement), plan_cost(plan), name=plan.name, num_updates=plan.schedule.num_updates)


class _Event(Enum):
    RESUME = auto()
    """A device goes on with its next item."""
    ARRIVAL = auto()
    """A message reaches its receiver."""
    COLLECTIVE_END = auto()
    """A collective ends for all its members."""
    CORES = auto()
    """The first of the devices that share cores is done with its slot."""


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


class _Simulation:
    def __init__(self, programs: Sequence[DeviceProgram], cost: Cost) -> None:
        self.programs = {program.device: program for program in programs}
        self.cost = cost
        self.spans: list[Span] = []
        self.memory: list[list[tuple[float, int]]] = [[(0.0, cost.standing_bytes(device))] for device in range(len(cost.devices))]
        self.heads = dict.fromkeys(self.programs, 0)
        self.waiting: dict[int, tuple[Message | Collective, float]] = {}
        self.computing: dict[int, float] = {}
        self.arrived: set[tuple[int, Message]] = set()
        self.ended: set[Collective] = set()
        self.started: dict[Collective, int] = {}
        self.free_s: dict[str, float] = {}
        self.cores = {device: cores for shared in cost.shared_compute for cores in [_Cores(shared)] for device in shared.devices}
        self.events: list[tuple[float, int, _Event, object]] = []
        self.sequence = 0

    def at(self, time_s: float, event: _Event, what: object) -> None:
        # The sequence number keeps simultaneous events in the order in which they were caused.
        self.sequence += 1
        heapq.heappush(self.events, (time_s, self.sequence, event, what))

    def run(self) -> None:
        for device in self.programs:
            self.at(0.0, _Event.RESUME, device)
        while self.events:
            now_s, _, event, what = heapq.heappop(self.events)
            match event, what:
                case _Event.RESUME, int(device):
                    self.finish(device, now_s)
                    self.proceed(device, now_s)
                case _Event.ARRIVAL, (int(device), Message() as message):
                    if device in self.waiting and self.waiting[device][0] == message:
                        self.wake(device, now_s)
                    else:
                        self.arrived.add((device, message))
                case _Event.COLLECTIVE_END, Collective() as collective:
                    self.ended.add(collective)
                    for device in collective.devices:
                        if device in self.waiting and self.waiting[device][0] == collective:
                            self.wake(device, now_s)
                case _Event.CORES, (_Cores() as cores, int(epoch)):
                    if cores.epoch == epoch:
                        self.cores_done(cores, now_s)
        stuck = [device for device, program in self.programs.items() if self.heads[device] < len(program.items)]
        assert not stuck, f"devices {stuck} wait for ever; validate the schedule before it is lowered"

    def wake(self, device: int, now_s: float) -> None:
        """Ends the wait of a device and lets it go on."""
        awaited, since_s = self.waiting.pop(device)
        if now_s > since_s:
            if isinstance(awaited, Message):
                kind, size = SpanKind.RECV, self.cost.message_bytes(awaited)
            else:
                kind, size = SpanKind.COLLECTIVE, self.cost.collective_bytes(awaited)
            self.spans.append(Span(device, kind, str(awaited), since_s, now_s, size))
        self.heads[device] += 1
        self.proceed(device, now_s)

    def proceed(self, device: int, now_s: float) -> None:
        """Runs items until the device computes or waits, or its program ends."""
        program = self.programs[device]
        while self.heads[device] < len(program.items):
            item = program.items[self.heads[device]]
            if isinstance(item, Compute):
                self.compute(device, item, program.rows[1] - program.rows[0], now_s)
                return
            if isinstance(item, Send):
                self.send(device, item, now_s)
            elif isinstance(item, Recv):
                if (device, item.message) not in self.arrived:
                    self.waiting[device] = (item.message, now_s)
                    return
                self.arrived.remove((device, item.message))
            elif isinstance(item, Start):
                self.start(item.collective, now_s)
            elif item.collective not in self.ended:
                self.waiting[device] = (item.collective, now_s)
                return
            self.heads[device] += 1

    def compute(self, device: int, item: Compute, share: float, now_s: float) -> None:
        duration_s = self.cost.compute_s(device, item.ops, share)
        self.computing[device] = now_s
        self.hold(device, now_s, sum(self.cost.memory_step_bytes(device, op, share)[0] for op in item.ops))
        cores = self.cores.get(device)
        if cores is None or not duration_s:
            self.at(now_s + duration_s, _Event.RESUME, device)
            return
        cores.advance(now_s)
        heapq.heappush(cores.active, (cores.work + duration_s, device))
        self.plan_cores(cores)

    def plan_cores(self, cores: _Cores) -> None:
        cores.epoch += 1
        if cores.active:
            self.at(cores.next_end_s(), _Event.CORES, (cores, cores.epoch))

    def cores_done(self, cores: _Cores, now_s: float) -> None:
        cores.advance(now_s)
        _, device = heapq.heappop(cores.active)
        self.plan_cores(cores)
        self.finish(device, now_s)
        self.proceed(device, now_s)

    def finish(self, device: int, now_s: float) -> None:
        """Ends the slot that the device computes, if it does."""
        since_s = self.computing.pop(device, None)
        if since_s is None:
            return
        program = self.programs[device]
        item = program.items[self.heads[device]]
        assert isinstance(item, Compute)
        self.heads[device] += 1
        self.spans.append(Span(device, SpanKind.COMPUTE, str(item), since_s, now_s))
        share = program.rows[1] - program.rows[0]
        self.hold(device, now_s, -sum(self.cost.memory_step_bytes(device, op, share)[1] for op in item.ops))

    def hold(self, device: int, now_s: float, more_bytes: int) -> None:
        if more_bytes:
            self.memory[device].append((now_s, self.memory[device][-1][1] + more_bytes))

    def send(self, device: int, item: Send, now_s: float) -> None:
        path = self.cost.path(device, item.device)
        size = self.cost.message_bytes(item.message)
        start_s = max((self.free_s.get(resource, 0.0) for resource, _ in path.resources), default=now_s)
        start_s = max(start_s, now_s)
        for resource, bandwidth in path.resources:
            self.free_s[resource] = start_s + size / bandwidth
        arrival_s = start_s + size / path.bandwidth_bytes_per_s + path.latency_s
        if arrival_s > start_s:
            self.spans.append(Span(item.device, SpanKind.TRANSFER, str(item.message), start_s, arrival_s, size))
        self.at(arrival_s, _Event.ARRIVAL, (item.device, item.message))

    def start(self, collective: Collective, now_s: float) -> None:
        self.started[collective] = self.started.get(collective, 0) + 1
        if self.started[collective] == len(collective.devices):
            self.at(now_s + self.cost.collective_s(collective), _Event.COLLECTIVE_END, collective)
