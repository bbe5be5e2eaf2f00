"""The cases of `async.py`: models, cluster, schedules and cuts, and what is simulated of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from models import MEMORY_BYTES_PER_S, Transformer

from raypipe.artifacts.calibration import TransportCosts
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.errors import ScheduleError
from raypipe.planning.balance import balanced_cut
from raypipe.planning.chunks import balanced, neighbors
from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import repeated, shard_optimizer
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.dispatch import TimedPipelines, defer_updates
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.plan_cost import layout_cost, stepped_shares, weight_versions
from raypipe.simulation.simulator import Timing, time_order

ROWS = 4
"""Sequences of a microbatch."""
SHAPES = {
    "gpt": Transformer(num_blocks=48, hidden=1600, sequence=1024, vocabulary=50304, num_rows=ROWS),
    "bert": Transformer(num_blocks=32, hidden=1600, sequence=1024, vocabulary=30528, num_rows=ROWS, head_product=True),
}
BATCHES = {4: (16, 32, 64, 128), 8: (32, 64, 128), 16: (64, 128, 256)}
"""Sequences of an update, by the number of devices."""
NUM_UPDATES = 9
NUM_TRIAL_UPDATES = 5
"""Of the windows by which cuts are chosen."""
MOST_STEPS = 6
ADAM_BYTES = 28
"""What a step reads and writes for a parameter: gradient, master weight and two moments, the last three also back, and the weight."""
LATENCY_S = 10e-6
STATE = 7.0
"""Bytes of gradient, master weight and moments over those of a half-precision weight."""


@dataclass(frozen=True)
class Case:
    """A schedule of the comparison.

    Attributes:
        name: of the schedule.
        chunks: stages a device.
        pipelines: 0 for the schedule's own number.
        most_stale: The most updates by which gradients may be late on average; `None` for no limit.
    """

    name: str
    chunks: int = 1
    pipelines: int = 0
    most_stale: float | None = None

    def __str__(self) -> str:
        more = f" V={self.chunks}" if self.chunks > 1 else f" N={self.pipelines}" if self.pipelines else ""
        return self.name + more + (f" S={self.most_stale:g}" if self.most_stale is not None else "")


CASES = (
    Case("1f1b"),
    Case("interleaved", chunks=2),
    Case("interleaved", chunks=3),
    Case("interleaved", chunks=4),
    Case("zb-auto"),
    Case("chimera"),
    Case("pipedream-2bw"),
    Case("async-1f1b"),
    Case("async-interleaved", chunks=2),
    Case("async-interleaved", chunks=3),
    Case("async-interleaved", chunks=4),
    Case("amdp-flush"),
    Case("amdp", pipelines=2),
    Case("amdp"),
    Case("amdp-auto", pipelines=2),
    Case("amdp-auto"),
)
OWN = "amdp"


def profile_of(name: str) -> ModelProfile:
    """The shape's profile, with the optimizer's steps."""
    profile = SHAPES[name].profile(name)
    layers = tuple(replace(layer, update_s=layer.parameter_bytes / 2 * ADAM_BYTES / MEMORY_BYTES_PER_S) for layer in profile.layers)
    return replace(profile, layers=layers)


def cluster(num_devices: int) -> ClusterTopology:
    """Nodes of up to eight A800: 400 GB/s of NVLink in both directions together, 100 Gbit/s a device between nodes."""
    names = ["a", "b"][: -(-num_devices // 8)]
    nodes = tuple(
        Node(
            name=name,
            devices=tuple(Device(f"{name}/{number}", "gpu", 80_000_000_000) for number in range(min(num_devices, 8))),
            link=NodeLink(bandwidth_bytes_per_s=200e9, latency_s=LATENCY_S),
        )
        for name in names
    )
    return ClusterTopology(name="A800", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=12.5e9, latency_s=20e-6))


def equal_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As many blocks in each stage as in any other, or one more; embedding and head besides."""
    num_blocks = num_layers - 2
    return (0, *(1 + round(stage * num_blocks / num_stages) for stage in range(1, num_stages)), num_layers)


def schedule_of(case: Case, size: ScheduleRequest) -> Schedule:
    """The case's order, with the scope's updates where nobody waits for them and an optimizer whose state the copies of a stage divide."""
    schedule = build(case.name, size)
    if size.update_scope is UpdateScope.GLOBAL and case.name in {"pipedream-2bw", "async-1f1b"}:
        schedule = defer_updates(schedule, TimedPipelines.of(schedule.pipelines, size))
    return shard_optimizer(schedule)


def cost_of(problem: Problem, cuts: tuple[int, ...], schedule: Schedule) -> Cost:
    """What the schedule costs with one device a worker."""
    edges = tuple((layer, layer + 1) for layer in range(problem.num_layers - 1))
    placement = Placement.even(schedule.num_workers)
    return layout_cost(
        profile=problem.profile,
        topology=problem.topology,
        cut=Cut.of_sizes([end - first for first, end in pairwise(cuts)], edges),
        pipelines=schedule.pipelines,
        placement=placement,
        devices=problem.names,
        microbatch_size=problem.microbatch_size,
        num_microbatches=problem.num_microbatches,
        weight_versions=weight_versions(schedule, placement),
        state_bytes_per_parameter_byte=STATE,
        stepped=stepped_shares(schedule, placement),
    )


def timed(case: Case, problem: Problem, scope: UpdateScope, cuts: tuple[int, ...], num_updates: int) -> tuple[Schedule, Timing]:
    """The case's order for these cuts, simulated."""
    schedule = build(case.name, ScheduleRequest(problem.num_devices, problem.num_microbatches, 1, case.chunks, case.pipelines, scope))
    cost = cost_of(problem, cuts, schedule)
    # Orders that are searched for are searched with the times of their stages.
    worker_of = schedule.pipelines[0]
    kinds = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)
    times = tuple(StageTimes(*(cost.compute_s(worker, (Op(kind, stage, 0),)) for kind in kinds)) for stage, worker in enumerate(worker_of))
    count = 1 if not schedule.weight_rule.overlaps_updates and scope is UpdateScope.GLOBAL else num_updates
    size = ScheduleRequest(
        problem.num_devices,
        problem.num_microbatches,
        count,
        case.chunks,
        case.pipelines,
        scope,
        times,
        LATENCY_S,
        max_mean_staleness=case.most_stale,
    )
    schedule = schedule_of(case, size)
    return schedule, time_order(CompiledOrder(lower(schedule)), cost_of(problem, cuts, schedule))


def best_cut(case: Case, problem: Problem, scope: UpdateScope, *known: tuple[int, ...]) -> tuple[int, ...]:
    """The fastest of several cuts, also of those that are known, with single layers moved between neighbors as long as that helps."""

    def update_s(cuts: tuple[int, ...]) -> float:
        return timed(case, problem, scope, cuts, NUM_TRIAL_UPDATES)[1].steady_update_s

    schedule = build(case.name, ScheduleRequest(problem.num_devices, problem.num_microbatches, 1, case.chunks, case.pipelines, scope))
    workers = tuple((device,) for device in range(problem.num_devices))
    longest = balanced_cut(problem.profile, schedule.num_stages)
    begin = [
        equal_cut(problem.num_layers, schedule.num_stages),
        (*(layers[0] for layers in longest.stages), problem.num_layers),
        balanced(Estimator(problem), workers, schedule),
        *known,
    ]
    best_s, best = min((update_s(cuts), cuts) for cuts in dict.fromkeys(begin))
    for _ in range(MOST_STEPS):
        moved = [layout.cuts for layout in neighbors(Layout(best, workers, case.name))]
        moved_s, found = min((update_s(cuts), cuts) for cuts in moved)
        if moved_s >= best_s:
            break
        best_s, best = moved_s, found
    return best


def figures_of(case: Case, problem: Problem, scope: UpdateScope, cuts: tuple[int, ...]) -> dict[str, Any]:
    """Sequences a second of one case, and what they cost."""
    schedule, timing = timed(case, problem, scope, cuts, NUM_UPDATES)
    known = metrics(schedule)
    update_s = timing.steady_update_s
    busy_s = sum(timing.busy_s) / problem.num_devices / schedule.num_updates
    return {
        "schedule": str(case),
        "sequences_per_s": problem.num_microbatches * problem.microbatch_size / update_s,
        "bubble": 1 - busy_s / update_s,
        "peak_memory_bytes": max(timing.peak_memory_bytes),
        "max_mismatch": known.max_mismatch,
        "max_delay": known.max_delay,
        "mean_delay": known.mean_delay,
        "cut": [end - first for first, end in pairwise(cuts)],
    }


def compared(model: str, num_devices: int, batch: int, scope: UpdateScope, cuts: dict[Case, tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """The figures of all cases that can take the size, with a cut for each."""
    problem = problem_of(model, num_devices, batch)
    for case, cut in cuts.items():
        try:
            found = figures_of(case, problem, scope, cut)
        except ScheduleError:
            continue
        yield found | {"model": model, "devices": num_devices, "batch": batch, "scope": str(scope)}


def problem_of(model: str, num_devices: int, batch: int) -> Problem:
    """The shape with so many sequences an update on so many A800."""
    return Problem(profile_of(model), cluster(num_devices), batch // ROWS, ROWS)


def cuts_of(model: str, num_devices: int, scope: UpdateScope, *, own: bool) -> dict[Case, tuple[int, ...]]:
    """A cut for each schedule that can have one, chosen at the batch in the middle where it is its own."""
    batches = BATCHES[num_devices]
    problem = problem_of(model, num_devices, batches[len(batches) // 2])
    found: dict[Case, tuple[int, ...]] = {}
    for case in CASES:
        if case.pipelines and num_devices // 2 <= case.pipelines:
            continue
        num_stages = num_devices * case.chunks
        if num_stages <= problem.num_layers - 2:
            # Orders by search take seconds each: it helps to begin with the cut of the same pipelines in AMDP's own.
            known = [cuts for other, cuts in found.items() if replace(other, name=case.name) == case]
            found[case] = best_cut(case, problem, scope, *known) if own else equal_cut(problem.num_layers, num_stages)
    return found


def plan_of(case: Case, problem: Problem, scope: UpdateScope, cuts: tuple[int, ...], costs: TransportCosts) -> Plan:
    """The case as a plan for as many CPU slots of one node, with this machine's links and overheads."""
    host = os.uname().nodename
    names = tuple(f"{host}/{number}" for number in range(problem.num_devices))
    node = Node(name=host, devices=tuple(Device(name, "cpu") for name in names), link=costs.link)
    schedule, _ = timed(case, problem, scope, cuts, NUM_UPDATES)
    if schedule.num_updates == 1:
        schedule = repeated(schedule, num_updates=NUM_TRIAL_UPDATES)
    return make_plan(
        name=str(case),
        planner="benchmark",
        cut=Cut.of_sizes(
            [end - first for first, end in pairwise(cuts)], tuple((layer, layer + 1) for layer in range(problem.num_layers - 1))
        ),
        schedule=schedule,
        profile=problem.profile,
        topology=ClusterTopology(name=host, nodes=(node,), overheads=costs.overheads),
        devices=names,
        microbatch_size=problem.microbatch_size,
    )
