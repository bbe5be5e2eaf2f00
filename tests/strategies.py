"""Hypothesis strategies: sizes, stage graphs, valid schedules by chance, and single edits that may spoil them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import assume
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, StageGraph, StageReplica, UpdateScope, WeightRule, ops_of
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.schedules import handwritten

SHOWN = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "))
"""Text that names may have."""
SPEC_NAMES = tuple(spec.name for spec in catalogue.SPECS)

HANDWRITTEN: Mapping[str, Callable[[], Schedule]] = {
    "opposite pipelines": handwritten.opposite_pipelines,
    "two branches": handwritten.two_branches,
    "two branches, two updates": lambda: handwritten.two_branches(num_updates=2, update_scope=UpdateScope.STAGE),
    "pipedream-2bw": handwritten.pipedream_2bw,
    "pipedream": handwritten.pipedream,
    "async-1f1b": handwritten.async_one_f_one_b,
}


CHUNKS: Mapping[str, tuple[int, ...]] = {"interleaved": (1, 2, 3), "async-interleaved": (1, 2, 3), "dualpipe-v": (2,), "zb-v": (2,)}
"""Numbers of stages a device that a family takes, where that is not 1; none that is larger than 3."""

CHIMERAS = ("chimera", "chimera-doubling", "chimera-halving")
BIDIRECTIONAL = (*CHIMERAS, "dualpipe")
ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "async-1f1b", "async-interleaved", "amdp", "amdp-auto")
AMDPS = ("amdp", "amdp-flush", "amdp-auto")
DIVIDED = ("chimera-halving",)
BRANCHED = "branch-aware"


def pipelines(name: str, num_devices: int) -> tuple[int, ...]:
    """The numbers of pipelines that a family takes on some devices, its own first."""
    if name in CHIMERAS:
        return tuple(number for number in range(2, num_devices + 1, 2) if num_devices % number == 0)
    if name in AMDPS:
        own = max(1, num_devices // 2)
        return (own, *(number for number in range(1, num_devices + 1) if number != own))
    return (2,) if name in BIDIRECTIONAL else (1,)


def num_pipelines(name: str, size: ScheduleRequest) -> int:
    """How many pipelines a schedule of an accepted size has."""
    return size.num_pipelines or pipelines(name, size.num_devices)[0]


def takes(name: str, size: ScheduleRequest) -> bool:
    """Whether a family should accept a size, as its documentation says."""
    if name in BIDIRECTIONAL and size.num_devices % 2:
        return False
    if name == BRANCHED and not size.branches:
        return False
    if name == "pipedream" and size.num_microbatches != 1:
        return False
    if name == "pipedream-2bw" and size.num_microbatches < size.num_devices - 1:
        return False
    if name in AMDPS and size.num_microbatches % unit(name, size):
        return False
    return size.num_chunks in CHUNKS.get(name, (1,)) and size.num_pipelines in {0, *pipelines(name, size.num_devices)}


def unit(name: str, size: ScheduleRequest) -> int:
    """What the microbatches of an update are a multiple of for AMDP: a round of the authors' case, or one for each pipeline."""
    number = size.num_pipelines or max(1, size.num_devices // 2)
    tabled = name != "amdp-auto" and size.num_devices % 4 == 0 and 2 * number == size.num_devices
    return size.num_devices if tabled else number


def near(name: str, num_devices: int, num_microbatches: int, num_updates: int = 1) -> ScheduleRequest:
    """A size that the family accepts: with a device more where it wants an even number of them, and the stages of its own choice.

    And as few microbatches more as it takes where it wants a multiple of some number, or one where it takes no other.
    """
    if name in BIDIRECTIONAL:
        num_devices += num_devices % 2
    if name == "pipedream":
        num_microbatches = 1
    if name == "pipedream-2bw":
        num_microbatches = max(num_microbatches, num_devices - 1)
    if name in AMDPS:
        rounds = unit(name, ScheduleRequest(num_devices, 1))
        num_microbatches = -(-num_microbatches // rounds) * rounds
    branches = (1.0, 1.0) if name == BRANCHED else ()
    return ScheduleRequest(num_devices, num_microbatches, num_updates, catalogue.spec(name).default_chunks, branches=branches)


@st.composite
def sizes(draw: st.DrawFn, name: str, *, max_devices: int = 8, max_microbatches: int = 20, max_updates: int = 3) -> ScheduleRequest:
    """A size that the family accepts."""
    step = 2 if name in BIDIRECTIONAL else 1
    num_devices = step * draw(st.integers(1, max_devices // step))
    size = ScheduleRequest(
        num_devices=num_devices,
        num_microbatches=draw(st.integers(1, max_microbatches)),
        num_updates=draw(st.integers(1, max_updates)),
        num_chunks=draw(st.sampled_from(CHUNKS.get(name, (1,)))),
        num_pipelines=draw(st.sampled_from((0, *pipelines(name, num_devices)))),
        update_scope=draw(st.sampled_from([None, *UpdateScope])),
    )
    if name in AMDPS:
        return replace(size, num_microbatches=-(-size.num_microbatches // unit(name, size)) * unit(name, size))
    if name == BRANCHED:
        # What is searched for takes time.
        few = replace(size, num_devices=min(num_devices, 3), num_microbatches=min(size.num_microbatches, 4))
        return replace(few, branches=draw(st.sampled_from([(1.0, 1.0), (1.0, 2.0)])), split=draw(st.booleans()))
    return replace(size, num_microbatches=near(name, num_devices, size.num_microbatches).num_microbatches)


@st.composite
def family_schedules(draw: st.DrawFn, *, max_devices: int = 5, max_microbatches: int = 8, max_updates: int = 2) -> Schedule:
    """A bundled schedule of an accepted size."""
    name = draw(st.sampled_from(SPEC_NAMES))
    size = draw(sizes(name, max_devices=max_devices, max_microbatches=max_microbatches, max_updates=max_updates))
    return catalogue.build(name, size)


@st.composite
def stage_graphs(draw: st.DrawFn, *, max_stages: int = 5) -> StageGraph:
    """A stage graph: a chain, or any edges from earlier to later stages; sometimes with a tie."""
    num_stages = draw(st.integers(1, max_stages))
    pairs = [(source, target) for target in range(num_stages) for source in range(target)]
    edges = StageGraph.chain(num_stages).edges
    if draw(st.booleans()):
        edges = tuple(pair for pair in pairs if draw(st.booleans()))
    tie = draw(st.sets(st.integers(0, num_stages - 1), max_size=3)) if draw(st.booleans()) else set()
    return StageGraph(num_stages, edges, (tuple(sorted(tie)),) if len(tie) >= 2 else ())


@dataclass
class _Work:
    """All Ops of a schedule to be and what each must come after, by rules of this file's own."""

    graph: StageGraph
    pipelines: tuple[tuple[int, ...], ...]
    num_microbatches: int
    num_updates: int
    weight_rule: WeightRule
    update_scope: UpdateScope
    reduced: bool
    pipeline_of: list[int]
    split: list[bool]

    def __post_init__(self) -> None:
        self.pipeline_through: dict[StageReplica, int] = {}
        for pipeline, workers in enumerate(self.pipelines):
            for stage, worker in enumerate(workers):
                self.pipeline_through.setdefault(StageReplica(worker, stage), pipeline)

    def worker(self, op: Op) -> int:
        return self.pipelines[op.pipeline][op.stage]

    def needs(self) -> dict[Op, list[Op]]:
        found: dict[Op, list[Op]] = {}
        for microbatch, pipeline in enumerate(self.pipeline_of):
            for stage in range(self.graph.num_stages):
                found |= self._microbatch(microbatch, stage, pipeline)
        for (worker, stage), pipeline in self.pipeline_through.items():
            for update in range(self.num_updates):
                op = Op(OpKind.UPDATE, stage, update, pipeline)
                found[op] = list(self._before_update(worker, stage, update))
                if self.reduced and sum(replica.stage == stage for replica in self.pipeline_through) > 1:
                    found[op._replace(kind=OpKind.REDUCE)] = list(self._gradients(stage, update, worker))
        # Reductions that share a worker need one order on all: here that of updates and stages.
        reductions = sorted((self.worker(op), op.index, op.stage, op) for op in found if op.kind is OpKind.REDUCE)
        for (worker, *_, before), (other, *_, op) in itertools.pairwise(reductions):
            if worker == other:
                found[op].append(before)
        return found

    def _microbatch(self, microbatch: int, stage: int, pipeline: int) -> dict[Op, list[Op]]:
        def op(kind: OpKind, at: int = stage) -> Op:
            return Op(kind, at, microbatch, pipeline)

        backward = OpKind.INPUT_GRADIENT if self.split[microbatch] else OpKind.BACKWARD
        forward_needs = [op(OpKind.FORWARD, source) for source in self.graph.predecessors[stage]]
        update = microbatch // self.num_microbatches
        version = {WeightRule.FLUSH: update, WeightRule.DOUBLE_BUFFER: max(update - 1, 0)}.get(self.weight_rule, 0)
        if version:
            forward_needs.append(
                Op(OpKind.UPDATE, stage, version - 1, self.pipeline_through[StageReplica(self.worker(op(OpKind.FORWARD)), stage)])
            )
        found = {
            op(OpKind.FORWARD): forward_needs,
            op(backward): [op(OpKind.FORWARD), *(op(backward, target) for target in self.graph.successors[stage])],
        }
        return found | {op(OpKind.WEIGHT_GRADIENT): [op(backward)]} if self.split[microbatch] else found

    def _gradients(self, stage: int, update: int, worker: int | None = None) -> Iterator[Op]:
        for microbatch in range(update * self.num_microbatches, (update + 1) * self.num_microbatches):
            op = Op(OpKind.WEIGHT_GRADIENT if self.split[microbatch] else OpKind.BACKWARD, stage, microbatch, self.pipeline_of[microbatch])
            if worker is None or self.worker(op) == worker:
                yield op

    def _before_update(self, worker: int, stage: int, update: int) -> Iterator[Op]:
        stages = {stage}
        if self.update_scope is UpdateScope.GLOBAL:
            stages.update(range(self.graph.num_stages))
        stages.update(other for tie in self.graph.ties if stage in tie for other in tie)
        for other in stages:
            yield from self._gradients(other, update)
            copies = [(replica, pipeline) for replica, pipeline in self.pipeline_through.items() if replica.stage == other]
            if self.reduced and len(copies) > 1:
                yield from (Op(OpKind.REDUCE, other, update, pipeline) for _, pipeline in copies)
        if update:
            yield Op(OpKind.UPDATE, stage, update - 1, self.pipeline_through[StageReplica(worker, stage)])


@st.composite
def random_schedules(draw: st.DrawFn, *, max_workers: int = 4, weight_rules: tuple[WeightRule, ...] = tuple(WeightRule)) -> Schedule:
    """A valid schedule by chance: any stage graph, pipelines and order that keeps what must come first.

    All Ops are put in one random order in which each stands behind what it needs, and dealt to their workers.
    """
    graph = draw(stage_graphs())
    num_workers = draw(st.integers(1, max_workers))
    num_pipelines = draw(st.integers(1, 2))
    worker = st.integers(0, num_workers - 1)
    num_microbatches, num_updates = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count = num_microbatches * num_updates
    work = _Work(
        graph=graph,
        pipelines=tuple(tuple(draw(worker) for _ in range(graph.num_stages)) for _ in range(num_pipelines)),
        num_microbatches=num_microbatches,
        num_updates=num_updates,
        weight_rule=draw(st.sampled_from(weight_rules)),
        update_scope=draw(st.sampled_from(UpdateScope)),
        reduced=draw(st.booleans()),
        pipeline_of=[draw(st.integers(0, num_pipelines - 1)) for _ in range(count)],
        split=[draw(st.booleans()) for _ in range(count)],
    )
    programs: list[list[Slot]] = [[] for _ in range(num_workers)]
    for op in _random_order(work.needs(), random.Random(draw(st.integers(0, 2**20)))):
        programs[work.worker(op)].append(op)
    schedule = Schedule(
        name="by chance",
        graph=graph,
        pipelines=work.pipelines,
        programs=tuple(map(tuple, programs)),
        num_microbatches=num_microbatches,
        num_updates=num_updates,
        weight_rule=work.weight_rule,
        update_scope=work.update_scope,
    )
    assume(_collectives_fit(schedule))
    return schedule


def _collectives_fit(schedule: Schedule) -> bool:
    """Whether norms, and the reductions that the schedule leaves to the pass, happen to fit together; chance does not see to it."""
    try:
        validate(schedule)
    except ScheduleError as error:
        return "in different orders" not in error.problem and " waits for " not in error.problem
    return True


def _random_order(needs: Mapping[Op, list[Op]], chance: random.Random) -> Iterator[Op]:
    """All Ops, each behind what it needs. A bias towards old or towards fresh Ops makes orders of both kinds."""
    missing = {op: len(set(before)) for op, before in needs.items()}
    behind: dict[Op, list[Op]] = {}
    for op, before in needs.items():
        for needed in set(before):
            behind.setdefault(needed, []).append(op)
    ready = [op for op, count in missing.items() if not count]
    depth = chance.choice((1, 3, 1000))
    while ready:
        op = ready.pop(chance.randrange(max(0, len(ready) - depth), len(ready)))
        yield op
        for later in behind.get(op, ()):
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)


def handwritten_schedules() -> st.SearchStrategy[Schedule]:
    """One of the hand-written schedules."""
    return st.sampled_from(sorted(HANDWRITTEN)).map(lambda name: HANDWRITTEN[name]())


def schedules() -> st.SearchStrategy[Schedule]:
    """Any valid schedule: bundled, hand-written or by chance."""
    return st.one_of(family_schedules(), handwritten_schedules(), random_schedules())


@dataclass(frozen=True)
class Edit:
    """A schedule after one edit, and the Ops that the edit moved, dropped or doubled."""

    what: str
    schedule: Schedule
    ops: tuple[Op, ...]


def without(programs: Sequence[Sequence[Slot]], op: Op) -> list[list[Slot]]:
    """The programs without an Op; what shared a slot with it stays there."""
    found: list[list[Slot]] = []
    for program in programs:
        found.append([])
        for slot in program:
            rest = tuple(other for other in ops_of(slot) if other != op)
            if rest:
                found[-1].append(Overlap(rest) if len(rest) > 1 else rest[0])
    return found


@st.composite
def edits(draw: st.DrawFn, schedule: Schedule) -> Edit:
    """The schedule with one Op dropped, doubled, moved or swapped with another, anywhere; moved Ops have slots of their own."""
    worker = draw(st.sampled_from([worker for worker, program in enumerate(schedule.programs) if program]))
    op = draw(st.sampled_from([op for slot in schedule.programs[worker] for op in ops_of(slot)]))
    ops: tuple[Op, ...] = (op,)
    what = draw(st.sampled_from(["drop", "double", "move", "move to another worker", "swap"]))
    programs = [list(program) for program in schedule.programs] if what in {"double", "swap"} else without(schedule.programs, op)
    match what:
        case "drop":
            pass
        case "double" | "move":
            programs[worker].insert(draw(st.integers(0, len(programs[worker]))), op)
        case "move to another worker":
            target = draw(st.integers(0, len(programs) - 1))
            programs[target].insert(draw(st.integers(0, len(programs[target]))), op)
        case _:
            other = draw(st.sampled_from([op for slot in programs[worker] for op in ops_of(slot)]))
            swapped = {op: other, other: op}
            programs[worker] = [
                Overlap(tuple(swapped.get(op, op) for op in slot.ops)) if isinstance(slot, Overlap) else swapped.get(slot, slot)
                for slot in programs[worker]
            ]
            ops = (op, other)
    return Edit(what, replace(schedule, programs=tuple(map(tuple, programs))), ops)
