"""The schedule language: Ops, their order on workers, and the two rules that give them meaning.

A `Schedule` is pure data: which worker runs which Ops in which order. It holds no times and no idle slots. Two functions
say all there is to know about an Op, for the validator, the lowering, the simulator and the executor alike:
`dependencies` (what must have ended before it starts) and `reads` (which version of the weights it uses).

Letters are torch's: F forward, B full backward, I input gradient, W weight gradient. (The zero-bubble papers call I "B".)

    worker 0   0F0 0F1 0F2 0F3 .   .   0B0 ...          an Op is written STAGE KIND INDEX, as in 2F5; behind it
    worker 1   .   1F0 1F1 1F2 .   1B0 ...              .PART and @PIPELINE where they are not 0, as in 2B5.1@1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from raypipe.errors import ScheduleError


class OpKind(StrEnum):
    """What an Op does."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"
    UPDATE = "U"
    REDUCE = "G"
    PUBLISH = "P"

    # Attributes rather than properties: every rule asks them of every Op.
    def __init__(self, letter: str) -> None:
        self.per_update = letter in "UGP"
        """Whether the index of an Op of this kind is an update and not a microbatch."""
        self.gives_input_gradient = letter in "BI"
        """Whether earlier stages wait for an Op of this kind in the backward pass."""
        self.writes_gradient = letter in "BW"
        """Whether an Op of this kind adds to the gradient buffer of its update."""


class Op(NamedTuple):
    """One piece of work of one stage.

    Attributes:
        kind: what the Op does.
        stage: number of the stage.
        index: number of the microbatch in the window; of the update for U, G and P.
        pipeline: the pipeline that processes the microbatch.
        part: 0 for undivided work; the parts of divided work (buckets, slices, halves) count from 1.
    """

    kind: OpKind
    stage: int
    index: int  # type: ignore[assignment]  # tuple.index gives way to the field's own word
    pipeline: int = 0
    part: int = 0

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        pipeline = f"@{self.pipeline}" if self.pipeline else ""
        return f"{self.stage}{self.kind}{self.index}{part}{pipeline}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """One slot whose Ops run at the same time. It starts when all its Ops can start, and has a duration of its own."""

    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return "(" + ";".join(map(str, self.ops)) + ")"


Slot = Op | Overlap


def ops_of(slot: Slot) -> tuple[Op, ...]:
    """Return the Ops of a slot, in order."""
    return slot.ops if isinstance(slot, Overlap) else (slot,)


class WeightRule(StrEnum):
    """How a backward finds its weights."""

    FLUSH = "flush"
    """Every microbatch of update u uses version u: synchronous."""
    STASH = "stash"
    """A forward uses the newest version, its backward the version that the forward used (PipeDream)."""
    DOUBLE_BUFFER = "double_buffer"
    """Forward and backward of update u use version max(u - 1, 0) (PipeDream-2BW, Narayanan et al., 2021, arXiv 2006.09503, section 3.1)."""
    LIVE = "live"
    """Each Op uses the newest version on its worker when it runs."""

    @property
    def overlaps_updates(self) -> bool:
        """Whether the microbatches of an update may start before the previous update has ended."""
        return self is not WeightRule.FLUSH

    @property
    def keeps_versions(self) -> bool:
        """Whether a stage holds earlier versions of its weights next to the newest one."""
        return self in {WeightRule.STASH, WeightRule.DOUBLE_BUFFER}

    @property
    def allows_mismatch(self) -> bool:
        """Whether a backward may use another version than its forward."""
        return self is WeightRule.LIVE

    def fixed_version(self, update: int) -> int | None:
        """Return the version that every microbatch of an update uses; `None` where it depends on the order."""
        if self is WeightRule.FLUSH:
            return update
        return max(update - 1, 0) if self is WeightRule.DOUBLE_BUFFER else None

    def only_reader(self, version: int) -> int | None:
        """Return the one update whose microbatches read a version, which an update has made; `None` where it depends on the order."""
        if self is WeightRule.FLUSH:
            return version
        return version + 1 if self is WeightRule.DOUBLE_BUFFER else None


class UpdateScope(StrEnum):
    """Which gradients an update waits for and clips by one norm. Stages that share a weight always wait for each other."""

    STAGE = "stage"
    """The gradients of one stage. The stage has a norm of its own, and so does each weight that it shares."""
    TIED = "tied"
    """The gradients of all stages that share a weight with the stage, under one norm."""
    GLOBAL = "global"
    """The gradients of all stages, under one norm."""


@dataclass(frozen=True)
class StageGraph:
    """The stages of a model and the edges between them.

    Attributes:
        num_stages: number of stages; stages count from 0, in topological order.
        edges: pairs (producer, consumer); the producer has the smaller number.
        ties: groups of stages that share a weight; a stage is in one group at most.
    """

    num_stages: int
    edges: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise ScheduleError(f"a stage graph needs at least one stage, got {self.num_stages}")
        for source, target in self.edges:
            if not 0 <= source < target < self.num_stages:
                raise ScheduleError(
                    f"edge {source} -> {target} does not lead from a stage to a later one of 0..{self.num_stages - 1}; "
                    "number the stages in topological order"
                )
        if len(set(self.edges)) != len(self.edges):
            raise ScheduleError("the stage graph names an edge twice")
        for tie in self.ties:
            if len(set(tie)) < 2 or not all(0 <= stage < self.num_stages for stage in tie):
                raise ScheduleError(f"tie {tie} does not name two or more of the stages 0..{self.num_stages - 1}")
        tied = [stage for tie in self.ties for stage in tie]
        if len(set(tied)) != len(tied):
            raise ScheduleError(f"a stage is in two of the ties {self.ties}; join them in one, since their updates wait for each other")

    @classmethod
    def chain(cls, num_stages: int) -> StageGraph:
        """Return the graph of stages in a line, each feeding the next."""
        return cls(num_stages, tuple((stage, stage + 1) for stage in range(num_stages - 1)))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that feed it, ascending."""
        return tuple(tuple(sorted(s for s, t in self.edges if t == stage)) for stage in range(self.num_stages))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that it feeds, ascending."""
        return tuple(tuple(sorted(t for s, t in self.edges if s == stage)) for stage in range(self.num_stages))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The stages that nothing feeds."""
        return tuple(stage for stage in range(self.num_stages) if not self.predecessors[stage])

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """The stages that feed nothing; the loss is taken there."""
        return tuple(stage for stage in range(self.num_stages) if not self.successors[stage])

    @cached_property
    def needs(self) -> dict[tuple[OpKind, int], tuple[tuple[OpKind, int], ...]]:
        """The rule of data flow: for each kind and stage of an Op, the kinds and stages whose Ops of the same microbatch end first.

        A schedule may have I for B, and R for the F of the same stage.
        """
        needs: dict[tuple[OpKind, int], tuple[tuple[OpKind, int], ...]] = {}
        for stage in range(self.num_stages):
            forward = (OpKind.FORWARD, stage)
            needs[forward] = tuple((OpKind.FORWARD, source) for source in self.predecessors[stage])
            needs[OpKind.RECOMPUTE, stage] = (forward,)
            for kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT):
                needs[kind, stage] = (forward, *((kind, target) for target in self.successors[stage]))
            needs[OpKind.WEIGHT_GRADIENT, stage] = ((OpKind.INPUT_GRADIENT, stage),)
        return needs

    @cached_property
    def needs_of_others(self) -> dict[tuple[OpKind, int], tuple[tuple[OpKind, int], ...]]:
        """Those of `needs` that are of other stages, where there are any."""
        others = {(kind, stage): tuple(need for need in needs if need[1] != stage) for (kind, stage), needs in self.needs.items()}
        return {key: needs for key, needs in others.items() if needs}

    @cached_property
    def tie_of(self) -> dict[int, int]:
        """For each stage that shares a weight, the number of its tie."""
        return {stage: number for number, tie in enumerate(self.ties) for stage in tie}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each stage, the number of edges on the longest path to the stage."""
        depths: list[int] = []
        for stage in range(self.num_stages):
            depths.append(max((depths[source] + 1 for source in self.predecessors[stage]), default=0))
        return tuple(depths)


class ProgramPlace(NamedTuple):
    """A worker and the position of a slot in its program."""

    worker: int
    position: int


class StageReplica(NamedTuple):
    """One copy of a stage's weights on a worker; several pipelines may pass through it."""

    worker: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """The order of Ops on workers for one window.

    Attributes:
        name: name of a registered schedule, or one that the user chose.
        graph: stages and the edges between them.
        pipelines: for each pipeline, the worker of each stage.
        programs: for each worker, its slots in order.
        num_microbatches: microbatches per update, summed over all pipelines.
        num_updates: updates per window.
        weight_rule: rule by which a backward finds its weights.
        update_scope: which gradients an update waits for.
    """

    name: str
    graph: StageGraph
    pipelines: tuple[tuple[int, ...], ...]
    programs: tuple[tuple[Slot, ...], ...]
    num_microbatches: int
    num_updates: int = 1
    weight_rule: WeightRule = WeightRule.FLUSH
    update_scope: UpdateScope = UpdateScope.GLOBAL

    @property
    def num_workers(self) -> int:
        """Number of workers; each has one program."""
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        """Number of stages of the model, without replicas."""
        return self.graph.num_stages

    def worker(self, op: Op) -> int:
        """Return the worker whose weights the Op concerns."""
        return self.pipelines[op.pipeline][op.stage]

    def replica(self, op: Op) -> StageReplica:
        """Return the copy of the weights that the Op uses or changes."""
        return StageReplica(self.pipelines[op.pipeline][op.stage], op.stage)

    def update(self, op: Op) -> int:
        """Return the update that the Op works for."""
        return op.index if op.kind.per_update else op.index // self.num_microbatches

    def ops(self) -> Iterator[tuple[Op, ProgramPlace]]:
        """Yield all Ops with their places, worker by worker."""
        for worker, program in enumerate(self.programs):
            for position, slot in enumerate(program):
                place = ProgramPlace(worker, position)
                for op in ops_of(slot):
                    yield op, place

    @cached_property
    def places(self) -> dict[Op, ProgramPlace]:
        """The place of each Op."""
        return dict(self.ops())

    @cached_property
    def first_pipeline(self) -> dict[StageReplica, int]:
        """For each copy of a stage's weights, the first pipeline through it: the one that the copy's U, G and P name."""
        found: dict[StageReplica, int] = {}
        for pipeline, workers in enumerate(self.pipelines):
            for stage, worker in enumerate(workers):
                found.setdefault(StageReplica(worker, stage), pipeline)
        return found

    @cached_property
    def replicas(self) -> tuple[tuple[StageReplica, ...], ...]:
        """For each stage, the copies of its weights, by first pipeline."""
        return tuple(tuple(replica for replica in self.first_pipeline if replica.stage == stage) for stage in range(self.num_stages))

    @cached_property
    def forward_only(self) -> bool:
        """Whether the schedule only evaluates: no Op writes a gradient or changes weights."""
        return not any(op.kind.writes_gradient or op.kind is OpKind.UPDATE or op.kind is OpKind.PUBLISH for op in self.places)

    @cached_property
    def _parts(self) -> dict[Op, list[Op]]:
        parts: dict[Op, list[Op]] = {}
        for op in self.places:
            if op.part:
                parts.setdefault(op._replace(part=0), []).append(op)
        return parts

    def find(self, op: Op) -> list[Op]:
        """Return the Ops that do the work of `op`: itself, the whole it is a part of, or all the parts it was divided into."""
        if op in self.places:
            return [op]
        whole = op._replace(part=0) if op.part else op
        return [whole] if whole in self.places else self._parts.get(whole, [])

    @cached_property
    def _gradient_ops(self) -> dict[tuple[StageReplica, int], list[Op]]:
        written: dict[tuple[StageReplica, int], list[Op]] = {}
        for op in self.places:
            if op.kind.writes_gradient:
                written.setdefault((self.replica(op), self.update(op)), []).append(op)
        return written

    def gradient_ops(self, replica: StageReplica, update: int) -> list[Op]:
        """Return the Ops that write the gradient buffer of a copy for an update, in program order."""
        return self._gradient_ops.get((replica, update), [])

    @cached_property
    def published_stages(self) -> frozenset[int]:
        """The stages whose copies step a part of the weights each and pass it on (P)."""
        return frozenset(op.stage for op in self.places if op.kind is OpKind.PUBLISH)

    @cached_property
    def _version_places(self) -> dict[StageReplica, list[tuple[int, int]]]:
        brought: dict[StageReplica, list[tuple[int, int]]] = {}
        for op, place in self.places.items():
            # Of a stage whose copies pass weights on, a version is whole at the P.
            if op.kind is (OpKind.PUBLISH if op.stage in self.published_stages else OpKind.UPDATE):
                brought.setdefault(self.replica(op), []).append((place.position, op.index + 1))
        return brought

    def newest_version(self, replica: StageReplica, position: int) -> int:
        """Return the newest version that a copy has when the slot at `position` starts."""
        return max((version for at, version in self._version_places.get(replica, ()) if at < position), default=0)


def reads(schedule: Schedule, op: Op) -> int:
    """Return the version of the weights that an Op uses: the updates seen since the window began. U changes it to the next."""
    if op.kind.per_update:
        return op.index
    version = schedule.weight_rule.fixed_version(op.index // schedule.num_microbatches)
    if version is not None:
        return version
    if not schedule.weight_rule.allows_mismatch:
        op = schedule.find(Op(OpKind.FORWARD, op.stage, op.index, op.pipeline, op.part))[0]
    return schedule.newest_version(schedule.replica(op), schedule.places[op].position)


def dependencies(schedule: Schedule, op: Op) -> list[Op]:
    """Return the Ops that must have ended before an Op starts, on its own worker and on others.

    The one rule about order. Ops that stand before it in its program for no such reason are not named.
    Time: proportional to the answer.
    """
    needed = _RULES[op.kind](schedule, op)
    if not op.kind.per_update and (version := reads(schedule, op)):
        if op.stage in schedule.published_stages:
            return needed + _of_copies(schedule, OpKind.PUBLISH, op.stage, version - 1)
        needed = needed + schedule.find(Op(OpKind.UPDATE, op.stage, version - 1, schedule.first_pipeline[schedule.replica(op)]))
    return needed


def takers(graph: StageGraph, op: Op) -> tuple[int, ...]:
    """Return the stages that take what an Op makes: an activation of F, a gradient of B and I."""
    if op.kind is OpKind.FORWARD:
        return graph.successors[op.stage]
    return graph.predecessors[op.stage] if op.kind.gives_input_gradient else ()


def inputs(schedule: Schedule, op: Op) -> list[Op]:
    """Return the Ops of neighboring stages whose tensors an Op takes."""
    needs = schedule.graph.needs_of_others.get((op.kind, op.stage), ())
    return [found for kind, stage in needs for found in _at(schedule, op, kind, stage)] if needs else []


def outputs(schedule: Schedule, op: Op, stage: int) -> list[Op]:
    """Return the Ops of a neighboring stage that take the tensors of an Op."""
    return _at(schedule, op, op.kind, stage)


def _before_compute(schedule: Schedule, op: Op) -> list[Op]:
    needed: list[Op] = []
    for kind, stage in schedule.graph.needs[op.kind, op.stage]:
        needed += _at(schedule, op, kind, stage)
    return needed


def _at(schedule: Schedule, op: Op, kind: OpKind, stage: int) -> list[Op]:
    """Return the Ops of a kind and stage for the microbatch of `op`, or those that stand for them in this schedule."""
    _, own, index, pipeline, part = op
    if kind is OpKind.FORWARD and stage == own and op.kind.gives_input_gradient:
        again = _new_op(Op, (OpKind.RECOMPUTE, stage, index, pipeline, part))
        if found := [again] if again in schedule.places else schedule.find(again):
            return found
    sought = _new_op(Op, (kind, stage, index, pipeline, part))
    found = [sought] if sought in schedule.places else schedule.find(sought)
    if not found and kind.gives_input_gradient:
        other = OpKind.INPUT_GRADIENT if kind is OpKind.BACKWARD else OpKind.BACKWARD
        found = schedule.find(sought._replace(kind=other))
    return found


_new_op = tuple.__new__
"""Makes an `Op` without the call that looks at default values: `dependencies` makes several for every Op of a schedule."""


def _before_reduction(schedule: Schedule, op: Op) -> list[Op]:
    # It only hands its copy's gradient over: what waits for the other copies is the update.
    return schedule.gradient_ops(schedule.replica(op), op.index)[-1:]


def _before_update(schedule: Schedule, op: Op) -> list[Op]:
    found = _gradient_ready(schedule, schedule.replica(op), op.index)
    for replica in _scope(schedule, schedule.replica(op)):
        found = found + _gradient_ready(schedule, replica, op.index)
    return found + (schedule.find(op._replace(index=op.index - 1)) if op.index else [])


def _before_publication(schedule: Schedule, op: Op) -> list[Op]:
    # It only hands on what its copy has stepped: what waits for the other copies is whoever reads the weights.
    return schedule.find(op._replace(kind=OpKind.UPDATE))


def _of_copies(schedule: Schedule, kind: OpKind, stage: int, index: int) -> list[Op]:
    pipelines = [schedule.first_pipeline[replica] for replica in schedule.replicas[stage]]
    return [found for pipeline in pipelines for found in schedule.find(Op(kind, stage, index, pipeline))]


_RULES: dict[OpKind, Callable[[Schedule, Op], list[Op]]] = {
    OpKind.FORWARD: _before_compute,
    OpKind.BACKWARD: _before_compute,
    OpKind.INPUT_GRADIENT: _before_compute,
    OpKind.WEIGHT_GRADIENT: _before_compute,
    OpKind.RECOMPUTE: _before_compute,
    OpKind.REDUCE: _before_reduction,
    OpKind.UPDATE: _before_update,
    OpKind.PUBLISH: _before_publication,
}


def _gradient_ready(schedule: Schedule, replica: StageReplica, update: int) -> list[Op]:
    """Return the reductions of a copy's gradient for an update, or the last gradient Op of each copy before the pass that adds them."""
    reductions = _of_copies(schedule, OpKind.REDUCE, replica.stage, update)
    return reductions or [found for copy in schedule.replicas[replica.stage] for found in schedule.gradient_ops(copy, update)[-1:]]


def _scope(schedule: Schedule, replica: StageReplica) -> Sequence[StageReplica]:
    graph = schedule.graph
    if schedule.update_scope is UpdateScope.GLOBAL:
        stages: Iterable[int] = range(schedule.num_stages)
    else:
        stages = sorted(graph.ties[graph.tie_of[replica.stage]]) if replica.stage in graph.tie_of else ()
    return [schedule.replicas[stage][0] for stage in stages if stage != replica.stage]
