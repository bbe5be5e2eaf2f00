"""Prediction of a window: simulation of the very programs that run, with times from a cost model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.schedules.lower import DeviceProgram, lower
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.events import EventLoop
from raypipe.simulation.plan_cost import plan_cost
from raypipe.simulation.timing import Timing


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
    return simulate_programs(lower(plan.schedule, plan.placement), plan_cost(plan), name=plan.name, num_updates=plan.schedule.num_updates)


def simulate_programs(programs: Sequence[DeviceProgram], cost: Cost, *, name: str, num_updates: int = 1, with_memory: bool = True) -> Trace:
    """Return the trace of one window of a valid schedule's lowered programs."""
    return time_order(CompiledOrder(programs), cost).trace(name=name, num_updates=num_updates, with_memory=with_memory)


def time_order(order: CompiledOrder, cost: Cost) -> Timing:
    """Return when everything in an order starts and ends."""
    loop = EventLoop(order, cost)
    loop.run()
    return Timing(order, cost, loop.starts, loop.ends, loop.waits, loop.departure_s, loop.arrival_s)
