"""Simulations of layouts, by which planners choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat

from raypipe import stopping
from raypipe.artifacts.plan import Plan, Predicted, Replica
from raypipe.communication.patterns import Pattern
from raypipe.errors import NoLinkError
from raypipe.planning.estimator import Estimator
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import ScheduleCache, layout_schedule, window_updates
from raypipe.planning.problem import Problem
from raypipe.planning.staleness_cost import drain_s, more_updates
from raypipe.schedule_registry import overlaps
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import lower
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import late_row_stages, layout_cost, stage_buckets, stepped_shares, weight_versions
from raypipe.simulation.simulator import Timing, time_order


@dataclass(frozen=True)
class Evaluation:
    """Simulated layout.

    Attributes:
        timing: Times of one update, or of a few where updates overlap.
        lacking_bytes: Bytes that the fullest device of each worker lacks.
        num_updates: Number of updates of the planned window.
        extrapolated_s: Seconds of one update, where `timing` has fewer microbatches, or workers as one device each.
        mean_delay: Updates by which gradients are late on average; 0 where loss does not count.
        more_updates: Number of updates to the same loss over that without late gradients; 1 where loss does not count.
        synchronous_share: As in `Problem`; 0 where loss does not count.
    """

    layout: Layout
    timing: Timing
    lacking_bytes: tuple[float, ...]
    num_updates: int = 1
    extrapolated_s: float | None = None
    mean_delay: float = 0.0
    more_updates: float = 1.0
    synchronous_share: float = 0.0

    @property
    def missing_bytes(self) -> float:
        """Bytes that the fullest device lacks."""
        return max(self.lacking_bytes)

    @property
    def lacking_stages(self) -> set[int]:
        """Stages of the workers that lack memory."""
        num_programs = [1 if self._is_merged else len(group) for group in self.layout.workers]
        of_programs = chain(*map(repeat, self.lacking_bytes, num_programs))
        lacking = (computes for computes, num_bytes in zip(self.timing.order.computes, of_programs, strict=True) if num_bytes)
        return {op.stage for computes in lacking for slot in computes for op in slot.ops}

    @property
    def update_s(self) -> float:
        """Seconds of one update: its part of the whole window, fill and drain included."""
        if self.extrapolated_s is not None:
            return self.extrapolated_s
        more = self.num_updates - max(len(self.timing.order.updates), 1)
        return (self.timing.makespan_s + more * self.timing.steady_update_s) / self.num_updates

    @property
    def mean_update_s(self) -> float:
        """Seconds of one update, averaged over a run whose first updates are drained."""
        num_simulated = max(len(self.timing.order.updates), 1)
        more_s = drain_s(self.timing.makespan_s, self.timing.steady_update_s, num_simulated, self.num_updates)
        return self.update_s + self.synchronous_share * more_s

    @property
    def loss_s(self) -> float:
        """Seconds until the loss that one update without late gradients reaches."""
        return self.mean_update_s * self.more_updates

    @property
    def devices_per_program(self) -> list[int]:
        """How many devices each simulated program stands for: all of a worker's where workers were simulated as one device."""
        sizes = list(map(len, self.layout.workers))
        return sizes if self._is_merged else [1] * sum(sizes)

    @property
    def _is_merged(self) -> bool:
        return len(self.timing.order.devices) == len(self.layout.workers)

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Most bytes that each device holds."""
        return tuple(chain(*map(repeat, self.timing.peak_memory_bytes, self.devices_per_program)))

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: layouts that fit first, then those that reach a loss sooner."""
        return self.missing_bytes, self.loss_s


OnEvaluated = Callable[[Evaluation], None]  # Called with every layout that is simulated.


def ignore(_: Evaluation) -> None:
    """Do nothing."""


def better(best: Evaluation | None, other: Evaluation | None) -> Evaluation | None:
    """Return the one with the lower rank; the first of equal ones."""
    if best is None or other is None:
        return best or other
    return other if other.rank < best.rank else best


@dataclass
class LayoutEvaluator:
    """Simulates layouts of one problem, with sums by `patterns` where these have their members, by number in the layout.

    Attributes:
        counts: Whether its layouts are plans with which a search may end; those of shorter updates are not.
        best_so_far: Best layout that was simulated.
        stopped: Whether the search for a layout was ended early.
    """

    problem: Problem
    schedules: ScheduleCache = field(default_factory=ScheduleCache, repr=False)
    on_evaluated: OnEvaluated = ignore
    patterns: Mapping[tuple[int, ...], Pattern] = field(default_factory=dict)
    counts: bool = True
    estimator: Estimator = field(init=False, repr=False)
    best_so_far: Evaluation | None = field(default=None, init=False, repr=False)
    stopped: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.problem)

    def note(self, evaluation: Evaluation) -> Evaluation:
        """Remember a simulated layout if it is the best so far; the search may end here."""
        self.best_so_far = better(self.best_so_far, evaluation)
        self.on_evaluated(evaluation)
        if self.counts:
            if not evaluation.missing_bytes:
                stopping.note_plan()
            stopping.spend()
        return evaluation

    def simulate(self, layout: Layout) -> Evaluation | None:
        """Return the simulated layout; `None` where its schedule is refused, or devices would communicate that have no link.

        If it is open which forwards run again: those that the estimate says, and those of workers that lack memory then. Updates do not
        wait where that takes memory that is lacking.
        """
        estimated = self.estimator.recomputed(layout) if layout.has_estimate else ()
        evaluation = self.simulate_exactly(replace(layout, recomputed=layout.recomputed or estimated))
        if evaluation is not None and evaluation.missing_bytes and layout.late is None and layout.has_copies and overlaps(layout.order):
            evaluation = better(evaluation, self.simulate_exactly(replace(evaluation.layout, late=0)))
        if evaluation is None or not evaluation.missing_bytes or layout.recomputed is not None or not self.problem.recompute:
            return evaluation
        again = tuple(sorted({*(evaluation.layout.recomputed or ()), *evaluation.lacking_stages}))
        return better(evaluation, self.simulate_exactly(replace(evaluation.layout, recomputed=again)))

    def simulate_at_last(self, layout: Layout) -> Evaluation | None:
        """Simulate a layout though the search has ended."""
        with stopping.to_the_end():
            return self.simulate(layout)

    def simulate_exactly(self, layout: Layout) -> Evaluation | None:
        """Simulate a layout that states which forwards run again; `None` where its schedule is refused."""
        compiled = self.schedules.compiled(self.problem, layout)
        if compiled is None:
            return None
        try:
            return self._timed(layout, *compiled)
        except NoLinkError as error:
            self.schedules.unlinked = str(error)
            return None

    def schedule(self, layout: Layout) -> Schedule:
        """Return the order of a layout that has been simulated."""
        compiled = self.schedules.compiled(self.problem, layout)
        assert compiled is not None, "it was valid when it was simulated"
        return compiled[0]

    def simulate_order(self, layout: Layout, schedule: Schedule) -> Evaluation:
        """Return a layout simulated with another order of as many stages on its workers."""
        workers = layout.placement(self.problem)
        assert workers is not None, "a simulated layout can be divided"
        profile, cut = self.problem.profile, layout.cut(self.problem)
        programs = lower(schedule, workers, buckets=stage_buckets(profile, cut), late_rows=late_row_stages(profile, cut))
        return self._timed(layout, schedule, CompiledOrder(programs))

    def _timed(self, layout: Layout, schedule: Schedule, order: CompiledOrder) -> Evaluation:
        problem, workers = self.problem, layout.placement(self.problem)
        assert workers is not None, "a layout with a schedule can be divided"
        cost = layout_cost(
            profile=problem.profile,
            topology=problem.topology,
            cut=layout.cut(problem),
            pipelines=schedule.pipelines,
            placement=workers,
            devices=tuple(problem.names[device] for group in layout.workers for device in group),
            microbatch_size=problem.microbatch_size,
            num_microbatches=schedule.num_microbatches,
            weight_versions=weight_versions(schedule, workers),
            state_bytes_per_parameter_byte=problem.state_bytes_per_parameter_byte,
            recomputed=layout.recomputed or (),
            stepped=stepped_shares(schedule, workers),
            patterns=self.patterns,
        )
        timing = time_order(order, cost)
        lacking_bytes = self.lacking_bytes(layout, lambda: timing.peak_memory_bytes)
        evaluation = Evaluation(layout, timing, lacking_bytes, window_updates(problem, layout))
        return self.note(self.charged(evaluation, lambda: self.schedules.mean_delay(problem, layout, schedule)))

    def charged(self, evaluation: Evaluation, mean_delay: Callable[[], float]) -> Evaluation:
        """Return an evaluation with what late gradients cost the problem's optimizer; without one, `mean_delay` is not called."""
        optimizer = self.problem.optimizer
        if optimizer is None:
            return evaluation
        delay, share = mean_delay(), self.problem.synchronous_share
        return replace(evaluation, mean_delay=delay, more_updates=more_updates(optimizer, delay, share), synchronous_share=share)

    def lacking_bytes(self, layout: Layout, peaks: Callable[[], Sequence[float]]) -> tuple[float, ...]:
        """Return the bytes that the fullest device of each worker lacks.

        `peaks`, of each device or of the one with the most rows of each worker, is called only where memory is limited.
        """
        limits = [[self.problem.memory_bytes[device] for device in group] for group in layout.workers]
        if min(map(min, limits)) == math.inf:
            return (0.0,) * len(limits)
        held = peaks()
        if len(held) == len(limits):
            return tuple(self._lacking_of(layout, worker, peak) for worker, peak in enumerate(held))
        of_devices = iter(held)
        return tuple(max(0.0, *(next(of_devices) - limit for limit in of_worker)) for of_worker in limits)

    def _lacking_of(self, layout: Layout, worker: int, peak: float) -> float:
        """Return the bytes that any device of a worker lacks, given what one with the most rows holds: activations are as the rows."""
        demands = self.problem.demands(layout.workers[worker])
        least = min(limit for _, limit in demands)
        if len(demands) == 1 or peak <= least or layout.worker_cuts is None or overlaps(layout.order):
            return max(0.0, peak - least)
        first, end = layout.worker_cuts[worker : worker + 2]
        of_worker = [cut for cut in layout.cuts if first <= cut <= end]
        # Weights, gradients and the vector of a sum do not depend on the rows.
        vector = max(self.estimator.vector_bytes(*ends) for ends in pairwise(of_worker))
        fixed = min(float(self.problem.standing_prefix[end] - self.problem.standing_prefix[first]) + vector, peak)
        largest = max(share for share, _ in demands)
        return max(0.0, *(fixed + (peak - fixed) * share / largest - limit for share, limit in demands))

    def plan(
        self,
        evaluation: Evaluation,
        *,
        planner: str,
        lower_bound_s: float,
        lower_bound_reason: str | None = None,
        lower_bound_one_run_s: float | None = None,
        lower_bound_bundled_s: float | None = None,
    ) -> Plan:
        """Return the plan of a simulated layout, with what is known of all plans, and of those with some schedules."""
        problem, layout = self.problem, evaluation.layout
        workers = layout.placement(problem)
        assert workers is not None, "a simulated layout can be divided"
        schedule = layout_schedule(problem, layout, num_updates=window_updates(problem, layout))
        predicted = self._predicted(evaluation)
        if predicted is None:
            if schedule.num_updates != len(evaluation.timing.order.updates):
                evaluation = self.simulate_order(layout, schedule)
            trace = evaluation.timing.trace(name=problem.profile.name, num_updates=schedule.num_updates)
            predicted = Predicted(
                update_s=evaluation.update_s,
                bubble_ratio=trace.bubble_ratio,
                device_bubble_ratios=trace.device_bubble_ratios,
                peak_memory_bytes=trace.peak_memory_bytes,
            )
        return Plan(
            name=problem.profile.name,
            planner=planner,
            microbatch_size=problem.microbatch_size,
            stages=tuple(tuple(problem.profile.layers[layer].name for layer in layers) for layers in layout.cut(problem).stages),
            workers=tuple(
                tuple(Replica(device=problem.names[device], share=share) for device, (_, share) in zip(group, placed, strict=True))
                for group, placed in zip(layout.workers, workers.workers, strict=True)
            ),
            schedule=schedule,
            profile=problem.profile,
            topology=problem.topology,
            predicted=replace(
                predicted,
                lower_bound_s=lower_bound_s,
                lower_bound_reason=lower_bound_reason,
                lower_bound_one_run_s=lower_bound_one_run_s,
                lower_bound_bundled_s=lower_bound_bundled_s,
            ),
            profile_digest=problem.profile.digest,
            topology_digest=problem.topology.digest,
        )

    def _predicted(self, evaluation: Evaluation) -> Predicted | None:
        """Return what is predicted of an update of which only parts were simulated; `None` where it was as a whole."""
        if evaluation.extrapolated_s is None:
            return None
        timing = evaluation.timing
        times = self.problem.num_microbatches / timing.order.microbatches_per_update
        # Without updates, which happen once, not once for each microbatch.
        of_programs = (
            sum(end_s - start_s for slot, start_s, end_s in zip(*program, strict=True) if not slot.ops[0].kind.per_update)
            for program in zip(timing.order.computes, timing.starts, timing.ends, strict=True)
        )
        busy_s = chain(*map(repeat, of_programs, evaluation.devices_per_program))
        ratios = tuple(max(1 - times * each_s / evaluation.update_s, 0.0) for each_s in busy_s)
        return Predicted(
            update_s=evaluation.update_s,
            bubble_ratio=sum(ratios) / len(ratios),
            device_bubble_ratios=ratios,
            peak_memory_bytes=evaluation.peak_memory_bytes,
        )
