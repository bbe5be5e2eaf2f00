"""Where a plan lacks memory, and what would mend that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.extrapolation import evaluator_of
from raypipe.schedules.passes import shard_optimizer
from raypipe.units import size

_MOST_HALVINGS = 10
_MOST_OPS = 20_000
"""Forwards of the longest update that is simulated to see whether it would fit."""


def lack_words(evaluator: LayoutEvaluator, lacking: Evaluation) -> str:
    """Say which device lacks how much for which layers, and what recomputation, sharding or fewer rows a microbatch would leave lacking."""
    problem, layout = evaluator.problem, lacking.layout
    devices = [(worker, device) for worker, group in enumerate(layout.workers) for device in group]
    lacks = [peak - problem.memory_bytes[device] for peak, (_, device) in zip(lacking.peak_memory_bytes, devices, strict=True)]
    worker, device = devices[max(range(len(lacks)), key=lambda at: (lacks[at], -at))]
    schedule = evaluator.schedule(layout)
    stages = sorted({stage for pipeline in schedule.pipelines for stage, at in enumerate(pipeline) if at == worker})
    cut = layout.cut(problem)
    of_stages = (f"stage {stage}: {_range([problem.profile.layers[layer].name for layer in cut.stages[stage]])}" for stage in stages)
    helps = list(_helps(evaluator, lacking))
    mended = f"; {'; '.join(helps)}" if helps else ""
    return f"{size(round(lacking.missing_bytes))} of memory on its fullest device {problem.names[device]} ({', '.join(of_stages)}){mended}"


def _range(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"layers {names[0]} to {names[-1]}"


def _helps(evaluator: LayoutEvaluator, lacking: Evaluation) -> Iterator[str]:
    problem, layout = evaluator.problem, lacking.layout
    if not problem.recompute:
        again = evaluator_of(replace(problem, recompute=True)).simulate(replace(layout, recomputed=None))
        if again is not None and again.missing_bytes < lacking.missing_bytes:
            yield f"running forwards again (--recompute) {_left(again)}"
    schedule = evaluator.schedule(layout)
    workers = layout.placement(problem)
    sharded = shard_optimizer(schedule, replicated_workers=workers.replicated_workers if workers else ())
    if sharded is not schedule:
        shared = evaluator.simulate_order(layout, sharded)
        if shared.missing_bytes < lacking.missing_bytes:
            yield f"an optimizer whose state the copies of a stage divide (scaling.shard_optimizer) {_left(shared)}"
    if problem.profile.loss_couples_rows:
        return
    fewest: str | None = None
    least_bytes = lacking.missing_bytes
    for halving in range(1, _MOST_HALVINGS):
        rows, odd = divmod(problem.microbatch_size, 2**halving)
        count = problem.num_microbatches * 2**halving
        if odd or not rows or count * layout.num_stages > _MOST_OPS:
            break
        smaller = evaluator_of(replace(problem, num_microbatches=count, microbatch_size=rows)).simulate(layout)
        if smaller is None or smaller.missing_bytes >= least_bytes:
            break
        fewest, least_bytes = f"{count} microbatches of {rows} {'rows' if rows > 1 else 'row'} {_left(smaller)}", smaller.missing_bytes
        if math.isclose(least_bytes, 0.0):
            break
    if fewest is not None:
        yield fewest


def _left(evaluation: Evaluation) -> str:
    return f"would leave {size(round(evaluation.missing_bytes))} lacking" if evaluation.missing_bytes else "would fit"
