"""Schedules written by hand that need the nouns which the bundled families leave out.

Two pipelines in opposite directions, a stage graph with branches, and asynchronous runs under each weight rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raypipe.schedules.builders import synchronous_pipelines, unflushed
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, StageGraph, UpdateScope, WeightRule, ops_of
from raypipe.schedules.request import ScheduleRequest


def opposite_pipelines(num_devices: int = 4) -> Schedule:
    """D microbatches through two pipelines, half of them each way (Chimera: Li and Hoefler, 2021, arXiv 2107.06925, section 3).

    Pipeline 0 lays stage s on worker s, pipeline 1 on worker D-1-s. The k-th microbatch of a pipeline has its F of stage s in
    slot 2k+s and its B in slot 2k+2D-1-s, so that the two never meet. With F = B and D = 4 (microbatches 2 and 3 run upwards):

        slot       0     1     2     3     4     5     6     7     8     9
        worker 0   0F0   .     0F1   3F2@1 3B2@1 3F3@1 3B3@1 0B0   .     0B1
        worker 1   .     1F0   2F2@1 1F1   2F3@1 2B2@1 1B0   2B3@1 1B1   .
        worker 2   .     1F2@1 2F0   1F3@1 2F1   2B0   1B2@1 2B1   1B3@1 .
        worker 3   0F2@1 .     0F3@1 3F0   3B0   3F1   3B1   0B2@1 .     0B3@1

    Each worker ends with a U for each of its two copies.
    """
    half = num_devices // 2
    pipelines = (tuple(range(num_devices)), tuple(reversed(range(num_devices))))
    slots: list[tuple[int, int, Op]] = []
    for pipeline, workers in enumerate(pipelines):
        for k in range(half):
            for stage, worker in enumerate(workers):
                microbatch = pipeline * half + k
                slots.append((worker, 2 * k + stage, Op(OpKind.FORWARD, stage, microbatch, pipeline)))
                slots.append((worker, 2 * k + 2 * num_devices - 1 - stage, Op(OpKind.BACKWARD, stage, microbatch, pipeline)))
    programs = []
    for worker in range(num_devices):
        mine = sorted((slot, op) for at, slot, op in slots if at == worker)
        assert len({slot for slot, _ in mine}) == len(mine)
        updates = (Op(OpKind.UPDATE, workers.index(worker), 0, pipeline) for pipeline, workers in enumerate(pipelines))
        programs.append((*(op for _, op in mine), *updates))
    return Schedule(
        name="opposite-pipelines",
        graph=StageGraph.chain(num_devices),
        pipelines=pipelines,
        programs=tuple(programs),
        num_microbatches=num_devices,
        update_scope=UpdateScope.GLOBAL,
    )


def two_branches(num_microbatches: int = 4, *, num_updates: int = 1, update_scope: UpdateScope = UpdateScope.GLOBAL) -> Schedule:
    """Two branches of two stages that meet in a fifth, on three workers of which two hold a stage of each branch.

        stage 0 -> stage 2 \\                worker 0: stages 0 and 1
                            stage 4         worker 1: stages 2 and 3
        stage 1 -> stage 3 /                worker 2: stage 4

    Both branches have the same depth, so that they run side by side as a 1F1B pipeline of depth 3:

        worker 0   0F0 1F0 0F1 1F1 0F2 1F2 .   0B0 1B0 0F3 1F3 0B1 1B1 ...
        worker 1   .   2F0 3F0 2F1 3F1 .   2B0 3B0 2F2 3F2 2B1 3B1 ...
        worker 2   .   .   .   4F0 4B0 4F1 4B1 4F2 4B2 4F3 4B3

    Worker w holds at most 3-w microbatches of each of its stages: 6, 4 and 1 stage activations.
    """
    stages = ((0, 1), (2, 3), (4,))
    programs = []
    for worker, held in enumerate(stages):
        ops: list[Op] = []
        for update in range(num_updates):
            for kind, microbatch in _one_f_one_b(num_microbatches, warm_up=2 - worker):
                ops += [Op(kind, stage, update * num_microbatches + microbatch) for stage in held]
            ops += [Op(OpKind.UPDATE, stage, update) for stage in held]
        programs.append(tuple(ops))
    return Schedule(
        name="two-branches",
        graph=StageGraph(5, ((0, 2), (1, 3), (2, 4), (3, 4))),
        pipelines=((0, 0, 1, 1, 2),),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
        num_updates=num_updates,
        update_scope=update_scope,
    )


def branches_without_flush(num_microbatches: int, num_updates: int, *, weight_rule: WeightRule) -> Schedule:
    """The order of `two_branches` over all microbatches of all updates, with U right behind a stage's last backward of each update."""
    over_all = two_branches(num_microbatches * num_updates)
    (workers,) = over_all.pipelines
    programs = [[op for slot in program for op in ops_of(slot) if not op.kind.per_update] for program in over_all.programs]
    request = ScheduleRequest(over_all.num_workers, num_microbatches, num_updates)
    schedule = unflushed("branches-without-flush", request, workers=workers, programs=programs, weight_rule=weight_rule)
    return replace(schedule, graph=over_all.graph)


def in_two_pipelines(schedule: Schedule, workers: Sequence[int]) -> Schedule:
    """The schedule twice, each time with microbatches of its own; worker w of it is `workers[w]` in the second pipeline.

    A worker of both runs the Ops of an update through the first pipeline, then those through the second.
    """
    num_microbatches = schedule.num_microbatches
    one_update: list[list[Slot]] = [[] for _ in range(max((schedule.num_workers - 1, *workers)) + 1)]
    for pipeline, placed in enumerate((range(schedule.num_workers), workers)):
        for worker, program in zip(placed, schedule.programs, strict=True):
            ops = [op for slot in program for op in ops_of(slot) if not op.kind.per_update and schedule.update(op) == 0]
            one_update[worker] += [op._replace(index=op.index + pipeline * num_microbatches, pipeline=pipeline) for op in ops]
    (first,) = schedule.pipelines
    return synchronous_pipelines(
        f"{schedule.name} twice",
        ScheduleRequest(len(one_update), 2 * num_microbatches, schedule.num_updates),
        pipelines=[first, [workers[worker] for worker in first]],
        one_update=one_update,
        graph=schedule.graph,
    )


def without_flush(
    num_devices: int,
    num_microbatches: int,
    num_updates: int,
    *,
    weight_rule: WeightRule,
    update_scope: UpdateScope = UpdateScope.STAGE,
    ties: Sequence[tuple[int, ...]] = (),
) -> Schedule:
    """1F1B over all microbatches of all updates, with U right behind the last backward of each update.

    With two devices, two microbatches and two updates:

        worker 0   0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0B3 0U1
        worker 1   1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1

    The weight rule makes it PipeDream (`stash`, one microbatch an update), PipeDream-2BW (`double_buffer`, at least D
    microbatches an update) or asynchronous 1F1B (`live`).
    """
    programs = []
    for stage in range(num_devices):
        ops: list[Op] = []
        for kind, microbatch in _one_f_one_b(num_microbatches * num_updates, warm_up=num_devices - 1 - stage):
            ops.append(Op(kind, stage, microbatch))
            if kind is OpKind.BACKWARD and (microbatch + 1) % num_microbatches == 0:
                ops.append(Op(OpKind.UPDATE, stage, microbatch // num_microbatches))
        programs.append(tuple(ops))
    chain = StageGraph.chain(num_devices)
    return Schedule(
        name="without-flush",
        graph=StageGraph(num_devices, chain.edges, tuple(ties)),
        pipelines=(tuple(range(num_devices)),),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
        num_updates=num_updates,
        weight_rule=weight_rule,
        update_scope=update_scope,
    )


def pipedream_2bw(num_devices: int = 4, num_microbatches: int = 4, num_updates: int = 3) -> Schedule:
    """PipeDream-2BW (Narayanan et al., 2021, arXiv 2006.09503): the order of `without_flush`, two versions of the weights."""
    return without_flush(num_devices, num_microbatches, num_updates, weight_rule=WeightRule.DOUBLE_BUFFER)


def pipedream(num_devices: int = 4, num_updates: int = 12) -> Schedule:
    """PipeDream (Narayanan et al., 2019, arXiv 1806.03377): an update after each microbatch, backward with forward's weights."""
    return without_flush(num_devices, 1, num_updates, weight_rule=WeightRule.STASH)


def async_one_f_one_b(num_devices: int = 4, num_microbatches: int = 4, num_updates: int = 3) -> Schedule:
    """1F1B without a flush in which every Op uses the newest weights."""
    return without_flush(num_devices, num_microbatches, num_updates, weight_rule=WeightRule.LIVE)


def _one_f_one_b(count: int, *, warm_up: int) -> Iterable[tuple[OpKind, int]]:
    """Kind and microbatch: warm-up forwards, then a forward and a backward in turn, then the rest."""
    lead = min(warm_up, count)
    for step in range(count + lead):
        if step < count:
            yield OpKind.FORWARD, step
        if step >= lead:
            yield OpKind.BACKWARD, step - lead


def halved(schedule: Schedule) -> Schedule:
    """The schedule with each microbatch divided into two halves of its rows, forwards in one slot, backwards one by one."""

    def parts(slot: Slot) -> list[Slot]:
        assert isinstance(slot, Op)
        if slot.kind.per_update:
            return [slot]
        halves = slot._replace(part=1), slot._replace(part=2)
        return [Overlap(halves)] if slot.kind is OpKind.FORWARD else list(halves)

    programs = tuple(tuple(part for slot in program for part in parts(slot)) for program in schedule.programs)
    return replace(schedule, programs=programs)


def divided(schedule: Schedule, num_parts: Mapping[int, int]) -> Schedule:
    """The schedule with each microbatch divided into parts at some stages, which run one by one where the whole stood."""

    def parts(slot: Slot) -> list[Slot]:
        assert isinstance(slot, Op)
        if slot.kind.per_update or slot.stage not in num_parts:
            return [slot]
        return [slot._replace(part=part) for part in range(1, num_parts[slot.stage] + 1)]

    programs = tuple(tuple(part for slot in program for part in parts(slot)) for program in schedule.programs)
    return replace(schedule, programs=programs)
