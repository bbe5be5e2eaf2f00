"""Orders for stage graphs whose branches share workers, within a limit on activations.

Two steps. First a window is run (`dispatch`) by several rules for a free worker and several limits on what each stage may hold: a
branch that may run far ahead keeps the others waiting, one that may not leaves its workers idle. Then single Ops of the best orders
are moved (`polished`).

Reconstructed from the abstract of Flexpipe (Zong et al., Tsinghua Science and Technology 2025), whose coordinator chooses how far
branches run ahead and which direction goes first; its rules are not published.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from raypipe import stopping
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.search.dispatch import Key, Room, TimedPipelines, dispatch
from raypipe.schedules.steps import StepRun, run_steps

Programs = tuple[tuple[Op, ...], ...]
_Move = tuple[int, int, int]
"""Worker, position of an Op, position of the Op before which it goes."""

_NUM_WHOLE = 8  # rules and limits that are tried with all microbatches; few microbatches tell which are worth it
_NUM_ALIKE = 8  # limits that are the same for all stages
_ROUGH_RULES = (0, 3, 4, 5)  # rules by which placements are compared
_ROUGH_MICROBATCHES = 8
_MOST_DRAFTED_OPS = 300_000  # Ops of all orders of few microbatches of one placement
_NUM_POLISHED = 3  # drafts that are improved
_LONGEST_MOVE = 8  # Ops that another may pass in one move
_EPSILON = 1e-9
_OP_WORK_S = 2e-6  # Of running an order, for each Op.


@dataclass(frozen=True)
class Found:
    """An order, how long it takes and the most activations that a worker holds; parts of a microbatch count as parts."""

    programs: Programs
    makespan_s: float
    held: float

    @property
    def rank(self) -> tuple[float, float]:
        """The time first, then activations; times that differ by rounding alone are equal."""
        return float(f"{self.makespan_s:.9g}"), self.held


@dataclass(frozen=True)
class BranchSearch:
    """The search for one stage graph on its workers.

    Attributes:
        line: One pipeline.
        num_microbatches: Microbatches of the update.
        max_held: The most activations of a worker.
        sizes: What an activation of each stage counts; 1 by default. Activations of stages that take no time never count.
        most_moved_ops: Ops of all orders that are tried to improve the drafts; 0 takes the best draft.
    """

    line: TimedPipelines
    num_microbatches: int
    max_held: float
    sizes: tuple[float, ...] = ()
    most_moved_ops: int = 1_500_000

    def best(self) -> Found | None:
        """Return the fastest order found, `None` if no order keeps the limit."""
        drafts = self.drafts()
        return self.polished(drafts) if drafts else None

    def drafts(self) -> list[Found]:
        """Return orders made by rules, the fastest first; of equally fast ones, those with fewer activations.

        The list is empty if no order keeps the limit.
        """
        tried = [self._dispatched(key, limits) for key, limits in self._promising()]
        return sorted(dict.fromkeys(order for order in tried if order is not None), key=lambda each: each.rank)

    def rough_s(self) -> float:
        """Return the seconds per microbatch of the best of a few orders of a few microbatches; infinity if none keeps the limit."""
        few = replace(self, num_microbatches=min(self._few, _ROUGH_MICROBATCHES))
        wanted = [[need * 1.5 for need in self._needed], [self.max_held // self._fullest] * len(self._needed)]
        limits = dict.fromkeys(few._clipped(each) for each in wanted)
        found = [few._dispatched(few._rules[rule], each) for rule in _ROUGH_RULES for each in limits]
        return min((each.makespan_s / few.num_microbatches for each in found if each), default=math.inf)

    def _promising(self) -> list[tuple[Key, tuple[float, ...]]]:
        few = replace(self, num_microbatches=self._few)
        trials = list(itertools.product(range(len(few._rules)), self._limits()))
        if self.num_microbatches > self._few:
            trials = trials[:: math.ceil(len(trials) * few._num_ops / _MOST_DRAFTED_OPS)]
            ranked: list[tuple[tuple[float, float], int, tuple[float, ...]]] = []
            for key, limits in trials:
                found = few._dispatched(few._rules[key], limits)
                if found is not None:
                    ranked.append((found.rank, key, limits))
            trials = [(key, limits) for _, key, limits in heapq.nsmallest(_NUM_WHOLE, ranked)]
        return [(self._rules[key], limits) for key, limits in trials]

    @cached_property
    def _few(self) -> int:
        """Microbatches that fill all stages and then some."""
        return min(self.num_microbatches, 2 * math.ceil(max(self._needed)) + 4)

    def _dispatched(self, key: Key, limits: tuple[float, ...]) -> Found | None:
        done = dispatch(self.line, turns=self.num_microbatches, key=key, room=Room(limits, self._sizes, self.max_held))
        programs = tuple(tuple(started.op for started in row) for row in done)
        if sum(map(len, programs)) < self._num_ops:
            return None  # what would make room waits for what has none
        held = max(map(self._most_held, programs))
        return Found(programs, max((row[-1].end_s for row in done if row), default=0.0), held) if held <= self.max_held + _EPSILON else None

    def _run(self, programs: Programs) -> StepRun[Op]:
        stopping.spend(_OP_WORK_S * self._num_ops)
        return run_steps(programs, seconds=self._seconds.__getitem__, needs=self._needs.__getitem__)

    @cached_property
    def _instant(self) -> frozenset[int]:
        """The stages that take no time, as a loss in which branches meet; their activations do not count."""
        return frozenset(stage for stage, times in enumerate(self.line.times) if not times.forward_s + times.backward_s)

    @cached_property
    def _sizes(self) -> tuple[float, ...]:
        sizes = self.sizes or (1.0,) * self.line.graph.num_stages
        return tuple(0.0 if stage in self._instant else size for stage, size in enumerate(sizes))

    @cached_property
    def _num_ops(self) -> int:
        return len(self.line.steps[0]) * self.num_microbatches

    @cached_property
    def _ops(self) -> list[Op]:
        return [Op(step.kind, step.stage, index, 0, step.part) for step in self.line.steps[0] for index in range(self.num_microbatches)]

    @cached_property
    def _seconds(self) -> dict[Op, float]:
        return {op: self.line.seconds(op) for op in self._ops}

    @cached_property
    def _needs(self) -> dict[Op, list[tuple[Op, float]]]:
        return {op: self.line.before(op) for op in self._ops}

    def _most_held(self, program: Sequence[Op]) -> float:
        return max(itertools.accumulate(map(self._holds, program)), default=0.0)

    def _holds(self, op: Op) -> float:
        if op.kind is OpKind.INPUT_GRADIENT:
            return 0.0
        return (self._sizes[op.stage] if op.kind is OpKind.FORWARD else -self._sizes[op.stage]) / (self.line.num_parts if op.part else 1)

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no order takes less than: of each worker, the wait for its first Op, all work, and the path behind its last."""
        steps = self.line.steps[0]
        head_s, tail_s = [0.0] * len(steps), [0.0] * len(steps)
        for at, step in enumerate(steps):
            for behind, hop_s in step.followers:
                head_s[behind] = max(head_s[behind], head_s[at] + step.seconds + hop_s)
        for at in reversed(range(len(steps))):
            followers = ((behind, hop_s) for behind, hop_s in steps[at].followers)
            tail_s[at] = max((hop_s + steps[behind].seconds + tail_s[behind] for behind, hop_s in followers), default=0.0)
        work_s = [seconds * self.num_microbatches for seconds in self.line.work_s]
        long = [at for at, step in enumerate(steps) if step.seconds]
        heads_s = [min((head_s[at] for at in long if steps[at].worker == worker), default=0.0) for worker in range(len(work_s))]
        tails_s = [min((tail_s[at] for at in long if steps[at].worker == worker), default=0.0) for worker in range(len(work_s))]
        return max(head + work + tail for head, work, tail in zip(heads_s, work_s, tails_s, strict=True))

    # Rules for a free worker

    @cached_property
    def _left_s(self) -> dict[tuple[OpKind, int], float]:
        """Seconds from the start of an Op to the end of its microbatch, if nothing else runs; without W, which nobody waits for."""
        left_s = self._longest_s(None)
        return {(step.kind, step.stage): left for step, left in zip(self.line.steps[0], left_s, strict=True)}

    def _longest_s(self, end: int | None) -> list[float]:
        """Return the longest path from each step's start to the end of step `end`, or of any; minus infinity where there is none."""
        steps = self.line.steps[0]
        nowhere = 0.0 if end is None else -math.inf
        longest_s = [0.0] * len(steps)
        for at in reversed(range(len(steps))):
            behind_s = max((hop_s + longest_s[behind] for behind, hop_s in steps[at].followers), default=nowhere)
            longest_s[at] = (
                steps[at].seconds + (0.0 if at == end else behind_s) if steps[at].kind is not OpKind.WEIGHT_GRADIENT else nowhere
            )
        return longest_s

    @cached_property
    def _rules(self) -> list[Key]:
        left_s, num_parts = self._left_s, self.line.num_parts
        unit_s = max(self.line.work_s) / num_parts
        forwards_first = {OpKind.FORWARD: 0, OpKind.BACKWARD: 1, OpKind.INPUT_GRADIENT: 1, OpKind.WEIGHT_GRADIENT: 2}
        backwards_first = {**forwards_first, OpKind.FORWARD: 2, OpKind.WEIGHT_GRADIENT: 3}
        last = OpKind.WEIGHT_GRADIENT

        def unit(op: Op) -> int:
            return op.index * num_parts + max(op.part - 1, 0)

        def left(op: Op) -> float:
            return left_s[op.kind, op.stage]

        rules: list[Key] = [
            lambda at_s, op: (forwards_first[op.kind], unit(op), at_s, -op.stage),
            lambda at_s, op: (backwards_first[op.kind], unit(op), at_s, -op.stage),
            lambda at_s, op: (op.kind is last, at_s, unit(op), -op.stage),
            lambda at_s, op: (op.kind is last, -left(op), unit(op)),
            lambda at_s, op: (op.kind is last, unit(op) * unit_s - left(op), unit(op)),
            lambda at_s, op: (op.kind is last, unit(op) * unit_s / 4 - left(op), unit(op)),
            lambda at_s, op: (forwards_first[op.kind], unit(op) * unit_s - left(op), unit(op)),
            lambda at_s, op: (backwards_first[op.kind], unit(op) * unit_s - left(op), unit(op)),
        ]
        return [self._instant_first(rule) for rule in rules]

    def _instant_first(self, rule: Key) -> Key:
        return lambda at_s, op: (op.stage not in self._instant, *rule(at_s, op))

    # Limits on the activations of each stage

    def _limits(self) -> Iterator[tuple[float, ...]]:
        least = min((size for size in self._sizes if size), default=1.0)
        most, needed = math.floor(min(self.num_microbatches, self.max_held / least)), self._needed
        alike = dict.fromkeys(round(most * number / _NUM_ALIKE) or 1 for number in range(1, _NUM_ALIKE + 1))
        wanted = [[float(each)] * len(needed) for each in alike]
        wanted += [[need * factor + more for need in needed] for factor, more in itertools.product((1.0, 1.5, 2.0, 3.0), range(3))]
        yield from dict.fromkeys(limits for each in wanted for limits in (self._clipped(each), self._clipped(each, divided=False)))

    @cached_property
    def _needed(self) -> list[float]:
        """For each stage, the activations that a worker without idle time would hold: of those on the way from F to the backward."""
        unit_s = max(self.line.work_s) or 1.0
        steps = self.line.steps[0]
        forwards = {step.stage: at for at, step in enumerate(steps) if step.kind is OpKind.FORWARD}
        backwards = {step.stage: at for at, step in enumerate(steps) if step.kind.gives_input_gradient}
        return [self._longest_s(backwards[stage])[forwards[stage]] / unit_s for stage in range(self.line.graph.num_stages)]

    @cached_property
    def _fullest(self) -> float:
        """What one activation of each stage of a worker counts, on the worker with the most."""
        held = [0.0] * self.line.num_workers
        for stage, worker in enumerate(self.line.pipelines[0]):
            held[worker] += self._sizes[stage]
        return max(held) or 1.0

    def _clipped(self, limits: Sequence[float], *, divided: bool = True) -> tuple[float, ...]:
        """Return whole limits; `divided`, those of each worker's stages are together at most `max_held`, taken from the largest first."""
        whole = [min(max(math.ceil(limit - _EPSILON), 1), self.num_microbatches) for limit in limits]
        clipped = [1.0 if stage in self._instant else float(limit) for stage, limit in enumerate(whole)]
        for worker in range(self.line.num_workers if divided else 0):
            stages = [stage for stage, at in enumerate(self.line.pipelines[0]) if at == worker and self._sizes[stage]]
            while sum(clipped[stage] * self._sizes[stage] for stage in stages) > self.max_held + _EPSILON:
                largest = max(stages, key=lambda stage: clipped[stage])
                if clipped[largest] <= 1:
                    break
                clipped[largest] -= 1
        return tuple(clipped)

    # Local improvement

    def polished(self, drafts: Sequence[Found]) -> Found:
        """Return the fastest order that moves of single Ops make of the first drafts; of equally fast ones, the first found.

        Simulated annealing: a slower order is kept with a probability that falls to 0, by its delay over the mean seconds of an Op.
        """
        best, chance = drafts[0], random.Random(0)
        num_moves = self.most_moved_ops // max(self._num_ops, 1)
        mean_s = sum(self.line.work_s) / len(self.line.steps[0])
        for draft in drafts[:_NUM_POLISHED]:
            current, moves = draft, self._critical_moves(draft)
            for number in range(num_moves // _NUM_POLISHED):
                if best.makespan_s <= self.bound_s * (1 + _EPSILON):
                    return best
                moved = self._timed(self._moved(current, moves, chance))
                if moved is None:
                    continue
                heat_s = mean_s * (1 - number * _NUM_POLISHED / num_moves)
                if chance.random() < math.exp(min((current.makespan_s - moved.makespan_s) / heat_s, 0.0)):
                    current, moves = moved, self._critical_moves(moved)
                best = min(best, current, key=lambda each: each.rank)
        return best

    def _moved(self, found: Found, moves: Sequence[_Move], chance: random.Random) -> Programs:
        """Return the order after a move on the critical path, or as often one of any Op."""
        if not moves or chance.random() >= 1 / 2:
            worker = chance.randrange(len(found.programs))
            moves = list(self._earlier(found, worker, chance.randrange(len(found.programs[worker]))))
        if not moves:
            return found.programs
        worker, at, to = chance.choice(moves)
        program = found.programs[worker]
        moved = (*program[:to], program[at], *program[to:at], *program[at + 1 :])
        return (*found.programs[:worker], moved, *found.programs[worker + 1 :])

    def _timed(self, programs: Programs) -> Found | None:
        held = max(map(self._most_held, programs))
        if held > self.max_held + _EPSILON:
            return None
        run = self._run(programs)
        return None if run.stuck else Found(programs, max(run.ends_s), held)

    def _critical_moves(self, found: Found) -> list[_Move]:
        """Return the moves of Ops of the critical path that wait for their worker alone."""
        run = self._run(found.programs)
        places = {op: (worker, at) for worker, program in enumerate(found.programs) for at, op in enumerate(program)}
        worker = run.ends_s.index(max(run.ends_s))
        cause: Op | None = found.programs[worker][-1]
        moves: list[_Move] = []
        while cause is not None:
            worker, at = places[cause]
            before = found.programs[worker][at - 1] if at else None
            cause = run.causes[worker][at]
            if cause is not None and cause == before:
                moves += self._earlier(found, worker, at)
        return moves

    def _earlier(self, found: Found, worker: int, at: int) -> Iterator[_Move]:
        """Yield the moves of one Op before some of those before it."""
        program = found.programs[worker]
        needs = {need for need, _ in self._needs[program[at]]}
        for to in range(at - 1, max(at - _LONGEST_MOVE, 0) - 1, -1):
            if program[to] in needs:
                return
            yield worker, at, to
