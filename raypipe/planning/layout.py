"""Layouts: which layers on which devices in which order; estimated in microseconds, or simulated.

The estimate is the largest of the ways through a chain of stages and channels that no order of whole microbatches can shorten
(head + all microbatches through the busiest stage, channel or wire that several channels share + tail), and of the cycle that a limit on
activations in flight closes: the forward of microbatch i + K waits for the backward of i, which has gone to the last stage and back. It
screens; the simulator judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Predicted, Replica
from raypipe.errors import InputError, ScheduleError
from raypipe.planning.problem import Group, Problem
from raypipe.schedule_registry import build, is_file, overlaps
from raypipe.schedules.families import list_order
from raypipe.schedules.ir import Schedule, ScheduleRequest, StageGraph
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.passes import over_graph, recompute
from raypipe.schedules.staleness import StalenessLimits
from raypipe.schedules.validate import facts
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import layout_cost, published_copies, weight_versions
from raypipe.simulation.simulator import time_order
from raypipe.simulation.timing import Timing


@dataclass(frozen=True)
class Layout:
    """Stages on workers on devices, and the name of the order.

    Attributes:
        cuts: the first layer of each stage, and the number of layers.
        workers: the devices of each worker.
        order: name of the schedule.
        max_in_flight: most activations that a device may hold, for the orders that take a limit.
        num_pipelines: for the orders that have several; 0 lets the order choose.
        recomputed: the stages whose forwards are run again; `None` for those that do not fit otherwise.
    """

    cuts: tuple[int, ...]
    workers: tuple[Group, ...]
    order: str = "1f1b"
    max_in_flight: int | None = None
    num_pipelines: int = 0
    recomputed: tuple[int, ...] | None = None

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.cuts) - 1

    def __str__(self) -> str:
        sizes = [end - first for first, end in zip(self.cuts, self.cuts[1:], strict=False)]
        again = f", forwards of stages {list(self.recomputed)} twice" if self.recomputed else ""
        pipelines = f" in {self.num_pipelines} pipelines" if self.num_pipelines else ""
        return f"{self.order}: layers {sizes} on devices {[list(group) for group in self.workers]}{pipelines}{again}"


class Channel(NamedTuple):
    """What messages from one worker to another cost; each device sends the rows that it has in common with a device of the other.

    Attributes:
        s_per_byte: seconds per byte of the whole tensor on the busiest wire; transfers that share a wire follow each other.
        latency_s: the longest of any wire.
        loads: of each wire, seconds per byte of the whole tensor.
    """

    s_per_byte: float
    latency_s: float
    loads: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Judged:
    """A simulated layout.

    Attributes:
        layout: what was simulated.
        timing: of one update, or of a few where updates overlap.
        missing_bytes: of memory, on the device that lacks most; 0 where all fits.
        num_updates: of the window that is planned.
        extrapolated_s: seconds of one update, where `timing` is of one with fewer microbatches.
    """

    layout: Layout
    timing: Timing
    missing_bytes: float
    num_updates: int = 1
    extrapolated_s: float | None = None

    @property
    def update_s(self) -> float:
        """Seconds of one update: its part of the whole window, with what fills and drains the pipeline."""
        if self.extrapolated_s is not None:
            return self.extrapolated_s
        more = self.num_updates - max(len(self.timing.order.updates), 1)
        return (self.timing.makespan_s + more * self.timing.steady_update_s) / self.num_updates

    @property
    def rank(self) -> tuple[float, float]:
        """What fits before what does not, then the faster."""
        return self.missing_bytes, self.update_s


Seen = Callable[[Judged], None]
"""Told of every layout that is simulated."""


def unwatched(_: Judged) -> None:
    """Does nothing with it."""


@dataclass
class LayoutEvaluator:
    """Estimates and simulates layouts of one problem, and remembers what several of them share.

    Attributes:
        problem: what is planned.
        numbered: orders and their lowered programs, which are the same on all devices that divide the rows alike.
        check: raises an `InputError` for an order, a placement and rows of a microbatch that are not to be chosen.
        seen: told of every layout that is simulated.
    """

    problem: Problem
    numbered: dict[object, tuple[Schedule, CompiledOrder] | None] = field(default_factory=dict, repr=False)
    too_stale: set[StalenessLimits] = field(default_factory=set, repr=False)
    """What would allow the orders that were passed over because the problem allows less."""
    refusals: list[str] = field(default_factory=list, repr=False)
    """Why orders cannot be."""
    check: Callable[[Schedule, Placement, int], None] | None = None
    seen: Seen = unwatched
    _channels: dict[tuple[Group, Group], Channel] = field(default_factory=dict)
    _stages: dict[tuple[Group, int, int], tuple[float, float, float]] = field(default_factory=dict)

    def channel(self, source: Group, target: Group) -> Channel:
        """The messages from one worker to another."""
        found = self._channels.get((source, target))
        if found is None:
            found = self._channels[source, target] = self._channel(source, target)
        return found

    def _channel(self, source: Group, target: Group) -> Channel:
        problem = self.problem
        loads: dict[str, float] = {}
        latency_s = 0.0
        rows = problem.rows(source), problem.rows(target)
        if rows[0] is None or rows[1] is None:
            return Channel(math.inf, math.inf, ())
        merged = _merged_overlaps if len(source) + len(target) > _MANY else _overlaps
        for sender, receiver, num_rows in merged(problem, (source, rows[0]), (target, rows[1])):
            path = problem.path(sender, receiver)
            latency_s = max(latency_s, path.latency_s)
            for resource, bandwidth in path.resources:
                loads[resource] = loads.get(resource, 0.0) + num_rows / problem.microbatch_size / bandwidth
        return Channel(max(loads.values(), default=0.0), latency_s, tuple(loads.items()))

    def stage(self, group: Group, first: int, end: int) -> tuple[float, float, float]:
        """Seconds of a stage's forward and backward of a microbatch, by its slowest device, and of the sum of its gradients."""
        key = (group, first, end)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._stage(group, first, end)
        return found

    def _stage(self, group: Group, first: int, end: int) -> tuple[float, float, float]:
        problem = self.problem
        factors = problem.factors(group)
        if factors is None:
            return math.inf, math.inf, math.inf
        forward_s = backward_s = 0.0
        for kind, factor in factors.items():
            prefix = problem.prefix_s[kind]
            forward, input_grad, weight_grad = (prefix[:, end] - prefix[:, first]).tolist()
            forward_s = max(forward_s, forward * factor)
            backward_s = max(backward_s, (input_grad + weight_grad) * factor)
        num_bytes = float(problem.trained_prefix[end] - problem.trained_prefix[first])
        own_s = problem.overheads_s
        return forward_s + own_s[0], backward_s + own_s[1], float(problem.sum_s(group, num_bytes))

    def missing_bytes(self, layout: Layout) -> float:
        """Estimated bytes of memory that are missing on the device that lacks most, for orders of one stage a worker."""
        again = self.recomputed(layout)
        return max(self._missing_bytes(layout, stage, recomputed=stage in again) for stage in range(layout.num_stages))

    def recomputed(self, layout: Layout) -> tuple[int, ...]:
        """The stages whose forwards are run again: where that is left open, those that are estimated not to fit otherwise."""
        if layout.recomputed is not None:
            return layout.recomputed
        if not self.problem.recompute or not self._limited:
            return ()
        return tuple(stage for stage in range(layout.num_stages) if self._missing_bytes(layout, stage, recomputed=False) > 0)

    @cached_property
    def _limited(self) -> bool:
        return min(self.problem.memory_bytes) < math.inf

    def _missing_bytes(self, layout: Layout, stage: int, *, recomputed: bool) -> float:
        problem, most = self.problem, 0.0
        group, first, end = layout.workers[stage], layout.cuts[stage], layout.cuts[stage + 1]
        standing = problem.standing_prefix[end] - problem.standing_prefix[first]
        held = in_flight(layout, stage, problem.num_microbatches)
        saved = problem.saved_prefix[end] - problem.saved_prefix[first]
        kept = min(problem.crossing_bytes[first], saved) if recomputed else saved
        # The last microbatch with what its layers need for a while.
        working = problem.working_peaks[first:end].max() - problem.saved_prefix[first]
        needed = kept * (held - 1) + max(saved, working)
        for share, limit in problem.demands(group):
            most = max(most, standing + needed * share - limit)
        return float(most)

    def estimate_s(self, layout: Layout) -> float:
        """Seconds of one update, for orders of one pipeline and one stage a worker that do not split the backward."""
        problem, workers, cuts = self.problem, layout.workers, layout.cuts
        num_microbatches, num_stages = problem.num_microbatches, layout.num_stages
        stages = [self.stage(group, cuts[n], cuts[n + 1]) for n, group in enumerate(workers)]
        for n in self.recomputed(layout):
            forward_s, backward_s, sum_s = stages[n]
            stages[n] = (forward_s, backward_s + forward_s, sum_s)
        # Of each channel: seconds that it is taken by a message, and until the message is there.
        there: list[tuple[float, float]] = []
        back: list[tuple[float, float]] = []
        wires: dict[str, tuple[int, float]] = {}  # The first stage that uses it, and seconds of a microbatch.
        for n in range(num_stages - 1):
            num_bytes = float(problem.crossing_bytes[cuts[n + 1]])
            for found, (source, target) in ((there, (workers[n], workers[n + 1])), (back, (workers[n + 1], workers[n]))):
                channel = self.channel(source, target)
                found.append((num_bytes * channel.s_per_byte, num_bytes * channel.s_per_byte + channel.latency_s))
                for wire, s_per_byte in channel.loads:
                    first, taken_s = wires.get(wire, (n, 0.0))
                    wires[wire] = (first, taken_s + num_bytes * s_per_byte)
        heads, tails = [0.0], [stages[0][2]]
        for n in range(1, num_stages):
            heads.append(heads[-1] + stages[n - 1][0] + there[n - 1][1])
            tails.append(max(stages[n][2], back[n - 1][1] + stages[n - 1][1] + tails[-1]))
        round_trip = 0.0
        longest = 0.0
        for n in reversed(range(num_stages)):
            forward_s, backward_s, _ = stages[n]
            if n == num_stages - 1:
                round_trip = forward_s + backward_s
            else:
                behind = round_trip
                rest = back[n][1] + backward_s + tails[n]
                longest = max(
                    longest,
                    heads[n] + forward_s + (num_microbatches - 1) * there[n][0] + there[n][1] + behind + rest,
                    heads[n + 1] + behind + (num_microbatches - 1) * back[n][0] + rest,
                )
                round_trip = forward_s + there[n][1] + behind + back[n][1] + backward_s
            turns = (num_microbatches - 1) // in_flight(layout, n, num_microbatches) + 1
            longest = max(longest, heads[n] + max(num_microbatches * (forward_s + backward_s), turns * round_trip) + tails[n])
        for first, taken_s in wires.values():
            longest = max(longest, heads[first] + stages[first][0] + num_microbatches * taken_s + stages[first][1] + tails[first])
        return longest

    def simulate(self, layout: Layout) -> Judged | None:
        """What the simulator says; `None` where the order cannot take so many workers, stages or microbatches.

        Where it is left open which forwards are run again and the estimate of what fits was wrong, or there is none: all of them.
        """
        found = self.simulate_as_it_is(
            replace(layout, recomputed=self.recomputed(layout) if layout.num_stages == len(layout.workers) else ())
        )
        if found is None or not found.missing_bytes or layout.recomputed is not None or not self.problem.recompute:
            return found
        again = self.simulate_as_it_is(replace(layout, recomputed=tuple(range(layout.num_stages))))
        return again if again is not None and again.rank < found.rank else found

    def simulate_as_it_is(self, layout: Layout) -> Judged | None:
        """The same of a layout that says which forwards are run again."""
        shares = self.shares(layout)
        if shares is None:
            return None
        cut = self.cut(layout)
        key = self._key(layout, cut, shares)
        if key not in self.numbered:
            placement = _placement(shares)
            try:
                schedule = self.schedule(layout, cut, num_updates=self._num_judged(layout))
                if self.check is not None:
                    self.check(schedule, placement, self.problem.microbatch_size)
                allowed = self._allowed(layout, cut)
                self.numbered[key] = (schedule, CompiledOrder(lower(schedule, placement))) if allowed else None
            except InputError as error:
                self.numbered[key] = None
                self.refusals.append(str(error))
        known = self.numbered[key]
        return None if known is None else self._timed(layout, *known)

    def _key(self, layout: Layout, cut: Cut, shares: Sequence[Sequence[float]]) -> object:
        return (layout.order, layout.max_in_flight, layout.num_pipelines, layout.num_stages, layout.recomputed, cut.graph, shares)

    def know(self, layout: Layout, schedule: Schedule) -> None:
        """Takes an order as what a layout's name stands for: one that was searched for with the times of its stages, or given."""
        shares = self.shares(layout)
        assert shares is not None, "what has an order can be divided"
        self.numbered[self._key(layout, self.cut(layout), shares)] = schedule, CompiledOrder(lower(schedule, _placement(shares)))

    def timed(self, layout: Layout, schedule: Schedule) -> Judged:
        """A layout that can be simulated, with an order of more updates."""
        shares = self.shares(layout)
        assert shares is not None, "a simulated layout can be divided"
        return self._timed(layout, schedule, CompiledOrder(lower(schedule, _placement(shares))))

    def _timed(self, layout: Layout, schedule: Schedule, numbered: CompiledOrder) -> Judged:
        problem, cut, shares = self.problem, self.cut(layout), self.shares(layout)
        assert shares is not None, "it has an order"
        cost = layout_cost(
            profile=problem.profile,
            topology=problem.topology,
            cut=cut,
            pipelines=schedule.pipelines,
            placement=_placement(shares),
            devices=self.devices(layout),
            microbatch_size=problem.microbatch_size,
            weight_versions=weight_versions(schedule, _placement(shares)),
            state_bytes_per_parameter_byte=problem.state_bytes_per_parameter_byte,
            recomputed=layout.recomputed or (),
            published=published_copies(schedule),
        )
        timing = time_order(numbered, cost)
        missing = self.missing_of(layout, lambda: timing.peak_memory_bytes)
        judged = Judged(layout, timing, missing, self.num_updates(layout))
        self.seen(judged)
        return judged

    def missing_of(self, layout: Layout, peaks: Callable[[], Sequence[float]]) -> float:
        """Bytes of memory that are missing on the device that lacks most.

        Args:
            layout: its devices.
            peaks: what they hold at most; worked out only where memory is limited.
        """
        limits = [self.problem.memory_bytes[device] for group in layout.workers for device in group]
        if min(limits) == math.inf:
            return 0.0
        return max(0.0, *(peak - limit for peak, limit in zip(peaks(), limits, strict=True)))

    def _allowed(self, layout: Layout, cut: Cut) -> bool:
        """Whether an order is no staler than the problem allows, in a whole window."""
        limits = self.problem.staleness
        if not limits or self.num_updates(layout) == 1:
            return True
        known = facts(self.schedule(layout, cut, num_updates=self.num_updates(layout)))
        if not limits.exceeded_by(known):
            return True
        self.too_stale.add(StalenessLimits.of(known))
        return False

    # Parts of a plan

    def shares(self, layout: Layout) -> tuple[tuple[float, ...], ...] | None:
        """For each worker its devices' shares of the rows; `None` where a worker has more devices than rows."""
        found = []
        for group in layout.workers:
            rows = self.problem.rows(group)
            if rows is None:
                return None
            found.append(tuple(of_device / self.problem.microbatch_size for of_device in rows))
        return tuple(found)

    def devices(self, layout: Layout) -> tuple[str, ...]:
        """The names of the devices in use, worker by worker."""
        return tuple(self.problem.names[device] for group in layout.workers for device in group)

    def cut(self, layout: Layout) -> Cut:
        """The layers of each stage."""
        sizes = [end - first for first, end in zip(layout.cuts, layout.cuts[1:], strict=False)]
        return Cut.of_sizes(sizes, self._edges, self.problem.profile.ties())

    @cached_property
    def _edges(self) -> tuple[tuple[int, int], ...]:
        return tuple((edge.producer, edge.consumer) for edge in self.problem.profile.edges())

    def num_updates(self, layout: Layout) -> int:
        """Updates of the order that is planned: one, which is repeated, or a window of them where they overlap."""
        return self.problem.updates_per_window if overlaps(layout.order) else 1

    def _num_judged(self, layout: Layout) -> int:
        """Updates that are simulated: of a file all, which may be the order of the whole window alone."""
        count = self.num_updates(layout)
        return count if is_file(layout.order) else min(count, _JUDGED_UPDATES)

    def schedule(self, layout: Layout, cut: Cut, *, num_updates: int) -> Schedule:
        """So many updates in the layout's order.

        Raises:
            ScheduleError: the order cannot take so many workers, stages or microbatches.
        """
        num_workers = len(layout.workers)
        num_chunks, odd = divmod(layout.num_stages, num_workers)
        if odd:
            raise ScheduleError(f"{layout.num_stages} stages cannot be dealt to {num_workers} workers evenly")
        size = ScheduleRequest(
            num_workers,
            self.problem.num_microbatches,
            num_updates=num_updates,
            num_chunks=num_chunks,
            num_pipelines=layout.num_pipelines,
            max_in_flight=layout.max_in_flight,
            max_mean_staleness=self.problem.max_mean_staleness,
            update_scope=self.problem.update_scope,
        )
        schedule = build(layout.order, size)
        if schedule.num_stages != layout.num_stages:
            raise ScheduleError(f"{layout.order} has {schedule.num_stages} stages on {num_workers} workers, not {layout.num_stages}")
        if cut.graph != StageGraph.chain(layout.num_stages):
            schedule = over_graph(schedule, cut.graph)
        return recompute(schedule, layout.recomputed) if layout.recomputed else schedule

    def plan(self, judged: Judged, *, planner: str, lower_bound_s: float) -> Plan:
        """The plan of a simulated layout."""
        problem, layout = self.problem, judged.layout
        shares = self.shares(layout)
        assert shares is not None, "a simulated layout can be divided"
        cut = self.cut(layout)
        schedule = self.schedule(layout, cut, num_updates=self.num_updates(layout))
        if schedule.num_updates != len(judged.timing.order.updates):
            judged = self.timed(layout, schedule)
        trace = judged.timing.trace(name=problem.profile.name, num_updates=schedule.num_updates)
        return Plan(
            name=problem.profile.name,
            planner=planner,
            microbatch_size=problem.microbatch_size,
            stages=tuple(tuple(problem.profile.layers[layer].name for layer in layers) for layers in cut.stages),
            workers=tuple(
                tuple(Replica(device=problem.names[device], share=share) for device, share in zip(group, of_group, strict=True))
                for group, of_group in zip(layout.workers, shares, strict=True)
            ),
            schedule=schedule,
            profile=problem.profile,
            topology=problem.topology,
            predicted=Predicted(
                update_s=judged.update_s,
                bubble_ratio=trace.bubble_ratio,
                device_bubble_ratios=trace.device_bubble_ratios,
                peak_memory_bytes=trace.peak_memory_bytes,
                lower_bound_s=lower_bound_s,
            ),
            profile_digest=problem.profile.digest,
            topology_digest=problem.topology.digest,
        )


def in_flight(layout: Layout, stage: int, num_microbatches: int) -> int:
    """The most activations that a stage holds in an order of one stage a worker."""
    num_stages = layout.num_stages
    if layout.order == "list":
        return list_order.in_flight(ScheduleRequest(num_stages, num_microbatches, max_in_flight=layout.max_in_flight), stage)
    if layout.order == "gpipe":
        return num_microbatches
    return min(num_stages - stage, num_microbatches)


def _placement(shares: Sequence[Sequence[float]]) -> Placement:
    numbers = iter(range(sum(map(len, shares))))
    return Placement(tuple(tuple((next(numbers), share) for share in of_group) for of_group in shares))


_Divided = tuple[Group, Sequence[int]]
"""The devices of a worker and the rows of each."""

_JUDGED_UPDATES = 5
"""Of a window whose updates overlap: the first fills, the last drains, and those in the middle are as all others."""

_MANY = 64
"""Beyond so many devices arrays are faster than loops."""


def _merged_overlaps(problem: Problem, source: _Divided, target: _Divided) -> list[tuple[int, int, int]]:
    """As `_overlaps`, but with the rows of all pairs between the same two nodes, which have one path, as those of the first."""
    ends = np.cumsum(source[1]), np.cumsum(target[1])
    borders = np.union1d(*ends)
    senders = np.array(source[0])[np.searchsorted(ends[0], borders)]
    receivers = np.array(target[0])[np.searchsorted(ends[1], borders)]
    num_rows = np.diff(borders, prepend=0)
    node_of = problem.nodes_of
    # Within a node each pair has a path of its own.
    within = node_of[senders] == node_of[receivers]
    found = list(zip(senders[within].tolist(), receivers[within].tolist(), num_rows[within].tolist(), strict=True))
    senders, receivers, num_rows = senders[~within], receivers[~within], num_rows[~within]
    _, first, block = np.unique(problem.block_of[senders, receivers], return_index=True, return_inverse=True)
    totals = np.bincount(block, weights=num_rows).astype(int)
    return found + list(zip(senders[first].tolist(), receivers[first].tolist(), totals.tolist(), strict=True))


def _overlaps(_: Problem, one: _Divided, other: _Divided) -> list[tuple[int, int, int]]:
    """The rows that each device of one worker has in common with each of another: (sender, receiver, rows)."""
    (source, source_rows), (target, target_rows) = one, other
    found: list[tuple[int, int, int]] = []
    sender = receiver = row = 0
    ends = [source_rows[0], target_rows[0]]
    while True:
        end = min(ends)
        found.append((source[sender], target[receiver], end - row))
        row = end
        if ends[0] == end:
            sender += 1
            if sender == len(source):
                return found
            ends[0] += source_rows[sender]
        if ends[1] == end:
            receiver += 1
            ends[1] += target_rows[receiver]
