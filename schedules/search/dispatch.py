"""Orders found by running a window: each free worker takes what has arrived by a rule.

For schedules without a formula. Pipelines share workers and admit a bounded number of microbatches; Ops take the stages' times
and wait for each other as the stage graph says (`StageGraph.needs`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from raypipe import stopping
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope, ops_of
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.steps import run_steps

Key = Callable[[float, Op], tuple[float, ...]]
"""Rank of an Op by its arrival: a free worker takes the least of all that wait."""


class Step(NamedTuple):
    """One step that every microbatch of a pipeline takes.

    Attributes:
        num_needed: Steps that must have ended before this one.
        followers: Steps that need this one, by position, each with the seconds from its end to their start.
    """

    kind: OpKind
    stage: int
    part: int
    worker: int
    seconds: float
    num_needed: int
    followers: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TimedPipelines:
    """Pipelines over a stage graph, and the seconds of the stages.

    Attributes:
        pipelines: The worker of each stage, for each pipeline.
        times: The seconds of each stage for a whole microbatch.
        latency_s: Seconds between the end of an Op and the start of its successor on another worker.
        hops_s: The same for single pairs (stage, stage of the successor) whose messages take longer or shorter.
        splits: Whether backwards are split into I and W.
        num_parts: Parts of a microbatch on which the stages work one by one; 1 leaves it whole.
        whole_stages: Stages that work on all parts at once.
    """

    graph: StageGraph
    pipelines: tuple[tuple[int, ...], ...]
    times: tuple[StageTimes, ...]
    latency_s: float = 0.0
    splits: bool = False
    num_parts: int = 1
    whole_stages: frozenset[int] = frozenset()
    hops_s: tuple[tuple[tuple[int, int], float], ...] = ()

    @classmethod
    def of(cls, pipelines: tuple[tuple[int, ...], ...], request: ScheduleRequest, graph: StageGraph | None = None) -> TimedPipelines:
        """Return pipelines with the times of a request, by default F = I = W = 1; the stages are a chain without a `graph`."""
        times = request.times or (StageTimes(1.0, 1.0, 1.0),)
        graph = graph or StageGraph.chain(len(pipelines[0]))
        return cls(graph, pipelines, tuple(times[stage % len(times)] for stage in range(graph.num_stages)), request.latency_s)

    @property
    def num_workers(self) -> int:
        """Return how many workers hold stages."""
        return 1 + max(max(workers) for workers in self.pipelines)

    @property
    def work_s(self) -> list[float]:
        """Return each worker's seconds for one microbatch of every pipeline."""
        work_s = [0.0] * self.num_workers
        for step in itertools.chain.from_iterable(self.steps):
            work_s[step.worker] += step.seconds
        return work_s

    def seconds(self, op: Op) -> float:
        """Return the seconds of an F, R, B, I or W."""
        return self.times[op.stage].of(op.kind) / (self.num_parts if op.part else 1)

    def hop_s(self, pipeline: int, source: int, target: int) -> float:
        """Return the seconds from the end of an Op to the start of one that needs it, by their stages."""
        workers = self.pipelines[pipeline]
        return 0.0 if workers[source] == workers[target] else self._hops_s.get((source, target), self.latency_s)

    @cached_property
    def _hops_s(self) -> dict[tuple[int, int], float]:
        return dict(self.hops_s)

    def before(self, op: Op) -> list[tuple[Op, float]]:
        """Return what an Op needs, each with the seconds from its end to the start that it allows."""
        return [
            (op._replace(kind=kind, stage=stage, part=part), self.hop_s(op.pipeline, stage, op.stage))
            for kind, stage in self.graph.needs[op.kind, op.stage]
            for part in self._parts(stage, op.part)
        ]

    def _parts(self, stage: int, part: int | None = None) -> Sequence[int]:
        """Return the parts on which a stage works, or those of them that an Op on `part` needs."""
        if self.num_parts == 1 or stage in self.whole_stages:
            return (0,)
        return (part,) if part else range(1, self.num_parts + 1)

    @cached_property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of a microbatch of each pipeline; each stands behind those that it needs."""
        return tuple(map(self._steps, range(len(self.pipelines))))

    def _steps(self, pipeline: int) -> tuple[Step, ...]:
        graph, stages = self.graph, range(self.graph.num_stages)
        backwards = (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT) if self.splits else (OpKind.BACKWARD,)
        keys = [(OpKind.FORWARD, stage) for stage in stages] + [(kind, stage) for stage in reversed(stages) for kind in backwards]
        ops = [Op(kind, stage, 0, pipeline, part) for kind, stage in keys for part in self._parts(stage)]
        positions = {op: position for position, op in enumerate(ops)}
        needed = [self.before(op) for op in ops]
        for op, needs in zip(ops, needed, strict=True):
            if op.kind.gives_input_gradient and graph.successors[op.stage]:
                del needs[0]  # its own forward ended long before the backwards of the stages that it feeds
        followers: list[list[tuple[int, float]]] = [[] for _ in ops]
        for position, needs in enumerate(needed):
            for need, hop_s in needs:
                followers[positions[need]].append((position, hop_s))
        workers = self.pipelines[pipeline]
        return tuple(
            Step(op.kind, op.stage, op.part, workers[op.stage], self.seconds(op), len(needs), tuple(behind))
            for op, needs, behind in zip(ops, needed, followers, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Started:
    """An F, R or B with its start and end, in seconds since the window began."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Room:
    """How many activations may be held.

    Attributes:
        of_stage: For each stage, the most activations; parts count as parts.
        sizes: For each stage, how much room on its worker an activation takes.
        of_worker: The room of each worker.
    """

    of_stage: tuple[float, ...]
    sizes: tuple[float, ...]
    of_worker: float


def dispatch(line: TimedPipelines, *, turns: int, key: Key, in_flight: int | None = None, room: Room | None = None) -> list[list[Started]]:
    """Return what each worker does, in order. Microbatch m is turn m // N of pipeline m mod N for N pipelines.

    A microbatch waits for the one `in_flight` turns earlier in its pipeline, and one turn more in all others, to end. A forward
    waits for `room`; the order is incomplete where what would make room waits for room itself. `key` ranks what waits for a worker.
    Time: the number of Ops times what waits at once.
    """
    return _Window(line, turns, key, in_flight or turns, room).run()


_EVENT_WORK_S = 10e-6  # Of all that happens at one time.
_Waiting = tuple[tuple[float, ...], int, int, Op]
"""Rank, tie-breaking number, position among the steps of the pipeline, Op."""


class _Window:
    """One run of `dispatch`."""

    def __init__(self, line: TimedPipelines, turns: int, key: Key, in_flight: int, room: Room | None) -> None:
        self.steps = line.steps
        self.turns = turns
        self.key = key
        self.in_flight = in_flight
        self.rooms = None if room is None else _Rooms(line, room)
        self.frees = OpKind.WEIGHT_GRADIENT if line.splits else OpKind.BACKWARD
        self.first_steps = [[at for at, step in enumerate(steps) if not step.num_needed] for steps in line.steps]
        self.num_last = [sum(not step.followers for step in steps) for steps in line.steps]
        self.kept: dict[tuple[int, int], list[_Waiting]] = {}  # by pipeline and stage, the forwards that wait for room
        self.waiting: list[list[_Waiting]] = [[] for _ in range(line.num_workers)]
        self.free = [True] * line.num_workers
        self.done: list[list[Started]] = [[] for _ in range(line.num_workers)]
        # (time, ends rather than arrives, tie-breaking number, position among the steps of the pipeline, Op)
        self.events: list[tuple[float, bool, int, int, Op]] = []
        self.numbers = itertools.count()
        self.arrived: Counter[tuple[int, int]] = Counter()  # of what a step of a microbatch needs, if several; position -1: its end
        self.ended = [0] * len(line.steps)
        self.admitted = [0] * len(line.steps)

    def run(self) -> list[list[Started]]:
        """Return what each worker did."""
        events = self.events
        self._admit(0.0)
        while events:
            stopping.spend(_EVENT_WORK_S)
            now_s = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] == now_s:
                _, ends, number, at, op = heapq.heappop(events)
                step = self.steps[op.pipeline][at]
                touched.add(step.worker)
                if ends:
                    self._end(now_s, at, op)
                elif step.num_needed <= 1 or self._is_last(op.index, at, step.num_needed):
                    heapq.heappush(self.waiting[step.worker], (self.key(now_s, op), number, at, op))
            for worker in sorted(touched):
                if self.free[worker]:
                    self._start(now_s, worker)
        return self.done

    def _admit(self, at_s: float) -> None:
        num_pipelines, slowest = len(self.ended), min(self.ended)
        for pipeline, ended in enumerate(self.ended):
            while self.admitted[pipeline] < min(self.turns, ended + self.in_flight, slowest + self.in_flight + 1):
                for at in self.first_steps[pipeline]:
                    self._push(at_s, self.admitted[pipeline] * num_pipelines + pipeline, pipeline, at)
                self.admitted[pipeline] += 1

    def _push(self, at_s: float, index: int, pipeline: int, at: int) -> None:
        step = self.steps[pipeline][at]
        heapq.heappush(self.events, (at_s, False, next(self.numbers), at, Op(step.kind, step.stage, index, pipeline, step.part)))

    def _is_last(self, index: int, at: int, num_needed: int) -> bool:
        self.arrived[index, at] += 1
        return self.arrived[index, at] == num_needed

    def _end(self, now_s: float, at: int, op: Op) -> None:
        step = self.steps[op.pipeline][at]
        self.free[step.worker] = True
        if self.rooms and op.kind is self.frees:
            for neighbor in self.rooms.give(op):
                if forwards := self.kept.get(neighbor):
                    heapq.heappush(self.waiting[step.worker], heapq.heappop(forwards))
        for follower, hop_s in step.followers:
            self._push(now_s + hop_s, op.index, op.pipeline, follower)
        if not step.followers and self._is_last(op.index, -1, self.num_last[op.pipeline]):
            self.ended[op.pipeline] += 1
            self._admit(now_s)

    def _start(self, now_s: float, worker: int) -> None:
        while self.waiting[worker]:
            chosen = heapq.heappop(self.waiting[worker])
            _, _, at, op = chosen
            if self.rooms and op.kind is OpKind.FORWARD and not self.rooms.take(op):
                heapq.heappush(self.kept.setdefault((op.pipeline, op.stage), []), chosen)
                continue
            end_s = now_s + self.steps[op.pipeline][at].seconds
            self.free[worker] = False
            self.done[worker].append(Started(op, now_s, end_s))
            heapq.heappush(self.events, (end_s, True, next(self.numbers), at, op))
            return


class _Rooms:
    """What is left of the room of each stage and worker."""

    def __init__(self, line: TimedPipelines, room: Room) -> None:
        self.line = line
        self.room = room
        self.of_stage = [list(room.of_stage) for _ in line.pipelines]
        self.of_worker = [room.of_worker] * line.num_workers
        self.together: list[list[tuple[int, int]]] = [[] for _ in self.of_worker]
        for pipeline, workers in enumerate(line.pipelines):
            for stage, worker in enumerate(workers):
                self.together[worker].append((pipeline, stage))

    def take(self, op: Op) -> bool:
        """Take the room of a forward, if there is enough."""
        worker, share = self.line.pipelines[op.pipeline][op.stage], self._share(op)
        size = share * self.room.sizes[op.stage]
        if self.of_stage[op.pipeline][op.stage] < share - _NOTHING or self.of_worker[worker] < size - _NOTHING:
            return False
        self.of_stage[op.pipeline][op.stage] -= share
        self.of_worker[worker] -= size
        return True

    def give(self, op: Op) -> list[tuple[int, int]]:
        """Give the room of an activation back; return the pipelines and stages for which there may be room now."""
        worker, share = self.line.pipelines[op.pipeline][op.stage], self._share(op)
        self.of_stage[op.pipeline][op.stage] += share
        self.of_worker[worker] += share * self.room.sizes[op.stage]
        return self.together[worker]

    def _share(self, op: Op) -> float:
        return 1 / self.line.num_parts if op.part else 1.0


_NOTHING = 1e-9  # of an activation


def timed(line: TimedPipelines, programs: Sequence[Sequence[Op]]) -> list[list[Started]]:
    """Return when each F, R and B of an order runs, if each starts as soon as it can."""
    run = run_steps(programs, seconds=line.seconds, needs=line.before)
    return [
        [Started(op, start_s, start_s + line.seconds(op)) for op, start_s in zip(program, starts_s, strict=False)]
        for program, starts_s in zip(programs, run.starts_s, strict=True)
    ]


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
