"""Evaluation of workers of many devices as if each were one device.

The devices of a worker do the same on their rows, so one that is held up most stands for all: its seconds, its memory, the messages of
all of them as one, and its sums, which follow one another. Such a simulation takes as long as one of single devices, and
layouts whose rows are divided otherwise share its schedule. Only the best layouts are simulated device by device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from raypipe.artifacts.profile import factor_of_rows
from raypipe.artifacts.topology import Path
from raypipe.errors import NoLinkError
from raypipe.planning.estimator import Channel
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import MergedSchedules, window_updates
from raypipe.planning.problem import Devices, Problem
from raypipe.planning.shared_wires import CopiedStage
from raypipe.schedules.collectives import Collective
from raypipe.schedules.ir import OpKind, Schedule
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost, MergedSum, StageCost
from raypipe.simulation.plan_cost import layout_cost, weight_versions
from raypipe.simulation.simulator import time_order


def can_merge(problem: Problem) -> bool:
    """Return whether one device can stand for a worker's: unless devices share cores, or a worker may not take the loss as a whole."""
    shares_cores = any(node.cores is not None and node.cores < len(node.devices) for node in problem.topology.nodes)
    return not (shares_cores or problem.profile.loss_couples_rows)


@dataclass
class MergedEvaluator(LayoutEvaluator):
    """Evaluates layouts with each worker as one device, where they have one pipeline; others device by device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._merged = MergedSchedules()

    def simulate_exactly(self, layout: Layout) -> Evaluation | None:
        """Simulate a layout worker by worker; see `LayoutEvaluator`."""
        if layout.branches is not None or layout.listed is not None or not layout.has_copies:
            return super().simulate_exactly(layout)
        compiled = self._merged.compiled(self.problem, layout)
        if compiled is None:
            refusals = self._merged.refusals
            self.schedules.refusals += [text for text in refusals if text not in self.schedules.refusals]
            return None
        schedule, order = compiled
        if len(schedule.pipelines) > 1:
            return super().simulate_exactly(layout)
        if any(self.problem.rows(group) is None or not self.estimator.problem.can_sum(group) for group in layout.workers):
            return None
        return self._merged_timed(layout, schedule, order)

    def _merged_timed(self, layout: Layout, schedule: Schedule, order: CompiledOrder) -> Evaluation | None:
        channels: dict[tuple[int, int], Channel] = {}
        for source, target, _ in order.transfers:
            channels[source, target] = channel = self.estimator.channel(layout.workers[source], layout.workers[target])
            if not channel.exists:
                return None
        try:
            timing = time_order(order, self._cost(layout, schedule, order, channels))
        except NoLinkError as error:
            self.schedules.unlinked = str(error)
            return None
        lacking_bytes = self.lacking_bytes(layout, lambda: timing.peak_memory_bytes)
        evaluation = Evaluation(layout, timing, lacking_bytes, window_updates(self.problem, layout))
        evaluation = self.charged(evaluation, lambda: self._merged.mean_delay(self.problem, layout, schedule))
        return self.note(replace(evaluation, extrapolated_s=evaluation.update_s))

    def _cost(self, layout: Layout, schedule: Schedule, order: CompiledOrder, channels: dict[tuple[int, int], Channel]) -> Cost:
        problem = self.problem
        placement = self._merged.placed(problem, layout)
        assert placement is not None, "it has a schedule"
        slowest = [self._slowest(group) for group in layout.workers]
        cost = layout_cost(
            profile=problem.profile,
            topology=problem.topology,
            cut=layout.cut(problem),
            pipelines=schedule.pipelines,
            placement=placement,
            devices=tuple(problem.names[device] for device, _ in slowest),
            microbatch_size=problem.microbatch_size,
            num_microbatches=schedule.num_microbatches,
            weight_versions=weight_versions(schedule, placement),
            state_bytes_per_parameter_byte=problem.state_bytes_per_parameter_byte,
            recomputed=layout.recomputed or (),
        )
        stages = {
            (worker, stage): self._of_share(of_stage, layout.workers[worker], slowest[worker][1], layout.cuts[stage : stage + 2])
            for (worker, stage), of_stage in cost.stages.items()
        }
        paths = {
            pair: Path(
                channel.latency_s,
                1 / channel.mean_s_per_byte if channel.mean_s_per_byte else math.inf,
                tuple((link, 1 / s_per_byte) for link, s_per_byte in channel.loads),
            )
            for pair, channel in channels.items()
        }
        return replace(
            cost,
            stages=stages,
            path=lambda source, target: paths.get((source, target)) or cost.path(source, target),
            nodes=(),
            merged=self._sums(layout, order, stages),
        )

    def _sums(
        self, layout: Layout, order: CompiledOrder, stages: Mapping[tuple[int, int], StageCost]
    ) -> Callable[[int, Collective], MergedSum]:
        """Return a function for a worker's sum, which begins while the Op runs that completes its gradients, B or W."""
        problem = self.problem
        split = {op.stage for _, slot, _ in order.classes for op in slot.ops if op.kind is OpKind.WEIGHT_GRADIENT}
        wires = self._common_wires(layout, stages)

        def merged(worker: int, collective: Collective) -> MergedSum:
            group, stage = layout.workers[worker], collective.stage
            if len(group) == 1 or 0 < collective.part < collective.num_parts:
                return MergedSum()  # The last part of a sum stands for all.
            first, end = layout.cuts[stage : stage + 2]
            sum_s = problem.layers_sum_s(group, first, end)
            cost = stages[worker, stage]
            late_s = problem.late_sums.late_of(first, end, sum_s, cost.weight_grad_s if stage in split else cost.backward_s)
            return MergedSum(late_s, sum_s, wires.get((worker, stage), {}))

        return merged

    def _common_wires(self, layout: Layout, stages: Iterable[tuple[int, int]]) -> dict[tuple[int, int], dict[str, float]]:
        """Return the seconds for which the sum of each stage of a worker keeps the wires that sums of other workers pass, too."""
        if not self.estimator.wires.can_be_shared():
            return {}
        busy_s: dict[tuple[int, int], dict[str, float]] = {}
        for worker, stage in stages:
            group = layout.workers[worker]
            if len(group) > 1:
                first, end = layout.cuts[stage : stage + 2]
                busy_s[worker, stage] = self.estimator.wires.busy_s([CopiedStage(group, first, end, 0.0, 0.0)])
        users = Counter(wire for _, wire in {(worker, wire) for (worker, _), of_stage in busy_s.items() for wire in of_stage})
        return {place: {wire: seconds for wire, seconds in of_stage.items() if users[wire] > 1} for place, of_stage in busy_s.items()}

    def _slowest(self, group: Devices) -> tuple[int, float]:
        """Return the device that takes longest with its rows, and its share of them."""
        problem = self.problem
        rows = problem.rows(group)
        assert rows is not None, "the worker has rows"
        pairs = [(device, of_device / problem.microbatch_size) for device, of_device in zip(group, rows, strict=True)]
        return max(pairs, key=lambda pair: problem.device_s(*pair))

    def _of_share(self, stage: StageCost, group: Devices, share: float, ends: tuple[int, ...]) -> StageCost:
        if len(group) == 1:
            return stage
        factor = factor_of_rows(stage.fixed_share, share)
        largest = max(share for share, _ in self.problem.demands(group))
        # A sum starts, at the earliest, during the last backward; it takes a vector besides what that needs.
        vector_bytes = round(self.estimator.vector_bytes(ends[0], ends[1]))
        return replace(
            stage,
            forward_s=stage.forward_s * factor,
            backward_s=stage.backward_s * factor,
            weight_grad_s=stage.weight_grad_s * factor,
            split_s=stage.split_s * factor,
            saved_bytes=round(stage.saved_bytes * largest),
            weight_grad_saved_bytes=round(stage.weight_grad_saved_bytes * largest),
            kept_bytes=None if stage.kept_bytes is None else round(stage.kept_bytes * largest),
            working_bytes=round(stage.working_bytes * largest) + vector_bytes,
            input_grad_working_bytes=round(stage.input_grad_working_bytes * largest) + vector_bytes,
        )
