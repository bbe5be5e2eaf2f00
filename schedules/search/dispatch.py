"""Orders found by running a window: each free worker takes what has arrived by a rule.

For schedules without a formula. Pipelines share workers and admit a bounded number of microbatches; Ops take the stages' times.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypipe.schedules.ir import Op, OpKind, Schedule, UpdateScope, ops_of
from raypipe.schedules.request import ScheduleRequest, StageTimes

Key = Callable[[float, Op], tuple[float, ...]]
"""Rank of an Op by its arrival: a free worker takes the least of all that wait."""


@dataclass(frozen=True)
class TimedPipelines:
    """Pipelines and the seconds of their stages.

    Attributes:
        pipelines: The worker of each stage, for each placement of the chain.
        latency_s: Seconds between the end of an Op and the start of its successor on another worker.
    """

    pipelines: tuple[tuple[int, ...], ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float = 0.0

    @classmethod
    def of(cls, pipelines: tuple[tuple[int, ...], ...], request: ScheduleRequest) -> TimedPipelines:
        """Return pipelines with the times of a request, by default F = I = W = 1."""
        times = request.times or (StageTimes(1.0, 1.0, 1.0),)
        of_stage = [times[stage % len(times)] for stage in range(len(pipelines[0]))]
        backward_s = tuple(each.input_grad_s + each.weight_grad_s for each in of_stage)
        return cls(pipelines, tuple(each.forward_s for each in of_stage), backward_s, request.latency_s)

    @property
    def num_workers(self) -> int:
        """Return how many workers hold stages."""
        return 1 + max(max(workers) for workers in self.pipelines)

    @property
    def work_s(self) -> list[float]:
        """Return each worker's seconds for one microbatch of every pipeline."""
        work_s = [0.0] * self.num_workers
        for workers in self.pipelines:
            for stage, worker in enumerate(workers):
                work_s[worker] += self.forward_s[stage] + self.backward_s[stage]
        return work_s

    def seconds(self, op: Op) -> float:
        """Return the seconds of an F, R or B."""
        return (self.backward_s if op.kind is OpKind.BACKWARD else self.forward_s)[op.stage]

    def hop_s(self, source: Op, target: Op) -> float:
        """Return the seconds between an Op and its successor on the chain."""
        workers = self.pipelines[source.pipeline]
        return 0.0 if workers[source.stage] == workers[target.stage] else self.latency_s

    def after(self, op: Op) -> Op | None:
        """Return the next F or B of the microbatch; `None` behind the last."""
        return self._beside(op, OpKind.BACKWARD)

    def before(self, op: Op) -> Op | None:
        """Return the previous F or B of the microbatch; `None` for the first."""
        return self._beside(op, OpKind.FORWARD)

    def _beside(self, op: Op, towards_first: OpKind) -> Op | None:
        kind, stage, index, pipeline, part = op
        if kind is towards_first:
            return Op(kind, stage - 1, index, pipeline, part) if stage else None
        if stage == len(self.pipelines[pipeline]) - 1:
            return Op(towards_first, stage, index, pipeline, part)
        return Op(kind, stage + 1, index, pipeline, part)


@dataclass(frozen=True, slots=True)
class Started:
    """An F, R or B with its start and end, in seconds since the window began."""

    op: Op
    start_s: float
    end_s: float


def dispatch(line: TimedPipelines, *, turns: int, in_flight: int, key: Key) -> list[list[Started]]:
    """Return what each worker does, in order. Microbatch m is turn m // N of pipeline m mod N for N pipelines.

    A microbatch waits for the one `in_flight` turns earlier in its pipeline, and one turn more in all others, to end. `key` ranks
    what waits for a worker. Time: the number of Ops times what waits at once.
    """
    num_pipelines = len(line.pipelines)
    paths = [_path(line, pipeline) for pipeline in range(num_pipelines)]
    waiting: list[list[tuple[tuple[float, ...], int, int, Op]]] = [[] for _ in range(line.num_workers)]
    free: list[bool] = [True] * line.num_workers
    done: list[list[Started]] = [[] for _ in range(line.num_workers)]
    # (time, ends rather than arrives, tie-breaking number, position on the path of the pipeline, Op)
    events: list[tuple[float, bool, int, int, Op]] = []
    numbers = itertools.count()
    ended = [0] * num_pipelines
    admitted = [0] * num_pipelines

    def admit(at_s: float) -> None:
        slowest = min(ended)
        for pipeline in range(num_pipelines):
            while admitted[pipeline] < min(turns, ended[pipeline] + in_flight, slowest + in_flight + 1):
                op = Op(OpKind.FORWARD, 0, admitted[pipeline] * num_pipelines + pipeline, pipeline)
                heapq.heappush(events, (at_s, False, next(numbers), 0, op))
                admitted[pipeline] += 1

    admit(0.0)
    while events:
        now_s = events[0][0]
        touched: set[int] = set()
        while events and events[0][0] == now_s:
            _, ends, number, at, op = heapq.heappop(events)
            path = paths[op.pipeline]
            worker = path[at].worker
            touched.add(worker)
            if not ends:
                heapq.heappush(waiting[worker], (key(now_s, op), number, at, op))
                continue
            free[worker] = True
            if at + 1 < len(path):
                after = path[at + 1]
                arrives_s = now_s + path[at].hop_s
                heapq.heappush(events, (arrives_s, False, next(numbers), at + 1, Op(after.kind, after.stage, op.index, op.pipeline)))
            else:
                ended[op.pipeline] += 1
                admit(now_s)
        for worker in sorted(touched):
            if free[worker] and waiting[worker]:
                _, _, at, op = heapq.heappop(waiting[worker])
                end_s = now_s + paths[op.pipeline][at].seconds
                free[worker] = False
                done[worker].append(Started(op, now_s, end_s))
                heapq.heappush(events, (end_s, True, next(numbers), at, op))
    return done


class _Step(NamedTuple):
    """One step of all microbatches of a pipeline, computed once: searches run this loop millions of times."""

    kind: OpKind
    stage: int
    worker: int
    seconds: float
    hop_s: float


def _path(line: TimedPipelines, pipeline: int) -> list[_Step]:
    steps: list[_Step] = []
    op: Op | None = Op(OpKind.FORWARD, 0, pipeline, pipeline)
    while op is not None:
        after = line.after(op)
        hop_s = line.hop_s(op, after) if after is not None else 0.0
        steps.append(_Step(op.kind, op.stage, line.pipelines[pipeline][op.stage], line.seconds(op), hop_s))
        op = after
    return steps


def timed(line: TimedPipelines, programs: Sequence[Sequence[Op]]) -> list[list[Started]]:
    """Return when each F, R and B of an order runs, if each starts as soon as it can."""
    ends_s: dict[Op, float] = {}
    rows: list[list[Started]] = [[] for _ in programs]
    ready = list(range(len(programs)))
    waiting: dict[Op, int] = {}
    while ready:
        worker = ready.pop()
        row = rows[worker]
        for op in programs[worker][len(row) :]:
            # A forward that runs again stands behind the first one.
            before = None if op.kind is OpKind.RECOMPUTE else line.before(op)
            start_s = row[-1].end_s if row else 0.0
            if before is not None:
                if before not in ends_s:
                    waiting[before] = worker
                    break
                start_s = max(start_s, ends_s[before] + line.hop_s(before, op))
            end_s = ends_s[op] = start_s + line.seconds(op)
            row.append(Started(op, start_s, end_s))
            if op in waiting:
                ready.append(waiting.pop(op))
    return rows


def defer_updates(schedule: Schedule, line: TimedPipelines) -> Schedule:
    """Return the schedule with each U where nobody waits for it: before the first Op that starts with its gradients there.

    These gradients are those of all copies of its stage and of tied stages; of all stages for the scope `global`. A U stands
    before any Op that must read its version (`WeightRule.fixed_version`). Backwards must be whole.
    """
    programs = [[op for slot in program for op in ops_of(slot) if op.kind is not OpKind.UPDATE] for program in schedule.programs]
    return replace(schedule, programs=tuple(map(tuple, with_updates(schedule, timed(line, programs)))))


def with_updates(schedule: Schedule, done: Sequence[Sequence[Started]]) -> list[list[Op]]:
    """Return the order of `defer_updates` for Ops that run at these times, ignoring the programs of `schedule`."""
    waits_for_all = schedule.update_scope is UpdateScope.GLOBAL
    ties = schedule.graph.ties
    # Of the stages that wait for each other, the first.
    meets = [0 if waits_for_all else min(next((tie for tie in ties if stage in tie), (stage,))) for stage in range(schedule.num_stages)]
    ready_s: dict[tuple[int, int], float] = {}
    for row in done:
        for started in row:
            if started.op.kind is OpKind.BACKWARD:
                met = (meets[started.op.stage], schedule.update(started.op))
                ready_s[met] = max(ready_s.get(met, 0.0), started.end_s)
    orders: list[list[Op]] = []
    for worker, row in enumerate(done):
        needed_s: dict[tuple[int, int], float] = {}
        for started in row:
            version = schedule.weight_rule.fixed_version(schedule.update(started.op))
            if version is not None:
                needed_s.setdefault((started.op.stage, version - 1), started.start_s)
        updates = sorted(
            (min(ready_s[meets[stage], update], needed_s.get((stage, update), math.inf)), update, stage, pipeline)
            for (held_by, stage), pipeline in schedule.first_pipeline.items()
            if held_by == worker
            for update in range(schedule.num_updates)
        )
        left = Counter((started.op.stage, schedule.update(started.op)) for started in row if started.op.kind is OpKind.BACKWARD)
        order: list[Op] = []
        for started in row:
            # A backward of no time starts when the gradients are there, and is one of them.
            while updates and updates[0][0] <= started.start_s and not left[updates[0][2], updates[0][1]]:
                _, update, stage, pipeline = updates.pop(0)
                order.append(Op(OpKind.UPDATE, stage, update, pipeline))
            if started.op.kind is OpKind.BACKWARD:
                left[started.op.stage, schedule.update(started.op)] -= 1
            order.append(started.op)
        orders.append(order + [Op(OpKind.UPDATE, stage, update, pipeline) for _, update, stage, pipeline in updates])
    return orders
