"""Schedules of layouts, checked and compiled for the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from raypipe import stopping
from raypipe.errors import InputError, ScheduleError
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.planning.staleness_cost import window_delay
from raypipe.schedule_registry import build, is_file, overlaps
from raypipe.schedules.families import branch_aware
from raypipe.schedules.ir import Schedule, StageGraph
from raypipe.schedules.lower import Placement, check_whole_losses, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import divide_stages, forwards_ahead, late_updates, over_graph, recompute
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.staleness import StalenessLimits
from raypipe.schedules.validate import validate
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import late_row_stages, stage_buckets

# Raises an `InputError` for a schedule, a placement and rows of a microbatch that cannot be run.
PlanCheck = Callable[[Schedule, Placement, int], None]

# Updates that are simulated of a window whose updates overlap: the first fills, the last drains, the others are alike.
_SIMULATED_UPDATES = 5
_OP_WORK_S = 25e-6  # Of a schedule, for each Op.
_ITEM_WORK_S = 25e-6  # Of programs, for each Op of a device.


def window_updates(problem: Problem, layout: Layout) -> int:
    """Return the updates of the planned schedule: one, or a whole window where updates overlap."""
    return problem.updates_per_window if overlaps(layout.order) else 1


def layout_schedule(problem: Problem, layout: Layout, *, num_updates: int) -> Schedule:
    """Build a layout's schedule.

    Raises:
        ScheduleError: The schedule cannot take so many workers, stages or microbatches.
    """
    if layout.branches is not None:
        search = replace(layout.branches.search, num_microbatches=problem.num_microbatches)
        schedule = branch_aware.ordered(search, num_updates=num_updates, update_scope=problem.update_scope)
        return recompute(schedule, layout.recomputed) if layout.recomputed else schedule
    num_workers = len(layout.workers)
    num_stages = len(layout.divided) or layout.num_stages
    num_chunks, remainder = divmod(num_stages, num_workers)
    if remainder:
        raise ScheduleError(f"{num_stages} stages cannot be divided evenly among {num_workers} workers")
    request = ScheduleRequest(
        num_workers,
        problem.num_microbatches,
        num_updates=num_updates,
        num_chunks=num_chunks,
        num_pipelines=layout.num_pipelines,
        max_in_flight=layout.max_in_flight,
        max_mean_staleness=problem.max_mean_staleness,
        update_scope=problem.update_scope,
        times=layout.times,
        hops_s=layout.hops_s,
        queues_s=layout.queues_s,
        sums_s=layout.sums_s,
    )
    schedule = build(layout.order, request)
    if schedule.num_stages != num_stages:
        raise ScheduleError(f"{layout.order} has {schedule.num_stages} stages on {num_workers} workers, not {num_stages}")
    graph = layout.cut(problem).graph
    if not layout.divided and graph != StageGraph.chain(num_stages):
        schedule = over_graph(schedule, graph)
    if any(layout.ahead):
        schedule = forwards_ahead(schedule, layout.forwards_ahead)
    if layout.divided:
        schedule = divide_stages(schedule, layout.divided, graph=graph, late_weight_grads=layout.late_weight_grads)
    if layout.divided or any(layout.ahead):
        validate(schedule)
    if layout.has_copies or len(schedule.pipelines) > 1:
        later = late_updates(schedule, layout.late)
        # Where a rule fixes versions no Op reads another one, but tied stages wait for each other.
        if layout.late or (graph.ties and later.programs != schedule.programs):
            validate(later)
        schedule = later
    return recompute(schedule, layout.recomputed) if layout.recomputed else schedule


def _built(problem: Problem, layout: Layout, num_updates: int) -> Schedule:
    stopping.spend(_OP_WORK_S * 2 * layout.num_stages * problem.num_microbatches * num_updates)
    return layout_schedule(problem, layout, num_updates=num_updates)


class _Lowered:
    """A schedule on devices, and its programs for each division of gradients into sums."""

    def __init__(self, schedule: Schedule, workers: Placement, *, merged: bool) -> None:
        self.schedule = schedule
        self._workers = workers
        self._merged = merged
        self._orders: dict[tuple[tuple[int, ...], tuple[int, ...]], CompiledOrder] = {}

    def order(self, problem: Problem, layout: Layout) -> CompiledOrder:
        copied = any(len(members) > 1 for members in self._workers.workers) or len(self.schedule.pipelines) > 1
        profile, cut = problem.profile, layout.cut(problem)
        sums = (tuple(stage_buckets(profile, cut)), late_row_stages(profile, cut)) if copied else ((), ())
        if sums not in self._orders:
            num_devices = sum(map(len, self._workers.workers))
            num_ops = sum(map(len, self.schedule.programs)) * num_devices / len(self._workers.workers)
            stopping.spend(_ITEM_WORK_S * num_ops)
            buckets, late_rows = sums
            programs = lower(self.schedule, self._workers, buckets=buckets, late_rows=late_rows, merged=self._merged)
            self._orders[sums] = CompiledOrder(programs)
        return self._orders[sums]


@dataclass
class ScheduleCache:
    """Compiled schedules, shared by layouts that divide rows alike.

    Attributes:
        too_stale: Limits that would allow the schedules that were refused for their staleness.
        refusals: Messages of all other refusals.
        unlinked: Message of the last layout in which devices communicate that have no link; empty if there was none.
    """

    merged: ClassVar[bool] = False
    """Whether a device stands for all of its worker."""
    check: PlanCheck | None = None
    too_stale: set[StalenessLimits] = field(default_factory=set, repr=False)
    refusals: list[str] = field(default_factory=list, repr=False)
    unlinked: str = field(default="", repr=False)
    _compiled: dict[object, _Lowered | None] = field(default_factory=dict, repr=False)
    _delays: dict[object, float] = field(default_factory=dict, repr=False)

    def mean_delay(self, problem: Problem, layout: Layout, schedule: Schedule) -> float:
        """Return by how many updates gradients are late on average in the planned window; `schedule` is that of the layout."""
        if not schedule.weight_rule.overlaps_updates:
            return 0.0
        window = window_updates(problem, layout)
        key = (problem.num_microbatches, window, self._key(problem, layout))
        if key not in self._delays:
            while (delay := window_delay(schedule, window)) is None:
                schedule = _built(problem, layout, min(2 * schedule.num_updates, window))
            self._delays[key] = delay
        return self._delays[key]

    def compiled(self, problem: Problem, layout: Layout) -> tuple[Schedule, CompiledOrder] | None:
        """Return the schedule of a layout as simulated, and its programs; `None` where it is refused."""
        workers = self.placed(problem, layout)
        if workers is None:
            return None
        key = self._key(problem, layout)
        if key not in self._compiled:
            try:
                self._compiled[key] = self._compile(problem, layout, workers)
            except InputError as error:
                self._compiled[key] = None
                self.refusals.append(str(error))
        found = self._compiled[key]
        return None if found is None else (found.schedule, found.order(problem, layout))

    def placed(self, problem: Problem, layout: Layout) -> Placement | None:
        """Return the workers on devices; `None` where one has more devices than rows."""
        return layout.placement(problem)

    def register(self, problem: Problem, layout: Layout, schedule: Schedule) -> None:
        """Use a schedule for a layout and all that share its schedule."""
        workers = layout.placement(problem)
        assert workers is not None, "the rows can be divided"
        self._compiled[self._key(problem, layout)] = _Lowered(schedule, workers, merged=self.merged)

    def without_refusals(self) -> ScheduleCache:
        """Share the schedules without the refusals."""
        return ScheduleCache(self.check, _compiled=self._compiled, _delays=self._delays)

    def clear(self) -> None:
        """Forget all schedules."""
        self._compiled.clear()
        self._delays.clear()

    def _key(self, problem: Problem, layout: Layout) -> object:
        order = (layout.order, layout.max_in_flight, layout.num_pipelines, layout.ahead, layout.late)
        stages = (layout.num_stages, layout.recomputed, layout.divided, layout.late_weight_grads)
        times = (layout.times, layout.hops_s, layout.queues_s, layout.sums_s)
        return order, stages, times, layout.branches or layout.cut(problem).graph, self._shares(problem, layout)

    def _shares(self, problem: Problem, layout: Layout) -> object:
        return layout.shares(problem)

    def _compile(self, problem: Problem, layout: Layout, workers: Placement) -> _Lowered | None:
        window = window_updates(problem, layout)
        # A schedule from a file may exist for the whole window alone.
        num_updates = window if is_file(layout.order) else min(window, _SIMULATED_UPDATES)
        schedule = _built(problem, layout, num_updates)
        if problem.profile.loss_couples_rows:
            try:
                check_whole_losses(schedule, workers)
            except InputError as error:
                self.refusals.insert(0, str(error))  # explains more than a size that a schedule cannot take
                return None
        if self.check is not None:
            self.check(schedule, workers, problem.microbatch_size)
        if problem.staleness and window > 1:
            staleness = metrics(layout_schedule(problem, layout, num_updates=window))
            if problem.staleness.exceeded_by(staleness):
                self.too_stale.add(StalenessLimits.of(staleness))
                return None
        return _Lowered(schedule, workers, merged=self.merged)


@dataclass
class MergedSchedules(ScheduleCache):
    """Compiled schedules of workers as single devices, shared by all layouts of as many workers."""

    merged: ClassVar[bool] = True

    def placed(self, problem: Problem, layout: Layout) -> Placement | None:
        """Return each worker as one device."""
        return Placement(tuple(((number, 1.0),) for number in range(len(layout.workers))))

    def _shares(self, problem: Problem, layout: Layout) -> object:
        return len(layout.workers)
