"""How long the sums of each stage may take, how long they take, and how long devices wait for what is on its way.

    stage 0 on a device   ... B3  F4 B2 F5  === U0  F6 ...        the gradients of update 0 are complete after B3
                              |-- slack --|                       F6 is the first to read what U0 makes
                              |----- need ----|
                                          |===|  exposed

After TriRace (Li et al., IEEE TPDS 2024): what a sum needs beyond its slack, computation does not hide.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass

from raypipe.analysis.idle import divide
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Dimension, SpanKind, Trace, dimension
from raypipe.schedules.collectives import Collective, Start
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Message
from raypipe.simulation.plan_cost import plan_cost, plan_programs


@dataclass(frozen=True)
class StageCommunication:
    """Communication of one stage in an update.

    Attributes:
        need_s: Seconds of its sums on links that carry nothing else; `None` where it has no sum.
        slack_s: Seconds from when all its gradients are complete until the first of its devices waits for their sum, or updates: the
            median over updates, without the last of a window, behind which nothing hides a sum. `None` where it has no sum.
        exposed_s: Seconds for which the device that waits longest waits for what is on its way to the stage, by dimension: the mean over
            the updates of a window. A norm counts for all stages of the device.
    """

    need_s: float | None
    slack_s: float | None
    exposed_s: dict[Dimension, float]


def stage_communication(plan: Plan, trace: Trace) -> list[StageCommunication]:
    """Return the communication of each stage of a plan, from its simulated trace."""
    needs = _needs_s(plan)
    slacks = _slacks_s(trace)
    exposed = _exposed_s(trace)
    return [
        StageCommunication(needs.get(stage), slacks.get(stage) if stage in needs else None, exposed[stage])
        for stage in range(len(plan.stages))
    ]


def _needs_s(plan: Plan) -> dict[int, float]:
    cost = plan_cost(plan)
    started = {item.collective for program in plan_programs(plan) for item in program.items if isinstance(item, Start)}
    needs: dict[int, float] = defaultdict(float)
    for collective in started:
        if collective.update == 0 and not collective.kind.is_norm and len(collective.devices) > 1:
            ties = plan.schedule.graph.ties
            for stage in ties[collective.stage] if collective.kind.of_tie else (collective.stage,):
                needs[stage] += cost.collective_s(collective)
    return dict(needs)


def _slacks_s(trace: Trace) -> dict[int, float]:
    # By stage and update, for each device.
    complete_s: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    due_s: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    num_microbatches = 1 + max((op.index for span in trace.spans for op in span.ops if not op.kind.per_update), default=0)
    per_update = max(num_microbatches // trace.num_updates, 1)
    for span in trace.spans:
        for op in span.ops:
            if op.kind.writes_gradient:
                ends = complete_s[op.stage, op.index // per_update]
                ends[span.device] = max(ends.get(span.device, 0.0), span.end_s)
            elif op.kind is OpKind.UPDATE:
                due_s[op.stage, op.index][span.device] = span.start_s
    for span in trace.spans:
        if span.kind is SpanKind.COLLECTIVE and isinstance(span.item, Collective):
            kind, update = span.item.kind, span.item.update
            stages = [stage for stage, of_update in due_s if of_update == update] if kind.of_tie or kind.is_norm else [span.item.stage]
            for dues in (due_s.get((stage, update), {}) for stage in stages):
                if span.device in dues:
                    dues[span.device] = min(dues[span.device], span.start_s)
    by_stage: dict[int, list[float]] = defaultdict(list)
    for (stage, update), dues in sorted(due_s.items()):
        if (stage, update) in complete_s and (update < trace.num_updates - 1 or trace.num_updates == 1):
            by_stage[stage].append(max(min(dues.values()) - max(complete_s[stage, update].values()), 0.0))
    return {stage: statistics.median(slacks) for stage, slacks in by_stage.items()}


def _exposed_s(trace: Trace) -> dict[int, dict[Dimension, float]]:
    division = divide(trace)
    by_device: dict[int, list[dict[Dimension, float]]] = defaultdict(list)
    for stages, row in zip(division.stages, division.intervals, strict=True):
        waits: dict[int, dict[Dimension, list[float]]] = {stage: defaultdict(list) for stage in stages}
        for interval in row:
            carried = dimension(interval.item)
            if carried is None or not interval.cause.is_transfer:
                continue
            match interval.item:
                case Message(target=target):
                    concerned = [target]
                case Collective(stage=stage) if carried is Dimension.SUM and not interval.item.kind.of_tie:
                    concerned = [stage]
                case _:
                    concerned = list(stages)
            for stage in concerned:
                if stage in waits:
                    waits[stage][carried].append(interval.duration_s)
        for stage, of_stage in waits.items():
            by_device[stage].append({carried: math.fsum(times) / trace.num_updates for carried, times in of_stage.items()})
    return defaultdict(dict, {stage: max(rows, key=lambda row: sum(row.values())) for stage, rows in by_device.items()})
