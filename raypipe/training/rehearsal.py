"""Rehearses a plan: programs, actors, messages and gradient sums are real, computations are waits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from raypipe.actors.execution.batches import BatchSource, row_range
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import BuildOrder
from raypipe.analysis.comparison import ComparedFigure, compare, median_window
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Source, Trace
from raypipe.cluster.discovery import planned_slots
from raypipe.cluster.node_matching import num_slots
from raypipe.config import ClusterConfig, OptimizerConfig, ScalingConfig
from raypipe.errors import ConfigError, PlanError
from raypipe.model import Batch
from raypipe.models.rehearsing import NUMBER_BYTES, LayerWaits, WaitingOptimizer, layers_per_stage, rehearsing
from raypipe.planning.sum_patterns import SumPatterns
from raypipe.schedules.ir import OpKind, Schedule
from raypipe.schedules.lower import DeviceProgram
from raypipe.schedules.passes import one_of_repeated
from raypipe.simulation.cost import Cost, LayerCost, StageCost
from raypipe.simulation.plan_cost import late_row_stages, plan_cost, plan_wiring, stage_buckets
from raypipe.simulation.simulator import simulate_programs
from raypipe.training.checks import check_links, least_rows
from raypipe.training.run_cluster import stage_actors
from raypipe.training.run_schedules import device_stages, window_of

_NUM_UPDATES = 4


@dataclass(frozen=True)
class Rehearsal:
    """A plan, predicted and rehearsed at some scales.

    Attributes:
        predicted: Simulated window.
        windows: Measured windows without the first, in which memory and connections are set up.
    """

    plan: Plan
    time_scale: float
    byte_scale: float
    predicted: Trace
    windows: tuple[Trace, ...]

    @cached_property
    def trace(self) -> Trace:
        """The window nearest to the median."""
        return median_window(self.windows)

    @cached_property
    def figures(self) -> list[ComparedFigure]:
        """Predicted against rehearsed."""
        return compare(self.predicted, self.windows)

    @property
    def error(self) -> float:
        """Relative error of the predicted update time, over the rehearsed."""
        return self.figures[0].error


@dataclass(frozen=True)
class _Rows:
    """Rows of zeros, each with the number of its microbatch."""

    num_rows: int

    def __call__(self, split: str) -> BatchSource:
        return self

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        first, end = row_range(rows, self.num_rows)
        return {"inputs": torch.zeros(end - first, 1), "microbatch": torch.full((end - first,), microbatch)}


def rehearse(
    plan: Plan,
    *,
    num_updates: int | None = None,
    num_windows: int = 3,
    time_scale: float = 1.0,
    byte_scale: float = 1.0,
    cluster: ClusterConfig | None = None,
    scaling: ScalingConfig | None = None,
    stand_ins: bool = False,
    notice: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Run a plan with waits for computation; the first of `num_windows + 1` windows does not count.

    The scales multiply computation times and the bytes of messages and sums. `num_updates` defaults to 4, or to those of an order whose
    updates overlap, `cluster` to a local one where the plan needs one node. CPU slots may be `stand_ins` for devices of other kinds.

    Raises:
        PlanError: The plan cannot be run, or the cluster does not fit it.
        ConfigError: A scale or the number of updates is out of range.
        RunError: Something failed while running.
    """
    for name, scale in (("time_scale", time_scale), ("byte_scale", byte_scale)):
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"{name} is {scale}; expected a finite number > 0")
    cluster, scaling = cluster or ClusterConfig(dashboard=False, log_to_driver=False), scaling or ScalingConfig()
    order = plan.schedule
    schedule = window_of(order, num_updates or (_NUM_UPDATES if one_of_repeated(order) else order.num_updates))
    if len(schedule.graph.sinks) > 1:
        raise PlanError(f"stages {', '.join(map(str, schedule.graph.sinks))} of the plan feed no other; a rehearsal takes one loss")
    check_links(plan, scaling.transport)
    buckets = stage_buckets(plan.profile, plan.cut)
    programs = executable_programs(schedule, plan.placement, buckets, late_row_stages(plan.profile, plan.cut))
    scaled = _Scaled(plan, schedule, programs, buckets, time_scale=time_scale, byte_scale=byte_scale)
    predicted = simulate_programs(programs, scaled.cost, name=plan.name, num_updates=schedule.num_updates, with_memory=False)
    predicted = dataclasses.replace(predicted, branches=plan.branches)
    actors = stage_actors(
        "rehearse",
        stages=device_stages(schedule, plan.placement),
        num_slots=num_slots(plan.topology, plan.devices),
        find_slots=partial(planned_slots, plan.topology, plan.devices, scaling, stand_ins=stand_ins),
        scaling=scaling,
        cluster=cluster,
        notice=notice,
    )
    traces: list[Trace] = []
    with actors as coordinator:
        coordinator.build([scaled.order(device) for device in range(len(plan.devices))])
        wiring = plan_wiring(plan, programs, SumPatterns(scaled.cost, programs, exact=True).patterns)
        coordinator.connect({"rehearse": programs}, scaled.cut, wiring=wiring)
        if coordinator.channel_text:
            notice(f"messages between devices: {coordinator.channel_text}")
        for number in range(num_windows + 1):
            result = coordinator.run_window("rehearse", num_updates=schedule.num_updates, first_update=number * schedule.num_updates)
            trace = dataclasses.replace(result.trace, name=plan.name, source=Source.REHEARSED, memory=(), branches=plan.branches)
            notice(f"window {number + 1} of {num_windows + 1}: {trace.update_s:.4g} s per update, predicted {predicted.update_s:.4g} s")
            traces.append(trace)
    return Rehearsal(plan, time_scale, byte_scale, predicted, tuple(traces[1:]))


class _Scaled:
    # A microbatch has only as many rows as its shares need: few rows of many numbers approximate the plan's bytes best.

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        programs: Sequence[DeviceProgram],
        buckets: Sequence[int],
        *,
        time_scale: float,
        byte_scale: float,
    ) -> None:
        self.plan = plan
        self.schedule = schedule
        self.buckets = buckets
        boundaries = [end for program in programs for rows in program.row_ranges for end in rows]
        self.num_rows = least_rows(boundaries, most=plan.microbatch_size)
        self.cut = _cut(schedule, buckets)
        self.split_stages = {op.stage for op, _ in schedule.ops() if op.kind is OpKind.INPUT_GRADIENT}
        whole = plan_cost(plan)
        row_bytes = NUMBER_BYTES * self.num_rows
        self.widths = {edge: max(round(whole.edge_bytes.get(edge, 0) * byte_scale / row_bytes), 1) for edge in schedule.graph.edges}
        self.cost = _scaled(whole, buckets, {edge: width * row_bytes for edge, width in self.widths.items()}, time_scale, byte_scale)

    def order(self, device: int) -> BuildOrder:
        waits = tuple(self._waits(device, stage) for stage in range(self.schedule.num_stages))
        return BuildOrder(
            model=partial(
                rehearsing,
                stages=waits,
                widths=self.widths,
                num_rows=self.num_rows,
                ties=self.schedule.graph.ties,
                num_microbatches=self.schedule.num_microbatches,
            ),
            batches=_Rows(self.num_rows),
            cut=self.cut,
            weight_rule=self.schedule.weight_rule,
            optimizer=OptimizerConfig(max_grad_norm=None),
            num_rows=self.num_rows,
            num_updates=1,
            seed=0,
            make_optimizer=partial(
                WaitingOptimizer, {stage: cost.update_s for (owner, stage), cost in self.cost.stages.items() if owner == device}
            ),
        )

    def _waits(self, device: int, stage: int) -> tuple[LayerWaits, ...]:
        cost = self.cost.stages.get((device, stage))
        tie = self.schedule.graph.tie_of.get(stage)
        num_tied = 0 if tie is None else max(self.cost.tied_bytes.get(tie, 0) // NUMBER_BYTES, 1)
        if cost is None:
            return (*[_NO_WAIT] * (self.buckets[stage] - 1), LayerWaits(0.0, 0.0, 0.0, 1, num_tied))
        # Weights only matter where their copies are summed or published.
        workers = [copy.worker for copy in self.schedule.replicas[stage]]
        num_copies = sum(len(self.plan.placement.workers[worker]) for worker in workers)
        has_late_rows = num_copies > 1 and stage in late_row_stages(self.plan.profile, self.plan.cut)
        apart_s = cost.split_s if stage in self.split_stages else 0.0
        shares = [layer.backward_s / cost.backward_s if cost.backward_s else 1 / len(cost.layers) for layer in cost.layers]
        return tuple(
            LayerWaits(
                forward_s=cost.forward_s * share,
                input_grad_s=layer.backward_s - layer.weight_grad_s + apart_s * share,
                weight_grad_s=layer.weight_grad_s,
                num_parameters=max(layer.gradient_bytes // NUMBER_BYTES, 1) if num_copies > 1 else 1,
                num_tied=num_tied if number == len(cost.layers) else 0,
                num_weights=num_copies if stage in self.schedule.published_stages else 1,
                # The last bucket is the first layer.
                num_late=cost.late_bytes // NUMBER_BYTES if number == 1 and has_late_rows else 0,
                fixed_share=cost.fixed_share,
            )
            for number, (layer, share) in enumerate(zip(cost.layers, shares, strict=True), 1)
        )


_NO_WAIT = LayerWaits(0.0, 0.0, 0.0, 1)


def _cut(schedule: Schedule, buckets: Sequence[int]) -> Cut:
    graph = schedule.graph
    sizes = layers_per_stage(buckets, graph.edges)
    stages = [[_NO_WAIT] * count for count in buckets]
    model = rehearsing(stages=stages, widths=dict.fromkeys(graph.edges, 1), num_rows=1, ties=graph.ties)
    return Cut.of_sizes(sizes, model.edges(), model.tied_layers())


# Waits use no cores, so neither run nor prediction has devices that slow each other down.
def _scaled(cost: Cost, buckets: Sequence[int], edge_bytes: Mapping[tuple[int, int], int], time_scale: float, byte_scale: float) -> Cost:
    stages = {
        place: dataclasses.replace(
            stage,
            forward_s=stage.forward_s * time_scale,
            backward_s=stage.backward_s * time_scale,
            weight_grad_s=stage.weight_grad_s * time_scale,
            split_s=stage.split_s * time_scale,
            update_s=stage.update_s * time_scale,
            # A rehearsal sums all weights that it has.
            parameter_bytes=round(stage.summed_bytes * byte_scale),
            frozen_bytes=0,
            untouched_bytes=0,
            late_bytes=round(stage.late_bytes * byte_scale),
            layers=tuple(_layers(stage, buckets[place[1]], time_scale, byte_scale)),
        )
        for place, stage in cost.stages.items()
    }
    tied_bytes = {tie: round(size * byte_scale) for tie, size in cost.tied_bytes.items()}
    return dataclasses.replace(cost, stages=stages, edge_bytes=dict(edge_bytes), tied_bytes=tied_bytes, shared_compute=())


def _layers(stage: StageCost, count: int, time_scale: float, byte_scale: float) -> Iterator[LayerCost]:
    """Yield a layer for each bucket, in order."""
    whole, weights = (
        [0.0, *(share * seconds for share in stage.ready(kind, count))]
        for kind, seconds in ((OpKind.BACKWARD, stage.backward_s), (OpKind.WEIGHT_GRADIENT, stage.weight_grad_s))
    )
    for part in range(count, 0, -1):
        backward_s, weight_grad_s = whole[part] - whole[part - 1], weights[part] - weights[part - 1]
        num_bytes = round(stage.bucket_bytes(part, count) * byte_scale)
        yield LayerCost(num_bytes, 0, backward_s * time_scale, weight_grad_s * time_scale)
