"""Prediction of a window: simulation of the very programs that run, with times from a cost model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from operator import attrgetter

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Source, Span, SpanKind, Trace, steady_s
from raypipe.schedules.lower import DeviceProgram
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.events import EventLoop
from raypipe.simulation.memory import MemoryCurve, memory_curves
from raypipe.simulation.plan_cost import plan_cost, plan_programs
from raypipe.simulation.transfers import Passed


@dataclass(frozen=True)
class Timing:
    """When the slots, messages and waits of an order start and end, by program or message.

    Attributes:
        waits: Waits of each program: message or -1, collective or -1, start, end.
        departure_s: Time at which each message enters its links.
        passed: Parts of sums that pass links.
    """

    order: CompiledOrder
    cost: Cost
    starts: list[list[float]]
    ends: list[list[float]]
    waits: list[list[tuple[int, int, float, float]]]
    departure_s: list[float]
    arrival_s: list[float]
    passed: Sequence[Passed] = ()

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last slot or wait ends."""
        return max([*(row[-1] for row in self.ends if row), *(row[-1][3] for row in self.waits if row)], default=0.0)

    @cached_property
    def update_ends_s(self) -> tuple[float, ...]:
        """End of each update's last U; the makespan alone where there is no U."""
        ends = self.ends
        return tuple(max(ends[program][slot] for program, slot in slots) for slots in self.order.updates) or (self.makespan_s,)

    @property
    def update_s(self) -> float:
        """Seconds per update, as `Trace.update_s`."""
        ends = self.update_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]

    @property
    def steady_update_s(self) -> float:
        """Seconds per update far from the window's ends, as `Trace.steady_update_s`."""
        return steady_s(self.update_ends_s) or self.update_s

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each program's device computes."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """Bytes that each device holds over time."""
        return memory_curves(self.order, self.cost, self.starts, self.ends)

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Most bytes that each device holds."""
        return tuple(max(held for _, held in steps) for steps in self.memory)

    def trace(self, *, name: str, num_updates: int = 1, with_memory: bool = True) -> Trace:
        """Return the trace of the window."""
        return Trace(name, Source.SIMULATED, self.cost.devices, num_updates, tuple(self._spans()), self.memory if with_memory else ())

    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        order, make, ops_of = self.order, Span._make, attrgetter("ops")
        num_bytes = [self.cost.message_bytes(message) for _, _, message in order.transfers]
        for device, slots, starts, ends, waits in zip(order.devices, order.computes, self.starts, self.ends, self.waits, strict=True):
            spans += map(make, zip(repeat(device), repeat(SpanKind.COMPUTE), map(ops_of, slots), starts, ends, repeat(0), repeat(None)))
            for message, collective, start, end in waits:
                if message >= 0:
                    transfer = order.transfer_of[message]
                    sender = order.transfers[transfer][0]
                    spans.append(make((device, SpanKind.RECV, order.messages[message], start, end, num_bytes[transfer], sender)))
                else:
                    awaited = order.collectives[collective]
                    spans.append(Span(device, SpanKind.COLLECTIVE, awaited, start, end, self.cost.collective_bytes(awaited)))
        for transfer, item, departure, arrival in zip(order.transfer_of, order.messages, self.departure_s, self.arrival_s, strict=True):
            if arrival > departure:
                sender, target, _ = order.transfers[transfer]
                spans.append(make((target, SpanKind.TRANSFER, item, departure, arrival, num_bytes[transfer], sender)))
        for number, source, target, size, departure, arrival in self.passed:
            spans.append(Span(target, SpanKind.TRANSFER, order.collectives[number], departure, arrival, round(size), source))
        return spans


def simulate(plan: Plan | str | os.PathLike[str], *, topology: ClusterTopology | str | os.PathLike[str] | None = None) -> Trace:
    """Return the predicted trace of one window of a plan.

    Args:
        plan: Plan, or the path of its file.
        topology: Cluster to run it on, or the path of its file; the plan's own by default. It has the plan's devices.

    Raises:
        FormatError: A file cannot be read.
        PlanError: The topology lacks a device of the plan.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if topology is not None:
        plan = plan.on(topology if isinstance(topology, ClusterTopology) else ClusterTopology.load(topology))
    trace = simulate_programs(plan_programs(plan), plan_cost(plan), name=plan.name, num_updates=plan.schedule.num_updates)
    return replace(trace, branches=plan.branches)


def simulate_programs(programs: Sequence[DeviceProgram], cost: Cost, *, name: str, num_updates: int = 1, with_memory: bool = True) -> Trace:
    """Return the trace of one window of a valid schedule's lowered programs."""
    return time_order(CompiledOrder(programs), cost).trace(name=name, num_updates=num_updates, with_memory=with_memory)


def time_order(order: CompiledOrder, cost: Cost) -> Timing:
    """Return when everything in an order starts and ends."""
    loop = EventLoop(order, cost)
    loop.run()
    return Timing(
        order, cost, loop.starts, loop.ends, loop.waits, loop.departure_s, loop.arrival_s, loop.network.passed if loop.network else ()
    )
