"""How fast orders are made, checked, lowered and simulated, on one core.

    python benchmarks/orders.py [--schedule 1f1b] [--devices 64] [--microbatches 512] [--rounds 5] [--json FILE]

Links with latency and bandwidth, one of which all transfers share, and memory are part of the simulation. `simulate` is numbering,
running, the ends of the updates and the memory curves: what a search pays for the first time; `time again` is what it pays for
each further cost; `trace` makes the spans. Medians over the rounds, with half the distance of the quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rounds import Summary, print_table, write_json

from raypipe.artifacts.topology import Path
from raypipe.schedules.catalogue import build, spec
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.plan_cost import equal_stages
from raypipe.simulation.simulator import Timing, time_order


def linked(schedule: Schedule) -> Cost:
    """Equal stages with memory, a link of its own for each pair of devices, and one that all transfers share."""

    def path(source: int, target: int) -> Path:
        return Path(0.01, 1e9, ((f"{source}->{target}", 1e9), ("backbone", 1e12)))

    cost = equal_stages(schedule)
    stages = {key: replace(stage, saved_bytes=10**8, parameter_bytes=10**9) for key, stage in cost.stages.items()}
    return replace(cost, stages=stages, edge_bytes=dict.fromkeys(schedule.graph.edges, 10**7), path=path)


def timed(seconds: dict[str, list[float]], name: str, work: Callable[[], Any]) -> Any:
    """The result of some work, whose seconds are noted."""
    since = time.perf_counter()
    result = work()
    seconds.setdefault(name, []).append(time.perf_counter() - since)
    return result


def one_round(seconds: dict[str, list[float]], name: str, size: ScheduleRequest) -> int:
    """Does all once; returns the number of Ops."""
    schedule = timed(seconds, "build", lambda: build(name, size))
    timed(seconds, "validate", lambda: validate(schedule))
    programs = timed(seconds, "lower", lambda: lower(schedule))
    cost = linked(schedule)

    def simulated() -> Timing:
        timing = time_order(CompiledOrder(programs), cost)
        assert timing.update_s
        assert timing.memory
        return timing

    timing = timed(seconds, "simulate", simulated)
    timed(seconds, "time again", lambda: time_order(timing.order, cost).update_s)
    timed(seconds, "trace", lambda: timing.trace(name=name))
    return len(schedule.places)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    size = ScheduleRequest(arguments.devices, arguments.microbatches, num_chunks=spec(arguments.schedule).default_chunks)
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        num_ops = one_round(seconds, arguments.schedule, size)
    found = {name: Summary.of(values) for name, values in seconds.items()}
    rows = [
        {"what": name, "s": f"{took.median:.3f} +-{took.spread:.3f}", "Ops per s": f"{num_ops / took.median:,.0f}"}
        for name, took in found.items()
    ]
    print_table(f"{arguments.schedule}, {arguments.devices} devices, {arguments.microbatches} microbatches: {num_ops:,} Ops", rows)
    write_json(arguments.json, {"num_ops": num_ops, "seconds": found, "arguments": vars(arguments)})


if __name__ == "__main__":
    main()
